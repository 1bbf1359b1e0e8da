"""vitkit inspect on the command line, and vitkit.inspect: every kind of model, and what it has not told."""

import json
import math
import re
from html.parser import HTMLParser
from io import BytesIO
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from test_cli import run

import vitkit
from vitkit.commands.inspect import head_figure, map_figure
from vitkit.commands.look import inspect, model_view, normalized
from vitkit.inspection.attention import attention_rollout
from vitkit.inspection.subject import class_number

LABELS = ("tench", "tabby, tabby cat", "<script>alert(1)</script>", "$\\frac{$", "0")
MAPS = {"maps", "head-maps"}


@pytest.fixture
def saved(small, tmp_path):
    """A small model in a file; options as for build."""

    def make(model=None, **options):
        model = model or small(**options)
        model.labels = LABELS if model.config.classes else ()
        vitkit.save(model, tmp_path / "m.safetensors")
        return tmp_path / "m.safetensors"

    return make


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 60, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"photo {i} <b>$&.png")
    return folder


def look(capsys, *arguments, code: int = 0) -> dict:
    assert run("inspect", *arguments, "--json", "--device", "cpu") == code
    return json.loads(capsys.readouterr().out)


def check_files(folder, facts):
    """Every figure is there as PNG and SVG, and valid; the arrays are those that the facts name."""
    for name in facts["figures"]:
        Image.open(folder / "figures" / f"{name}.png").load()
        svg = (folder / "figures" / f"{name}.svg").read_bytes()
        assert not [n for n in ElementTree.fromstring(svg).iter() if n.tag.endswith("script")]
    assert len(list((folder / "figures").iterdir())) == 2 * len(facts["figures"])
    Image.open(folder / "contact-sheet.png").load()
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        assert {name: list(arrays[name].shape) for name in arrays} == facts["arrays"]
    assert json.loads((folder / "facts.json").read_text()) | {"folder": str(folder)} == facts


def test_without_images_it_shows_what_needs_none_and_says_what_images_would_add(saved, tmp_path, capsys):
    out = tmp_path / "out"
    facts = look(capsys, saved(), "--out", out)
    assert facts["figures"] == ["filters", "position-similarity"]
    assert facts["grid"] == [4, 4] and facts["arrays"]["position_similarity"] == [1, 4, 4, 4, 4]
    assert set(facts["skipped"].values()) == {"needs images"}
    assert run("inspect", saved(), "--out", out) == 0
    output = capsys.readouterr().out
    assert "add images to see also: attention distances" in output and str(out) in output


def test_with_images_it_shows_all_and_the_same_bytes_again(saved, photos, tmp_path, capsys):
    model, outs = saved(), (tmp_path / "a", tmp_path / "b")
    facts = look(capsys, model, photos, "--out", outs[0], "--layer", 0)
    assert {"filters", "position-similarity", "attention-distance"} | MAPS == set(facts["figures"])
    assert facts["images"] == 3 and facts["head_layer"] == 0 and not facts["skipped"]
    assert facts["arrays"]["head_maps"] == [3, 2, 4, 4] and facts["arrays"]["class_maps"] == [1, 3, 4, 4]
    assert all(math.isclose(sum(p for _, p in row["top"]), 1, rel_tol=1e-5) for row in facts["shown"])
    check_files(outs[0], facts)
    look(capsys, model, photos, "--out", outs[1], "--layer", 0)
    for path in outs[0].rglob("*"):
        assert path.is_dir() or path.read_bytes() == (outs[1] / path.relative_to(outs[0])).read_bytes()


def test_each_picture_is_drawn_twice_and_named_each_time(saved, photos, tmp_path, capsys):
    """Once beside all of its maps, once beside the heads of a layer; as text in the SVG of each."""
    facts = look(capsys, saved(), photos, "--out", tmp_path / "out")
    assert {name for name in facts["figures"] if "sheet" not in name} - MAPS == {
        "filters", "position-similarity", "attention-distance"}  # fmt: skip
    maps = arrays_of(tmp_path / "out")
    for draw, columns in ((map_figure, ["Input", "Attention", "Class map", "Features"]),
                          (head_figure, ["Input", "Head 0", "Head 1"])):  # fmt: skip
        names = [f"photo {i} <b>$&.png" for i in range(3)]
        figure = (draw(maps, facts, names) if draw is map_figure
                  else draw(maps["images"], maps["head_maps"], 1, names))  # fmt: skip
        axes = figure.axes[0]
        words = [one.get_text() for one in axes.texts]
        assert len(axes.images) == 3 * len(columns) and set(columns) <= set(words)
        assert all(any(name in text for text in words) for name in names)


