// Small helpers for the document. Text enters it as text only.

import { words } from "./strings.js";

export const touch = matchMedia("(pointer: coarse)").matches; // a phone or a tablet: nothing is dropped on it

export const at = (id) => document.getElementById(id);

// An element with properties and children: make("p", { className: "note" }, "text", element)
export function make(kind, properties = {}, ...children) {
  const element = document.createElement(kind);
  const { label, ...rest } = properties;
  Object.assign(element, rest);
  if (label !== undefined) element.setAttribute("aria-label", label);
  element.append(...children);
  return element;
}

// Fixed texts: data-word names what an element says, data-label what it is called, data-touch either on a phone.
export function fillWords(root) {
  const chosen = (element, name) => words[(touch && element.dataset.touch) || element.dataset[name]];
  for (const element of root.querySelectorAll("[data-word]")) element.textContent = chosen(element, "word");
  for (const element of root.querySelectorAll("[data-label]"))
    element.setAttribute("aria-label", chosen(element, "label"));
}

// Control characters and marks that turn the direction of writing are shown by number, so that no name can
// pass for another.
export function readable(text) {
  return String(text).replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu, shown);
}

function shown(character) {
  const code = character.codePointAt(0);
  return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
}

// The name of a class or of a file, in its own direction of writing.
export const named = (text) => make("bdi", { className: "name" }, readable(text));

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text; // an unchanged text is not announced again
}

// An answer's share as a bar; the number beside it says the same in words.
export function bar(share) {
  const filled = make("span", { className: "filled" });
  filled.style.width = `${Math.max(0.5, 100 * share)}%`;
  const track = make("span", { className: "track" }, filled);
  track.setAttribute("aria-hidden", "true");
  return track;
}
