// The page of `vitkit serve`: sends pictures to the model, a few at a time, and shows its predictions.

import { offerCamera } from "./camera.js";
import { Card } from "./cards.js";
import { csv, download } from "./csv.js";
import { answersOf, inPlaces, placesOf, threshold } from "./places.js";
import { at, fillWords, make, readable, setText, touch } from "./dom.js";
import { ask, Refused } from "./server.js";
import { words } from "./strings.js";
import { Viewer } from "./viewer.js";

const OPTIONAL = [".avif", ".heic", ".heif"]; // formats that need a library on the server
const TOP = 10; // answers that are asked for
const LEAST = 0.05; // score of the boxes that are asked for; a slider chooses among them
const AT_ONCE = 3; // requests
const MANY = 3; // pictures from which there is a summary
const TOLD = 4; // pictures up to which every answer is announced

const items = [];
const viewer = new Viewer();
let model = {};
let running = 0;
let made = 0; // pictures without a file name of their own

function add(files) {
  if (!files.length) return;
  complain("");
  for (const file of files) {
    const item = { file, name: file.name, url: URL.createObjectURL(file), state: "queued", top: [], error: "" };
    item.card = new Card(item, { open: (i) => viewer.open(i), remove, retry });
    items.push(item);
    at("cards").append(item.card.element);
    at("rows").append(item.card.row);
    change(item, {});
  }
  work();
}

function change(item, what) {
  Object.assign(item, what);
  item.card.update(item);
  viewer.changed(item);
  showProgress();
}

// Starts as many requests as may run at once; each starts the next when it is done.
function work() {
  while (running < AT_ONCE) {
    const item = items.find((one) => one.state === "queued");
    if (!item) break;
    running += 1;
    answer(item).finally(() => {
      running -= 1;
      work();
    });
  }
}

async function answer(item) {
  item.stop = new AbortController();
  const { signal } = item.stop;
  change(item, { state: "sending", error: "" });
  try {
    await introduced; // what the server takes
    check(item.file);
    const waiting = (seconds) => change(item, seconds ? { state: "waiting", seconds } : { state: "sending" });
    const query = ["detect", "instances"].includes(model.task) ? `&reject=${LEAST}` : "";
    const said = await ask(`v1/predict?top=${TOP}${query}`, { body: item.file, signal, waiting });
    const [result] = said.results;
    if (result.error) throw new Refused(result.error, 422);
    const places = placesOf(result);
    change(item, { state: "done", places, top: result.top ?? answersOf(places, threshold(model)) });
    const [first] = item.top;
    const text = first ? words.answered(readable(item.name), readable(first.label), first.probability) : "";
    announce(text || words.nothing(readable(item.name)));
  } catch (error) {
    if (item.removed) return;
    const told = error instanceof Refused ? error.message : words.strange(error.message);
    const text = signal.aborted ? words.cancelled : told;
    change(item, { state: "failed", error: text, passing: signal.aborted || error.passing !== false });
    if (!signal.aborted) announce(words.failedName(readable(item.name), readable(text)));
  }
}

function check(file) {
  if (!file.size) throw new Refused(words.empty, 422);
  if (model.most && file.size > model.most) throw new Refused(words.tooLarge(file.size, model.most), 413);
}

function retry(item) {
  change(item, { state: "queued", error: "" });
  item.card.thumb.focus();
  work();
}

function cancel() {
  for (const item of items) {
    if (item.state === "queued") change(item, { state: "failed", error: words.cancelled, passing: true });
    else if (isOpen(item)) item.stop.abort();
  }
}

function forget(item) {
  item.removed = true;
  item.stop?.abort();
  URL.revokeObjectURL(item.url);
  item.card.element.remove();
  item.card.row.remove();
}

function remove(item) {
  const place = items.indexOf(item);
  items.splice(place, 1);
  forget(item);
  (items[place] ?? items[place - 1])?.card.thumb.focus();
  if (!items.length) at("choose").focus();
  showProgress();
}

function clear() {
  items.splice(0).forEach(forget);
  showProgress();
  at("choose").focus();
}

const isOpen = (item) => ["queued", "sending", "waiting"].includes(item.state);

