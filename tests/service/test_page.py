"""The page of `vitkit serve` in a browser, on the real service: what a visitor gives, sees and is spared."""

import os
import shutil
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from launch import service
from PIL import Image
from test_report_browser import HOSTILE, wide
from visits import Visit, as_png, model_of, png, wait_until

import vitkit
from vitkit.data.names import REMEDIES, readable_suffixes
from vitkit.inference.predict import pixels
from vitkit.models.vit import in_patches

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="there is no chromium here")

NAMES = tuple(name for name in HOSTILE if "\udcff" not in name)  # a label is stored as UTF-8


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model with hostile labels, and its file."""
    model, path = model_of(NAMES), tmp_path_factory.mktemp("model") / "small.safetensors"
    vitkit.save(model, path)
    return model, path


@pytest.fixture(scope="module")
def running(saved):
    with service(saved[1]) as one:
        yield one


@pytest.fixture(scope="module")
def address(running):
    return running.url


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as play:
        camera = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
        window = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *camera])
        yield window
        window.close()


def unquoted(text: str) -> str:
    """A cell of the CSV as it was before it was made harmless for spreadsheets."""
    return text[1:] if text[:2] in ("'=", "'+", "'-", "'@", "'\t") else text


def test_pictures_are_answered_as_by_predict_and_the_overlay_follows_its_sliders(browser, address, saved):
    with Visit(browser, address) as visit:
        visit.choose({"chosen.png": png(0), "broken.png": b"nothing"})
        visit.give("drop", {"dropped.png": png(1), "second.png": png(2)})
        visit.give("paste", {"image.png": png(3)})
        visit.settled(5)
        rows = visit.table()
        assert [row["image"] for row in rows] == [
            "chosen.png", "broken.png", "dropped.png", "second.png", "pasted picture 1.png"
        ]  # fmt: skip
        for row, seed in zip([rows[0], *rows[2:]], range(4), strict=True):
            expected = vitkit.predict(saved[0], png(seed), 10)
            assert [unquoted(row[f"label_{n}"]) for n in range(1, 11)] == [label for label, _ in expected]
            chances = [float(row[f"probability_{n}"]) for n in range(1, 11)]
            assert chances == pytest.approx([p for _, p in expected], abs=1e-4)
        assert "image" in rows[1]["error"] and not rows[1]["label_1"]
        assert rows[1]["error"] in visit.page.locator(".card").nth(1).inner_text()
        visit.open()
        overlay(visit)


def overlay(visit: Visit) -> None:
    """Every control of the open picture changes what is drawn, without a further request."""
    assert visit.page.get_by_label("Class map", exact=True).is_checked()
    assert visit.page.get_by_role("heading", name="Other predictions").is_visible()
    assert visit.page.locator("#first .answer").get_attribute("aria-pressed") == "true"
    by_class, asked = visit.drawn(), len(visit.asked)
    visit.slide("Opacity", "Home")
    plain = visit.drawn()
    visit.slide("Opacity", "End")
    map_alone = visit.drawn()
    assert np.abs(by_class - plain).max() > 20 and np.abs(by_class - map_alone).max() > 20
    assert map_alone.std() > 20  # it is not the same everywhere
    visit.page.get_by_label("Photo", exact=True).check()
    assert np.array_equal(visit.drawn(), plain) and visit.page.locator("#opacity").is_hidden()
    visit.page.get_by_label("Attention", exact=True).check()
    assert np.abs(visit.drawn() - map_alone).max() > 20
    visit.page.get_by_label("One head", exact=True).check()
    seen = [visit.drawn()]
    for name, key in (("Head", "ArrowRight"), ("Layer", "Home"), ("Head", "ArrowLeft")):
        visit.slide(name, key)
        seen.append(visit.drawn())
    assert all(np.abs(a - b).max() > 20 for i, a in enumerate(seen) for b in seen[:i])
    assert visit.page.get_by_label("Layer", exact=True).get_attribute("aria-valuetext") == "1 of 2"
    assert len(visit.asked) == asked
    visit.page.get_by_label("Class map", exact=True).check()
    first = visit.drawn()
    visit.page.locator("#others .answer").nth(2).click()
    visit.looked()
    assert visit.page.locator("#others .answer").nth(2).get_attribute("aria-pressed") == "true"
    assert len(visit.asked) == asked + 1 and first.std() > 0


def test_the_overlay_leaves_the_photograph_visible_everywhere(browser, address):
    stripes = np.zeros((960, 960, 3), np.uint8)
    stripes[:, np.arange(960) // 16 % 2 == 0] = 255
    with Visit(browser, address) as visit:
        visit.give("drop", {"stripes.png": as_png(stripes)})
        visit.settled(1)
        visit.open()
        for mode in ("Class map", "Attention", "One head"):
            visit.page.get_by_label(mode, exact=True).check()
            assert 0.5 * 255 < visit.contrast(16) < 0.9 * 255, mode


@pytest.mark.slow
def test_a_rest_that_lies_in_no_whole_patch_is_not_covered_by_the_map(browser, tmp_path):
    """40 pixels are two patches of 16 and a rest of 8, at the right and at the bottom."""
    vitkit.save(model_of(NAMES, patch=16, image_size=(40, 40)), tmp_path / "rest.safetensors")
    white = as_png(np.full((500, 500, 3), 255, np.uint8))
    with service(tmp_path / "rest.safetensors") as running, Visit(browser, running.url) as visit:
        visit.give("drop", {"white.png": white})
        visit.settled(1)
        visit.open()
        shown = np.asarray(Image.open(BytesIO(visit.page.locator("#canvas").screenshot())).convert("L"))
        rows, columns = np.nonzero(shown < 250)
        for places, side in zip((rows, columns), shown.shape, strict=True):
            assert places.min() <= 2 and places.max() == pytest.approx(0.8 * side, abs=0.01 * side)
        assert "pale border" in visit.page.locator("#outside").inner_text()


@pytest.mark.slow
def test_a_phone_is_offered_its_camera_and_its_photos(browser, address):
    with Visit(browser, address, 390, has_touch=True, is_mobile=True) as visit:
        shown = visit.page.locator("#drop").inner_text()
        assert "Take or choose a photo" in shown and "Drop" not in shown and "Ctrl" not in shown
        assert visit.page.locator("#drop").get_attribute("aria-label") == "Take or choose a photo"
        with visit.page.expect_file_chooser() as chooser:
            visit.page.get_by_role("button", name="Take a photo").tap()
        assert chooser.value.element.get_attribute("capture") == "environment"
        visit.choose({"one.png": png(1)}, "Choose photos")
        visit.settled(1)
        visit.page.locator(".thumb").tap()
        visit.looked()
        assert wide(visit) == 0 and visit.page.locator("#keys").is_hidden()


@pytest.mark.slow
def test_pictures_are_seen_to_open(browser, address):
    with Visit(browser, address) as visit:
        visit.give("drop", {f"{i}.png": png(i) for i in range(3)})
        visit.settled(3)
        assert visit.page.locator("#hint").is_visible()
        assert visit.page.locator(".thumb").first.inner_text() == "Look closer"
        assert visit.says("getComputedStyle(document.querySelector('.thumb')).cursor") == "zoom-in"
        visit.open(1)
        title = visit.page.locator("#viewer-title")
        for key, name in (("ArrowRight", "2.png"), ("ArrowRight", "0.png"), ("ArrowLeft", "2.png")):
            visit.page.keyboard.press(key)
            assert title.inner_text() == name
        visit.looked()
        visit.page.route("**/v1/attention*", lambda _: None)  # an answer that never comes
        visit.page.get_by_role("button", name="Close", exact=True).click()
        visit.give("drop", {"3.png": png(3)})
        visit.settled(4)
        visit.page.locator(".thumb").nth(3).click()
        assert visit.page.locator("#looking").is_visible()
        visit.page.keyboard.press("ArrowLeft")  # to a picture whose maps are here
        visit.looked()
        visit.slide("Opacity", "ArrowRight")  # which moves the slider, not on to the next picture
        assert title.inner_text() == "2.png" and "Esc" in visit.page.locator("#keys").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("width, scheme", [(390, "light"), (1280, "dark")])
def test_the_documents_fit_and_no_page_asks_for_what_is_not_there(browser, running, width, scheme):
    with Visit(browser, running.url, width, scheme) as visit:
        visit.page.get_by_role("link", name="Use this model from your own code").click()
        visit.page.get_by_role("heading", name="POST /v1/predict").wait_for()
        visit.page.wait_for_load_state()  # a heading is there before the style sheets are
        assert visit.page.url == f"{running.url}/docs" and wide(visit) == 0
        ground = visit.says("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(", "))) < 384) == (scheme == "dark")
        visit.page.goto(f"{running.url}/favicon.ico")
        assert not visit.trouble and "404" not in running.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("touch", [False, True])
def test_files_are_offered_of_the_formats_that_the_server_reads(browser, address, touch):
    """A phone converts what it is not offered; elsewhere also formats that need a library may be chosen."""
    with Visit(browser, address, has_touch=touch, is_mobile=touch) as visit:
        visit.page.get_by_role("heading", name=".safetensors").wait_for()
        offered = visit.page.locator("#files").get_attribute("accept").split(",")
        assert set(offered) == set(readable_suffixes()) | (set() if touch else {".avif", ".heic", ".heif"})
        assert len(offered) == len(set(offered))


def as_heic(content: bytes) -> bytes:
    heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed")
    file = BytesIO()
    heif.from_pillow(Image.open(BytesIO(content))).save(file, format="HEIF", quality=95)
    return file.getvalue()


def as_avif(content: bytes) -> bytes:
    file = BytesIO()
    Image.open(BytesIO(content)).save(file, "AVIF", quality=95)
    return file.getvalue()


@pytest.mark.slow
def test_photographs_as_phones_store_them_are_answered(browser, address):
    pictures = {"a.png": png(1), "a.heic": as_heic(png(1)), "a.avif": as_avif(png(1))}
    with Visit(browser, address) as visit:
        visit.give("drop", pictures)
        visit.settled(3)
        labels = visit.page.locator(".card .answers li:first-child .name").all_inner_texts()
        assert len(labels) == 3 and len(set(labels)) == 1


@pytest.mark.slow
def test_without_its_library_a_format_is_refused_with_the_remedy(browser, saved, tmp_path, monkeypatch):
    hidden = "import sys\nsys.modules['pillow_heif'] = None\nfrom PIL import features\n"
    hidden += "check = features.check\nfeatures.check = lambda name: name != 'avif' and check(name)\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    paths = [str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    pictures = {"a.heic": as_heic(png(1)), "a.avif": as_avif(png(1)), "a.png": png(1)}
    with service(saved[1]) as running, Visit(browser, running.url) as visit:
        visit.give("drop", pictures)
        visit.settled(3)
        states = visit.says("[...document.querySelectorAll('.card')].map(c => c.dataset.state)")
        assert states == ["failed", "failed", "done"]
        heic, avif = visit.page.locator(".card .state.failed").all_inner_texts()
        assert REMEDIES["HEIC"] in heic and 'pip install "vitkit[heif]"' in heic and REMEDIES["AVIF"] in avif


@pytest.mark.slow
@pytest.mark.parametrize("size", [(200, 120), (90, 240), (64, 64)])
def test_the_map_lies_on_the_part_of_the_picture_that_the_model_sees(browser, address, small, size):
    across, down = np.meshgrid(np.arange(size[0]), np.arange(size[1]))
    content = as_png(np.stack([across, down, 0 * down], -1).astype(np.uint8))  # each pixel tells its place
    model = small()
    for resize, crop in (("squash", 1.0), ("crop", 1.0), ("crop", 0.875)):
        model.preprocessing = replace(model.preprocessing, resize=resize, crop=crop)
        left, top, right, bottom = places(pixels(content, model))
        with Visit(browser, address) as visit:
            arguments = [*size, list(model.config.image_size), {"resize": resize, "crop": crop}]
            x, y, width, height = visit.says(
                "async (a) => (await import('./static/overlay.js')).seen(...a)", arguments
            )
        assert (x, y, x + width, y + height) == pytest.approx((left, top, right, bottom), abs=2.5)
        part = in_patches(pixels(content, model), 20)  # as if patches had 20 pixels: 20 x 20 of 32 x 32
        left, top, right, bottom = places(part)
        with Visit(browser, address) as visit:
            x, y, width, height = visit.says(
                "async (a) => (await import('./static/overlay.js')).seen(...a)", [*arguments, [20, 20]]
            )
        assert (x, y, x + width, y + height) == pytest.approx((left, top, right, bottom), abs=2.5)


def places(view) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a view, each half a step beyond its outermost pixel."""
    across, down = view[0].float().mean(0), view[1].float().mean(1)
    step = [(line[-1] - line[0]) / (len(line) - 1) / 2 for line in (across, down)]
    result = across[0] - step[0], down[0] - step[1], across[-1] + step[0], down[-1] + step[1]
    return tuple(float(place) + 0.5 for place in result)


