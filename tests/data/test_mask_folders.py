"""Folders of images and class masks are read by numbers and colours, and what does not fit is refused."""

import pickle
import shutil
import struct
import zlib

import numpy as np
import pytest
from annotated_data import png, random_mask, write_mask, write_photo
from PIL import Image

from vitkit.data.decode import decode
from vitkit.data.splits import join, same_classes
from vitkit.data.targets import IGNORE
from vitkit.datasets.opening import open_data
from vitkit.errors import Error


def made(folder, layout="images/{split}/{stem}.jpg masks/{split}/{stem}.png", classes="sky\nroad\nvoid\n",
         splits=("train", "val", "test"), mode="L"):  # fmt: skip
    """Two images of 60 x 40 in each split; the masks by split and stem."""
    image, mask = layout.split()
    masks = {}
    for n, split in enumerate(splits):
        for stem in ("a", "b"):
            masks[split, stem] = random_mask(10 * n + ord(stem), 3)
            write_photo(folder / image.format(split=split, stem=stem), 10 * n + ord(stem))
            write_mask(folder / mask.format(split=split, stem=stem), masks[split, stem], mode)
    if classes:
        (folder / "classes.txt").write_text(classes, "utf-8")
    return masks


@pytest.mark.parametrize(
    "layout",
    [
        "images/{split}/{stem}.jpg masks/{split}/{stem}.png",
        "{split}/images/{stem}.png {split}/masks/{stem}.png",
        "img/{split}/{stem}.png labels/{split}/{stem}_label.png",
        "images/{split}/deep/{stem}.jpg annotations/{split}/deep/{stem}_mask.png",
        "{split}/{stem}.png {split}annot/{stem}.png",
        "{split}/{stem}.jpg {split}/{stem}_mask.png",
        "inner/images/{split}/{stem}.jpg inner/masks/{split}/{stem}.png",
    ],
)
def test_layouts_are_recognised_and_masks_are_read_by_number(tmp_path, layout):
    masks = made(tmp_path, layout)
    if layout.startswith("inner"):
        shutil.move(tmp_path / "classes.txt", tmp_path / "inner/classes.txt")
    splits = open_data(tmp_path)
    assert set(splits) == {"train", "val", "test"}
    for split, source in splits.items():
        assert source.classes == ("sky", "road") and source.labels.tolist() == [0, 0]
        source = pickle.loads(pickle.dumps(source)).take(np.array([1, 0]))
        assert source.targets.kinds == {"mask"}
        for index, stem in enumerate("ba"):
            target = source.targets.read(index)
            expected = masks[split, stem]
            assert target.size == decode(source.fetch(index)).shape[:2] and target.mask.dtype == np.uint8
            assert (target.mask == np.where(expected == 2, IGNORE, expected)).all()


def test_data_without_splits_and_names_of_splits(tmp_path):
    made(tmp_path, "images/{stem}.jpg masks/{stem}.png", splits=("train",))
    assert {k: len(v) for k, v in open_data(tmp_path).items()} == {"all": 2}
    made(tmp_path / "b", splits=("training", "validation"))
    assert set(open_data(tmp_path / "b")) == {"train", "val"}
    made(tmp_path / "c", splits=("val", "valid"))
    with pytest.raises(Error) as caught:
        open_data(tmp_path / "c")
    assert caught.value.code == "data.layout"


def test_an_archive_is_read_in_place(tmp_path):
    masks = made(tmp_path / "street")
    for kind in ("zip", "tar"):
        place = shutil.make_archive(str(tmp_path / "street"), kind, tmp_path, "street")
        source = open_data(place)["val"]
        target = pickle.loads(pickle.dumps(source)).targets.read(1)
        assert (target.mask == np.where(masks["val", "b"] == 2, IGNORE, masks["val", "b"])).all()


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        ("sky\nroad\nvoid\n", ("sky", "road")),
        ("\ufeffsky\r\nroad\r\nunlabelled\r\n", ("sky", "road")),
        ("0 sky 1 2 3\n1 traffic light 4 5 6\n2 void 7 8 9\n", ("sky", "traffic light")),
        ("sky 1 2 3\nroad 4 5 6\nIgnore 7 8 9\n", ("sky", "road")),
        ("void\nsky\nroad\n", ("void", "sky", "road")),  # only a last one is left out
    ],
)
def test_lists_of_classes(tmp_path, classes, names):
    made(tmp_path, classes=classes)
    assert open_data(tmp_path)["train"].classes == names