function showProgress() {
  const number = (state) => items.filter((item) => item.state === state).length;
  const open = items.filter(isOpen).length;
  const text = words.progress({
    all: items.length, open, done: number("done"), waiting: number("waiting"), failed: number("failed"),
  });
  setText(at("progress"), text);
  at("results").hidden = !items.length;
  at("summary").hidden = items.length < MANY;
  at("cancel").hidden = !open;
  at("download").disabled = open === items.length;
  document.body.classList.toggle("started", items.length > 0);
  if (items.length > TOLD && !open) setText(at("said"), text);
}

function announce(text) {
  if (items.length <= TOLD) setText(at("said"), text);
}

function complain(text) {
  setText(at("trouble"), text);
  at("trouble").hidden = !text;
}

// The files of a drop, also those in folders.
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.());
  const loose = [...transfer.files]; // must be read before the first wait
  if (!entries.some((entry) => entry?.isDirectory)) return loose;
  return (await Promise.all(entries.filter(Boolean).map(inside))).flat();
}

async function inside(entry) {
  if (entry.isFile) return [await new Promise((resolve, reject) => entry.file(resolve, reject))];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!some.length) break; // a folder is listed in parts
    found.push(...some);
  }
  const visible = found.filter((one) => !one.name.startsWith("."));
  return (await Promise.all(visible.map(inside))).flat();
}

const renamed = (blob, name) => new File([blob], `${name}.${blob.type.split("/")[1] ?? "png"}`, { type: blob.type });

function takeFiles() {
  at("choose").onclick = () => at("files").click();
  for (const input of [at("files"), at("capture")]) {
    input.onchange = () => {
      add([...input.files]);
      input.value = ""; // the same file can be chosen again
    };
  }
  document.addEventListener("paste", (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (files.length) event.preventDefault();
    add(files.map((file) => (file.name === "image.png" ? renamed(file, words.pasted((made += 1))) : file)));
  });
  takeDrops();
  offerCamera((blob) => add([renamed(blob, words.photographed((made += 1)))]), complain);
}

// A drop anywhere on the page counts: one that misses would make the browser leave the page.
function takeDrops() {
  const area = at("drop");
  const title = area.querySelector(".drop-title");
  const idle = title.textContent;
  const mark = (over) => {
    area.classList.toggle("over", over);
    setText(title, over ? words.dropNow : idle);
  };
  document.addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(true);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || mark(false));
  document.addEventListener("drop", async (event) => {
    event.preventDefault();
    mark(false);
    add(await dropped(event.dataTransfer));
  });
}

async function introduce() {
  try {
    const said = await ask("v1/model");
    model = { ...said, size: said.image_size, most: said.limits?.bytes };
  } catch (error) {
    return complain(error.message);
  }
  viewer.model = model;
  at("least").value = Math.round(100 * threshold(model));
  // Phones convert what is not accepted; elsewhere the server's answer says how to read the other formats.
  const formats = model.formats ?? ["image/*"];
  at("files").accept = [...new Set(touch ? formats : [...formats, ...OPTIONAL])].join();
  at("hint").hidden = model.attention === false && !inPlaces(model);
  if (inPlaces(model)) {
    setText(at("hint"), words.hintPlaces);
    setText(document.querySelector(".headline"), words.titlePlaces);
    setText(document.querySelector(".lead"), words.leadPlaces);
  }
  const name = readable(model.name ?? words.unnamed);
  setText(at("model"), name);
  document.title = words.pageTitle(name);
  const facts = words.facts(model);
  setText(at("facts"), model.multilabel ? `${facts}. ${words.multilabel}` : facts);
}

fillWords(document);
document.body.classList.toggle("touch", touch);
at("columns").append(
  ...Object.entries(words.columns).map(([key, text]) =>
    make("th", { scope: "col", className: { probability: "number", next: "next" }[key] ?? "" }, text)),
);
viewer.items = () => items;
at("cancel").onclick = cancel;
at("clear").onclick = clear;
at("download").onclick = () => download(words.csvFile, csv(items));
const introduced = introduce();
takeFiles();
