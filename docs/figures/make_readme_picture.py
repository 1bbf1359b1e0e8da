"""The picture of the README: `vitkit demo digits` in a terminal, its report, and attention over photographs.

    python docs/figures/make_readme_picture.py [FOLDER]

FOLDER has demo.log, the output of `vitkit demo digits`, and runs/demo; without it the demo is run first.
"""

import base64
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).parent
OUT = HERE / "vitkit.webp"
WIDTH = 1600  # pixels
MOST = 400_000  # bytes
RESULT = re.compile(
    r"no problems|[\d.]+ % |report: | +\d: |runs/demo/pictures/|.*largest difference|mean attention"
)
SHOWN = 2  # lines of results of each step
STYLE = """
* { box-sizing: border-box; margin: 0; }
body { width: 1600px; padding: 4px; display: grid; grid-template-columns: 860px 1fr; gap: 20px; }
.card { border: 2px solid #8b93a1; border-radius: 14px; overflow: hidden; background: #14161a; }
.bar { display: flex; gap: 9px; padding: 13px 16px; background: #262a32; }
.bar i { width: 13px; height: 13px; border-radius: 50%; background: #6b7280; }
pre { padding: 18px 22px; color: #d7dbe3; font: 16.5px/1.45 ui-monospace, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
b { color: #56b4e9; font-weight: 600; } u { color: #fff; text-decoration: none; font-weight: 600; }
.page { grid-column: 2; grid-row: 1 / span 2; height: 0; min-height: 100%; position: relative;
  padding: 12px 18px; background: #fff; }
.page::after { content: ""; position: absolute; inset: auto 0 0; height: 90px;
  background: linear-gradient(#fff0, #fff 80%); }
img { display: block; width: 100%; }
.photos { background: #fff; padding: 14px 20px; }
"""


def run_demo(folder: Path) -> None:
    line = [sys.executable, "-m", "vitkit", "demo", "digits"]
    with (folder / "demo.log").open("w") as log:
        subprocess.run(line, cwd=folder, stdout=log, stderr=subprocess.STDOUT, check=True)  # noqa: S603


def terminal(log: str) -> str:
    """The output as HTML: the title and the command of each step with the first of its results."""
    _, *steps = re.split(r"\n(?=\d\. )", log.replace("\r", "\n"))
    shown = []
    for step in steps:
        title, command, *lines = filter(None, step.splitlines())
        results = [line for line in lines if RESULT.match(line)][:SHOWN]
        shown += [f"\n<u>{escape(title)}</u>", f"<b>{escape(command)}</b>", *map(escape, results)]
    return "\n".join(shown).replace("-", "&#8209;")  # no line break after a hyphen


def source(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def screenshot(browser: Browser, url: str, width: int, height: int = 900, **options: object) -> bytes:
    context = browser.new_context(
        viewport={"width": width, "height": height}, device_scale_factor=1, color_scheme="light"
    )
    page = context.new_page()
    page.goto(url)
    content = page.screenshot(full_page=True, **options)
    context.close()
    return content


def composed(browser: Browser, folder: Path, report: Path) -> Image.Image:
    sheet = screenshot(browser, report.resolve().as_uri(), 1060)
    attention = (HERE / "attention.png").read_bytes()
    log = terminal((folder / "demo.log").read_text())
    document = f"""<!doctype html><meta charset="utf-8"><style>{STYLE}</style>
<div class="card"><div class="bar"><i></i><i></i><i></i></div>
<pre><u>$ vitkit demo digits</u>\n{log}</pre></div>
<div class="card page"><img src="{source(sheet)}"></div>
<div class="card photos"><img src="{source(attention)}"></div>"""
    path = folder / "picture.html"
    path.write_text(document)
    content = screenshot(browser, path.resolve().as_uri(), WIDTH, omit_background=True)
    return Image.open(BytesIO(content)).convert("RGBA")


def main() -> None:
    chromium = shutil.which("chromium")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as play:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary)
        if len(sys.argv) < 2:
            run_demo(folder)
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        picture = composed(browser, folder, folder / "runs" / "demo" / "all" / "report.html")
        browser.close()
    picture.save(OUT, quality=88, method=6)
    size = OUT.stat().st_size
    print(f"{OUT}: {picture.width} x {picture.height} pixels, {size:,} bytes")
    assert size < MOST


if __name__ == "__main__":
    main()
