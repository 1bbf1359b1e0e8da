"""Reports in a browser: nothing runs, is fetched or is cut off, whatever things are named."""

import html
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_report_page import run_content

from vitkit.report.compare_page import compare_page
from vitkit.report.confusion import NAMED
from vitkit.report.figure_style import render
from vitkit.report.figures import draw_scores
from vitkit.report.html import clipped, encoded, text
from vitkit.report.palette import DARK, LIGHT
from vitkit.report.run_page import run_page
from vitkit.report.study_page import study_page
from vitkit.report.suite_page import suite_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium here")

HOSTILE = (
    "<script>window.pwned=1</script>", "<img src=x onerror=window.pwned=1>", '"><svg onload=window.pwned=1>',
    "' onmouseover='window.pwned=1", '" onfocus="window.pwned=1" autofocus="', "javascript:window.pwned=1",
    "</style><script>window.pwned=1</script>", "</title><script>window.pwned=1</script>", "<!-- ", "-->",
    "]]><script>window.pwned=1</script>", "&lt;script&gt;window.pwned=1&lt;/script&gt;", "&#60;b&#62;",
    "&amp;",
    "<iframe srcdoc='<script>parent.pwned=1</script>'>", "<base href=http://example.org/>",
    "<meta http-equiv=refresh content=0;url=http://example.org/>", "<a href=javascript:window.pwned=1>x</a>",
    "<link rel=stylesheet href=http://example.org/a.css>", "<object data=http://example.org/>",
    "{{constructor.constructor('window.pwned=1')()}}", "${window.pwned=1}", "<%= window.pwned=1 %>",
    "cat\u202egpj.exe", "a\u2066b\u2069c", "zero\u200bwidth\u2060joined", "\u05d0\u05d1\u05d2 \u0645\u0631",
    "x" * 5000, "new\nline\ttab", "not utf-8 \udcff\udc80", "nul\x00escape\x1b[31m",
    "z\u0310\u0345a\u0334l\u0321go",
)  # fmt: skip
OURS = {
    "html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "h3", "p", "small", "nav", "a",
    "section", "figure", "svg", "g", "line", "polyline", "polygon", "circle", "path", "rect", "text", "tspan",
    "ul", "li", "bdi", "div", "table", "thead", "tbody", "tr", "th", "td", "details", "summary", "dl", "dt",
    "dd", "pre", "span", "img", "b", "br", "figcaption",
}  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        window = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield window
        window.close()


