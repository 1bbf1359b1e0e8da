"""What a run's model predicted for each test image, by the image's content: what two runs are compared by."""

import gzip
import hashlib
import json
import zlib
from base64 import b64decode, b64encode
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.data.content import SIZE
from vitkit.data.sources.source import Source
from vitkit.data.splits import fingerprints
from vitkit.io.files import replace_file

if TYPE_CHECKING:  # a report needs no torch
    from vitkit.metrics.classification import Accuracy

PREDICTIONS = "predictions.json.gz"
LIMIT = 200_000  # images


def write_predictions(out: Path, source: Source, found: "Accuracy") -> None:
    """A row for each image that was tested, as columns; not for very large test sets."""
    if len(source) > LIMIT:
        return
    images = fingerprints(source)[found.index.numpy()]
    columns = {
        "classes": list(source.classes), "images": b64encode(images.tobytes()).decode(),
        "truth": found.truth.tolist(), "predicted": found.predicted.tolist(),
        "confidence": [round(value, 6) for value in found.confidence.tolist()],
    }  # fmt: skip
    content = gzip.compress(json.dumps(columns).encode(), 6, mtime=0)
    replace_file(out / PREDICTIONS, lambda beside: beside.write_bytes(content))


def tested_images(out: Path, split: str) -> dict[str, Any]:
    """What a run was tested on, as plain values; older runs know the names of the images only.

    content: a digest of the images and their labels; right: by image, whether it is; names: a digest of
    the names, labels and sizes.
    """
    from vitkit.runs.provenance.fingerprint import FILE as DATA
    from vitkit.runs.provenance.fingerprint import read as read_data

    found: dict[str, Any] = {"content": None, "right": None, "names": None}
    stored = read_data(out / DATA, 1)
    if stored and split in stored[0]["splits"]:
        row = stored[0]["splits"][split]
        found["names"] = json.dumps([row.get(key) for key in ("images", "digest", "sizes")])
    try:
        with gzip.open(out / PREDICTIONS, "rt", encoding="ascii") as file:
            columns = json.load(file)
        raw, names = b64decode(columns["images"]).hex(), columns["classes"]
        images = [raw[at : at + 2 * SIZE] for at in range(0, len(raw), 2 * SIZE)]
        rows = list(zip(images, columns["truth"], columns["predicted"], strict=True))
        labelled = sorted(f"{image} {names[truth]}" for image, truth, _ in rows)
        found["content"] = hashlib.sha256("\n".join(labelled).encode("utf-8", "surrogatepass")).hexdigest()
        found["right"] = {image: truth == said for image, truth, said in rows}
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zlib.error):
        pass  # an older run, or a file that was cut off
    return found
