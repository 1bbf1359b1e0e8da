"""Segmentation and detection over HTTP, in pixels of each image, and drawn on the page."""

import json
import shutil

import httpx
import numpy as np
import pytest
from dense_models import NAMES, detector, photograph, segmenter
from launch import picture, service
from test_report_browser import wide
from visits import Visit, as_png, wait_until

import vitkit
from vitkit.data.run_lengths import mask_of, parse_counts

MAKERS = {"detect": detector, "segment": segmenter}


@pytest.fixture(scope="module", params=list(MAKERS))
def running(request, tmp_path_factory):
    """A service with a model of each task."""
    model, path = MAKERS[request.param](), tmp_path_factory.mktemp("model") / "small.safetensors"
    vitkit.save(model, path)
    with service(path) as one:
        yield model, one.url


def same(model, result, content, **options):
    """Whether a result is what predict answers."""
    expected = vitkit.predict(model, content, **options)
    if model.task == "segment":
        assert result["size"] == list(expected.shape)
        for one in result["classes"]:
            there = mask_of(parse_counts(one["mask"]["counts"], ""), tuple(one["mask"]["size"]))
            assert (there == (expected == NAMES.index(one["label"]))).mean() > 0.999
        return
    assert len(result["detections"]) == len(expected) > 0
    for one, other in zip(result["detections"], expected, strict=True):
        assert one["label"] == other["label"] and one["box"] == pytest.approx(other["box"], abs=0.05)
        assert one["score"] == pytest.approx(other["score"], abs=1e-4)


def test_answers_are_those_of_predict_for_images_of_any_size(running):
    model, url = running
    contents = [picture(0, (40, 90)), as_png(photograph(97, 33)), picture(2, (200, 30)), b"nothing"]
    files = [("files", (f"{n}", content)) for n, content in enumerate(contents)]
    results = httpx.post(f"{url}/v1/predict", files=files, timeout=60).json()["results"]
    for result, content in zip(results[:3], contents, strict=False):
        same(model, result, content)
    assert results[3]["code"] == "image.unreadable"


def test_the_model_says_its_task_and_has_no_attention_maps(running):
    model, url = running
    said = httpx.get(f"{url}/v1/model", timeout=60).json()
    assert said["task"] == model.task and said["labels"] == list(NAMES) and said["attention"] is False
    assert said["threshold"] == (0.3 if model.task == "detect" else None)
    response = httpx.post(f"{url}/v1/attention", content=picture(0), timeout=60)
    assert response.status_code == 422 and response.json()["code"] == "inspection.unsupported"


def test_reject_is_the_least_score(running):
    model, url = running
    content = picture(0, (40, 90))
    response = httpx.post(f"{url}/v1/predict?reject=0.01", content=content, timeout=60)
    if model.task == "segment":
        assert response.status_code == 422 and response.json()["code"] == "model.unsupported"
    else:
        same(model, response.json()["results"][0], content, reject=0.01)


def test_a_picture_of_20_megapixels_is_answered_in_a_few_megabytes(running):
    model, url = running
    content = picture(1, (4000, 5000))
    response = httpx.post(f"{url}/v1/predict", content=content, timeout=120)
    assert response.status_code == 200 and len(response.content) < 4 * 2**20
    same(model, response.json()["results"][0], content)


CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("there is no chromium here")
    with playwright.sync_playwright() as play:
        window = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield window
        window.close()


def test_the_page_draws_places_that_follow_their_slider(browser, running):
    model, url = running
    content = as_png(photograph(90, 120))
    with Visit(browser, url) as visit:
        visit.give("drop", {"one.png": content, "broken.png": b"nothing"})
        visit.settled(2)
        visit.open()
        names = set(visit.says("[...document.querySelectorAll('#places bdi')].map((e) => e.textContent)"))
        assert names and names <= set(NAMES) and visit.page.locator("#place-controls").is_visible()
        assert visit.page.locator("#controls").is_hidden() and wide(visit) == 0
        before, asked = visit.drawn(), len(visit.asked)
        if model.task == "detect":
            visit.slide("Score ≥", "Home")
            many = visit.page.locator("#places li").count()
            visit.slide("Score ≥", "End")
            assert visit.page.locator("#places li").count() < many
        else:
            visit.slide("Mask", "Home")
        assert np.abs(visit.drawn() - before).max() > 20 and len(visit.asked) == asked
        visit.page.keyboard.press("Escape")


def test_masks_on_the_page_are_those_of_the_answer(browser, running):
    model, url = running
    if model.task != "segment":
        pytest.skip("only masks")
    content = as_png(photograph(37, 53))
    (result,) = httpx.post(f"{url}/v1/predict", content=content, timeout=60).json()["results"]
    code = """async (result) => {
      const { maskCanvas, colourOf } = await import('./static/places.js');
      const canvas = maskCanvas(result);
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return [canvas.height, canvas.width, [...data], [0, 1, 2, 25].map(colourOf)];
    }"""
    with Visit(browser, url) as visit:
        height, width, data, colours = visit.says(code, json.loads(json.dumps(result)))
    from vitkit.report.target_overlay import class_colour

    assert [tuple(colour) for colour in colours] == [class_colour(n) for n in (0, 1, 2, 25)]
    drawn = np.array(data).reshape(height, width, 4)
    mask = vitkit.predict(model, content)
    expected = np.array([class_colour(n) for n in range(len(NAMES))])[mask]
    assert (height, width) == mask.shape and (drawn[..., 3] == 255).all()
    assert (drawn[..., :3] == expected).all(-1).mean() > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("width, scheme", [(390, "light"), (390, "dark"), (1280, "dark")])
def test_the_page_fits_its_window(browser, running, width, scheme):
    with Visit(browser, running[1], width, scheme) as visit:
        visit.give(
            "drop", {f"a picture with a long name {n}.png": as_png(photograph(90, 120, n)) for n in range(3)}
        )
        visit.settled(3)
        assert wide(visit) == 0
        visit.open(1)
        assert wide(visit) == 0 and "undefined" not in visit.page.locator("body").text_content()
        wait_until(lambda: visit.page.locator("#places li").count() > 0)
        assert visit.says("(v => v.scrollWidth - v.clientWidth)(document.getElementById('viewer'))") == 0