class Opened:
    """A page in the browser, with everything that it asked for and complained of."""

    def __init__(self, browser, path: Path, width: int = 1280, scheme: str = "light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.trouble: list[str] = []
        self.page.on("request", lambda r: self.asked.append(r.url))
        self.page.on("console", lambda m: self.trouble.append(m.text))
        self.page.on("pageerror", lambda e: self.trouble.append(str(e)))
        self.page.on("dialog", lambda d: (self.trouble.append(d.message), d.dismiss()))
        self.page.goto(path.as_uri())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.context.close()

    def says(self, code: str):
        return self.page.evaluate(code)


def hostile() -> dict:
    """A run in which everything that has a name has a hostile one."""
    value = run_content(classes=HOSTILE, name=HOSTILE[0], place=HOSTILE[1])
    value["recipe"] |= {"data": HOSTILE[2], "weights": HOSTILE[5], "about": HOSTILE[6]}
    for one, key in zip(value["mistakes"]["worst"], HOSTILE[8:] + HOSTILE[:8], strict=False):
        one["key"] = key
    value["doctor"]["findings"] = [
        {"severity": "warning", "text": key, "remedy": key, "kind": "x"} for key in HOSTILE[:12]
    ]
    value["environment"]["machine"] = dict.fromkeys(("device", "system"), HOSTILE[1]) | {
        HOSTILE[2]: HOSTILE[4]
    }
    value["unusable"] = {"train": {"count": 999, "files": dict.fromkeys(HOSTILE, HOSTILE[1])}}
    value["commands"] = {HOSTILE[1]: list(HOSTILE[:6])}
    value["result"]["cost"] = value["result"]["cost"] | {"device": HOSTILE[0]}
    return value


def write(path: Path, document: str) -> Path:
    path.write_bytes(encoded(document))
    return path


def wide(opened: Opened) -> int:
    """How far the page can be scrolled to the side."""
    return opened.says("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_hostile_names_do_nothing_and_are_shown_as_text(browser, tmp_path):
    two = [hostile(), hostile() | {"name": HOSTILE[6], "link": "javascript%3Awindow.pwned%3D1"}]
    for document in (run_page(hostile()), compare_page(two)):
        path = write(tmp_path / "page.html", document)
        with Opened(browser, path, width=390) as opened:
            opened.says("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert opened.says("typeof window.pwned") == "undefined"
            kinds = opened.says("[...new Set([...document.querySelectorAll('*')].map(e => e.localName))]")
            assert set(kinds) <= OURS
            risky = "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes]).map(a => a.name)"
            assert not [a for a in opened.says(risky) if a.startswith("on") or a in ("style", "srcdoc")]
            links = opened.says("[...document.querySelectorAll('a')].map(a => a.protocol)")
            assert set(links) == {"file:"}
            assert wide(opened) == 0
            assert not opened.trouble
            assert [url for url in opened.asked if not url.startswith("data:")] == [path.as_uri()]


def test_every_hostile_name_can_be_read(browser, tmp_path):
    with Opened(browser, write(tmp_path / "page.html", run_page(hostile()))) as opened:
        opened.says("document.querySelectorAll('details').forEach(d => d.open = true)")
        shown = opened.says("[...document.querySelectorAll('td bdi')].map(e => e.textContent)")
        assert "<script>window.pwned=1</script>" in opened.page.title()
        for label in HOSTILE:
            assert html.unescape(text(clipped(label, NAMED))) in shown, label
        assert "cat[U+202E]gpj.exe" in shown and "not utf-8 \\xff\\x80" in shown


VIEWS = pytest.mark.parametrize("width, scheme", [
    (390, "dark"), (1280, "light"),
    pytest.param(390, "light", marks=pytest.mark.slow), pytest.param(1280, "dark", marks=pytest.mark.slow),
])  # fmt: skip
# elements that stick out of the window, unless a box around them scrolls or hides what sticks out
OUTSIDE = """[...document.querySelectorAll('body *')].filter(e => {
    const box = e.getBoundingClientRect();
    if (!box.width || box.right <= innerWidth + 1) return false;
    for (let p = e.parentElement; p; p = p.parentElement)
        if (getComputedStyle(p).overflowX !== 'visible' && p.getBoundingClientRect().right <= innerWidth + 1)
            return false;
    return true; }).map(e => `${e.localName}.${e.className.baseVal ?? e.className}`)"""
# text of figures, and the colour of what lies behind it
INKS = """[...document.querySelectorAll('figure, .chart, .pictures, .matrix')].flatMap(f =>
    [...f.querySelectorAll('text, figcaption *, li, td, th')]).filter(e => e.textContent.trim()).map(e => {
        const style = getComputedStyle(e);
        let ground = e;
        while (ground && ['rgba(0, 0, 0, 0)', ''].includes(getComputedStyle(ground).backgroundColor))
            ground = ground.parentElement;
        return [e instanceof SVGElement ? style.fill : style.color,
                getComputedStyle(ground ?? document.body).backgroundColor]; })"""


def luminance(colour: str) -> float:
    """Of a colour as the browser computes it: rgb(r, g, b), or color(srgb r g b) of a mixture."""
    numbers = [float(n) for n in re.findall(r"[\d.]+", colour)[:3]]
    red, green, blue = numbers if colour.startswith("color(") else [n / 255 for n in numbers]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def suite() -> dict:
    """A suite as its folder tells of it."""
    row = {"top1": 0.5, "std": 0.01, "images": 1000, "rate": 0.01, "seeds": [0, 1, 2], "order": "tfds"}
    tried = {"rate-0.01-steps-500": 0.5, "rate-0.003-steps-2500": 0.4, "bit": 0.3}
    row |= {"group": "Natural", "complete": False, "tried": tried, "chosen": "rate-0.01-steps-500"}
    tasks = [row | {"task": name} for name in ("cifar100", "diabetic-retinopathy")]
    mean = {"mean": 0.5, "tasks": 2, "of": 7, "complete": False, "images": 2000, "interval": [0.4, 0.6]}
    return {"model": "ViT-B/16.augreg-i21k", "means": {"Natural": mean, "VTAB-1k": mean}, "tasks": tasks,
            "missing": [{"task": "dtd", "group": "Natural"}], "waiting": 1, "setting": None}  # fmt: skip


@VIEWS
@pytest.mark.slow
def test_every_page_fits_its_window_and_can_be_read_in_light_and_dark(browser, tmp_path, width, scheme):
    pages = {
        "run": run_page(run_content([f"a class with the number {i}" for i in range(30)])),
        "compare": compare_page([run_content(name=f"run {i}", place=str(i)) for i in range(9)]),
        "unfinished": run_page(run_content(result=None, mistakes=None)),
        "study": study_page(study()),
        "suite": suite_page(suite(), "VTAB-1k", {}),
    }
    for kind, document in pages.items():
        with Opened(browser, write(tmp_path / f"{kind}.html", document), width, scheme) as opened:
            opened.says("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert wide(opened) == 0 and not opened.says(OUTSIDE) and not opened.trouble, kind
            ground, ink = (
                opened.says(f"getComputedStyle(document.body).{which}")
                for which in ("backgroundColor", "color")
            )
            assert [luminance(c) < 0.5 for c in (ground, ink)] == [scheme == "dark", scheme == "light"]
            inks = opened.says(INKS)
            assert len(inks) > 10 or kind == "suite"
            assert all(abs(luminance(a) - luminance(b)) > 0.15 for a, b in inks), kind
            if kind in ("run", "compare", "unfinished"):
                drawn = opened.says("[...document.querySelectorAll('.chart > svg')].map(e => e.clientWidth)")
                assert len(drawn) >= 4 and min(drawn) > 300


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_of_matplotlib_follow_the_scheme_of_the_pages(browser, tmp_path, scheme):
    points = [(1, 0.2, 0.01), (2, 0.3, 0.01)]
    figure = draw_scores({"a": points}, x_label="step", y_label="accuracy", title="title")
    (tmp_path / "figure.svg").write_bytes(render(figure, "svg"))
    colours = DARK if scheme == "dark" else LIGHT
    with Opened(browser, tmp_path / "figure.svg", scheme=scheme) as opened:
        style = "[...document.querySelectorAll('{}')].map(e => getComputedStyle(e).{})"
        texts, fonts = (opened.says(style.format("text", which)) for which in ("fill", "fontFamily"))
        assert set(texts) == {as_rgb(colours[name]) for name in ("ink", "soft")}
        assert {font.split(",")[0] for font in fonts} == {"system-ui"}
        ground = opened.says("getComputedStyle(document.querySelector('#patch_1 path')).fill")
        assert ground == as_rgb(colours["paper"]) and not opened.trouble
        lines = opened.says(style.format("path", "stroke"))
        assert as_rgb(colours["c0"]) in lines


def as_rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def test_links_lead_to_their_sections_and_pictures_are_there(browser, tmp_path):
    with Opened(browser, write(tmp_path / "page.html", run_page(run_content()))) as opened:
        for link in opened.page.query_selector_all("nav a"):
            link.click()
            target = opened.says("document.querySelector(location.hash).querySelector('h2').textContent")
            assert target == link.text_content()
            assert opened.says("document.querySelector(location.hash).getBoundingClientRect().top") < 900
        sizes = opened.says("[...document.images].map(i => i.naturalWidth)")
        assert sizes and set(sizes) == {192}


BREEDS = ("American Staffordshire terrier", "German short-haired pointer", "tench", "black-footed ferret",
          "West Highland white terrier", "great white shark")  # fmt: skip
# of what is shown: text that does not fit, column names that lie over each other, matrices that are cut
CUT = """[...document.querySelectorAll('.wide, .matrix, .matrix th, .chart, .claims, .pictures, dl, pre')]
    .filter(e => e.offsetParent && e.scrollWidth > e.clientWidth + 1)
    .map(e => e.className || e.textContent)"""
OVERLAPPING = """[...document.querySelectorAll('.matrix')].filter(m => m.offsetParent).flatMap(m => {
    const boxes = [...m.querySelectorAll('th[scope=col] span')].map(e => e.getBoundingClientRect());
    return boxes.slice(1).filter((b, i) => b.left < boxes[i].right - 1).map(b => b.left); })"""
NAMES = """[...document.querySelectorAll('.matrix')].filter(m => m.offsetParent)
    .map(m => [...m.querySelectorAll('th[scope=%s] bdi')].map(e => e.textContent))"""


@pytest.mark.parametrize("count, wide_rows, narrow_rows", [
    (5, 5, 5), (37, 37, 8), (100, 24, 8),
    pytest.param(10, 10, 10, marks=pytest.mark.slow), pytest.param(1000, 24, 8, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_confusion_matrix_fits_its_window_with_whole_names(
    browser, tmp_path, count, wide_rows, narrow_rows
):
    names = [f"{BREEDS[i % 6]} {i}" for i in range(count)]
    path = write(tmp_path / "page.html", run_page(run_content(names)))
    for width, rows in ((1280, wide_rows), (390, narrow_rows)):
        with Opened(browser, path, width) as opened:
            assert wide(opened) == 0 and not opened.says(CUT) and not opened.says(OVERLAPPING)
            (beside,), (above,) = opened.says(NAMES % "row"), opened.says(NAMES % "col")
            assert len(beside) == rows and set(beside) <= set(names)
            assert above[:rows] == beside and len(above) == rows + (rows < count)
            size = opened.says("[...document.querySelectorAll('.matrix table')].find(m => m.offsetParent)"
                               ".clientWidth")  # fmt: skip
            assert size >= (780 if width == 1280 else 350)
            shown = opened.says("[...document.querySelectorAll('.pair img')].filter(i => i.offsetParent)"
                                ".map(i => i.clientWidth)")  # fmt: skip
            assert shown and min(shown) >= 160


def test_commands_break_between_words_and_are_copied_whole(browser, tmp_path):
    line = "vitkit finetune photos --weights ViT-B/16.augreg-i21k --image-size 384 --label-smoothing 0.1"
    path = write(tmp_path / "page.html", run_page(run_content() | {"commands": {"Use it": [line]}}))
    with Opened(browser, path, width=390) as opened:
        assert opened.says("document.querySelector('pre').innerText") == f"$ {line}"
        rows = opened.says("[...document.querySelectorAll('.word')].map(e => e.getClientRects().length)")
        heights = opened.says("[...document.querySelectorAll('.word')].map(e => e.clientHeight)")
        assert rows == [1] * len(line.split()) and len(set(heights)) == 1
        assert opened.says("document.querySelector('pre').clientHeight") > 2 * heights[0]


def test_plots_of_a_report_stand_in_one_grid(browser, tmp_path):
    with Opened(browser, write(tmp_path / "page.html", run_page(run_content()))) as opened:
        boxes = opened.says("""[...document.querySelectorAll('.chart > svg')].map(e => {
            const b = e.getBoundingClientRect();
            return [Math.round(b.left), Math.round(b.top), Math.round(b.width)]; })""")
        assert len({left for left, _, _ in boxes}) == 2 and len({width for *_, width in boxes}) == 1
        assert boxes[0][1] == boxes[1][1] and boxes[2][1] == boxes[3][1]


def study(names=("1d", "2d, with a rather long name", "relative")) -> dict:
    """A study as its folder tells of it, with every kind of figure."""
    verdicts = [{"claim": f"{name} is better than none", "outcome": outcome, "seeds": 3,
                 "words": "+1.20 [-0.40, +2.80] points, 3 seeds; at most 1 point less is called as good"}
                for name, outcome in zip(names, ("holds at this scale", "does not hold at this scale",
                                                 "inconclusive"), strict=False)]  # fmt: skip
    rows = [{"trial": f"positions={name},seed={seed}", "positions": name, "injection": "every layer",
             "hyper": "low rate and decay", "seed": seed, "steps": 1200, "top1": 0.5, "fewshot_mean": 0.4,
             "images_seen": 38_400, "seconds": 12.3, "device": "NVIDIA H200"} for name in names
            for seed in range(3)]  # fmt: skip
    means = [{"positions": name, "injection": "every layer", "hyper": "low rate and decay", "seeds": 3,
              "top-1 accuracy, %": "10.06 ± 1.23", "few-shot accuracy, %": "34.50 ± 2.01",
              "parameters": 86_415_592, "GFLOPs": 35.1, "exaFLOPs": 1.22e-8, "tpu_v3_core_days": 5.9e-9,
              "images_seen": 307_200_000, "seconds": 12_345.6} for name in names]  # fmt: skip
    chart = {"y": "few-shot accuracy", "x": "step", "log_x": True}
    line = [(1, 0.1, 0.02), (1000, 0.4, 0.01)]
    figures = [
        {"title": "as the run goes", "lines": dict.fromkeys(names, line)} | chart,
        {"title": "by setting", "bars": {n: {n: (0.5, 0.1), "other": (0.4, 0.0)} for n in names},
         "band": {}} | chart,
        {"title": "how alike", "maps": {n: np.eye(16).reshape(4, 4, 4, 4) for n in names}} | chart,
    ]  # fmt: skip
    return {"study": "positions", "shows": "Table 8", "about": "kinds of position embedding", "laws": [],
            "verdicts": verdicts, "figures": figures, "means": means, "rows": rows, "total": 9, "failed": {},
            "factors": ["positions", "injection", "hyper"], "table": "table.csv", "published": ("Table 8",),
            "chosen": {"steps": 1200}, "commands": ["vitkit study run positions --data digits"]}  # fmt: skip


@VIEWS
def test_a_study_tells_its_verdict_first_and_nothing_is_cut(browser, tmp_path, width, scheme):
    path = write(tmp_path / "page.html", study_page(study()))
    with Opened(browser, path, width, scheme) as opened:
        opened.says("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert wide(opened) == 0 and not opened.trouble and not opened.says(CUT)
        verdict = opened.says("document.querySelector('.headline').textContent")
        assert verdict.startswith("1 of 3 claims holds") and verdict.count("1 ") == 3
        assert opened.says("document.querySelector('.headline').getBoundingClientRect().bottom") < 220
        kinds = opened.says("[...document.querySelectorAll('.charts > *')].map(e => e.className)")
        assert kinds == ["chart", "chart"] and opened.says("document.images.length") == 3
        outside = """[...document.querySelectorAll('.chart svg text')].filter(t => {
            const b = t.getBoundingClientRect(), s = t.ownerSVGElement.getBoundingClientRect();
            return b.left < s.left - 1 || b.right > s.right + 1; }).map(t => t.textContent)"""
        assert not opened.says(outside)


def test_hostile_names_in_a_study_do_nothing(browser, tmp_path):
    value = study(names=HOSTILE) | {"study": HOSTILE[0], "table": "table.csv"}
    with Opened(browser, write(tmp_path / "page.html", study_page(value)), width=390) as opened:
        opened.says("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert opened.says("typeof window.pwned") == "undefined" and not opened.trouble
        kinds = opened.says("[...new Set([...document.querySelectorAll('*')].map(e => e.localName))]")
        assert set(kinds) <= OURS and wide(opened) == 0
