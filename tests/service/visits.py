"""For tests of the page: pictures, a model that tells them apart, and visits by a browser."""

import csv
import io
import time
from base64 import b64encode
from pathlib import Path

import numpy as np
import torch
from launch import TINY, randomised
from PIL import Image

from vitkit.commands.look import normalized
from vitkit.inference.predict import pixels
from vitkit.models.variants import build

WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (e) => violations.push(`${e.violatedDirective} ${e.blockedURI}`));
window.held = new Set();
const [make, revoke] = [URL.createObjectURL, URL.revokeObjectURL];
URL.createObjectURL = (blob) => { const url = make.call(URL, blob); held.add(url); return url; };
URL.revokeObjectURL = (url) => { held.delete(url); revoke.call(URL, url); };
"""
GIVE = """([kind, files]) => {
  const transfer = new DataTransfer();
  for (const [name, base64] of files) {
    const content = Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
    transfer.items.add(new File([content], name, { type: "image/png" }));
  }
  const options = { bubbles: true, cancelable: true };
  document.body.dispatchEvent(kind === "drop"
    ? new DragEvent("drop", { ...options, dataTransfer: transfer })
    : new ClipboardEvent("paste", { ...options, clipboardData: transfer }));
}"""
DRAWN = """() => {
  const canvas = document.getElementById("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return Array.from({ length: 400 }, (_, i) => data[4 * Math.floor((i + 0.5) * data.length / 1600) + i % 3]);
}"""
STRIPES = """(step) => {
  const canvas = document.getElementById("canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const grey = (x, y) => [0, 1, 2].reduce((sum, c) => sum + data[4 * (y * canvas.width + x) + c], 0) / 3;
  let least = 255;
  for (let y = step / 2; y < canvas.height; y += step)
    for (let x = step / 2; x + step < canvas.width; x += step)
      least = Math.min(least, Math.abs(grey(x, y) - grey(x + step, y)));
  return least;
}"""


def png(seed: int) -> bytes:
    """A picture of twenty smooth patches of colour."""
    colours = np.random.default_rng(seed).integers(0, 255, (4, 5, 3), dtype=np.uint8)
    return as_png(np.asarray(Image.fromarray(colours).resize((120, 90), Image.Resampling.BICUBIC)))


def as_png(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def model_of(names: tuple[str, ...], groups: int = 4, name: str = "ViT-Ti/8", **options):
    """A small model for which picture i is of the classes i, i + groups, i + 2 groups and so on."""
    model = randomised(build(name, **(TINY | {"classes": len(names)} | options)))
    model.labels = names
    with torch.no_grad():
        seen = torch.stack([normalized(model, pixels(png(i), model)[None])[0] for i in range(groups)])
        one = 4 * torch.linalg.pinv(model.features(seen)).T  # (groups, D): 4 for its picture, 0 for others
        model.head.weight.copy_(torch.stack([one[i % groups] for i in range(len(names))]))
        model.head.bias.copy_(torch.linspace(0, 1, len(names)))
    return model


def wait_until(true, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "this took too long"
        time.sleep(0.05)


class Visit:
    """A visit to the page. At its end: nothing foreign was asked for, run or complained of."""

    def __init__(self, browser, url: str, width: int = 1280, scheme: str = "light", **options):
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme, **options)
        self.context.add_init_script(WATCH)
        self.page, self.url = self.context.new_page(), url
        self.asked: list[str] = []
        self.trouble: list[str] = []
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.on("console", lambda m: m.type == "error" and self.trouble.append(m.text))
        self.page.on("pageerror", lambda e: self.trouble.append(str(e)))
        self.page.on("filechooser", lambda _: None)  # from the start, so that none is missed
        self.page.goto(url)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            assert self.says("typeof window.pwned") == "undefined"
            assert not self.says("violations"), self.says("violations")
            output = ("Failed to load resource: the server responded",)  # Chromium's note of a 4xx or 503
            errors = [text for text in self.trouble if not text.startswith(output)]
            assert not errors, errors
            foreign = [url for url in self.asked if not url.startswith((self.url, "blob:", "data:"))]
            assert not foreign, foreign
        self.context.close()

    def says(self, code: str, *values):
        return self.page.evaluate(code, *values)

    def give(self, kind: str, files: dict[str, bytes]) -> None:
        self.says(GIVE, [kind, [(name, b64encode(content).decode()) for name, content in files.items()]])

    def choose(self, files: dict[str, bytes], button: str = "Choose pictures") -> None:
        with self.page.expect_file_chooser() as chooser:
            self.page.get_by_role("button", name=button).click()
        chooser.value.set_files([{"name": n, "mimeType": "image/png", "buffer": b} for n, b in files.items()])

    def settled(self, count: int) -> None:
        over = "document.querySelectorAll('[data-state=done], [data-state=failed]').length"
        wait_until(lambda: self.says(over) == count, 40)

    def table(self) -> list[dict[str, str]]:
        with self.page.expect_download() as download:
            self.page.get_by_role("button", name="Download as CSV").click()
        return list(csv.DictReader(Path(download.value.path()).read_text("utf-8").splitlines(keepends=True)))

    def open(self, place: int = 0) -> None:
        self.page.locator(".thumb").nth(place).click()
        self.looked()

    def looked(self) -> None:
        ready_ = "document.getElementById('looking').hidden && document.getElementById('canvas').width > 0"
        wait_until(lambda: self.says(ready_))

    def drawn(self) -> np.ndarray:
        return np.array(self.says(DRAWN), dtype=int)

    def contrast(self, step: int) -> float:
        """The least difference of two neighbouring black and white stripes, each `step` pixels wide."""
        return self.says(STRIPES, step)

    def slide(self, name: str, key: str) -> None:
        self.page.get_by_label(name, exact=True).press(key)
