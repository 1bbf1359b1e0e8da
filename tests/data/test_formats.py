"""HEIC, AVIF and TIFF: read where a library is installed, else one message with the remedy, everywhere."""

import io
import json
from contextlib import suppress
from importlib.machinery import PathFinder

import numpy as np
import pytest
from PIL import Image
from test_cli import run

import vitkit
from vitkit.data import decode as decoder
from vitkit.data.decode import TURNS, BadImage, decode, largest_extent, pixels_by_header
from vitkit.data.names import DATA_SUFFIXES, SUFFIXES, not_read, readable_formats, readable_suffixes
from vitkit.datasets.opening import open_data

REMEDY = 'pip install "vitkit[heif]"'
SCENE = np.kron(np.random.default_rng(0).integers(0, 255, (3, 4, 3)), np.ones((16, 16, 1))).astype(np.uint8)
HEAD = b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + b"\0" * 40  # a HEIC file as far as it is recognised
heif = pytest.mark.skipif("HEIC" not in readable_formats(), reason="pillow-heif is not installed")
no_heif = pytest.mark.skipif("HEIC" in readable_formats(), reason="pillow-heif is installed")


def saved(kind: str, pixels: np.ndarray = SCENE, **options) -> bytes:
    if kind == "HEIF":
        import pillow_heif

        pillow_heif.register_heif_opener()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return exif.tobytes()


def apart(one: np.ndarray, other: np.ndarray) -> float:
    assert one.shape == other.shape
    return float(np.abs(one.astype(int) - other).mean())


def with_extent(data: bytes, width: int, height: int) -> bytes:
    """The same file, whose header declares another size."""
    at = data.index(b"ispe") + 8
    return data[:at] + width.to_bytes(4) + height.to_bytes(4) + data[at + 8 :]


