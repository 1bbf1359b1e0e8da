"""What an index of shards costs: seconds to open it, memory for each entry, seconds for lookups and an order.

    python bench/shard_index.py [--entries 1000000 10000000] [--folder DIR] [--several]

The shards are files with holes, of images of 1,000 zero bytes; the index is as real as any. With --several
an image has 1.3 labels on average, and a batch of 4,096 is made of them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np

IMAGE = bytes(1000)
PER_SHARD = 100_000
CLASSES = 21_843


def labels_of(entries: int, several: bool) -> Any:
    """Class i % C; with several, for three of ten images the class after it, too."""
    from vitkit.data.sources.sparse_labels import SparseLabels

    number = np.arange(entries)
    if not several:
        return number % CLASSES
    lengths = 1 + (number % 10 < 3)
    rows = np.repeat(number % (CLASSES - 1), lengths)
    rows[np.cumsum(lengths)[lengths == 2] - 1] += 1
    return SparseLabels(np.cumsum(lengths), rows.astype(np.int32), CLASSES)


def write(folder: Path, entries: int, several: bool, held_out: int = 0) -> None:
    """An index of so many training images and, if held_out, of that many validation and test images."""
    from vitkit.data.sources.index import INDEX, ROW, Shard, make_columns, write_index
    from vitkit.io.files import replaced

    rows = np.zeros(entries, ROW)
    number = np.arange(entries)
    rows["shard"], within = np.divmod(np.random.default_rng(0).permutation(number), PER_SHARD)
    rows["offset"], rows["length"], rows["crc"] = within * 2048 + 512, len(IMAGE), zlib.crc32(IMAGE)
    rows["digest"] = np.frombuffer(np.random.default_rng(1).bytes(16 * entries), "V16")
    rows["content"] = np.frombuffer(np.random.default_rng(2).bytes(16 * entries), "V16")
    counts = np.bincount(rows["shard"]).tolist()
    shards = [Shard(f"train-{i:06d}.tar", PER_SHARD * 2048, "0" * 64, n) for i, n in enumerate(counts)]
    keys = (f"n{i % CLASSES:08d}/n{i % CLASSES:08d}_{i}.JPEG" for i in range(entries))
    splits = {"train": (shards, make_columns(rows, keys, labels_of(entries, several)))}
    for split in ("val", "test") if held_out else ():
        few = rows[:held_out].copy()
        few["shard"], few["offset"] = 0, np.arange(held_out) * 2048 + 512
        few["digest"] = np.frombuffer(split.encode().ljust(16) * held_out, "V16")
        columns = make_columns(few, map(str, range(held_out)), np.arange(held_out) % CLASSES)
        splits[split] = [Shard(f"{split}-000000.tar", PER_SHARD * 2048, "0" * 64, held_out)], columns
    with replaced(folder / INDEX) as file:
        write_index(file, [f"n{i:08d}" for i in range(CLASSES)], splits, {})
    shards += [shard for split in splits if split != "train" for shard in splits[split][0]]
    for shard in shards:
        with (folder / shard.file).open("wb") as file:
            file.truncate(shard.bytes)


def forget(path: Path) -> None:
    """Ask the system to drop its copy of a file, so that the first open reads the disk."""
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)


def resident() -> np.ndarray:
    """Bytes of this process in memory: its own, and pages of files, which are the system's to take back."""
    output = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * np.array([int(output[kind].split()[0]) for kind in ("RssAnon", "RssFile")])


def peak() -> float:
    """Gigabytes at most, files that are mapped and Python's imports included."""
    output = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(output["VmHWM"].split()[0]) / 2**20


def measure(folder: Path) -> dict[str, float]:
    from vitkit.data.order import Order
    from vitkit.datasets.opening import open_data

    before, began = resident(), time.perf_counter()
    source = open_data(folder)["train"]
    opened, held = time.perf_counter(), (resident() - before) / len(source)
    some = np.random.default_rng(2).integers(0, len(source), 1000).tolist()
    began_lookups = time.perf_counter()
    for index in some:
        assert source.fetch(index) == IMAGE and source.keys[index].endswith(f"_{index}.JPEG")
        if source.multilabel:
            assert len(source.labels.of(index)) == 1 + (index % 10 < 3)
        else:
            assert source.labels[index] == index % CLASSES
    looked, after = time.perf_counter(), (resident() - before) / len(source)
    order = Order(len(source), 4096)
    began_order = time.perf_counter()
    for place in range(4096):
        order.sample(1000, place)
    ordered = time.perf_counter()
    half = source.take(np.arange(0, len(source), 2))
    assert half.keys[7] == source.keys[14]
    ended = time.perf_counter()
    made = source.labels[np.random.default_rng(3).integers(0, len(source), 4096)]
    if source.multilabel:
        assert made.padded(source.labels.most).shape == (4096, 2)
    labelled = time.perf_counter()
    return {
        "labels of a batch s": labelled - ended,
        "peak GB": peak(),
        "index B/entry": (folder / "index.vitkit").stat().st_size / len(source),
        "open s": opened - began, "own B/entry": held[0], "mapped B/entry": held[1],
        "1000 lookups s": looked - began_lookups, "then own": after[0], "then mapped": after[1],
        "Order.sample us": (ordered - began_order) / 4096 * 1e6, "take half s": ended - ordered,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, nargs="+", default=[10**6, 10**7])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--several", action="store_true")
    parser.add_argument("--measure", type=Path)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure)))
        return
    for number, entries in enumerate(given.entries):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            write(Path(folder), entries, given.several)
            forget(Path(folder) / "index.vitkit")
            cold, warm = (measured(folder) for _ in range(2))
        output = {"entries": f"{entries:,}", "cold open s": f"{cold['open s']:.3g}"}
        output |= {name: f"{value:.3g}" for name, value in warm.items()}
        if not number:
            print(" | ".join(output))
        print(" | ".join(output.values()))


def measured(folder: str) -> dict[str, float]:
    """In a process of its own, with nothing in memory."""
    again = [sys.executable, __file__, "--measure", folder]
    return json.loads(subprocess.run(again, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
