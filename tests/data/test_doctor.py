"""The doctor finds each fault of a data set by its kind and files, and no fault where there is none."""

import inspect
import json
import re
import threading
import unicodedata
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitkit import cli, options
from vitkit.commands.shared import note_if_slow
from vitkit.data import decode, doctor
from vitkit.data.decode import BadImage
from vitkit.data.doctor import COLUMNS, ImageCheck, difference_hash, examine, near_groups, near_pairs
from vitkit.data.findings import KINDS, MEND, Finding, find
from vitkit.data.sources.source import Lazy, Source, digits, from_arrays, from_rows
from vitkit.data.splits import complete
from vitkit.datasets.opening import open_data


def scene(number: int, width: int = 48, height: int = 48) -> Image.Image:
    """A picture like no other: blobs of 8 x 8 random colours."""
    blobs = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(blobs).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def scenes(numbers, label="") -> dict[str, bytes]:
    return {f"{label or 'ab'[n % 2]}/{n}.png": saved(scene(n)) for n in numbers}


def source(files: dict[str, bytes], labels: dict[str, str] | None = None, **more) -> Source:
    def fetch(key):
        if files[key] is None:
            raise BadImage("unreadable", "cannot be opened: Permission denied")
        return files[key]

    return from_rows("made", [(k, (labels or {}).get(k, k.split("/")[0])) for k in files], fetch, **more)


def split(part: str, files: dict[str, bytes]) -> Source:
    """A part whose files are named part/class/file, as in a folder."""
    named = {f"{part}/{key}": data for key, data in files.items()}
    return source(named, {key: key.split("/")[1] for key in named})


def clean(**more) -> dict[str, bytes]:
    return scenes(range(12)) | more


def kinds(report) -> list[str]:
    """In their order; nearly all sets here are too small in all, which has a test of its own."""
    return [finding.kind for finding in report.findings if finding.kind != "few-in-all"]


def check(report, kind, severity, files, *words) -> Finding:
    (finding,) = [finding for finding in report.findings if finding.kind == kind]
    assert (finding.severity, list(finding.files)) == (severity, files)
    assert all(word in finding.text for word in words), finding.text
    assert finding.text.endswith(".") and finding.remedy.endswith(".") and "{" not in finding.remedy
    return finding


def test_a_good_data_set_has_no_findings():
    report = examine({"train": split("train", clean()), "val": split("val", scenes(range(20, 24)))})
    assert kinds(report) == [] and report.ok and report.splits["val"]["images"] == 4
    six, side = ({"min": n, "median": float(n), "max": n} for n in (6, 48))
    assert report.splits["train"] == {"images": 12, "classes": 2, "per_class": six}
    assert report.sizes == {"width": side, "height": side, "non_square": 0.0} and report.modes == {}


def test_the_digits_have_no_error():
    report = examine(complete({"all": digits()}))
    assert report.ok and kinds(report) == ["tiny"] and len(report.findings[0].files) == 1797