@pytest.mark.slow
def test_hostile_names_of_classes_and_files_are_text(browser, address):
    shown = "[...document.querySelectorAll('bdi')].map((e) => e.textContent)"
    with Visit(browser, address, width=390) as visit:
        visit.give("drop", {name: png(i % 4) for i, name in enumerate(NAMES)})
        visit.settled(len(NAMES))
        read = set(visit.says(shown))
        for place in range(4):
            visit.open(place)
            read |= set(visit.says(shown))
            assert wide(visit) == 0
            assert visit.says("document.getElementById('viewer').scrollWidth") <= 390
            visit.page.keyboard.press("Escape")
        written = [visit.says("async (s) => (await import('./static/dom.js')).readable(s)", n) for n in NAMES]
        assert set(written) <= read
        assert "cat[U+202E]gpj.exe" in read and "<script>window.pwned=1</script>" in read
        assert wide(visit) == 0
        risky = "[...document.querySelectorAll('*')].flatMap((e) => [...e.attributes]).map((a) => a.name)"
        assert not [name for name in visit.says(risky) if name.startswith("on") or name == "srcdoc"]
        assert visit.says("document.querySelectorAll('iframe, object, base, main script').length") == 0
        assert {row["image"][:1] for row in visit.table()} & {"=", "+", "-", "@"} == set()


