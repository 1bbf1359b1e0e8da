"""Every line that /docs shows is sent to the service, and its answer has the form of the one beside it."""

import json
import os
import re
import subprocess
from html import unescape
from itertools import pairwise

import httpx
import pytest
from launch import picture, service, tiny

from vitkit.report.palette import DARK, LIGHT
from vitkit.server.docs import EXAMPLES, MORE, SENDING, base_url, page
from vitkit.weights.save import save

TOKEN = "a-secret-of-23-characters"
SHOWN = re.compile(r'<pre class="(command|answer|error)"><code>(.*?)</code></pre>', re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that asks for a token, and two pictures."""
    place = tmp_path_factory.mktemp("docs")
    model = tiny()
    model.labels = ("tabby cat", "tiger cat", "lynx", "dog", "owl")
    save(model, place / "photos.safetensors")
    for seed, name in enumerate(("cat.jpg", "dog.jpg")):
        (place / name).write_bytes(picture(seed))
    return place


@pytest.fixture(scope="module")
def running(folder):
    with service(folder / "photos.safetensors", token=TOKEN) as one:
        yield one


@pytest.fixture(scope="module")
def shown(running):
    """What /docs shows in boxes, in its order: (kind, text)."""
    return [(kind, unescape(text)) for kind, text in SHOWN.findall(httpx.get(f"{running.url}/docs").text)]


def sent(line: str, folder) -> str:
    """What a line for the shell prints."""
    known = os.environ | {"VITKIT_TOKEN": TOKEN, "no_proxy": "*"}
    words = ["sh", "-c", line.replace("curl ", "curl -sS ")]
    done = subprocess.run(words, cwd=folder, env=known, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def differences(example, answer, place: str = "answer") -> list[str]:
    """Where an answer has another form than its example, whose lists may end in an ellipsis."""
    if isinstance(example, dict) and isinstance(answer, dict):
        if list(example) != list(answer):
            return [f"{place}: {list(answer)}"]
        return [d for key in example for d in differences(example[key], answer[key], f"{place}.{key}")]
    if isinstance(example, list) and isinstance(answer, list):
        more = example[-1:] == [MORE]
        known = example[:-1] if more else example
        if not (len(answer) > len(known) if more else len(answer) == len(known)):
            return [f"{place}: {len(answer)} values"]
        return [d for i, one in enumerate(answer) for d in differences(known[0], one, f"{place}[{i}]")]
    return [] if type(example) is type(answer) else [f"{place}: {answer!r}"]


def test_every_line_of_a_call_gets_the_answer_beside_it(shown, folder):
    pairs = [(line, text) for (_, line), (kind, text) in pairwise(shown) if kind == "answer"]
    assert len(pairs) == len(EXAMPLES)
    for line, example in pairs:
        answer = sent(line, folder)
        if "/metrics" in line:
            names = {row.partition("{")[0].split()[0] for row in example.splitlines() if row != MORE}
            assert names and all(re.search(rf"^{name}[{{ ]", answer, re.M) for name in names)
        else:
            written = json.loads(example.replace(f", {MORE}", f', "{MORE}"'))
            assert differences(written, json.loads(answer)) == [], line


def test_images_are_sent_in_the_three_ways(shown, folder):
    lines = [text for kind, text in shown if kind == "command"][-len(SENDING) :]
    answers = [json.loads(sent(line, folder))["results"] for line in lines]
    assert [[one["image"] for one in results] for results in answers] == [
        ["cat.jpg", "dog.jpg"], ["image"], ["cat.jpg"]
    ]  # fmt: skip
    chances = [[one["probability"] for one in results[0]["top"]] for results in answers]
    assert chances[0] == pytest.approx(chances[1], abs=1e-5) and chances[1] == chances[2]


def test_the_error_has_the_form_and_the_text_that_is_shown(shown, running):
    (example,) = [json.loads(text) for kind, text in shown if kind == "error"]
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "image/jpeg"}
    answer = httpx.post(f"{running.url}/v1/predict", content=b"notes", headers=headers)
    assert answer.status_code == 422 and differences(example, answer.json()) == []
    assert all(answer.json()[name] == example[name] for name in ("error", "code"))


def test_every_call_is_shown_and_programs_get_the_same_examples(running):
    document = httpx.get(f"{running.url}/openapi.json").json()
    assert set(document["paths"]) == set(EXAMPLES)
    good = document["paths"]["/v1/predict"]["post"]["responses"]["200"]["content"]["application/json"]
    assert [one["label"] for one in good["example"]["results"][0]["top"]][-1] == "lynx"
    wrong = document["paths"]["/v1/predict"]["post"]["responses"]["422"]["content"]["application/json"]
    assert set(wrong["schema"]["properties"]) == {"error", "code", "request"}
    assert "VITKIT_TOKEN" not in page(document, running.url)


@pytest.mark.parametrize(
    ("headers", "url"),
    [
        ({"host": "127.0.0.1:8731"}, "http://127.0.0.1:8731"),
        ({"host": "[::1]:80"}, "http://[::1]:80"),
        ({"host": "photos.example", "x-forwarded-proto": "https"}, "https://photos.example"),
        ({"host": "a';rm -r .;'"}, "http://127.0.0.1:8000"),
        ({"host": "$(id)"}, "http://127.0.0.1:8000"),
        ({}, "http://127.0.0.1:8000"),
    ],
)
def test_lines_have_the_address_by_which_the_service_was_asked(headers, url):
    assert base_url(headers) == url


def test_the_icon_that_browsers_ask_for_is_there(running):
    answer = httpx.get(f"{running.url}/favicon.ico")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("image/svg")
    assert answer.text.startswith("<svg")


def luminance(colour: str) -> float:
    """Of #rrggbb, as WCAG 2 has it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_can_be_read_in_light_and_dark():
    """At least 4.5 to 1, on both grounds of all pages."""
    for colour in (LIGHT, DARK):
        pairs = [(text, ground) for text in ("ink", "soft", "link", "error") for ground in ("paper", "panel")]
        for text, ground in [*pairs, ("on-primary", "link")]:
            low, high = sorted(luminance(colour[name]) for name in (text, ground))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def test_another_form_of_answer_is_noticed():
    """The control of the comparison."""
    example = {"top": [{"label": "a", "p": 0.5}, {"label": "b", "p": 0.1}], "many": [0.5, MORE]}
    good = {"top": [{"label": "c", "p": 0.2}] * 2, "many": [0.1, 0.2]}
    assert differences(example, good) == []
    assert differences(example, good | {"top": good["top"][:1]})
    assert differences(example, good | {"top": [{"label": "a"}] * 2})
    assert differences(example, good | {"many": [0.1]}) and differences(example, good | {"many": ["x", 0.1]})
    assert differences(example, {"top": good["top"]})
