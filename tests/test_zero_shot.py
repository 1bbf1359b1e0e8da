"""Zero-shot classification and text embeddings with tiny random CLIP and SigLIP models and own tokenizers."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from test_cli import run as command
from torch.nn.functional import normalize

import vitkit
from vitkit.models.text_tower import TextConfig
from vitkit.models.variants import fresh
from vitkit.models.vit import ViTConfig
from vitkit.weights import tokenizer
from vitkit.weights.published import PUBLISHED
from vitkit.weights.tokenizer import clean, encode, tokenize

WORDS = ["a", "photo", "of", "cat", "dog", "red", "car", "this", "is", ".", ","]
VOCABULARY = {"<pad>": 0, "<unk>": 1} | {word: i for i, word in enumerate(WORDS, 2)} | {"<end>": 40}
CLIP = {"pool": "end", "causal": True, "gelu": "quick", "norm_eps": 1e-5}
SIGLIP = {
    "pool": "last",
    "causal": False,
    "gelu": "tanh",
    "norm_eps": 1e-6,
    "output_bias": True,
    "sigmoid": True,
}
SIZES = {"width": 32, "depth": 2, "heads": 2, "hidden": 48}
SCALE = 3.0  # of the logits
VISION = SIZES | {"patch": 8, "image_size": (32, 32), "classes": 0}


def word_tokenizer(end="<end>"):
    """One token for each word, and the end token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", special_tokens=[(end, VOCABULARY[end])]
    )
    return tokenizer


