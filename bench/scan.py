"""How long 100,000 files take: the walk through a folder, and `vitkit doctor --quick` over what it found.

    python bench/scan.py
    python bench/scan.py 1000000 --classes 50000

The whole command includes the start of Python and the imports; the files lie in the cache, as just written.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vitkit.data.doctor import examine
from vitkit.data.sources.source import walk
from vitkit.datasets.opening import open_data


def build(root: Path, files: int, classes: int) -> None:
    """Empty files with the names of images, in folders train/class and, one in ten, test/class."""
    for n in range(files):
        number, label = divmod(n, classes)
        folder = root / ("test" if number % 10 == 9 else "train") / f"class {label:05d}"
        if number in (0, 9):
            folder.mkdir(parents=True)
        os.close(os.open(folder / f"{n:07d}.jpg", os.O_CREAT | os.O_WRONLY))


def timed(name: str, seconds: dict[str, float], function, *arguments, **options):
    begun = time.perf_counter()
    result = function(*arguments, **options)
    seconds[name] = round(time.perf_counter() - begun, 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="?", type=int, default=100_000)
    parser.add_argument("--classes", type=int, default=1000)
    options = parser.parse_args()
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        timed("build", seconds, build, root, options.files, options.classes)
        timed("walk", seconds, lambda: list(walk(root)))
        splits = timed("open_data", seconds, open_data, root)
        report = timed("examine", seconds, examine, splits, deep=False)
        command = [sys.executable, "-m", "vitkit", "doctor", name, "--quick", "--json"]
        timed("whole command", seconds, subprocess.run, command, stdout=subprocess.DEVNULL, check=False)
    counted = {name: row["images"] for name, row in report.splits.items()}
    print(json.dumps({"files": options.files, **counted, "seconds": seconds}, indent=2))


if __name__ == "__main__":
    main()
