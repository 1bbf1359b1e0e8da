"""RandAugment: each operation against its definition, all magnitudes, one generator and no other state."""

import numpy as np
import pytest
from refusals import refused

from vitkit.data.randaugment import OPERATIONS, augment, operate

PUBLISHED = [
    "AutoContrast", "Equalize", "Invert", "Rotate", "Posterize", "Solarize", "Color", "Contrast",
    "Brightness", "Sharpness", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd",
]  # fmt: skip
GEOMETRIC = {"Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"}


class Sign:
    """A generator that always chooses the first of two signs, or always the second."""

    def __init__(self, value: int):
        self.value = value

    def random(self) -> float:
        return 0.0 if self.value > 0 else 0.9


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ramp() -> np.ndarray:
    """Every value once in each channel, in different places."""
    values = np.arange(256, dtype=np.uint8)
    return np.stack([values, values[::-1], np.roll(values, 99)], -1).reshape(16, 16, 3)


def test_the_sixteen_published_operations_in_their_order():
    assert list(OPERATIONS) == PUBLISHED


@pytest.mark.parametrize("magnitude", [0, 10, 15, 20])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (64, 48)])
@pytest.mark.parametrize("name", PUBLISHED)
def test_every_operation_keeps_shape_and_type_and_follows_the_generator(name, shape, magnitude):
    image = noise(*shape)
    before = image.copy()
    first, again = (operate(name, image, magnitude, rng(3)) for _ in range(2))
    assert first.shape == image.shape and first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert np.array_equal(image, before), "the image given is left alone"


def test_invert():
    assert np.array_equal(operate("Invert", ramp(), 7, rng()), 255 - ramp())


@pytest.mark.parametrize(
    ("level", "kept"), [(0, 1), (2.5, 1), (5, 2), (10, 4), (15, 6), (20, 8), (30, 8)], ids=str
)
def test_posterize_keeps_the_top_bits_and_never_none(level, kept):
    expected = ramp() >> (8 - kept) << (8 - kept)
    assert np.array_equal(operate("Posterize", ramp(), level, rng()), expected)


@pytest.mark.parametrize(("level", "threshold"), [(0, 0), (5, 128), (9, 230), (10, 0), (15, 128), (20, 0)])
def test_solarize_compares_bytes(level, threshold):
    expected = np.where(ramp() < threshold, ramp(), 255 - ramp())
    assert np.array_equal(operate("Solarize", ramp(), level, rng()), expected)


@pytest.mark.parametrize(("level", "addition"), [(0, 0), (5, 55), (10, 110), (15, 165), (20, 220)])
def test_solarize_add_lightens_what_is_dark(level, addition):
    added = np.minimum(ramp().astype(int) + addition, 255)
    assert np.array_equal(operate("SolarizeAdd", ramp(), level, rng()), np.where(ramp() < 128, added, ramp()))


def test_autocontrast_spreads_each_channel_to_the_full_range():
    image = np.array([[[50, 7, 0], [100, 7, 128], [150, 7, 255]]], np.uint8)
    result = operate("AutoContrast", image, 10, rng())
    assert result.tolist() == [[[0, 7, 0], [127, 7, 128], [255, 7, 255]]]  # a flat channel stays


