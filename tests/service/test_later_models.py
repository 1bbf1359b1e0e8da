"""`vitkit serve` with later ViTs: registers and two features, a zero-shot classifier, a distilled model."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from launch import picture, service, tiny
from test_zero_shot import towers  # noqa: F401

import vitkit

LABELS = ("cat", "dog", "red car")
JPEG = {"content-type": "image/jpeg"}


@pytest.fixture
def classifiers(towers):  # noqa: F811
    """A model of each family by its name, with labels."""
    dinov2 = tiny(classes=3, registers=4, layer_scale=True, head="token+gap", position_resize="timm")
    models = {"dinov2": dinov2, "deit": tiny(classes=3, distilled=True)}
    for model in models.values():
        model.labels = LABELS
    return models | {"clip": vitkit.zero_shot(vitkit.load(towers("clip"), text=True), LABELS)}


@pytest.mark.slow
def test_the_service_answers_as_predict_does(classifiers, tmp_path):
    files = {name: tmp_path / f"{name}.safetensors" for name in classifiers}
    for name, model in classifiers.items():
        vitkit.save(model, files[name])
    content, answers = picture(1), {}
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        starts = [service(file, "--workers", "1") for file in files.values()]
        for name, running in zip(files, pool.map(stack.enter_context, starts), strict=True):
            with httpx.Client(base_url=running.url, timeout=120) as ask:
                answer = ask.post("/v1/predict?top=3", content=content, headers=JPEG)
                assert answer.status_code == 200, answer.text
                (answers[name],) = answer.json()["results"]
                assert ask.get("/v1/model").json()["labels"] == list(LABELS)
    for name in classifiers:
        wanted = vitkit.predict(vitkit.load(files[name]), content, top=3)
        assert [one["label"] for one in answers[name]["top"]] == [label for label, _ in wanted]
        chances = [one["probability"] for one in answers[name]["top"]]
        assert chances == pytest.approx([chance for _, chance in wanted], abs=1e-5)
        assert sum(chances) == pytest.approx(1, abs=1e-4) and max(chances) > 1.01 / 3
