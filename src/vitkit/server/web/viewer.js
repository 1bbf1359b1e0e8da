// One enlarged picture with its predictions and attention maps.

import { answerLine } from "./cards.js";
import { at, make, named, readable, setText } from "./dom.js";
import { draw, drawScale, seen, stretched } from "./overlay.js";
import { answersOf, drawBoxes, drawMask, inPlaces, maskCanvas, placeLine } from "./places.js";
import { ask } from "./server.js";
import { chance, words } from "./strings.js";

const SIDES = [960, 1600]; // pixels of the longer side of the canvas, at least and at most
const LONGEST_LABEL = 500; // characters that the server takes
const QUANTILE = { rollout: 0.95, head: 0.95, classMap: 0.98 }; // drawn as the greatest: a few patches often stand out

export class Viewer {
  constructor() {
    this.items = () => [];
    this.model = {};
    this.mode = "classMap";
    this.item = null;
    this.stop = new AbortController();
    drawScale(at("scale"));
    at("close").onclick = () => at("viewer").close();
    at("viewer").onclose = () => this.closed();
    at("viewer").addEventListener("click", (event) => {
      if (event.target === at("viewer")) at("viewer").close(); // a click beside it
    });
    at("viewer").addEventListener("keydown", (event) => this.pressed(event));
    at("previous").onclick = () => this.step(-1);
    at("next").onclick = () => this.step(1);
    for (const radio of document.getElementsByName("mode")) radio.onchange = () => this.setMode(radio.value);
    for (const id of ["layer", "head", "opacity", "over"]) at(id).oninput = () => this.redraw();
    at("least").oninput = () => this.refresh();
  }

  open(item) {
    this.stop.abort();
    this.stop = new AbortController();
    this.item = item;
    this.picture = null;
    this.target = item.top[0]?.label;
    at("viewer-title").replaceChildren(named(item.name));
    if (!at("viewer").open) at("viewer").showModal();
    this.updatePlace();
    this.complain(item.state === "failed" ? readable(item.error) : "");
    this.showPicture(item, this.stop.signal);
    this.look();
  }

  closed() {
    this.stop.abort();
    this.item = null;
    this.picture = null;
    [at("canvas").width, at("canvas").height] = [0, 0]; // a large picture is not kept behind a closed window
  }

  // Arrows go through the pictures, except where they move a slider or choose what is shown.
  pressed(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by || event.target.matches("input") || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    this.step(by);
  }

  step(by) {
    const items = this.items();
    if (items.length < 2) return;
    this.open(items[(items.indexOf(this.item) + by + items.length) % items.length]);
  }

  updatePlace() {
    const items = this.items();
    setText(at("place"), words.place(items.indexOf(this.item) + 1, items.length));
    at("previous").parentElement.hidden = at("keys").hidden = items.length < 2;
  }

  // Called when the picture that is shown got its answer meanwhile.
  changed(item) {
    if (item !== this.item || !["done", "failed"].includes(item.state)) return;
    this.target ??= item.top[0]?.label;
    this.complain(item.state === "failed" ? readable(item.error) : "");
    this.look();
  }

  async showPicture(item, signal) {
    const image = new Image();
    image.src = item.url;
    const shown = await image.decode().then(() => true, () => false);
    if (signal.aborted) return;
    this.picture = shown ? image : null;
    const [h, w] = shown ? [image.naturalHeight, image.naturalWidth] : (this.model.size ?? [224, 224]);
    const side = Math.max(h, w);
    const scale = Math.min(Math.max(side, SIDES[0]), SIDES[1]) / side;
    [at("canvas").width, at("canvas").height] = [w, h].map((n) => Math.max(1, Math.round(n * scale)));
    setText(at("blank"), words.noPreview);
    at("blank").hidden = shown;
    this.refresh();
  }

