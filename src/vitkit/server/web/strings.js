// All texts of the page; `locale` sets the number format.

export const locale = "en";

const number = new Intl.NumberFormat(locale);
const short = new Intl.NumberFormat(locale, { notation: "compact", compactDisplay: "long", maximumSignificantDigits: 3 });
const percent = new Intl.NumberFormat(locale, { minimumFractionDigits: 1, maximumFractionDigits: 1 });

const count = (n, one, many) => `${number.format(n)} ${n === 1 ? one : many}`;

export function chance(p) {
  if (p > 0 && p < 0.0005) return "< 0.1 %";
  if (p < 1 && p > 0.9995) return "> 99.9 %";
  return `${percent.format(100 * p)} %`;
}

export function size(bytes) {
  if (bytes < 1000) return count(bytes, "byte", "bytes");
  if (bytes < 1e6) return `${number.format(Math.round(bytes / 1000))} kB`;
  return `${percent.format(bytes / 1e6)} MB`;
}

export const words = {
  // the page
  title: "What is in the picture?",
  pageTitle: (model) => `${model} · vitkit`,
  titlePlaces: "What is where in the picture?",
  leadPlaces: "See what the model finds, and where in the picture it is.",
  hintPlaces: "Open a picture to see the places.",
  places: "In the picture",
  least: "Score ≥",
  over: "Mask",
  boxes: (n, all) => `${count(n, "object", "objects")} shown of ${number.format(all)}`,
  masks: (n) => `${count(n, "class", "classes")}, with the share of the pixels`,
  nothing: (name) => `${name}: nothing found`,
  nothingHere: "Nothing found.",
  lead: "See what the model recognises, and which parts of the picture led to its prediction.",
  docs: "Use this model from your own code",
  unnamed: "a model",
  facts: (m) =>
    [
      m.classes ? count(m.classes, "class", "classes") : "",
      m.size ? `${m.size[1]} × ${m.size[0]} pixels` : "",
      m.parameters ? `${short.format(m.parameters)} parameters` : "",
      [m.engine, m.device].filter(Boolean).join(" on "),
    ].filter(Boolean).join(" · "),
  multilabel: "A picture can have several labels, so each class has its own probability.",

  // giving pictures
  drop: "Drop pictures here",
  dropNow: "Release to add them",
  ways: "or paste one with Ctrl+V or ⌘V",
  choose: "Choose pictures",
  camera: "Use the camera",
  touchTitle: "Take or choose a photo",
  touchChoose: "Choose photos",
  touchCamera: "Take a photo",
  private: "Pictures are sent to this server only, unchanged.",
  pasted: (n) => `pasted picture ${n}`,
  photographed: (n) => `photograph ${n}`,

  // the list
  results: "Pictures",
  cancel: "Cancel",
  clear: "Clear all",
  remove: "Remove",
  removeThis: (name) => `Remove ${name}`,
  hint: "Open a picture to see which parts led to the prediction.",
  closer: "Look closer",
  open: (name) => `Look closer at ${name}`,
  again: "Try again",
  againThis: (name) => `Try again: ${name}`,
  noPreview: "No preview",
  progress: (p) =>
    [
      p.open
        ? `${number.format(p.done)} of ${count(p.all, "picture", "pictures")} done`
        : count(p.done, "picture done", "pictures done"),
      p.waiting ? `${number.format(p.waiting)} waiting for the server` : "",
      p.failed ? `${number.format(p.failed)} failed` : "",
    ].filter(Boolean).join(", "),
  answered: (name, label, p) => `${name}: ${label}, ${chance(p)}`,
  failedName: (name, why) => `${name}: ${why}`,

  // states of a picture
  queued: "Queued",
  sending: "Running the model …",
  waiting: (seconds) => `The server is busy. Waiting to retry in ${seconds} s`,
  cancelled: "Cancelled.",
  unreachable: "The server did not answer. Is it still running?",
  unreadable: "This file could not be read from the disk. Was it moved or changed?",
  empty: "This file is empty.",
  tooLarge: (has, most) => `This file has ${size(has)}; the server accepts up to ${size(most)}.`,
  overLimit: "This file is larger than the server accepts.",
  busyTooLong: "The server is still busy. Try again later.",
  noToken: "The server requires a token.",
  strange: (status) => `The server answered with an error (${status}).`,

  // the summary
  summary: "Summary",
  download: "Download as CSV",
  columns: { image: "Picture", answer: "Prediction", probability: "Probability", next: "Next most likely" },
  csvFile: "answers.csv",
  csv: { image: "image", label: (n) => `label_${n}`, probability: (n) => `probability_${n}`, error: "error" },

  // one picture
  close: "Close",
  previous: "Previous picture",
  next: "Next picture",
  keys: "← and → switch between pictures, Esc closes.",
  place: (n, of) => `${number.format(n)} of ${number.format(of)}`,
  answer: "Prediction",
  others: "Other predictions",
  othersNote: "Choose one to see which parts of the picture support it.",
  rest: (n) => `${count(n, "other class", "other classes")} combined`,
  show: "Show",
  classMap: "Class map",
  rollout: "Attention",
  head: "One head",
  photo: "Photo",
  explain: {
    classMap: (label) => `The parts of the picture that support “${label}”.`,
    rollout: () => "Attention rollout: the attention of all layers, traced back to the picture.",
    head: () => "The attention of a single head. Choose the layer and the head with the sliders.",
    photo: () => "The picture without an overlay.",
  },
  layer: "Layer",
  headNumber: "Head",
  opacity: "Opacity",
  of: (n, all) => `${n} of ${all}`,
  shareOf: (p) => `${Math.round(100 * p)} %`,
  little: "low",
  much: "high",
  looking: "Computing …",
  outside: "The model does not see the pale border.",
  noAttention: "This model has no attention maps.",
  noAnswerHere: "There is no prediction for this picture.",
  noClassMap: "This model has no class map.",
  drawn: {
    rollout: (name) => `${name}, overlaid with the attention of all layers`,
    classMap: (name, label) => `${name}, overlaid with the class map of ${label}`,
    head: (name, layer, head) => `${name}, overlaid with head ${head} of layer ${layer}`,
    photo: (name) => name,
  },

  // the token
  tokenTitle: "This server requires a token",
  tokenNote: "Ask the operator of the server for it. It is kept until you close this tab.",
  tokenLabel: "Token",
  tokenWrong: "This token was not accepted.",
  tokenSend: "Continue",

  // the camera
  cameraTitle: "Camera",
  shoot: "Take the picture",
  cameraOff: "The camera cannot be used: it is missing, busy or not allowed for this page.",
};
