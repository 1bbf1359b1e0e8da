"""The prediction for each test image of a run, by content hash, so that two runs can be compared."""

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


def write_predictions(out: Path, source: Source, accuracy: "Accuracy") -> None:
    """Write the predictions as columns; very large test sets are skipped."""
    if len(source) > LIMIT:
        return
    images = fingerprints(source)[accuracy.index.numpy()]
    columns = {
        "classes": list(source.classes), "images": b64encode(images.tobytes()).decode(),
        "truth": accuracy.truth.tolist(), "predicted": accuracy.predicted.tolist(),
        "confidence": [round(value, 6) for value in accuracy.confidence.tolist()],
    }  # fmt: skip
    content = gzip.compress(json.dumps(columns).encode(), 6, mtime=0)
    replace_file(out / PREDICTIONS, lambda beside: beside.write_bytes(content))


def tested_images(out: Path, split: str) -> dict[str, Any]:
    """The test images of a run; runs of older versions have only the names.

    content: a digest of the images and their labels; right: by image, whether the prediction is right;
    names: a digest of the names, labels and sizes.
    """
    from vitkit.runs.provenance.fingerprint import FILE as DATA
    from vitkit.runs.provenance.fingerprint import read as read_data

    tested: dict[str, Any] = {"content": None, "right": None, "names": None}
    stored = read_data(out / DATA, 1)
    if stored and split in stored[0]["splits"]:
        row = stored[0]["splits"][split]
        tested["names"] = json.dumps([row.get(key) for key in ("images", "digest", "sizes")])
    try:
        with gzip.open(out / PREDICTIONS, "rt", encoding="ascii") as file:
            columns = json.load(file)
        raw, names = b64decode(columns["images"]).hex(), columns["classes"]
        images = [raw[start : start + 2 * SIZE] for start in range(0, len(raw), 2 * SIZE)]
        rows = list(zip(images, columns["truth"], columns["predicted"], strict=True))
        labelled = sorted(f"{image} {names[truth]}" for image, truth, _ in rows)
        tested["content"] = hashlib.sha256("\n".join(labelled).encode("utf-8", "surrogatepass")).hexdigest()
        tested["right"] = {image: truth == predicted for image, truth, predicted in rows}
    except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, zlib.error):
        pass  # a run of an older version, or a truncated file
    return tested