def arrays_of(folder) -> dict[str, np.ndarray]:
    with np.load(folder / "arrays.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def test_figures_of_an_earlier_inspection_do_not_stay(saved, tmp_path, capsys):
    old = tmp_path / "out" / "figures" / "maps.png"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"")
    check_files(tmp_path / "out", look(capsys, saved(), "--out", tmp_path / "out"))
    assert not old.exists()


def test_uniform_attention_reaches_what_the_closed_form_says(small, saved, photos, tmp_path, capsys):
    model = small()
    with torch.no_grad():
        for block in model.encoder.blocks:
            block.attention.qkv.weight[: model.config.width] = 0
            block.attention.qkv.bias[: model.config.width] = 0
    facts = look(capsys, saved(model), photos, "--image-size", "16x24", "--out", tmp_path / "out")
    places = [(8 * i, 8 * j) for i in range(2) for j in range(3)]
    expected = sum(math.dist(p, q) for p in places for q in places) / 6 / 7  # 6 patches and a class token
    reach = facts["attention_distance"]
    assert reach["mean"] == pytest.approx([expected] * 2) and reach["uniform"] == pytest.approx(expected)
    assert reach["least"] == pytest.approx(reach["greatest"]) and reach["rank_correlation"] is None
    assert reach["local_heads"] == [0, 0] and reach["other_heads"] == [2, 2]
    assert facts["arrays"]["rollout"] == [3, 2, 3] and facts["arrays"]["images"] == [3, 16, 24, 3]


@pytest.mark.parametrize(
    "options, missing",
    [
        ({"head": "gap"}, {}),
        pytest.param({"head": "map"}, {}, marks=pytest.mark.slow),
        ({"classes": 0}, {"class_maps": "no head"}),
        ({"positions": "relative"}, {"position_similarity": "offsets"}),
        pytest.param({"positions": "none"}, {"position_similarity": "no position"}, marks=pytest.mark.slow),
        ({"attention": "axial", "head": "gap"}, {"class_maps": "axial"}),
        (
            {"depth": 0},
            dict.fromkeys(("attention_distance", "rollout", "head_maps", "class_maps"), "depth 0"),
        ),
    ],
    ids=str,
)
def test_what_a_model_has_not_is_skipped_and_said(saved, photos, tmp_path, capsys, options, missing):
    out = tmp_path / "out"
    facts = look(capsys, saved(**options), photos, "--out", out)
    assert set(facts["skipped"]) == set(missing)
    assert all(why in facts["skipped"][name] for name, why in missing.items())
    check_files(out, facts)


def test_tables_of_several_layers_have_a_figure_each(saved, tmp_path, capsys):
    facts = look(capsys, saved(injection="every", depth=5), "--out", tmp_path / "out")
    assert facts["figures"][1:] == [f"position-similarity-layer-{i}" for i in (0, 2, 4)]
    assert [row["layer"] for row in facts["position_similarity"]] == [0, 2, 4]


def test_a_hybrid_is_inspected_by_its_root_and_its_stride(small_hybrid, saved, photos, tmp_path, capsys):
    facts = look(capsys, saved(small_hybrid()), photos, "--out", tmp_path / "out")
    assert facts["arrays"]["filters"][1:] == [7, 7, 3] and facts["patch_pixels"] == 8 and not facts["skipped"]


def test_a_resnet_is_refused_with_the_reason(small_resnet, tmp_path, capsys):
    vitkit.save(small_resnet(), tmp_path / "r.safetensors")
    assert run("inspect", tmp_path / "r.safetensors", "--out", tmp_path / "out") == 2
    assert "only a ViT or a hybrid" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_bad_image_among_good_ones_is_named_and_the_others_done(saved, photos, tmp_path, capsys):
    (photos / "bad.png").write_bytes(b"not a picture")
    assert run("inspect", saved(), photos, "--out", tmp_path / "out", "--json", "--device", "cpu") == 1
    output = capsys.readouterr()
    facts = json.loads(output.out)
    assert facts["images"] == 3 and list(facts["unreadable"]) == [str(photos / "bad.png")]
    assert re.search(r"skipped: .*bad\.png: not an image", output.err)
    assert run("inspect", saved(), photos / "bad.png", "--out", tmp_path / "out") == 2
    assert "none of the 1 images can be read" in capsys.readouterr().err


def test_data_sets_are_looked_at_all_over(saved, tmp_path, capsys):
    facts = look(capsys, saved(), "digits", "--images", 20, "--out", tmp_path / "out")
    assert facts["images"] == 20 and len(facts["shown"]) == 8
    assert [row["image"] for row in facts["shown"]][-1] > "001400"


