"""The ink: valid files, the same bytes for the same arrays, any text harmless, maps where they belong."""

import struct
from io import BytesIO
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from PIL import Image
from refusals import refused

from vitkit.report.figure_style import render
from vitkit.report.figures import (
    contact_sheet,
    display_text,
    draw_distance,
    draw_filters,
    draw_pictures,
    draw_scores,
    draw_similarity,
    mosaic,
    subsampled,
)
from vitkit.report.overlay import COLOURS, coloured, in_blocks, masked, overlay, stretched

RANDOM = np.random.default_rng(0)
PHOTO = RANDOM.integers(0, 256, (24, 36, 3), np.uint8)
HOSTILE = [
    "<script>alert(1)</script>",
    "a&b --> ]]>",
    "$\\frac{$",
    "\x01\x1b[31m\u202e\udcff",
    "日本語",
    "x" * 500,
    "",
]


def cosines(h: int, w: int) -> np.ndarray:
    rows = np.random.default_rng(1).standard_normal((h * w, 8))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows @ rows.T).reshape(h, w, h, w)


FIGURES = {
    "filters": lambda: draw_filters(np.random.default_rng(2).standard_normal((28, 16, 16, 3))),
    "few filters": lambda: draw_filters(np.random.default_rng(2).standard_normal((3, 4, 4, 1))),
    "similarity": lambda: draw_similarity(cosines(4, 4)),
    "similarity of many": lambda: draw_similarity(cosines(32, 20)),
    "similarity of a strip": lambda: draw_similarity(cosines(1, 9)),
    "distance, Ti": lambda: draw_distance(np.arange(36.0).reshape(12, 3), uniform=30.0),
    "distance, G": lambda: draw_distance(np.arange(768.0).reshape(48, 16)),
    "distance of one head": lambda: draw_distance(np.zeros((1, 1))),
    "pictures": lambda: draw_pictures([(PHOTO, PHOTO)] * 5, columns=("Input", "Map"), captions=list("abcde")),
    "a narrow picture": lambda: draw_pictures([(PHOTO[:, :4],)], title="one"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_is_a_valid_file_and_the_same_every_time(name):
    png, svg = render(FIGURES[name](), "png"), render(FIGURES[name](), "svg")
    Image.open(BytesIO(png)).load()
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert b"Software" not in png and b"<dc:date>" not in svg
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "svg.hashsalt": None}):
        assert render(FIGURES[name](), "png") == png and render(FIGURES[name](), "svg") == svg


def test_nothing_of_matplotlibs_own_state_is_changed():
    before = dict(matplotlib.rcParams)
    render(draw_filters(np.ones((2, 3, 3, 3))), "svg")
    assert dict(matplotlib.rcParams) == before


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("text", HOSTILE)
def test_any_text_is_only_text(text):
    figure = draw_pictures([(PHOTO, PHOTO)], columns=("Input", text), captions=[text], title=text)
    svg = render(figure, "svg")
    tree = ElementTree.fromstring(svg)
    assert not [node for node in tree.iter() if node.tag.endswith("script")] and b"<script>" not in svg
    render(figure, "png")
    assert len(display_text(text, 20)) <= 20 and display_text(text, 20).isprintable()


def test_a_label_is_as_long_as_there_is_room():
    assert display_text("tabby cat", 9) == "tabby cat" and display_text("tabby cats", 9) == "tabby ca…"


def cubic(x: float) -> float:
    """Keys' kernel with a = -1/2."""
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def written(heat: np.ndarray, height: int, width: int, y: int, x: int) -> float:
    """One pixel of the enlarged map."""
    down, right = (y + 0.5) * heat.shape[0] / height - 0.5, (x + 0.5) * heat.shape[1] / width - 0.5
    total = weights = 0.0
    for i, j in np.ndindex(*heat.shape):
        weight = cubic(down - i) * cubic(right - j)
        total, weights = total + weight * heat[i, j], weights + weight
    return min(1.0, max(0.0, total / weights))


@pytest.mark.parametrize("side", [4, 7, 14])
def test_bright_corners_do_not_flatten_a_map(side):
    """Corner patches are as light as the lightest of the others, which use the whole scale."""
    heat = np.linspace(0, 1, side * side).reshape(side, side)
    bright = heat.copy()
    bright[[0, 0, -1, -1], [0, -1, 0, -1]] = 1000.0
    result = in_blocks(bright, (side, side))
    inner = np.ones((side, side), bool)
    inner[[0, 0, -1, -1], [0, -1, 0, -1]] = False
    assert np.ptp(result[inner].sum(-1).astype(int)) > 600 and (result[~inner] == COLOURS[-1]).all()
    flat = in_blocks(bright, (side, side), 1.0)
    assert np.ptp(flat[inner].sum(-1).astype(int)) < 20


