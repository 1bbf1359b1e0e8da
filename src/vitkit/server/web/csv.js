// The answers as a table for other programs, made in the browser.

import { words } from "./strings.js";

// A cell in quotes. Spreadsheets run what begins with one of these signs, so a quote mark comes before it.
function cell(value) {
  const text = String(value ?? "");
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n\r']/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

export function csv(items) {
  const done = items.filter((item) => ["done", "failed"].includes(item.state));
  const most = Math.max(0, ...done.map((item) => item.top.length));
  const places = Array.from({ length: most }, (_, i) => i);
  const head = [
    words.csv.image, ...places.flatMap((i) => [words.csv.label(i + 1), words.csv.probability(i + 1)]), words.csv.error,
  ];
  const rows = done.map((item) => [
    item.name, ...places.flatMap((i) => [item.top[i]?.label, item.top[i]?.probability]), item.error,
  ]);
  return [head, ...rows].map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000); // the download has begun by then
}