def test_files_that_cannot_be_used_are_named_by_reason():
    whole, jpeg = saved(scene(50, 200, 200)), saved(scene(51, 200, 200), "JPEG")
    bad = {
        "a/cut.png": whole[: len(whole) // 2], "a/cut.jpg": jpeg[: len(jpeg) // 2], "b/empty.png": b"",
        "b/page.jpg": b"<html>404</html>", "b/locked.png": None, "a/paper.jpg": b"%PDF-1", "a/none.png": b"",
    }  # fmt: skip
    report = examine({"train": source(clean(**bad))})
    check(report, "unusable-truncated", "error", ["a/cut.jpg", "a/cut.png"], "2", "truncated before")
    check(report, "unusable-empty", "error", ["a/none.png", "b/empty.png"])
    check(report, "unusable-not-an-image", "error", ["b/page.jpg"])
    check(report, "unusable-unreadable", "error", ["b/locked.png"], "Permission denied")
    check(report, "unusable-unsupported-format", "error", ["a/paper.jpg"], "PDF")
    assert not report.ok and len(kinds(report)) == 5  # two empty files are copies of nothing


def exif(turn: int) -> bytes:
    data = Image.Exif()
    data[274] = turn
    return data.tobytes()


ODD = {
    "gray": saved(scene(60).convert("L"), "JPEG"), "alpha": saved(scene(61).convert("RGBA")),
    "16-bit": saved(Image.fromarray(np.asarray(scene(62).convert("L")).astype(np.uint16) << 8)),
    "cmyk": saved(scene(63).convert("CMYK"), "JPEG"), "palette": saved(scene(64).convert("P")),
    "exif-rotated": saved(scene(65), "JPEG", exif=exif(6)), "bilevel": saved(scene(66).convert("1")),
    "animated": saved(scene(67), "WEBP", save_all=True, append_images=[scene(68)], lossless=True),
    "float": saved(Image.fromarray(np.asarray(scene(69).convert("L")).astype(np.float32) / 255), "TIFF"),
}  # fmt: skip


@pytest.mark.parametrize("mode", ODD)
def test_images_that_need_care_are_noted(mode):
    plain = {"a/up.jpg": saved(scene(70), "JPEG", exif=exif(1)), "b/x.webp": saved(scene(71), "WEBP")}
    report = examine({"train": source(clean(**plain) | {"a/odd": ODD[mode]})})
    check(report, f"mode-{mode}", "note", ["a/odd"], mode)
    assert report.modes == {mode: 1} | ({"gray": 1} if mode == "16-bit" else {}) and report.ok


def test_copies_within_a_split():
    more = {"a/again.png": saved(scene(0)), "a/bmp.bmp": saved(scene(0), "BMP"), "b/3b.png": saved(scene(3))}
    report = examine({"train": source(clean(**more))})
    names = ["a/0.png", "a/again.png", "a/bmp.bmp", "b/3.png", "b/3b.png"]
    finding = check(report, "duplicates", "warning", names, "train", "2")
    assert finding.groups == (tuple(names[:3]), tuple(names[3:])) and kinds(report) == ["duplicates"]


def test_one_image_under_two_labels():
    report = examine({"train": source(clean(**{"b/zero.png": saved(scene(0))}))})
    check(report, "label-conflict", "error", ["a/0.png", "b/zero.png"], "(a)", "(b)")
    assert kinds(report) == ["label-conflict", "duplicates"]


def test_copies_across_splits_are_leakage():
    train = split("train", clean() | {"a/4b.png": saved(scene(4))})
    val, test = split("val", scenes([4, 21])), split("test", scenes([4, 5, 30]))
    report = examine({"test": test, "train": train, "val": val})
    pair, many = (f for f in report.findings if f.kind == "leakage" and f.severity == "error")
    assert pair.files == ("train/b/5.png", "test/b/5.png") and "train and test" in pair.text
    assert many.files == ("train/a/4.png", "train/a/4b.png", "val/a/4.png", "test/a/4.png")
    check(report, "duplicates", "warning", ["train/a/4.png", "train/a/4b.png"])
    assert kinds(report) == ["leakage", "leakage", "duplicates"]


def test_the_same_key_in_two_splits_is_told_apart():
    rng = np.random.default_rng(0)
    train, test = (rng.integers(0, 256, (12, 40, 40, 3), dtype=np.uint8) for _ in range(2))
    test[5] = train[2]
    labels = np.arange(12) % 2
    report = examine({"test": from_arrays("n", test, labels), "train": from_arrays("n", train, labels)})
    check(report, "leakage", "error", ["train:000002", "test:000005"])
    check(report, "label-conflict", "error", ["train:000002", "test:000005"])


def test_near_duplicates_within_and_across_splits():
    small = {"a/small.jpg": saved(scene(0).resize((40, 40)), "JPEG", quality=70)}
    bright = saved(scene(3).point(lambda v: min(255, v * 0.9 + 20)))
    train = split("train", clean() | small | {"a/copy.png": saved(scene(0))})
    report = examine({"train": train, "val": split("val", scenes([20, 21]) | {"b/bright.png": bright})})
    check(report, "near-duplicates", "warning", ["train/a/0.png", "train/a/small.jpg"], "train")
    check(report, "near-leakage", "warning", ["train/b/3.png", "val/b/bright.png"], "train and val")
    assert kinds(report) == ["duplicates", "near-duplicates", "near-leakage"] and report.ok


def test_flat_images_and_smooth_ramps_are_no_near_duplicates():
    flat = {f"a/flat{v}.png": saved(Image.new("RGB", (48, 48), (v, v, v))) for v in (10, 90, 200)}
    flat |= {f"a/faint{v}.png": saved(scene(0).point(lambda p, v=v: v + p // 40)) for v in (100, 120)}
    flat |= {f"b/{size}.png": saved(Image.new("RGB", size)) for size in ((40, 60), (60, 40))}  # equal bytes
    ramp = np.tile(np.arange(48, dtype=np.uint8), (48, 1))
    ramps = {f"b/ramp{s}.png": saved(Image.fromarray(ramp * s).convert("RGB")) for s in (2, 3, 5)}
    assert kinds(examine({"train": source(clean(**flat, **ramps))})) == []


def test_near_pairs_are_those_of_comparing_all_with_all():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2, (60, 64), dtype=np.uint8).repeat(10, 0)
    for row in bits:
        row[rng.choice(64, rng.integers(0, 5), replace=False)] ^= 1
    rows = np.unique(np.packbits(bits, axis=1), axis=0)
    distance = np.unpackbits(rows[:, None] ^ rows, axis=2).sum(2)
    expected = {(int(a), int(b)) for a, b in np.argwhere(distance <= 3) if a < b}
    pairs = {tuple(sorted(map(int, pair))) for part in near_pairs(rows) for pair in part}
    assert pairs == expected and len(expected) > 300


def test_near_groups_join_by_steps():
    chain = [(2 ** (3 * step) - 1).to_bytes(8, "little") for step in range(21)]
    looks = [ImageCheck("all", "", "", digest=value, hash=value) for value in [*chain, bytes([85] * 8)]]
    assert near_groups(looks) == [looks[:21]]
    assert near_groups([]) == []


def test_the_hash_is_of_brighter_right_neighbours():
    levels = np.random.default_rng(2).permutation(72).reshape(8, 9).astype(np.uint8) * 3
    pixels = levels.repeat(6, 0).repeat(6, 1)[..., None].repeat(3, 2)
    bits = np.unpackbits(np.frombuffer(difference_hash(pixels), np.uint8)).reshape(8, 8).T
    assert (bits == (levels[:, 1:] > levels[:, :-1])[:, COLUMNS]).all()


def counted(part: str, **numbers: int) -> Source:
    """So many names of each class, and no image behind them."""
    keys = {f"{part}/{label}/{i}.png": label for label, number in numbers.items() for i in range(number)}
    return source(dict.fromkeys(keys), keys)


def test_classes_that_are_not_everywhere():
    parts = {"train": counted("train", cat=6, dog=6), "val": counted("val", cat=2, cow=2, emu=1)}
    report = examine(parts | {"test": counted("test", cat=1, dog=1)}, deep=False)
    files = ["val/cow/0.png", "val/cow/1.png", "val/emu/0.png"]
    assert check(report, "class-not-in-train", "error", files, "'cow', 'emu'").classes == ("cow", "emu")
    assert check(report, "class-not-in-split", "warning", [], "val", "'dog'").classes == ("dog",)
    assert kinds(report) == ["class-not-in-train", "class-not-in-split"] and not report.ok


def test_one_class_few_images_and_imbalance():
    report = examine({"train": counted("train", cat=6)}, deep=False)
    assert check(report, "one-class", "error", [], "'cat'").classes == ("cat",)
    report = examine({"all": counted("all", cat=50, cow=5, dog=4)}, deep=False)
    check(report, "few-images", "warning", [f"all/dog/{i}.png" for i in range(4)], "dog: 4")
    assert check(report, "imbalance", "warning", [], "'cat' has 50", "'dog' has 4").classes == ("cat", "dog")
    assert kinds(examine({"all": counted("all", cat=50, cow=5)}, deep=False)) == []


def test_a_class_with_one_image_is_a_finding_of_its_own():
    report = examine({"train": counted("train", cat=6, dog=1, emu=2)}, deep=False)
    assert check(report, "one-image", "warning", ["train/dog/0.png"], "'dog'").classes == ("dog",)
    assert check(report, "few-images", "warning", [f"train/emu/{i}.png" for i in (0, 1)]).classes == ("emu",)


def test_of_many_images_only_those_in_findings_are_named(monkeypatch):
    monkeypatch.setattr(doctor, "NAMED", 20)
    asked = []

    def large(part, emus):
        labels = np.array([0, 1] * 30 + [2] * emus)
        data = from_arrays(part, np.zeros((len(labels), 8, 8, 3), np.uint8), labels, ("cat", "dog", "emu"))
        keys = Lazy(len(labels), lambda i: asked.append((part, i)) or f"{i}.png")
        return replace(data, keys=keys)

    examine({"train": large("train", 30), "val": large("val", 30)}, deep=False)
    assert asked == []
    report = examine({"train": large("train", 3), "val": large("val", 30)}, deep=False)
    check(report, "few-images", "warning", ["train:60.png", "train:61.png", "train:62.png"], "emu: 3")
    assert asked == [("train", 60), ("train", 61), ("train", 62)]


def test_few_images_in_all_and_none_to_test_on():
    report = examine({"all": counted("all", cat=5, dog=5)}, deep=False)
    check(report, "few-in-all", "warning", [], "10")
    assert report.ok and [finding.kind for finding in report.findings] == ["few-in-all"]
    assert examine({"all": counted("all", cat=10, dog=10)}, deep=False).findings == ()
    report = examine({"all": counted("all", cat=1, dog=1, emu=1)}, deep=False)
    check(report, "nothing-to-test", "error", [], "3")
    assert not report.ok and "few-in-all" not in [finding.kind for finding in report.findings]
    tested = {"train": counted("train", cat=1, dog=1), "test": counted("test", cat=1, dog=1)}
    assert examine(tested, deep=False).ok


def test_folders_without_an_image_are_named(tmp_path):
    for key, data in scenes(range(40)).items():
        (tmp_path / "train" / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / key).write_bytes(data)
    for folder in ("train/none/deeper", "train/a/part", "val", "train/.hidden"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "train/notes").mkdir()
    (tmp_path / "train/notes/list.txt").write_text("x")
    report = examine(open_data(tmp_path), deep=False)
    result = check(report, "empty-class", "warning", [], "'train/none'", "'train/notes'")
    assert result.classes == ("train/a/part", "train/none", "train/notes") and report.ok
    only = replace(counted("all", cat=30), empty=("dog",))
    result = check(examine({"all": only}, deep=False), "one-class", "error", [], "'cat'", "'dog'")


def test_classes_named_like_parts_of_a_data_set():
    names = ["images", "annotations/trimaps", "n01443537/Images", "trains", "label maker", "cat"]
    report = examine({"all": counted("all", **dict.fromkeys(names, 5))}, deep=False)
    result = check(report, "folder-name", "warning", [], "'images'")
    assert result.classes == ("annotations/trimaps", "images", "n01443537/Images")
    assert kinds(report) == ["folder-name"]


@pytest.mark.parametrize("mode", ["L", "P", "1"])
def test_classes_of_masks_beside_photographs(mode):
    """As Pets' trimaps, CamVid's 12 classes and VOC's palettes: a few values in one channel."""
    grid = np.random.default_rng(0).integers(0, 12, (5, 4, 4), dtype=np.uint8)
    drawn = [Image.fromarray(np.kron(one, np.ones((12, 12), np.uint8))) for one in grid]
    if mode == "1":
        drawn = [one.point(lambda value: 255 * (value > 5)).convert("1") for one in drawn]
    elif mode == "P":
        for one in drawn:
            one.putpalette([16 * i for i in range(12) for _ in "rgb"])
    flat = {f"m/{i}.png": saved(one) for i, one in enumerate(drawn)}
    report = examine({"all": source(clean() | flat)})
    assert check(report, "masks", "warning", list(flat), "'m'").classes == ("m",)
    grays = {f"m/{i}.png": saved(scene(50 + i).convert("L")) for i in range(5)}
    assert "masks" not in kinds(examine({"all": source(clean() | flat | grays)}))  # not all of them
    assert "masks" not in kinds(examine({"all": source(flat)}))  # drawings, all of them


def test_class_names_that_look_alike():
    nfc, nfd = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    names = ["Cat", "cat", "polar bear", "polarbear ", nfc, nfd, "dog", "dogs"]
    report = examine({"all": counted("all", **dict.fromkeys(names, 5))}, deep=False)
    twins = [f.classes for f in report.findings if f.kind == "similar-classes" and f.severity == "warning"]
    assert sorted(twins) == [("Cat", "cat"), (nfd, nfc), ("polar bear", "polarbear ")]
    assert len(report.findings) == 3 and any(r"\xe9" in f.text for f in report.findings)


def test_unusual_sizes_are_noted():
    sized = {"a/tiny.png": (31, 40), "a/even.png": (32, 32), "b/long.png": (48, 241), "b/five.png": (48, 240)}
    files = clean(**{key: saved(scene(80 + i, *size)) for i, (key, size) in enumerate(sized.items())})
    huge = {"b/huge.png": saved(Image.new("L", (5000, 4001)).convert("RGB"), compress_level=1)}
    report = examine({"train": source(files | huge)})
    check(report, "tiny", "note", ["a/tiny.png"], "31 x 40")
    check(report, "long", "note", ["b/long.png"], "48 x 241")
    check(report, "enormous", "note", ["b/huge.png"], "5000 x 4001")
    assert kinds(report) == ["enormous", "long", "tiny"] and report.sizes["non_square"] == 4 / 17


def test_other_files_are_noted_once(tmp_path):
    for key, data in clean(**{"a/notes.txt": b"x", "b/list.csv": b"y"}).items():
        for part in ("train", "val"):
            (tmp_path / part / key).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / part / key).write_bytes(data)
    names = ["train/a/notes.txt", "train/b/list.csv", "val/a/notes.txt", "val/b/list.csv"]
    check(examine(open_data(tmp_path), deep=False), "other-files", "note", names, "4")


def test_links_and_images_without_a_label_are_not_called_files_without_a_suffix():
    left_out = ("a/link.png", "a/notes.txt", "x.parquet:3")
    report = examine({"all": replace(source(clean()), skipped=left_out)}, deep=False)
    check(report, "links", "warning", ["a/link.png"], "1")
    check(report, "unlabelled", "note", ["x.parquet:3"], "1")
    check(report, "other-files", "note", ["a/notes.txt"], "1")


def test_several_labels_are_counted_and_never_in_conflict():
    files = scenes(range(6), "x") | {"x/copy.png": saved(scene(0))}
    labels = {key: "sky;sea" if i % 2 else "sky" for i, key in enumerate(files)} | {"x/copy.png": "sea"}
    val = source(scenes([20], "v"), {"v/20.png": "sky;fog"}, several=True)
    report = examine({"train": source(files, labels, several=True), "val": val})
    assert kinds(report) == ["class-not-in-train", "class-not-in-split", "few-images", "duplicates"]
    check(report, "few-images", "warning", ["x/1.png", "x/3.png", "x/5.png", "x/copy.png"], "sea: 4")
    assert report.splits["train"]["per_class"] == {"min": 4, "median": 5.0, "max": 6}


@pytest.fixture(scope="module")
def faulty() -> dict[str, Source]:
    bad = {"a/cut.png": saved(scene(9))[:300], "a/like.jpg": saved(scene(1), "JPEG")} | scenes([0], "b")
    val = split("val", scenes([2, 30, 31]) | {"c/9.gif": ODD["gray"], "c/8.png": ODD["alpha"]})
    return {"train": split("train", clean(**bad)), "val": val}


def test_neither_order_nor_threads_change_the_report(faulty):
    text = json.dumps(examine(faulty, workers=4).to_json())
    for seed in range(3):
        rng = np.random.default_rng(seed)
        shuffled = {name: part.take(rng.permutation(len(part))) for name, part in reversed(faulty.items())}
        assert json.dumps(examine(shuffled, workers=1 + seed).to_json()) == text


def test_the_report_travels_as_json_and_puts_errors_first(faulty):
    report = examine(faulty)
    assert {"label-conflict", "leakage", "unusable-truncated", "near-duplicates"} <= set(kinds(report))
    back = json.loads(json.dumps(report.to_json()))
    assert back["ok"] is False and back["splits"] == report.splits and back["sizes"] == report.sizes
    assert back["findings"] == json.loads(json.dumps([finding.to_json() for finding in report.findings]))
    severities = [finding.severity for finding in report.findings]
    assert list(dict.fromkeys(severities)) == ["error", "warning", "note"]


def test_each_image_is_read_once_and_progress_adds_up(faulty):
    reads, output, train = [], [], faulty["train"]
    watched = replace(train, fetch=lambda i: reads.append(i) or train.fetch(i))
    examine({"train": watched}, advance=output.append)
    assert sorted(reads) == list(range(len(train))) and sum(output) == len(train)


def test_a_hundred_thousand_names_are_looked_at_without_reading_one():
    def fetch(index):
        raise AssertionError("read")

    labels = np.arange(100_000) % 1000
    keys = [f"class {label}/{i}.jpg" for i, label in enumerate(labels)]
    many = Source("many", tuple(f"class {n}" for n in range(1000)), keys, labels, fetch)
    report = examine({"all": many}, deep=False)
    assert report.findings == () and report.sizes == {} and report.splits["all"]["images"] == 100_000


def test_every_remedy_is_one_line_that_says_what_to_do():
    reasons = set(re.findall(r'BadImage\("([\w-]+)"', inspect.getsource(decode)))
    reasons |= {"damaged", "float-out-of-range", "int-out-of-range"}  # chosen by an expression
    assert reasons == set(MEND), "a reason for which a file is refused has its remedy"
    kinds = [kind for kind in KINDS if kind not in ("unusable", "mode")]
    kinds += [f"unusable-{reason}" for reason in MEND] + ["mode-gray"]
    words = ("first", "place", "here", "split", "train", "listed", "large", "small", "twins", "beside",
             "least", "most", "size")  # fmt: skip
    values = dict.fromkeys((*words, "count", "page", "table"), "x")
    files = (*Path(cli.__file__).parent.glob("*.py"), Path(options.__file__))
    source = "".join(file.read_text() for file in files)
    for kind in kinds:
        remedy = find(kind, ["a"], **values).remedy
        assert "\n" not in remedy and "{" not in remedy and len(remedy) >= 60, kind
        for option in re.findall(r"--([a-z-]+)", remedy):
            assert f"{option.replace('-', '_')}:" in source, f"{kind}: --{option} is an option"


def test_what_is_being_listed_is_told_when_that_is_slow(capfd):
    def wait_for_it():
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join(60)

    with note_if_slow("listing", after=0.01):
        wait_for_it()
    with note_if_slow("quick", after=60):
        pass
    with note_if_slow("quiet", after=0.01, quiet=True):
        wait_for_it()
    assert capfd.readouterr().err == "listing\n"