def test_of_many_images_a_sheet_shows_up_to_128_beside_their_attention(saved, tmp_path, capsys):
    out = tmp_path / "out"
    facts = look(capsys, saved(), "digits", "--images", 150, "--out", out)
    assert facts["images"] == 150 and len(facts["sheet"]) == 128 == len(set(facts["sheet"]))
    assert facts["arrays"]["sheet_rollout"] == [128, 4, 4]
    assert facts["arrays"]["sheet_images"] == [128, 32, 32, 3] and len(facts["shown"]) == 8
    check_files(out, facts)
    sheet = Image.open(out / "figures" / "attention-sheet.png").convert("RGB")
    assert sheet.size == (16 + 8 * 67 + 7 * 12 + 16, 44 + 16 * 32 + 15 * 12 + 16), (
        "8 pairs in each of 16 rows"
    )
    with np.load(out / "arrays.npz") as arrays:
        first, last = arrays["sheet_images"][0], arrays["sheet_images"][-1]
    pixels = np.asarray(sheet)
    np.testing.assert_array_equal(pixels[44:76, 16:48], first)
    np.testing.assert_array_equal(pixels[-48:-16, -16 - 67 : -16 - 67 + 32], last)
    assert Image.open(out / "contact-sheet.png").height < 6000


def test_classes_by_name_or_number_are_explained(saved, photos, tmp_path, capsys):
    asked = ["--class", "Tabby Cat", "--class", "2", "--class", "$\\frac{$"]
    facts = look(capsys, saved(), photos, *asked, "--out", tmp_path / "out")
    assert facts["arrays"]["class_maps"] == [3, 3, 4, 4]
    assert [row[0] for row in facts["classes"]] == [LABELS[1], LABELS[2], LABELS[3]]
    check_files(tmp_path / "out", facts)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--class", "tenc"], "did you mean tench?"),
        (["--class", "7"], "0 to 4"),
        (["--layer", "2"], "0 to 1"),
        (["--image-size", "30", "--strict-size"], "nearest that fits: 24 or 32"),
        (["--image-size", "5"], "nearest that fits: 8"),
        (["--image-size", "big"], "HxW"),
        (["--images", "0"], "--images 0: expected"),
    ],
)
def test_a_wrong_word_is_refused_before_anything_is_written(saved, photos, tmp_path, capsys, words, said):
    assert run("inspect", saved(), photos, *words, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_class_is_found_by_label_before_number(small):
    model = small()
    model.labels = LABELS
    assert class_number(model, "0") == 4 and class_number(model, 0) == 0 and class_number(model, "TENCH") == 0
    with refused("model.unsupported", "tench", "no head"):
        class_number(small(classes=0), "tench")
    with refused("request.unknown", "tench", "no names"):
        class_number(small(), "tench")


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_a_look_shows_itself_with_labels_as_text(small, photos, tmp_path):
    model = small()
    model.labels = LABELS
    path = next(iter(sorted(photos.iterdir())))
    result = inspect(model, path, target=2)
    page = Tags(result._repr_html_())
    assert (
        page.tags == {"div", "figure", "img", "figcaption", "p"} and "<script>alert(1)</script>" in page.text
    )
    Image.open(BytesIO(result._repr_png_())).load()
    for name in ("look.png", "look.svg", "look.html"):
        result.save(tmp_path / name)
    assert (
        ElementTree.parse(tmp_path / "look.svg") and b"<script>" not in (tmp_path / "look.html").read_bytes()
    )
    with refused("request.value", "look.gif", ".png, .svg or .html"):
        result.save(tmp_path / "look.gif")


def test_a_look_is_of_the_picture_however_it_is_given(small, photos):
    model, path = small(), next(iter(sorted(photos.iterdir())))
    looks = [
        inspect(model, p) for p in (path, path.read_bytes(), Image.open(path), np.array(Image.open(path)))
    ]
    view = model_view(model, path.read_bytes(), (32, 32))[None]
    expected = attention_rollout(model, normalized(model, view))[0]
    for result in looks:
        np.testing.assert_array_equal(result.rollout, expected)
        assert result.predictions == looks[0].predictions == tuple(vitkit.predict(model, path))
    assert looks[0].heads.shape == (2, 4, 4) and looks[0].target == f"class {looks[0].predictions[0][0]}"
    assert inspect(model, path, image_size=(16, 24)).colours.shape == (2, 3, 3)


def test_a_look_at_a_model_without_a_head_has_no_classes(small):
    result = inspect(small(classes=0), np.zeros((9, 9), np.uint8))
    assert result.class_map is None and not result.predictions and "class_maps" in result.skipped
    assert "attention" in result._repr_html_()