@pytest.fixture
def towers(tmp_path):
    """The folder of a random model of a kind with both towers, and its tokenizer."""

    def make(kind):
        text = (CLIP if kind == "clip" else SIGLIP) | SIZES | {"vocabulary": 41, "length": 10, "output": 32}
        vision = VISION | (
            {"input_norm": True, "project_bias": False, "representation": 32, "norm_eps": 1e-5,
             "representation_kind": "linear", "gelu": "quick", "position_resize": "hf"}
            if kind == "clip" else {"head": "map", "position_resize": "hf"}
        )  # fmt: skip
        torch.manual_seed(0)
        model = fresh(ViTConfig(**vision, text=TextConfig(**text)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
            model.text.tokens.weight.mul_(5)
            model.text.logit_scale.fill_(SCALE)
            if kind == "siglip":
                model.text.logit_bias.fill_(-5)
        vitkit.save(model, tmp_path / kind, "hf")
        word_tokenizer().save(str(tmp_path / kind / "tokenizer.json"))
        return tmp_path / kind

    return make


@pytest.fixture
def photo(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def by_hand(folder, photo, texts):
    """The cosine similarity of a photo with texts, and the model."""
    model = vitkit.load(folder, text=True)
    image = torch.from_numpy(vitkit.embed(model, photo))
    numbers = [[VOCABULARY.get(word, 1) for word in text.split()] + [40] for text in texts]
    tokens = torch.tensor([row + [0] * (10 - len(row)) for row in numbers])
    with torch.no_grad():
        embedded = normalize(model.text(tokens), dim=-1)
    return embedded @ normalize(image, dim=-1), model, embedded, image


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_probabilities_are_those_of_the_formulas(towers, photo, kind):
    """CLIP: a softmax of exp(scale) * cosine; SigLIP: a sigmoid of each, with a bias."""
    folder = towers(kind)
    cosine, model, _, _ = by_hand(folder, photo, [f"a photo of a {x} ." for x in ("cat", "dog", "red car")])
    logits = cosine * np.exp(SCALE)
    expected = logits.softmax(0) if kind == "clip" else (logits + model.text.logit_bias).sigmoid()
    assert logits.max() - logits.min() > 0.05  # the texts differ
    answers = vitkit.predict(folder, photo, labels=["cat", "dog", "red car"])
    assert sorted(p for _, p in answers) == pytest.approx(sorted(expected.tolist()), abs=1e-5)
    order = expected.argsort(descending=True).tolist()
    assert [label for label, _ in answers] == [["cat", "dog", "red car"][i] for i in order]
    assert vitkit.predict(model, photo, labels=["cat", "dog", "red car"]) == answers
    assert vitkit.predict(folder, [photo, photo], labels="cat")[1][0][0] == "cat"


def test_templates_are_the_mean_of_normalised_embeddings(towers, photo):
    folder = towers("clip")
    cat, dog = (by_hand(folder, photo, [f"a photo of a {x}", f"this is {x} ."])[2] for x in ("cat", "dog"))
    labels = normalize(torch.stack([cat.mean(0), dog.mean(0)]), dim=-1)
    image = normalize(by_hand(folder, photo, ["a"])[3], dim=-1)
    expected = (labels @ image * np.exp(SCALE)).softmax(0)
    templates = ("a photo of a {}", "this is {} .")
    answers = dict(vitkit.predict(folder, photo, labels=("cat", "dog"), template=templates))
    assert [answers["cat"], answers["dog"]] == pytest.approx(expected.tolist(), abs=1e-5)
    one = dict(vitkit.predict(folder, photo, labels=("cat", "dog"), template=templates[0]))
    assert abs(one["cat"] - answers["cat"]) > 1e-3


def test_a_zero_shot_classifier_is_a_model_like_any_other(towers, photo, tmp_path):
    model = vitkit.zero_shot(vitkit.load(towers("siglip"), text=True), ["cat", "red_car"])
    assert model.labels == ("cat", "red_car") and model.task == "multilabel" and model.text is None
    vitkit.save(model, tmp_path / "zero.safetensors")
    answers = vitkit.predict(model, photo)
    assert vitkit.predict(tmp_path / "zero.safetensors", photo) == answers
    spaces = vitkit.zero_shot(vitkit.load(tmp_path / "siglip", text=True), ["cat", "red car"])
    assert torch.equal(spaces.head.weight, model.head.weight)
    tuned = vitkit.adapt(model, classes=3)
    assert not tuned.config.normalize and tuned.head.weight.shape == (3, 32)
    with refused("weights.unsupported", "normalize"):
        vitkit.save(model, tmp_path / "zero.pth", "timm")


@pytest.mark.slow
def test_an_exported_classifier_gives_the_same_answers(towers, photo, tmp_path):
    model = vitkit.zero_shot(vitkit.load(towers("clip"), text=True), ["cat", "dog"])
    vitkit.export(model, tmp_path / "zero.onnx")
    expected = vitkit.predict(model, photo)
    actual = vitkit.predict(tmp_path / "zero.onnx", photo)
    assert [a for a, _ in actual] == [a for a, _ in expected]
    assert [p for _, p in actual] == pytest.approx([p for _, p in expected], abs=1e-4)
    with refused("model.unsupported", "zero.onnx"):
        vitkit.predict(tmp_path / "zero.onnx", photo, labels=["cat"])


def test_words_find_images(towers, photo):
    """Texts and images have embeddings of one space."""
    folder = towers("clip")
    one, several = vitkit.embed(folder, text="a red car"), vitkit.embed(folder, text=["a red car", "dog"])
    expected = by_hand(folder, photo, ["a red car", "dog"])[2]
    assert one.shape == (32,) and several[0] == pytest.approx(one, abs=1e-5)
    assert normalize(torch.from_numpy(several), dim=-1).numpy() == pytest.approx(expected.numpy(), abs=1e-5)
    assert vitkit.embed(folder, photo).shape == one.shape
    for options in ({"images": photo}, {"out": "x.npz"}, {"normalize": True}):
        with refused("request.conflict", next(iter(options))):
            vitkit.embed(folder, text="a", **options)
    with refused("request.missing"):
        vitkit.embed(folder)


def test_tokens_have_the_start_end_and_filling_of_the_published_models():
    tokenizer = word_tokenizer()
    sizes = {"width": 4, "heads": 1, "hidden": 4, "length": 6}
    clip = TextConfig(vocabulary=49_408, **sizes)
    assert encode(tokenizer, ["A  cat"], clip).tolist() == [[49_406, 2, 5, 49_407, 0, 0]]
    assert encode(tokenizer, ["a cat . dog , red"], clip).tolist() == [[49_406, 2, 5, 11, 6, 49_407]]
    first = TextConfig(vocabulary=32_000, **sizes)
    assert encode(tokenizer, ["A cat, dog."], first).tolist() == [[2, 5, 6, 1, 1, 1]]
    second = TextConfig(vocabulary=256_000, **sizes)
    assert encode(tokenizer, ["A cat, dog."], second).tolist() == [[2, 5, 12, 6, 11, 1]]
    assert encode(tokenizer, ["cat", "Red car"], second).tolist() == [[5, 1, 0, 0, 0, 0], [7, 8, 1, 0, 0, 0]]
    other = TextConfig(vocabulary=41, **sizes)
    assert encode(tokenizer, ["a a a a a a a a"], other).tolist() == [[2, 2, 2, 2, 2, 40]]
    assert clean("Don't  PANIC!", first) == "dont panic" and clean("Don't  PANIC!", second) == "don't panic!"


def test_a_tokenizer_that_was_saved_by_transformers_gives_its_tokens(tmp_path):
    """A byte-pair vocabulary as CLIP's, of a few words, whose numbers transformers computes too."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>", unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<unk>"], end_of_word_suffix="</w>")
    tokenizer.train_from_iterator(["a photo of a cat", "a photo of a dog", "a red car"] * 3, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), pad_token="<unk>")
    texts = ["A photo of a CAT", "red dogs"]
    expected = theirs(texts, padding="max_length", max_length=12)["input_ids"]
    config = TextConfig(vocabulary=60, width=4, heads=1, hidden=4, length=12)
    assert encode(tokenizer, texts, config).tolist() == expected


def test_refusals_name_the_remedy(towers, photo, small, tmp_path):
    folder = towers("clip")
    vitkit.save(small(), tmp_path / "vision.safetensors")
    with refused("model.unsupported", "text=True"):
        vitkit.predict(tmp_path / "vision.safetensors", photo, labels=["cat"])
    with refused("model.unsupported", "text=True"):
        vitkit.predict(vitkit.load(folder), photo, labels=["cat"])
    with refused("request.value", "{}"):
        vitkit.predict(folder, photo, labels=["cat"], template=["a photo"])
    for labels in ([], ["cat", "cat"], ["cat", " "]):
        with refused("request.value", "labels"):
            vitkit.predict(folder, photo, labels=labels)
    with refused("model.unsupported"):
        tokenize(fresh(vitkit.load(folder, text=True).config).text, ["cat"])
    (folder / "tokenizer.json").rename(folder / "other.json")
    with refused("weights.not-found", "tokenizer.json"):
        vitkit.predict(folder, photo, labels=["cat"])
    (folder / "tokenizer.json").write_text("{}")
    with refused("weights.format", "tokenizer.json"):
        vitkit.predict(folder, photo, labels=["cat"])


def test_the_tokenizer_of_published_weights_is_that_of_their_repository(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(tokenizer, "download", lambda address, path: asked.append((address, path.name)))
    for name in ("CLIP-B/16.openai", "SigLIP-L/16.webli-256", "SigLIP2-L/16.webli-384"):
        tokenizer.TokenizerPlace(tmp_path / "weights", PUBLISHED[name].address).find()
    hub = "https://huggingface.co/{}/resolve/main/tokenizer.json"
    assert asked == [
        (hub.format("openai/clip-vit-base-patch16"), "CLIP-B_16.openai.tokenizer.json"),
        (hub.format("google/siglip-large-patch16-256"), "SigLIP-L_16.webli-256.tokenizer.json"),
        (hub.format("google/siglip2-base-patch16-224"), "SigLIP2.tokenizer.json"),
    ]
    with refused("weights.not-found", "tokenizer.json"):
        tokenizer.TokenizerPlace(tmp_path / "weights", PUBLISHED["MAE-B/16.i1k"].address).find()


def test_the_tokenizer_of_another_model_is_refused(towers, photo):
    folder = towers("clip")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["zebra"] = 41
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with refused("weights.shape", "41"):
        vitkit.predict(folder, photo, labels=["cat"])


def test_without_the_library_the_extra_is_named(towers, photo, monkeypatch):
    folder = towers("clip")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with refused("request.extra-missing", "vitkit[text]"):
        vitkit.predict(folder, photo, labels=["cat"])


def test_conversion_keeps_text_tower_and_tokenizer(towers, tmp_path, photo):
    from vitkit.weights.convert import convert

    expected = vitkit.predict(folder := towers("clip"), photo, labels=["cat", "dog"])
    result = convert(folder, tmp_path / "own.safetensors")
    assert result.ok and vitkit.load(tmp_path / "own.safetensors", text=True).text is not None
    assert convert(folder, tmp_path / "again", format="hf").ok
    assert vitkit.predict(tmp_path / "again", photo, labels=["cat", "dog"]) == expected
    timm = convert(folder, tmp_path / "timm.safetensors", format="timm")
    assert timm.ok and any("text tower" in note for note in timm.notes)


@pytest.fixture
def pets(tmp_path):
    rng = np.random.default_rng(1)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for i in range(3):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{i}.png")
    return tmp_path / "pets"


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_accuracy_by_the_class_names_of_the_data(towers, pets, kind):
    folder = towers(kind)
    metrics = vitkit.evaluate(folder, pets, labels=True, workers=0)
    files = sorted(pets.rglob("*.png"))
    right = [vitkit.predict(folder, f, labels=["cat", "dog"])[0][0] == f.parent.name for f in files]
    assert metrics.images == 6 and metrics["top1"] == pytest.approx(np.mean(right))
    more = vitkit.evaluate(folder, pets, labels=["red car", "dog", "cat"], workers=0)
    assert sorted(more["per_class"]) == ["cat", "dog", "red car"]
    with refused("data.classes", "cat"):
        vitkit.evaluate(folder, pets, labels=["dog"], workers=0)


def test_the_command_line(towers, pets, photo, tmp_path, capsys):
    """predict as text, JSON and --out, evaluate, and embed --text."""
    folder, labels = towers("clip"), ("--labels", "cat", "dog", "--template", "a {}", "--template", "{} .")
    label, probability = vitkit.predict(folder, photo, labels=["cat", "dog"], template=["a {}", "{} ."])[0]
    code, out = printed(capsys, "predict", folder, photo, *labels)
    assert code == 0 and out[0]["label"] == label
    assert out[0]["probability"] == pytest.approx(probability, abs=1e-5)
    assert command("predict", folder, photo, "--out", tmp_path / "a.csv", *labels) == 0
    assert label in (tmp_path / "a.csv").read_text().splitlines()[1]
    code, out = printed(capsys, "evaluate", folder, pets, "--workers", 0, "--labels")
    assert code == 0 and out["images"] == 6
    (tmp_path / "queries.txt").write_text("a red car\n\na dog\n")
    query = ("--text", tmp_path / "queries.txt", "--out", tmp_path / "q.npz", "--normalize")
    code, out = printed(capsys, "embed", folder, *query)
    assert code == 0 and out["texts"] == 2
    stored = np.load(tmp_path / "q.npz")
    assert stored["text"].tolist() == ["a red car", "a dog"]
    expected = normalize(torch.from_numpy(vitkit.embed(folder, text=["a red car", "a dog"])), dim=-1)
    assert stored["embedding"] == pytest.approx(expected.numpy(), abs=1e-6)


def printed(capsys, *arguments):
    """The exit code of a command and the JSON that it prints."""
    capsys.readouterr()
    code = command(*arguments, "--json")
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("request.conflict", ("predict", "clip", "photo.png", "--template", "a {}")),
        ("request.value", ("predict", "clip", "photo.png", "--labels", "cat", "--template", "a")),
        ("request.conflict", ("embed", "clip", "photo.png", "--text", "cat", "--out", "q.npz")),
        ("request.missing", ("embed", "clip", "--out", "q.npz")),
        ("file.not-found", ("embed", "clip", "--text", "none.txt", "--out", "q.npz")),
    ],
)
def test_the_command_line_refuses(towers, photo, tmp_path, capsys, monkeypatch, code, arguments):
    towers("clip")
    monkeypatch.chdir(tmp_path)
    status, out = printed(capsys, *arguments)
    assert status and out["error"]["code"] == code