def test_the_overlay_is_the_grey_photograph_and_the_enlarged_map_mixed():
    heat = np.random.default_rng(3).random((2, 3)).astype(np.float32)
    heat01 = (heat - heat.min()) / (heat.max() - heat.min())
    result, lit = overlay(PHOTO, heat, strength=0.4, quantile=1), masked(PHOTO, heat, quantile=1)
    assert result.dtype == np.uint8 and result.shape == PHOTO.shape
    for y, x in np.ndindex(24, 36):
        value = written(heat01, 24, 36, y, x)
        low = min(int(value * 16), 15)
        colour = COLOURS[low] + (value * 16 - low) * (COLOURS[low + 1].astype(float) - COLOURS[low])
        grey = 0.299 * PHOTO[y, x, 0] + 0.587 * PHOTO[y, x, 1] + 0.114 * PHOTO[y, x, 2]
        np.testing.assert_allclose(result[y, x], 0.6 * grey + 0.4 * colour, atol=0.51)
        np.testing.assert_allclose(lit[y, x], PHOTO[y, x] * value, atol=0.51)


def test_a_map_is_stretched_to_its_own_range_or_to_a_quantile_of_it():
    values = np.array([[2.0, 3.0, 4.0, 5.0, 100.0]])
    assert stretched(values).tolist()[0][::4] == [0, 1]
    np.testing.assert_allclose(stretched(values, 0.75)[0], [0, 1 / 3, 2 / 3, 1, 1])
    assert not stretched(np.full((2, 2), 7.0)).any()
    assert stretched(np.array([[0.0] * 99 + [1.0]]), 0.5).max() == 1  # nearly all are the least


def test_colours_grow_lighter_from_end_to_end():
    light = coloured(np.linspace(0, 1, 50)) @ [0.299, 0.587, 0.114]
    assert (np.diff(light) > 0).all() and (coloured(np.array([-1.0, 2.0])) == COLOURS[[0, -1]]).all()


@pytest.mark.parametrize(
    "image, heat, code, values",
    [
        (PHOTO.astype(float), np.ones((2, 2)), "request.value", ("float64", "uint8")),
        (PHOTO[..., 0], np.ones((2, 2)), "request.value", (PHOTO[..., 0].shape, "uint8")),
        (PHOTO, np.ones(4), "request.value", ("(h, w)", "(4,)")),
        (PHOTO, np.full((2, 2), np.nan), "inspection.unsupported", ("finite",)),
    ],
)
def test_what_cannot_be_laid_over_is_refused(image, heat, code, values):
    with refused(code, *values):
        overlay(image, heat)


def test_strength_is_a_share():
    with refused("request.value", "strength", "not 2"):
        overlay(PHOTO, np.ones((2, 2)), strength=2)


def test_every_patch_is_a_block_of_its_colour():
    colours = np.array([[[1, 0, 0], [0, 1, 0]], [[0, 0, 1], [1, 1, 1]]], np.float32)
    blocks = in_blocks(colours, (4, 6))
    assert (blocks[:2, :3] == [255, 0, 0]).all() and (blocks[2:, 3:] == 255).all()


def test_tiles_stand_in_their_places_with_gaps_between():
    tiles = np.arange(6.0).reshape(2, 3, 1, 1, 1).repeat(2, 2).repeat(2, 3)
    result = mosaic(tiles, gap=1, fill=-1)[..., 0]
    assert result.shape == (5, 8) and (result[:2, 3:5] == 1).all() and (result[3:, 6:] == 5).all()
    assert (result[2] == -1).all() and (result[:, 2] == -1).all()


def test_of_many_rows_some_are_drawn():
    assert subsampled(14).tolist() == list(range(14)) and subsampled(32).tolist() == list(range(0, 32, 2))
    axis = draw_similarity(cosines(32, 4)).axes[0]
    assert axis.get_ylabel() == "Patch row (subsampled)" and axis.get_xlabel() == "Patch column"


def test_a_dot_stands_where_its_head_reaches():
    distance = np.array([[10.0, 30.0], [20.0, 60.0]])
    axes = draw_distance(distance, uniform=50.0).axes[0]
    assert axes.collections[0].get_offsets().tolist() == [[0, 10], [0, 30], [1, 20], [1, 60]]
    assert axes.lines[0].get_ydata().tolist() == [20, 40] and axes.lines[1].get_ydata()[0] == 50


def test_the_contact_sheet_holds_every_picture_whole():
    colours, files = [(255, 0, 0), (0, 255, 0), (0, 0, 255)], []
    for colour, size in zip(colours, [(40, 30), (50, 10), (60, 20)], strict=True):
        file = BytesIO()
        Image.new("RGB", size, colour).save(file, "PNG")
        files.append(file.getvalue())
    sheet = contact_sheet(files, width=120, gap=5)
    assert struct.unpack(">II", sheet[16:24]) == (105, 65)  # 40 and 50 in the first row, 60 in the second
    pixels = np.asarray(Image.open(BytesIO(sheet)))
    assert [(pixels == colour).all(-1).sum() for colour in colours] == [1200, 500, 1200]


def test_a_log_axis_counts_in_plain_figures():
    """Formulas are switched off, since a file may be called $1$; matplotlib's own must not show raw."""
    for scale in (1e-5, 1.0, 1e5):
        points = [(scale * x, 0.2, 0.01) for x in (1.0, 3.0, 20.0)]
        figure = draw_scores({"ViT": points}, x_label="exaFLOPs", y_label="accuracy", log_x=True)
        figure.canvas.draw()
        shown = [label.get_text() for label in figure.axes[0].get_xticklabels(which="both")]
        assert len([text for text in shown if text]) >= 3 and not any("$" in text for text in shown)