@pytest.mark.parametrize("kind", ["P", "1", "I;16", "L2", "L4", "RGB", "RGBA", "labelmap"])
def test_every_kind_of_png_gives_the_same_numbers(tmp_path, kind):
    colours = np.array([(0, 0, 0), (128, 64, 0), (1, 2, 3)], np.uint8)
    text = "".join(f"{n} {name} {r} {g} {b}\n" for n, (name, (r, g, b)) in enumerate(
        zip(("sky", "road", "void"), colours.tolist(), strict=True)))  # fmt: skip
    made(tmp_path, classes=text, splits=("train",))
    mask = random_mask(5, 2 if kind == "1" else 3)
    path = tmp_path / "masks/train/a.png"
    if kind == "P":
        write_mask(path, mask, "P")
        assert Image.open(path).mode == "P" and (np.asarray(Image.open(path).convert("L")) != mask).any()
    elif kind == "1":
        Image.fromarray(mask.astype(bool)).save(path)
    elif kind == "I;16":
        write_mask(path, mask.astype(np.uint16))
    elif kind in ("L2", "L4"):
        path.write_bytes(gray_png(mask, int(kind[1])))
    elif kind == "RGBA":
        Image.fromarray(colours[mask]).convert("RGBA").save(path)
    else:
        Image.fromarray(colours[mask]).save(path)
    if kind == "labelmap":
        (tmp_path / "classes.txt").unlink()
        lines = ["# label:color_rgb:parts:actions", "sky:0,0,0::", "road:128,64,0::", "void:1,2,3::"]
        (tmp_path / "labelmap.txt").write_text("\n".join(lines), "utf-8")
    read = open_data(tmp_path)["train"].targets.read(0).mask
    assert (read == np.where(mask == 2, IGNORE, mask)).all()