  // Fetches the maps that are not there yet. Those of heads and of the rollout come with the first class.
  async look() {
    const { item, target } = this;
    at("looking").hidden = true; // a request for another picture or class may still be under way
    this.refresh();
    if (item.state !== "done" || this.model.attention === false) return;
    if (item.looks?.classes.has(target)) return;
    const { signal } = this.stop;
    setText(at("looking"), words.looking);
    at("looking").hidden = false;
    try {
      const query = new URLSearchParams({ target: asked(target, this.model.labels) });
      const waiting = (seconds) => setText(at("looking"), seconds ? words.waiting(seconds) : words.looking);
      const answer = await ask(`v1/attention?${query}`, { body: item.file, signal, waiting });
      item.looks ??= { ...answer, maps: bytes(answer.maps), classes: new Map() };
      item.looks.classes.set(target, answer.class_map);
    } catch (error) {
      if (!signal.aborted) this.complain(readable(error.message));
    }
    if (signal.aborted || target !== this.target) return; // another class was chosen meanwhile
    at("looking").hidden = true;
    this.refresh();
  }

  complain(text) {
    setText(at("viewer-error"), text);
    at("viewer-error").hidden = !text;
  }

  setMode(mode) {
    this.mode = mode;
    this.refresh();
  }

  choose(label) {
    this.target = label;
    this.mode = "classMap";
    this.complain("");
    this.look();
  }

  // What is to be drawn now, as { values, grid, title }, or nothing while it is not known.
  map() {
    const { looks, name } = this.item;
    if (!looks || this.mode === "photo") return null;
    const [layer, head] = [Number(at("layer").value), Number(at("head").value)];
    const { grid, heads, maps, rollout, classes } = looks;
    const area = grid[0] * grid[1];
    const begin = ((layer - 1) * heads + head - 1) * area;
    const shown = {
      rollout: () => [rollout, words.drawn.rollout(name)],
      classMap: () => [classes.get(this.target), words.drawn.classMap(name, this.target)],
      head: () => [maps.subarray(begin, begin + area), words.drawn.head(name, layer, head)],
    };
    const [values, title] = shown[this.mode]();
    return values ? { values: stretched(values, QUANTILE[this.mode]), grid, title } : null;
  }

  refresh() {
    this.fillControls();
    this.fillAnswers();
    this.redraw();
  }

  redraw() {
    this.fillValues();
    const canvas = at("canvas");
    const map = this.map();
    const { size, preprocessing, covered } = this.model;
    const region = seen(canvas.width, canvas.height, size, preprocessing, covered);
    const opacity = Number(at("opacity").value) / 100;
    if (canvas.width) draw(canvas, this.picture, map, { opacity, region });
    if (canvas.width && this.item.places) this.drawPlaces(canvas);
    canvas.setAttribute("aria-label", readable(map ? map.title : words.drawn.photo(this.item.name)));
    at("outside").hidden = !map || (region[2] > canvas.width - 2 && region[3] > canvas.height - 2);
  }

  // Boxes or masks over the picture.
  drawPlaces(canvas) {
    const { places } = this.item;
    if (places.classes) {
      this.item.mask ??= maskCanvas(places);
      return drawMask(canvas, this.item.mask, Number(at("over").value) / 100);
    }
    if (!this.picture) return;
    const scale = canvas.width / this.picture.naturalWidth;
    drawBoxes(canvas, this.shownBoxes(), this.numbers(), scale, readable);
  }

  shownBoxes() {
    return answersOf(this.item.places, Number(at("least").value) / 100);
  }

  // The number of each class by its label.
  numbers() {
    return new Map((this.model.labels ?? []).map((label, number) => [label, number]));
  }

  fillPlaces() {
    const { places } = this.item;
    const boxes = Boolean(places?.boxes);
    at("place-controls").hidden = !places;
    at("least-row").hidden = !boxes;
    at("over-row").hidden = boxes;
    if (!places) return [];
    setValue("least", words.shareOf(Number(at("least").value) / 100));
    setValue("over", words.shareOf(Number(at("over").value) / 100));
    const shown = boxes ? this.shownBoxes() : answersOf(places);
    const numbers = this.numbers();
    setText(at("place-note"), boxes ? words.boxes(shown.length, places.boxes.length) : words.masks(shown.length));
    return shown.map((one) => make("li", {}, placeLine(one, one.class ?? numbers.get(one.label) ?? 0)));
  }

