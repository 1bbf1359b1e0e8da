// Answers about places in a picture: boxes of a detector, masks of classes.

import { make, named } from "./dom.js";
import { chance } from "./strings.js";

// the colours of the classes, as vitkit draws them in files
const COLOURS =
  "e6194b 3cb44b ffe119 4363d8 f58231 911eb4 46f0f0 f032e6 bcf60c fabebe 008080 e6beff 9a6324 fffac8 800000 aaffc3 808000 ffd8b1 000075 a9a9a9"
    .split(" ").map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
const LARGEST = 4096; // pixels of the longer side of a mask that is drawn
const USUAL = 0.3; // threshold of a detector that names none

export const inPlaces = (model) => ["detect", "instances", "segment"].includes(model.task);
export const threshold = (model) => model.reject_below ?? model.threshold ?? USUAL;

// What an answer says about places, or nothing: { boxes } or { classes, size }.
export function placesOf(result) {
  if (result.detections) return { boxes: result.detections };
  return result.classes ? { classes: result.classes, size: result.size } : null;
}

// Lines for a card: boxes above a threshold, or classes with their share of the picture.
export function answersOf(places, least) {
  if (places.classes) return places.classes.map((one) => ({ ...one, probability: one.share }));
  return places.boxes.filter((one) => one.score >= least).map((one) => ({ ...one, probability: one.score }));
}

// The same colour for a class in every picture: 20 chosen ones, then ever finer parts of the circle.
export function colourOf(number) {
  if (number < COLOURS.length) return COLOURS[Math.max(0, number)];
  const rank = number - COLOURS.length;
  const value = [0.95, 0.65, 0.8][rank % 3];
  const saturation = [0.75, 0.9, 0.5][Math.floor(rank / 3) % 3];
  const hue = ((rank * 0.61803398875) % 1) * 6;
  return [5, 3, 1].map((n) => {
    const k = (n + hue) % 6;
    return Math.round(255 * (value - value * saturation * Math.max(0, Math.min(k, 4 - k, 1))));
  });
}

const css = ([red, green, blue], alpha = 1) => `rgb(${red} ${green} ${blue} / ${alpha})`;
const dark = ([red, green, blue]) => 0.299 * red + 0.587 * green + 0.114 * blue > 140;

// The run lengths of COCO: groups of 5 bits, from the fourth on differences to the run before the last.
export function runs(text) {
  const counts = [];
  for (let i = 0; i < text.length; ) {
    let [value, shift, bits] = [0, 0, 0];
    do {
      bits = text.charCodeAt(i++) - 48;
      value += (bits & 31) * 2 ** shift;
      shift += 5;
    } while (bits & 32);
    if (bits & 16) value -= 2 ** shift;
    counts.push(counts.length > 2 ? value + counts[counts.length - 2] : value);
  }
  return counts;
}

// The masks of all classes as one canvas in their colours, no larger than a picture that is drawn.
export function maskCanvas({ classes, size: [height, width] }) {
  const scale = Math.min(1, LARGEST / Math.max(height, width));
  const [h, w] = [height, width].map((n) => Math.max(1, Math.round(n * scale)));
  const pixels = new ImageData(w, h);
  const words = new Uint32Array(pixels.data.buffer);
  for (const one of classes) {
    const [red, green, blue] = colourOf(one.class);
    const colour = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    let place = 0;
    runs(one.mask.counts).forEach((length, i) => {
      if (i % 2 && scale === 1) fillRun(words, place, length, height, w, colour);
      else if (i % 2) fillScaled(words, place, length, height, [h, w, scale], colour);
      place += length;
    });
  }
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [w, h];
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

// Runs go down the columns.
function fillRun(words, place, length, height, w, colour) {
  let [x, y] = [Math.floor(place / height), place % height];
  for (let n = 0; n < length; n++) {
    words[y * w + x] = colour;
    if (++y === height) [x, y] = [x + 1, 0];
  }
}

function fillScaled(words, place, length, height, [h, w, scale], colour) {
  for (let n = place; n < place + length; n++) {
    const x = Math.min(w - 1, Math.floor(Math.floor(n / height) * scale));
    words[Math.min(h - 1, Math.floor((n % height) * scale)) * w + x] = colour;
  }
}

// Masks over the picture that is on a canvas.
export function drawMask(canvas, mask, opacity) {
  const context = canvas.getContext("2d");
  context.globalCompositeOperation = "source-over";
  context.globalAlpha = opacity;
  context.imageSmoothingEnabled = false;
  context.drawImage(mask, 0, 0, canvas.width, canvas.height);
  context.imageSmoothingEnabled = true;
  context.globalAlpha = 1;
}

// Boxes with names and scores over the picture, small ones last; `scale`: pixels of the canvas for one of it.
export function drawBoxes(canvas, boxes, numbers, scale, name) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  const line = Math.max(2, Math.round(Math.max(width, height) / 320));
  const high = Math.max(14, Math.round(Math.max(width, height) / 48));
  const area = ({ box: [x0, y0, x1, y1] }) => (x1 - x0) * (y1 - y0);
  context.globalCompositeOperation = "source-over";
  context.globalAlpha = 1;
  context.lineWidth = line;
  context.font = `600 ${high}px system-ui, sans-serif`;
  context.textBaseline = "top";
  for (const one of [...boxes].sort((a, b) => area(b) - area(a))) {
    const colour = colourOf(numbers.get(one.label) ?? 0);
    const [x0, y0, x1, y1] = one.box.map((side) => side * scale);
    context.strokeStyle = css(colour);
    context.strokeRect(x0 + line / 2, y0 + line / 2, Math.max(1, x1 - x0 - line), Math.max(1, y1 - y0 - line));
    const text = `${name(one.label)} ${chance(one.score)}`;
    const wide = Math.min(width, context.measureText(text).width + 8);
    const left = Math.max(0, Math.min(x0, width - wide));
    const top = y0 >= high + 6 ? y0 - high - 6 : y0;
    context.fillStyle = css(colour);
    context.fillRect(left, top, wide, high + 6);
    context.fillStyle = dark(colour) ? "#000" : "#fff";
    context.fillText(text, left + 4, top + 3, wide - 8);
  }
}

// A line of the legend: the colour of a class, its name, and its share or score.
export function placeLine({ label, probability }, number) {
  const patch = make("span", { className: "patch" });
  patch.style.background = css(colourOf(number));
  patch.setAttribute("aria-hidden", "true");
  return make("span", { className: "line with-patch" }, patch, named(label),
    make("span", { className: "share" }, chance(probability)));
}
