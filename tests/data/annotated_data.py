"""Small data sets with masks and boxes, written into a folder for tests."""

import json
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image


def photo(number: int, height: int = 40, width: int = 60) -> Image.Image:
    """A picture like no other."""
    blobs = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(blobs).resize((width, height), Image.Resampling.BICUBIC)


def write_photo(path: Path, number: int, height: int = 40, width: int = 60, orientation: int = 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[274] = orientation
    photo(number, height, width).save(path, exif=exif)


def write_mask(path: Path, mask: np.ndarray, mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(mask)
    if mode == "P":
        picture = Image.fromarray(mask.astype(np.uint8)).convert("L")
        picture = Image.frombytes("P", picture.size, picture.tobytes())
        picture.putpalette([v for n in range(256) for v in (n * 37 % 256, n * 91 % 256, 255 - n)])
    picture.save(path)


def png(mask: np.ndarray) -> bytes:
    file = BytesIO()
    Image.fromarray(mask).save(file, "PNG")
    return file.getvalue()


def random_mask(number: int, classes: int, height: int = 40, width: int = 60) -> np.ndarray:
    return np.random.default_rng(number).integers(0, classes, (height, width), dtype=np.uint8)


def coco(images: list[dict], annotations: list[dict], names: tuple[str, ...] = ("cat", "dog")) -> dict:
    categories = [{"id": 3 * n + 1, "name": name, "supercategory": "thing"} for n, name in enumerate(names)]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_coco(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), "utf-8")


def one_image(folder: Path, annotations: list[dict], **image) -> Path:
    """A data set of one image of 60 x 40 pixels in images/train; ids and areas may be left out."""
    write_photo(folder / "images/train/a.jpg", 1)
    rows = [{"id": n, "image_id": 7, "category_id": 1} | row for n, row in enumerate(annotations, 1)]
    listed = {"id": 7, "file_name": "a.jpg", "width": 60, "height": 40} | image
    write_coco(folder / "annotations/train.json", coco([listed], rows))
    return folder


def voc_xml(name: str, size: tuple[int, int], objects: list[tuple[str, tuple, int]]) -> str:
    rows = "".join(
        f"<object><bndbox><ymax>{y1}</ymax><xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax></bndbox>"
        f"<name>{label}</name><difficult>{difficult}</difficult></object>"
        for label, (x0, y0, x1, y1), difficult in objects
    )
    height, width = size
    head = f"<filename>{name}</filename><size><width>{width}</width><height>{height}</height></size>"
    return f"<annotation>{head}{rows}</annotation>"