def test_equalize_is_the_scaled_cumulative_histogram():
    image = (noise(40, 40).astype(int) ** 2 // 400).astype(np.uint8)
    expected = np.empty_like(image)
    for channel in range(3):
        counts = np.bincount(image[..., channel].ravel(), minlength=256)
        last = counts[counts > 0][-1]
        step = (counts.sum() - last) // 255
        below = np.concatenate([[0], np.cumsum(counts)[:-1]])
        expected[..., channel] = np.minimum((below + step // 2) // step, 255)[image[..., channel]]
    assert np.array_equal(operate("Equalize", image, 10, rng()), expected)
    assert not np.array_equal(expected, image)


@pytest.mark.parametrize("level", [0, 5, 10, 20])
def test_enhancements_blend_with_their_degenerates(level):
    image, share = noise(12, 9), level / 10 * 1.8 + 0.1
    grey = image @ np.array([0.299, 0.587, 0.114])
    smooth = image.astype(float)
    for j in range(1, 11):
        for i in range(1, 8):
            block = image[j - 1 : j + 2, i - 1 : i + 2].astype(float)
            smooth[j, i] = (block.sum((0, 1)) + 4 * block[1, 1]) / 13
    degenerates = {
        "Brightness": np.zeros_like(smooth),
        "Contrast": np.full_like(smooth, np.round(np.round(grey).mean())),
        "Color": np.repeat(np.round(grey)[..., None], 3, -1),
        "Sharpness": smooth,
    }
    for name, degenerate in degenerates.items():
        expected = np.clip(degenerate + share * (image - degenerate), 0, 255)
        error = np.abs(operate(name, image, level, rng()) - expected).max()
        # a level of rounding in the degenerate is extrapolated too
        assert error <= 1 + abs(1 - share), name


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("name", "axis"), [("TranslateX", 1), ("TranslateY", 0)])
def test_translate_moves_whole_pixels_and_fills_with_grey(name, axis, sign):
    image = noise(30, 40)
    result = operate(name, image, 1, Sign(sign))  # level 1: 10 pixels
    expected = np.roll(image, -10 * sign, axis)
    outside = slice(-10, None) if sign > 0 else slice(None, 10)
    expected[(slice(None), outside) if axis else outside] = 128
    assert np.array_equal(result, expected)


def test_translate_by_100_pixels_leaves_nothing_of_a_small_image():
    assert (operate("TranslateX", noise(32, 32), 10, rng()) == 128).all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", ["ShearX", "ShearY"])
def test_shear_moves_each_line_by_its_distance(name, sign):
    image = noise(21, 21)
    result = operate(name, image, 10, Sign(sign))  # 0.3 pixels a line
    if name == "ShearY":
        image, result = image.swapaxes(0, 1), result.swapaxes(0, 1)
    for line in range(21):
        if line % 5 == 0 and line % 10:
            continue  # half pixels may go either way
        source = np.arange(21) + round(0.3 * sign * line)
        inside = (source >= 0) & (source < 21)
        assert np.array_equal(result[line, inside], image[line, source[inside]])
        assert (result[line, ~inside] == 128).all()


def test_rotate_turns_about_the_centre_by_three_degrees_a_level():
    image = noise(41, 41)
    quarter, back = (operate("Rotate", image, 30, Sign(sign)) for sign in (1, -1))
    assert np.array_equal(quarter, np.rot90(image, 1)) and np.array_equal(back, np.rot90(image, -1))
    result = operate("Rotate", image, 10, Sign(1))
    assert np.array_equal(result[20, 20], image[20, 20])
    assert (result[[0, 0, -1, -1], [0, -1, 0, -1]] == 128).all(), "corners come from outside"
    assert not np.array_equal(result, image)


@pytest.mark.parametrize("name", [*sorted(GEOMETRIC), "Cutout", "SolarizeAdd"])
def test_level_zero_changes_nothing_where_zero_is_no_change(name):
    assert np.array_equal(operate(name, noise(13, 17), 0, rng()), noise(13, 17))


@pytest.mark.parametrize("name", sorted(GEOMETRIC))
def test_both_signs_are_drawn_equally_often(name):
    image, generator = noise(48, 48), rng(5)
    plus = operate(name, image, 2, Sign(1))
    share = np.mean([np.array_equal(operate(name, image, 2, generator), plus) for _ in range(400)])
    assert 0.4 < share < 0.6


def test_cutout_is_a_grey_square_about_any_pixel():
    image, generator = np.zeros((40, 60, 3), np.uint8), rng()
    centres, areas = [], []
    for _ in range(300):
        rows, columns = np.nonzero(operate("Cutout", image, 2, generator)[..., 0] == 128)
        areas.append(len(rows))
        assert np.ptp(rows) < 16 and np.ptp(columns) < 16  # level 2: half a side of 8
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
        centres.append((rows.min() + 8, columns.min() + 8))
    assert {0, 8} <= {c[0] - 8 for c in centres} and {0, 8} <= {c[1] - 8 for c in centres}
    assert max(areas) == 256 and min(areas) < 200, "whole inside, cut off at the border"
    inside = [c for c in centres if c[0] > 8 and c[1] > 8]
    assert max(c[0] for c in inside) >= 37 and max(c[1] for c in inside) >= 56


def test_the_same_generator_gives_the_same_pixels_and_another_gives_others():
    image = noise(120, 150)
    results = [augment(image, 2, 9, rng(seed)) for seed in range(12)]
    for seed, result in enumerate(results):
        assert np.array_equal(result, augment(image, 2, 9, rng(seed)))
    assert len({result.tobytes() for result in results}) >= 10


def test_no_global_state_is_read_or_written():
    np.random.seed(1)
    before = np.random.get_state()[1].tobytes()
    first = augment(noise(8, 8), 5, 10, rng(2))
    assert np.random.get_state()[1].tobytes() == before
    np.random.seed(2)
    assert np.array_equal(first, augment(noise(8, 8), 5, 10, rng(2)))


def test_every_selected_operation_is_applied_and_all_are_selected(monkeypatch):
    counts = dict.fromkeys(PUBLISHED, 0)

    def counting(name):
        def operation(image, level, generator):
            counts[name] += 1
            return image

        return operation

    for name in PUBLISHED:
        monkeypatch.setitem(OPERATIONS, name, counting(name))
    generator = rng()
    for _ in range(1600):
        augment(noise(1, 1), 2, 10, generator)
    assert sum(counts.values()) == 3200
    assert all(150 < count < 250 for count in counts.values()), counts
    for _ in range(1600):
        augment(noise(1, 1), 2, 10, generator, chance=(0.2, 0.8))
    assert 1500 < sum(counts.values()) - 3200 < 1700, "on average every second one"


def test_no_layers_change_nothing_and_the_result_is_a_copy():
    image = noise(5, 6)
    result = augment(image, 0, 10, rng())
    assert np.array_equal(result, image) and not np.shares_memory(result, image)
    assert result.flags.writeable and result.flags.c_contiguous


def test_a_view_of_memory_gives_what_its_copy_gives():
    image = noise(20, 30)[:, ::-1]
    assert np.array_equal(augment(image, 3, 10, rng(1)), augment(image.copy(), 3, 10, rng(1)))


def test_what_cannot_be_is_refused():
    image = noise(2, 2)
    for layers, magnitude in ((-1, 10), (2, -3)):
        with refused("request.value", f"{layers}, {magnitude}"):
            augment(image, layers, magnitude, rng())
    with refused("request.value", (0.8, 0.2)):
        augment(image, 2, 10, rng(), chance=(0.8, 0.2))
    with refused("request.unknown", "'Blur'", "AutoContrast"):
        operate("Blur", image, 10, rng())