  fillControls() {
    const { looks, state } = this.item;
    at("controls").hidden = state !== "done" || this.model.attention === false;
    at("no-attention").hidden = this.model.attention !== false || inPlaces(this.model);
    const without = looks && [...looks.classes.values()].every((map) => map === null);
    if (without && this.mode === "classMap") this.mode = "rollout";
    for (const radio of document.getElementsByName("mode")) {
      radio.checked = radio.value === this.mode;
      if (radio.value === "classMap") radio.disabled = Boolean(without);
    }
    const text = words.explain[this.mode](readable(this.target ?? ""));
    setText(at("explain"), without ? `${text} ${words.noClassMap}` : text);
    at("one-head").hidden = this.mode !== "head";
    at("colours").hidden = this.mode === "photo";
    if (looks) {
      setRange("layer", looks.layers);
      setRange("head", looks.heads);
    }
  }

  fillValues() {
    for (const id of ["layer", "head"]) setValue(id, words.of(at(id).value, at(id).max));
    setValue("opacity", words.shareOf(Number(at("opacity").value) / 100));
    setValue("over", words.shareOf(Number(at("over").value) / 100));
  }

  fillAnswers() {
    const lines = this.fillPlaces();
    at("answer-section").hidden = Boolean(this.item.places);
    if (this.item.places) {
      at("places").replaceChildren(...lines);
      at("more").hidden = true;
      return;
    }
    const { top, state } = this.item;
    const mapped = !at("controls").querySelector("[value=classMap]").disabled;
    const drawable = state === "done" && this.model.attention !== false && mapped;
    const chosen = document.activeElement?.dataset?.place;
    const entries = top.map((answer, i) => this.entry(answer, i, drawable));
    at("first").replaceChildren(...entries.slice(0, 1));
    at("others").replaceChildren(...entries.slice(1), ...this.rest(top));
    at("more").hidden = top.length < 2;
    at("more-note").hidden = !drawable;
    setText(at("no-answer"), state === "failed" ? words.noAnswerHere : words.sending);
    at("no-answer").hidden = top.length > 0;
    if (chosen !== undefined) entries[Number(chosen)]?.firstChild.focus(); // the button was made anew
  }

  entry(answer, place, drawable) {
    if (!drawable) return make("li", {}, answerLine(answer));
    const button = make("button", { type: "button", className: "answer" }, answerLine(answer));
    button.dataset.place = place;
    button.setAttribute("aria-pressed", String(this.mode === "classMap" && answer.label === this.target));
    button.onclick = () => this.choose(answer.label);
    return make("li", {}, button);
  }

  rest(top) {
    const others = (this.model.classes ?? 0) - top.length;
    if (this.model.multilabel || others < 1 || !top.length) return [];
    const left = Math.max(0, 1 - top.reduce((sum, answer) => sum + answer.probability, 0));
    const share = make("span", { className: "share" }, chance(left));
    return [make("li", { className: "rest note" }, make("span", { className: "line" }, words.rest(others), share))];
  }
}

function setRange(id, most) {
  const slider = at(id);
  if (Number(slider.max) !== most) {
    slider.max = most;
    if (id === "layer") slider.value = most; // the last layer says most about the answer
  }
  slider.disabled = most < 2;
}

function setValue(id, text) {
  setText(at(`${id}-value`), text);
  at(id).setAttribute("aria-valuetext", text);
}

// A class is asked for by its label; by its number where no address could hold the label.
function asked(label, labels) {
  const fits = label.length <= LONGEST_LABEL && (label.isWellFormed?.() ?? true);
  return fits ? label : String(labels.indexOf(label));
}

const bytes = (base64) => Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
