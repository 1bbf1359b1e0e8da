// A picture's card and its row in the summary.

import { bar, make, named, readable, setText } from "./dom.js";
import { chance, words } from "./strings.js";

const SHOWN = 5; // answers on a card

// Card and row of a picture. `actions` are open, remove and retry, each with the picture as its argument.
export class Card {
  constructor(item, actions) {
    const name = readable(item.name);
    this.image = make("img", { alt: "", src: item.url, loading: "lazy", decoding: "async" });
    this.image.onerror = () => this.image.replaceWith(make("span", { className: "note" }, words.noPreview));
    this.thumb = make(
      "button", { type: "button", className: "thumb", label: words.open(name) },
      this.image, make("span", { className: "closer" }, words.closer),
    );
    this.state = make("p", { className: "state note" });
    this.answers = make("ol", { className: "answers" });
    this.again = make("button", { type: "button", label: words.againThis(name), hidden: true }, words.again);
    const remove = make("button", { type: "button", className: "quiet", label: words.removeThis(name) }, words.remove);
    this.thumb.onclick = () => actions.open(item);
    this.again.onclick = () => actions.retry(item);
    remove.onclick = () => actions.remove(item);
    this.element = make(
      "li", { className: "card" }, this.thumb,
      make("p", { className: "file" }, named(item.name), remove),
      this.answers, this.state, this.again,
    );
    this.cells = ["", "", "number", "next"].map((className) => make("td", { className }));
    this.cells[0].append(named(item.name));
    this.row = make("tr", {}, ...this.cells);
  }

  update(item) {
    const text = stateText(item);
    const failed = item.state === "failed";
    setText(this.state, text);
    this.state.hidden = !text;
    this.state.classList.toggle("failed", failed);
    this.again.hidden = !(failed && item.passing);
    this.element.dataset.state = item.state;
    this.element.setAttribute("aria-busy", String(["sending", "waiting"].includes(item.state)));
    const top = item.state === "done" ? item.top : [];
    this.answers.replaceChildren(...top.slice(0, SHOWN).map((answer) => make("li", {}, answerLine(answer))));
    this.fillRow(text, failed, top);
  }

  fillRow(text, failed, [first, ...others]) {
    const [, answer, probability, next] = this.cells;
    answer.replaceChildren(first ? named(first.label) : text);
    answer.classList.toggle("failed", failed);
    setText(probability, first ? chance(first.probability) : "");
    const line = (o) => make("span", { className: "line" }, named(o.label), share(o.probability));
    next.replaceChildren(...others.slice(0, 2).map(line));
  }
}

const share = (probability) => make("span", { className: "share" }, chance(probability));

// A label, its share as a number and its share as a bar.
export function answerLine({ label, probability }) {
  return make(
    "span", { className: "line" },
    named(label), share(probability), bar(probability),
  );
}

function stateText(item) {
  if (item.state === "waiting") return words.waiting(item.seconds);
  if (item.state === "failed") return readable(item.error);
  if (item.state === "done" && !item.top.length) return words.nothingHere;
  return { queued: words.queued, sending: words.sending }[item.state] ?? "";
}