def gray_png(mask: np.ndarray, bits: int) -> bytes:
    """A gray PNG with 2 or 4 bits, which Pillow cannot write."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    height, width = mask.shape
    planes = np.unpackbits(mask[..., None], axis=2)[..., 8 - bits :].reshape(height, width * bits)
    rows = b"".join(b"\0" + row.tobytes() for row in np.packbits(planes, axis=1))
    head = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_a_mask_with_a_palette_of_voc(tmp_path):
    write_photo(tmp_path / "JPEGImages/2007_1.jpg", 1)
    write_photo(tmp_path / "JPEGImages/2007_2.jpg", 2)
    write_photo(tmp_path / "JPEGImages/2007_3.jpg", 3)
    mask = random_mask(1, 21)
    mask[0] = 255
    for n in (1, 2):
        write_mask(tmp_path / f"SegmentationClass/2007_{n}.png", mask, "P")
    lists = tmp_path / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("2007_1\n", "utf-8")
    (lists / "val.txt").write_text("2007_2\n", "utf-8")
    (lists / "trainval.txt").write_text("2007_1\n2007_2\n", "utf-8")
    splits = open_data(tmp_path)
    assert {split: list(source.keys) for split, source in splits.items()} == {
        "train": ["JPEGImages/2007_1.jpg"], "val": ["JPEGImages/2007_2.jpg"]
    }  # fmt: skip
    assert len(splits["train"].classes) == 21 and (splits["train"].targets.read(0).mask == mask).all()


def test_ade20k_counts_from_one_and_cityscapes_has_ids(tmp_path):
    ade, streets = tmp_path / "ade", tmp_path / "streets"
    write_photo(ade / "images/training/ADE_train_1.jpg", 1)
    mask = random_mask(1, 151)
    write_mask(ade / "annotations/training/ADE_train_1.png", mask)
    (source,) = open_data(ade).values()
    read = source.targets.read(0).mask
    assert len(source.classes) == 150 and (read == np.where(mask == 0, 255, mask - 1)).all()

    for split, city in (("train", "aachen"), ("test", "berlin")):
        write_photo(streets / f"leftImg8bit/{split}/{city}/{city}_1_leftImg8bit.png", 2)
        ids = np.tile(np.arange(30, dtype=np.uint8), (40, 2))
        for kind in ("labelIds", "color", "instanceIds"):
            write_mask(streets / f"gtFine/{split}/{city}/{city}_1_gtFine_{kind}.png", ids)
    splits = open_data(streets)
    row = splits["train"].targets.read(0).mask[0, :30]
    assert set(splits) == {"train"} and len(splits["train"].classes) == 19
    assert (
        row[[7, 8, 11, 13, 17, 28]].tolist() == [0, 1, 2, 4, 5, 15] and row[[0, 9, 29]].tolist() == [255] * 3
    )


@pytest.mark.parametrize("orientation", [1, 2, 3, 5, 6, 8])
def test_a_mask_of_the_stored_picture_is_turned_with_it(tmp_path, orientation):
    """The mask is drawn into the picture, so that both must be turned alike."""
    made(tmp_path, splits=("train",))
    mask = np.kron(random_mask(3, 2, 5, 8), np.ones((8, 8), np.uint8))
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(mask * 255).convert("RGB").save(tmp_path / "images/train/a.jpg", exif=exif, quality=95)
    write_mask(tmp_path / "masks/train/a.png", mask)
    source = open_data(tmp_path)["train"]
    target, problems = source.targets.read.checked(0)
    pixels = decode(source.fetch(0))
    assert target.size == pixels.shape[:2] == target.mask.shape
    if (
        orientation > 4
    ):  # otherwise both pictures have this size, and the mask is taken as that of the upright
        assert ((pixels[..., 0] > 127) == (target.mask == 1)).all() and problems == ("exif-turned",)
    else:
        assert (target.mask == mask).all() and problems == (("exif-unclear",) if orientation > 1 else ())


def break_size(folder):
    write_mask(folder / "masks/train/a.png", random_mask(1, 2, 30, 60))


def break_value(folder):
    write_mask(folder / "masks/train/a.png", np.full((40, 60), 7, np.uint8))


def break_colour(folder):
    Image.new("RGB", (60, 40)).save(folder / "masks/train/a.png")


def break_jpeg_inside(folder):
    Image.new("L", (60, 40)).save(folder / "masks/train/a.png", "JPEG")


def break_file(folder):
    path = folder / "masks/train/a.png"
    path.write_bytes(path.read_bytes()[:60])


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (break_size, "data.labels", ("60 x 30", "60 x 40")),
        (break_value, "data.labels", ("7 in 2400 pixels",)),
        (break_colour, "data.labels", ("R G B",)),
        (break_jpeg_inside, "data.labels", ("PNG",)),
        (break_file, "data.corrupt", ()),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_when_it_is_read(tmp_path, change, code, words):
    made(tmp_path, splits=("train",))
    change(tmp_path)
    source = open_data(tmp_path)["train"]
    with pytest.raises(Error) as caught:
        source.targets.read(0)
    assert caught.value.code == code and "masks/train/a.png" in str(caught.value)
    assert all(word in str(caught.value) for word in words)
    assert source.targets.read(1).mask.shape == (40, 60)


def remove_mask(folder):
    (folder / "masks/train/a.png").unlink()


def jpeg_mask(folder):
    Image.open(folder / "masks/train/a.png").save(folder / "masks/train/a.jpg")


def no_classes(folder):
    (folder / "classes.txt").unlink()


def repeat_class(folder):
    (folder / "classes.txt").write_text("sky\nroad\nSky\n", "utf-8")


def gap_in_numbers(folder):
    (folder / "classes.txt").write_text("1 sky 0 0 0\n2 road 1 1 1\n", "utf-8")


def too_many_classes(folder):
    (folder / "classes.txt").write_text("".join(f"class-{n}x\n" for n in range(300)), "utf-8")


def same_stem(folder):
    write_photo(folder / "images/train/a.png", 9)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (remove_mask, "data.labels"),
        (jpeg_mask, "data.labels"),
        (no_classes, "data.classes"),
        (repeat_class, "data.classes"),
        (gap_in_numbers, "data.classes"),
        (too_many_classes, "data.classes"),
        (same_stem, "data.labels"),
    ],
)
def test_folders_that_do_not_fit_are_refused(tmp_path, change, code):
    made(tmp_path, splits=("train",))
    change(tmp_path)
    with pytest.raises(Error) as caught:
        open_data(tmp_path)
    assert caught.value.code == code


def test_the_message_names_the_numbers_if_there_is_no_list(tmp_path):
    made(tmp_path, splits=("train",), classes="")
    with pytest.raises(Error, match="0, 1, 2"):
        open_data(tmp_path)


def test_masks_without_an_image_are_noted(tmp_path):
    made(tmp_path, splits=("train",))
    write_mask(tmp_path / "masks/train/z.png", random_mask(1, 2))
    source = open_data(tmp_path)["train"]
    assert source.targets.read.notes == (("stray-annotations", ("masks/train/z.png",)),)


def test_folders_of_classes_are_still_folders_of_classes(tmp_path):
    """Even if a class is called masks, or photographs have such names."""
    for n, name in enumerate(("cat/1.png", "cat/2.png", "masks/1.png", "masks/1_mask.png")):
        write_photo(tmp_path / name, n)
    source = open_data(tmp_path)["all"]
    assert source.targets is None and source.classes == ("cat", "masks")


def test_a_huge_mask_is_refused_by_its_header(tmp_path):
    made(tmp_path, splits=("train",))
    data = bytearray(png(np.zeros((4, 4), np.uint8)))
    data[16:24] = (60_000).to_bytes(4) * 2
    data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4)
    (tmp_path / "masks/train/a.png").write_bytes(bytes(data))
    with pytest.raises(Error) as caught:
        open_data(tmp_path)["train"].targets.read(0)
    assert caught.value.code == "image.too-large"


def test_joined_and_renumbered_sources_keep_their_targets(tmp_path):
    masks = made(tmp_path)
    splits = open_data(tmp_path)
    both = pickle.loads(pickle.dumps(join(splits["train"], splits["val"])))
    assert (both.targets.read(3).mask == splits["val"].targets.read(1).mask).all()
    other = same_classes(splits["train"], ("tree", "road", "sky"))
    read = other.targets.read(1).mask
    assert (read == np.array([2, 1, IGNORE], np.uint8)[masks["train", "b"]]).all()
    assert other.labels.tolist() == [0, 0] and other.classes == ("tree", "road", "sky")