@pytest.mark.slow
@pytest.mark.parametrize("width, scheme", [(390, "light"), (390, "dark"), (1280, "light"), (1280, "dark")])
def test_the_page_fits_its_window_in_light_and_dark(browser, address, width, scheme):
    with Visit(browser, address, width, scheme) as visit:
        assert wide(visit) == 0
        visit.give(
            "drop", {f"a picture with a long name {i}.png": png(i) for i in range(6)} | {"b.png": b"no"}
        )
        visit.settled(7)
        assert wide(visit) == 0
        assert "undefined" not in visit.page.locator("body").text_content()
        visit.open(2)
        for mode in ("Attention", "Class map", "One head", "Photo"):
            visit.page.get_by_label(mode, exact=True).check()
            assert wide(visit) == 0
            assert visit.says("(v => v.scrollWidth - v.clientWidth)(document.getElementById('viewer'))") == 0
        assert visit.says("document.getElementById('canvas').getBoundingClientRect().width") > 0.5 * min(
            width, 700
        )
        ground = visit.says("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground[4:-1].split(", "))) < 384) == (scheme == "dark")


@pytest.mark.slow
@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1280, "light")])
def test_everything_can_be_done_with_the_keyboard(browser, address, width, scheme):
    focus = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent.trim()"
    with Visit(browser, address, width, scheme, reduced_motion="reduce") as visit:
        press = visit.page.keyboard.press
        press("Tab")
        assert visit.says(focus) == "Choose pictures"
        assert visit.says("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        with visit.page.expect_file_chooser() as chooser:
            press("Enter")
        chooser.value.set_files([{"name": "one.png", "mimeType": "image/png", "buffer": png(1)}])
        visit.settled(1)
        wait_until(lambda: visit.says("document.getElementById('said').textContent").startswith("one.png: "))
        reach(visit, focus, "Look closer at one.png")
        press("Enter")
        visit.looked()
        assert visit.says("document.querySelector('dialog[open]').id") == "viewer"
        before = visit.drawn()
        assert wide(visit) == 0
        reach(visit, "document.activeElement.value", "classMap")
        press("ArrowRight")
        press("ArrowRight")
        reach(visit, "document.activeElement.id", "layer")
        press("Home")
        assert np.abs(visit.drawn() - before).max() > 20
        reach(visit, "document.activeElement.dataset.place", "1")
        press("Space")
        visit.looked()
        assert visit.says("document.activeElement.getAttribute('aria-pressed')") == "true"
        press("Escape")
        assert visit.says(focus) == "Look closer at one.png"
        reach(visit, focus, "Remove one.png")
        press("Enter")
        assert visit.says(focus) == "Choose pictures" and visit.says("held.size") == 0


def reach(visit: Visit, what: str, wanted: str) -> None:
    """Tab until the focus is there."""
    for _ in range(25):
        if visit.says(what) == wanted:
            return
        visit.page.keyboard.press("Tab")
    raise AssertionError(f"the keyboard does not reach {wanted}")


@pytest.mark.slow
def test_a_token_is_asked_for_and_kept_for_the_tab_only(browser, saved):
    secret = "a-secret-of-23-characters"
    with service(saved[1], token=secret) as running, Visit(browser, running.url) as visit:
        field = visit.page.get_by_label("Token", exact=True)
        for wrong in ("not it", secret):
            field.fill(wrong)
            visit.page.get_by_role("button", name="Continue").click()
            if wrong != secret:
                visit.page.get_by_text("This token was not accepted.").wait_for()
        visit.page.get_by_text("31 classes").wait_for()
        visit.give("drop", {"one.png": png(1)})
        visit.settled(1)
        assert visit.page.locator("[data-state=done]").count() == 1
        assert visit.says("Object.values(sessionStorage)") == [secret]
        assert visit.says("localStorage.length") == 0 and visit.says("document.cookie") == ""
        assert not [asked for asked in visit.asked if secret in asked]
        visit.says("sessionStorage.clear()")
        visit.give("drop", {"two.png": png(2)})
        visit.page.locator("#token-cancel").click()
        visit.settled(2)
        assert "token" in visit.page.locator("[data-state=failed]").inner_text()


@pytest.mark.slow
def test_a_busy_server_is_waited_for_and_waiting_can_be_cancelled(browser, saved):
    with (
        service(saved[1], "--queue", "1", "--max-wait-ms", "400") as running,
        Visit(browser, running.url) as visit,
    ):
        visit.give("drop", {f"{i}.png": png(i) for i in range(5)})
        visit.page.locator("[data-state=waiting]").first.wait_for()
        assert "Waiting" in visit.page.locator("[data-state=waiting]").first.inner_text()
        visit.settled(5)
        assert visit.page.locator("[data-state=done]").count() == 5
        visit.give("drop", {f"{i}.png": png(i) for i in range(5, 25)})
        visit.page.locator("[data-state=waiting]").first.wait_for()
        visit.page.get_by_role("button", name="Cancel", exact=True).click()
        visit.settled(25)
        assert visit.page.locator("[data-state=failed]").count() >= 15
        visit.page.get_by_role("button", name="Try again").first.click()
        wait_until(lambda: visit.page.locator("[data-state=done]").count() >= 6)
        visit.page.get_by_role("button", name="Clear all").click()
        assert visit.page.locator(".card").count() == 0 and visit.says("held.size") == 0


@pytest.mark.slow
def test_limits_are_told_and_a_camera_gives_pictures(browser, saved):
    with service(saved[1], "--max-bytes", "20kB") as running, Visit(browser, running.url) as visit:
        held = []  # a picture may be dropped before the page knows the server's limits
        visit.page.route("**/v1/model", lambda route: held.append(route))
        visit.page.reload()
        visit.give("drop", {"large.png": png(0) + bytes(30_000), "empty.png": b""})
        wait_until(lambda: visit.page.locator(".card").count() == 2 and held)
        held[0].continue_()
        visit.settled(2)
        shown = visit.page.locator("#cards").inner_text()
        assert "the server accepts up to 20 kB" in shown and "This file is empty." in shown
        visit.page.get_by_role("button", name="Use the camera").click()
        wait_until(lambda: visit.says("document.getElementById('video').videoWidth") > 0)
        visit.page.get_by_role("button", name="Take the picture").click()
        visit.page.get_by_text("photograph 1.png").first.wait_for()
        assert visit.says("document.getElementById('video').srcObject") is None


@pytest.mark.slow
def test_a_model_without_attention_still_answers(browser, tmp_path, small_resnet):
    model = small_resnet()
    model.labels = ("a", "b", "c", "d", "e")
    vitkit.save(model, tmp_path / "resnet.safetensors")
    with service(tmp_path / "resnet.safetensors") as running, Visit(browser, running.url) as visit:
        visit.give("drop", {"one.png": png(1)})
        visit.settled(1)
        visit.page.locator(".thumb").click()
        visit.page.get_by_text("This model has no attention maps.").wait_for()
        assert visit.page.locator("#controls").is_hidden() and visit.drawn().std() > 0
        assert visit.page.locator(".viewer .answers .line").count() == 5
