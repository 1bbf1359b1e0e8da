// Requests to the service: asks for a token and retries while the server is busy.

import { at } from "./dom.js";
import { words } from "./strings.js";

const TRIES = 30; // of a server that says it is busy
const KEY = "vitkit-token";

// An error whose message is shown to the user.
export class Refused extends Error {
  constructor(text, status = 0) {
    super(text);
    this.status = status;
  }

  // whether the same picture may fare better at another time
  get passing() {
    return !this.status || this.status >= 500 || [401, 403, 408, 429].includes(this.status);
  }
}

// JSON from the service. `waiting(seconds)` is called during a wait, and `waiting(0)` before a retry.
export async function ask(path, { body, signal, waiting = () => {} } = {}) {
  let wrong = false;
  for (let tried = 0; tried < TRIES; ) {
    const token = sessionStorage.getItem(KEY);
    const headers = { "Content-Type": "application/octet-stream" }; // what kind of picture it is stands in the file
    if (token) headers.Authorization = `Bearer ${token}`;
    const response = await send(path, { method: body ? "POST" : "GET", body, headers, signal });
    if (response.ok) return response.json();
    if (response.status === 401) {
      // another picture may have asked in the meantime
      if (sessionStorage.getItem(KEY) === token) await askForToken(wrong || Boolean(token));
      wrong = true;
    } else if (response.status === 503) {
      tried += 1;
      await wait(patience(response), signal, waiting);
    } else {
      throw new Refused(await reason(response), response.status);
    }
  }
  throw new Refused(words.busyTooLong, 503);
}

async function send(path, options) {
  try {
    return await fetch(path, { ...options, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new Refused((await isReadable(options.body)) ? words.unreachable : words.unreadable);
  }
}

// A folder, or a file that was moved or changed since it was chosen, has nothing to send.
async function isReadable(file) {
  try {
    await file?.slice(0, 1).arrayBuffer();
    return true;
  } catch {
    return false;
  }
}

async function reason(response) {
  const said = await response.json().catch(() => null);
  if (typeof said?.error === "string") return said.error;
  return response.status === 413 ? words.overLimit : words.strange(response.status);
}

function patience(response) {
  const seconds = Number(response.headers.get("Retry-After"));
  return Number.isFinite(seconds) && seconds > 0 ? Math.min(seconds, 60) : 1;
}

// Seconds that are counted down, unless the signal ends them.
async function wait(seconds, signal, waiting) {
  const end = performance.now() + 1000 * seconds;
  for (let left = seconds; left > 0; left = (end - performance.now()) / 1000) {
    waiting(Math.ceil(left));
    await sleep(Math.min(1000, 1000 * left), signal);
  }
  waiting(0);
}

function sleep(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    signal?.throwIfAborted();
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", stop);
      resolve();
    }, milliseconds);
    signal?.addEventListener("abort", stop, { once: true });
  });
}

// One dialog for all who wait for a token; it is kept for this tab only.
let asking = null;

function askForToken(wrong) {
  asking ??= new Promise((resolve, reject) => {
    const dialog = at("token");
    const field = at("token-value");
    at("token-wrong").hidden = !wrong;
    field.value = "";
    let given = "";
    at("token-form").onsubmit = () => (given = field.value.trim());
    at("token-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      asking = null;
      field.value = "";
      if (!given) return reject(new Refused(words.noToken, 401));
      sessionStorage.setItem(KEY, given);
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}
