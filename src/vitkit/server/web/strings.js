// Everything that the page says, in one place; `locale` decides how numbers are written.

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
  lead: "The model names what it sees and shows which parts made it say so.",
  docs: "Ask this model from a program",
  unnamed: "a model",
  facts: (m) =>
    [
      m.classes ? count(m.classes, "class", "classes") : "",
      m.size ? `${m.size[1]} × ${m.size[0]} pixels` : "",
      m.parameters ? `${short.format(m.parameters)} parameters` : "",
      [m.engine, m.device].filter(Boolean).join(" on "),
    ].filter(Boolean).join(" · "),
  multilabel: "A picture can show several classes at once: each has a probability of its own.",

  // giving pictures
  drop: "Drop pictures here",
  dropNow: "Let go to add them",
  ways: "or paste one with Ctrl+V or ⌘V",
  choose: "Choose pictures",
  camera: "Use the camera",
  touchTitle: "Take or choose a photo",
  touchChoose: "Choose photos",
  touchCamera: "Take a photo",
  private: "Pictures go to this server as they are, and nowhere else.",
  pasted: (n) => `pasted picture ${n}`,
  photographed: (n) => `photograph ${n}`,

  // the list
  results: "Pictures",
  cancel: "Cancel",
  clear: "Clear all",
  remove: "Remove",
  removeThis: (name) => `Remove ${name}`,
  hint: "Open a picture to see which parts of it led to the answer.",
  closer: "Look closer",
  open: (name) => `Look closer at ${name}`,
  again: "Try again",
  againThis: (name) => `Try again: ${name}`,
  noPreview: "No preview",
  progress: (p) =>
    [
      p.open
        ? `${number.format(p.done)} of ${count(p.all, "picture", "pictures")} answered`
        : count(p.done, "picture answered", "pictures answered"),
      p.waiting ? `${number.format(p.waiting)} waiting for the server` : "",
      p.failed ? `${number.format(p.failed)} without an answer` : "",
    ].filter(Boolean).join(", "),
  answered: (name, label, p) => `${name}: ${label}, ${chance(p)}`,
  failedName: (name, why) => `${name}: ${why}`,

  // states of a picture
  queued: "In line",
  sending: "Asking the model …",
  waiting: (seconds) => `The server is busy. Waiting; next try in ${seconds} s`,
  cancelled: "Cancelled.",
  unreachable: "The server did not answer. Is it still running?",
  unreadable: "This file could not be read from the disk. Was it moved or changed?",
  empty: "This file is empty.",
  tooLarge: (has, most) => `This file has ${size(has)}; the server takes up to ${size(most)}.`,
  overLimit: "This file is larger than the server takes.",
  busyTooLong: "The server stayed busy. Try again later.",
  noToken: "The server wants a token, and none was given.",
  strange: (status) => `The server answered with an error (${status}).`,

  // the summary
  summary: "Summary",
  download: "Download as CSV",
  columns: { image: "Picture", answer: "Answer", probability: "Probability", next: "Next likely" },
  csvFile: "answers.csv",
  csv: { image: "image", label: (n) => `label_${n}`, probability: (n) => `probability_${n}`, error: "error" },

  // one picture
  close: "Close",
  previous: "Previous picture",
  next: "Next picture",
  keys: "← and → go to other pictures, Esc closes.",
  place: (n, of) => `${number.format(n)} of ${number.format(of)}`,
  answer: "Answer",
  others: "Other answers",
  othersNote: "Choose one to see which parts point to it.",
  rest: (n) => `${count(n, "other class", "other classes")} together`,
  show: "Show",
  classMap: "Class map",
  rollout: "Attention",
  head: "One head",
  photo: "Photo",
  explain: {
    classMap: (label) => `The parts of the picture that point to “${label}”.`,
    rollout: () => "Where the model looked: the attention of all layers, followed from the last back to the picture.",
    head: () => "What a single head looks at. Move the sliders to go through the layers and their heads.",
    photo: () => "The picture alone.",
  },
  layer: "Layer",
  headNumber: "Head",
  opacity: "Opacity",
  of: (n, all) => `${n} of ${all}`,
  shareOf: (p) => `${Math.round(100 * p)} %`,
  little: "little",
  much: "much",
  looking: "Looking …",
  outside: "The model does not see the pale border.",
  noAttention: "This model has no attention that could be drawn.",
  noAnswerHere: "There is no answer for this picture.",
  noClassMap: "This model has no class map.",
  drawn: {
    rollout: (name) => `${name}, with the attention of all layers laid over it`,
    classMap: (name, label) => `${name}, with the parts that point to ${label} coloured`,
    head: (name, layer, head) => `${name}, with head ${head} of layer ${layer} laid over it`,
    photo: (name) => name,
  },

  // the token
  tokenTitle: "This server wants a token",
  tokenNote: "Whoever runs it can tell you. It is kept until this tab is closed.",
  tokenLabel: "Token",
  tokenWrong: "This token was not accepted.",
  tokenSend: "Continue",

  // the camera
  cameraTitle: "Camera",
  shoot: "Take the picture",
  cameraOff: "The camera cannot be used: it is missing, busy or not allowed for this page.",
};