KINDS = [pytest.param("AVIF"), pytest.param("HEIF", marks=heif)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("orientation", TURNS)
def test_pixels_come_upright(kind, orientation):
    content = saved(kind, quality=95, exif=turned(orientation))
    assert apart(decode(content), TURNS[orientation](SCENE)) < 6


@pytest.mark.parametrize("kind", KINDS)
def test_transparency_is_laid_on_white(kind):
    clear = np.dstack([SCENE, np.zeros(SCENE.shape[:2], np.uint8)])
    assert apart(decode(saved(kind, clear)), np.full_like(SCENE, 255)) < 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_is_refused_by_its_header(kind, monkeypatch):
    bomb = with_extent(saved(kind), 40_000, 40_000)
    assert largest_extent(bomb) == (40_000, 40_000)
    monkeypatch.setattr(decoder, "OPENERS", {})  # nothing is opened
    monkeypatch.setattr(decoder, "_heic", lambda *_: pytest.fail("opened"))
    with pytest.raises(BadImage, match="40000 x 40000") as refused:
        decode(bomb)
    assert refused.value.reason == "too-many-pixels"


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_one_line_with_the_format(kind):
    whole = saved(kind)
    for length in range(40, len(whole), 37):
        with pytest.raises(BadImage) as refused:
            decode(whole[:length])
        assert "\n" not in str(refused.value)
    rng = np.random.default_rng(1)
    for _ in range(40):
        broken = bytearray(whole)
        broken[rng.integers(12, len(whole))] ^= int(rng.integers(1, 256))
        with suppress(BadImage):
            assert decode(bytes(broken)).dtype == np.uint8


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", *KINDS])
def test_the_pixels_of_every_format_are_counted_by_its_header(kind):
    padded = 64 * 64 if kind == "HEIF" else 48 * 64  # to whole blocks, which are decoded
    assert SCENE.shape == (48, 64, 3) and pixels_by_header(saved(kind)) == padded


def test_the_pixels_of_large_and_turned_round_tiffs_are_counted():
    assert pixels_by_header(saved("TIFF", big_tiff=True)) == SCENE.shape[0] * SCENE.shape[1]
    assert pixels_by_header(b"MM\0*" + b"\xff" * 30) == pixels_by_header(b"II+\0\x08\0\0\0") == 0


def test_tiffs_of_several_pages_and_depths():
    other = Image.fromarray(255 - SCENE)
    assert apart(decode(saved("TIFF", save_all=True, append_images=[other])), SCENE) == 0
    deep = (SCENE[..., 0].astype(np.uint16) << 8) + 7
    assert (decode(saved("TIFF", deep))[..., 0] == SCENE[..., 0]).all()
    with pytest.raises(BadImage, match=r"0\.\.1") as refused:
        decode(saved("TIFF", SCENE[..., 0].astype(np.float32)))
    assert refused.value.reason == "float-out-of-range"


def test_what_is_offered_is_what_is_read():
    offered = readable_suffixes()
    assert set(offered) <= set(SUFFIXES) and {".jpg", ".tiff"} <= set(offered)
    assert (".heic" in offered) == ("HEIC" in readable_formats()) and (".avif" in offered) == (
        "AVIF" in decoder.FORMATS
    )


def test_the_library_decides_whether_heic_is_read(tmp_path, monkeypatch):
    """Both answers: with a library of that name on the path, and without one."""
    monkeypatch.setattr("vitkit.data.names.find_spec", lambda name: None)
    assert "HEIC" not in readable_formats() and REMEDY in not_read("HEIC", ("JPEG",))
    (tmp_path / "pillow_heif.py").touch()
    monkeypatch.setattr(
        "vitkit.data.names.find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)])
    )
    assert "HEIC" in readable_formats() and ".heic" in readable_suffixes()


@pytest.fixture
def phone(tmp_path):
    """Photographs as a phone leaves them: two folders of nothing but .HEIC files."""
    for name in ("cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(6):
            (tmp_path / "photos" / name / f"IMG_{number}.HEIC").write_bytes(HEAD + bytes([number]))
    return tmp_path / "photos"


def test_a_folder_of_heic_files_is_not_empty(phone):
    assert len(open_data(phone)["all"]) == 12


@no_heif
def test_every_verb_names_the_remedy_in_one_line(phone, small, tmp_path, capsys):
    model = small(classes=2)
    model.labels = ("cat", "dog")
    vitkit.save(model, tmp_path / "m.safetensors")
    photo = phone / "cat" / "IMG_0.HEIC"
    verbs = {
        "doctor": (["doctor", phone, "--json"], 1),
        "finetune": (["finetune", phone, "--model", "ViT-Ti/16", "--image-size", 32, "--steps", 1,
                      "--workers", 0, "--out", tmp_path / "run"], 2),
        "predict": (["predict", tmp_path / "m.safetensors", photo], 1),
        "evaluate": (["evaluate", tmp_path / "m.safetensors", phone, "--workers", 0], 2),
    }  # fmt: skip
    for verb, (words, code) in verbs.items():
        assert run(*words) == code, verb
        output = capsys.readouterr()
        assert REMEDY in output.out + output.err, verb
        assert "Traceback" not in output.err and "HEIC" in output.out + output.err, verb


@heif
def test_photographs_of_a_phone_are_read_by_every_verb(tmp_path, small, capsys):
    rng = np.random.default_rng(2)
    for name, shade in (("cat", 40), ("dog", 200)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(rng.normal(shade, 30, (40, 48, 3)), 0, 255).astype(np.uint8)
            content = saved("HEIF", pixels, quality=90, exif=turned(6))
            (tmp_path / "photos" / name / f"IMG_{number}.HEIC").write_bytes(content)
    assert run("doctor", tmp_path / "photos", "--json") == 0
    assert json.loads(capsys.readouterr().out)["splits"]["all"]["images"] == 24
    words = ["finetune", tmp_path / "photos", "--model", "ViT-Ti/16", "--image-size", 32, "--steps", 2]
    words += ["--batch", 8, "--workers", 0, "--out", tmp_path / "run", "--json"]
    assert run(*words, "--set", "model_options=width=16,depth=1,heads=1,hidden=16") == 0
    assert json.loads(capsys.readouterr().out)["cost"]["unusable_images"] == 0
    assert run("predict", tmp_path / "run", tmp_path / "photos", "--json") == 0
    assert all("error" not in one for one in json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("suffix", [*DATA_SUFFIXES, ".h5"])
def test_every_suffix_of_data_has_somebody_who_opens_it(suffix, tmp_path):
    (path := tmp_path / f"x{suffix}").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError) as caught:
        open_data(path)
    assert ("unknown kind of data" in str(caught.value)) == (suffix not in DATA_SUFFIXES)
