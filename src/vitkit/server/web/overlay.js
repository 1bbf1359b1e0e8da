// Maps of attention drawn over a picture so that the picture stays visible: a map is the more transparent, the
// lower its value.

// from dark to light in steps that look equal: 17 colours of the map "magma" (CC0)
const SCALE =
  "000004 0a0822 1d1147 36106b 51127c 6a1c81 832681 9c2e7f b73779 d0416f e75263 f56b5c fc8961 fea772 fec488 fde2a3 fcfdbf";
const STOPS = SCALE.split(" ").map((hex) => [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16)));
const PART = [0.1, 0.85]; // of the scale: its black would hide a dark picture, its pale end a bright one
const COLOURS = Array.from({ length: 256 }, (_, i) => {
  const place = (PART[0] + (i / 255) * (PART[1] - PART[0])) * (STOPS.length - 1);
  const low = Math.min(Math.floor(place), STOPS.length - 2);
  return STOPS[low].map((from, c) => from + (STOPS[low + 1][c] - from) * (place - low));
});
const LEAST = 0.25; // opacity of the value 0, as a share of that of 1
const SIDE = 224; // pixels of the longer side of an enlarged map; the browser smooths the rest

// The least is 0, and 1 is what lies above the quantile; where all are equal all are 0.
export function stretched(values, quantile = 1) {
  const sorted = Float32Array.from(values).sort();
  const low = sorted[0];
  let high = sorted[Math.round(quantile * (sorted.length - 1))];
  if (high <= low) high = sorted[sorted.length - 1];
  return Float32Array.from(values, (v) => (high > low ? Math.min(1, (v - low) / (high - low)) : 0));
}

// Numbers along a line brought to another length by cubic interpolation (Catmull-Rom).
function row(get, length, wanted, put) {
  for (let i = 0; i < wanted; i++) {
    const x = ((i + 0.5) * length) / wanted - 0.5;
    const left = Math.floor(x);
    const t = x - left;
    const [a, b, c, d] = [-1, 0, 1, 2].map((n) => get(Math.min(length - 1, Math.max(0, left + n))));
    put(i, b + 0.5 * t * (c - a + t * (2 * a - 5 * b + 4 * c - d + t * (3 * (b - c) + d - a))));
  }
}

function enlarged(values, [h, w]) {
  const scale = Math.max(1, Math.round(SIDE / Math.max(h, w)));
  const [height, width] = [h * scale, w * scale];
  const middle = new Float32Array(h * width);
  const out = new Float32Array(height * width);
  for (let y = 0; y < h; y++) row((i) => values[y * w + i], w, width, (i, v) => (middle[y * width + i] = v));
  for (let x = 0; x < width; x++) row((i) => middle[i * width + x], h, height, (i, v) => (out[i * width + x] = v));
  return { out, height, width };
}

// A canvas that holds the colours of a map of h × w numbers in 0..1, those of 0 with the opacity `least`.
function coloured(values, grid, least) {
  const { out, height, width } = enlarged(values, grid);
  const pixels = new ImageData(width, height);
  out.forEach((number, i) => {
    const value = Math.min(1, Math.max(0, number));
    const [red, green, blue] = COLOURS[Math.round(255 * value)];
    pixels.data[4 * i] = red;
    pixels.data[4 * i + 1] = green;
    pixels.data[4 * i + 2] = blue;
    pixels.data[4 * i + 3] = 255 * (least + (1 - least) * value);
  });
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

// The part of a picture that the model sees, in pixels of the picture: all of it, or the middle.
// Pixels at the right and bottom that lie in no whole patch are not part of it.
export function seen(width, height, size, preprocessing, covered = size) {
  if (!size) return [0, 0, width, height];
  let [h, w] = [height, width];
  if (preprocessing?.resize === "crop") {
    const side = Math.round(Math.max(...size) / preprocessing.crop);
    const scale = Math.min(width, height) / side;
    [h, w] = [size[0] * scale, size[1] * scale];
  }
  return [(width - w) / 2, (height - h) / 2, (w * covered[1]) / size[1], (h * covered[0]) / size[0]];
}

// The picture, greyer under the map so that its colours stand out, and the map over the part that the model sees.
export function draw(canvas, picture, map, { opacity, region }) {
  const context = canvas.getContext("2d");
  const { width, height } = canvas;
  context.globalCompositeOperation = "source-over";
  context.globalAlpha = 1;
  context.clearRect(0, 0, width, height);
  if (picture) context.drawImage(picture, 0, 0, width, height);
  if (!map) return;
  const [x, y, w, h] = region;
  context.globalAlpha = opacity;
  if (picture) {
    context.globalCompositeOperation = "saturation";
    context.fillStyle = "#808080";
    context.fillRect(x, y, w, h);
    context.globalCompositeOperation = "source-over";
    context.fillStyle = "rgb(255 255 255 / 0.75)"; // what the model does not see is pale
    context.beginPath();
    context.rect(0, 0, width, height);
    context.rect(x, y, w, h);
    context.fill("evenodd");
  }
  context.imageSmoothingQuality = "high";
  context.drawImage(coloured(map.values, map.grid, picture ? LEAST : 1), x, y, w, h);
}

// The colours from little to much, on a canvas 256 pixels wide.
export function drawScale(canvas) {
  const pixels = new ImageData(256, 1);
  COLOURS.forEach((colour, i) => pixels.data.set([...colour, 255 * (LEAST + ((1 - LEAST) * i) / 255)], 4 * i));
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}
