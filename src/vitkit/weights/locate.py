"""Where a model lies: a file, a run folder, a Hugging Face folder or a published name; and its files.

A vitkit card in the weights describes the whole model. Where there is none, config.json and
preprocessor_config.json beside the weights do, whether the folder was given or the file in it.
"""

import json
import os
from pathlib import Path
from typing import Any

from vitkit.errors import WeightsError
from vitkit.models.card import Origin
from vitkit.weights.published import PUBLISHED, check_known, fetch, unknown
from vitkit.weights.untrusted import Arrays, MalformedFile, UntrustedCheckpoint, listed, open_arrays

INDEX = ".index.json"
WEIGHTS = (  # of a folder, in the order of transformers
    "model.safetensors",
    f"model.safetensors{INDEX}",
    "pytorch_model.bin",
    f"pytorch_model.bin{INDEX}",
)
SIDE_FILES = ("config.json", "preprocessor_config.json")
RECIPE = "recipe.json"  # marks a run folder
EXPORTED = (".onnx", ".xml", ".pt2")  # what vitkit export writes
LARGEST_JSON = 4 * 2**20  # bytes


def locate(source: str | Path) -> tuple[Path, Origin]:
    """The file or folder behind a path or a published name."""
    path = Path(source)
    if str(source) and path.exists():
        return path, Origin(source=path.name)
    if str(source) in PUBLISHED:
        weight = PUBLISHED[str(source)]
        path, sha256 = fetch(weight)
        return path, Origin(source=weight.address, licence=weight.licence, sha256=sha256)
    raise unknown(str(source))


def check_place(source: str | Path) -> None:
    """Refuse what is no model before anything is done: nothing is fetched, and no array is read."""
    check_known(str(source))
    if Path(source).exists():
        weight_file(Path(source))


def is_exported(place: object) -> bool:
    """Whether a place is a file for another runtime, which holds a graph and no arrays that we read."""
    return isinstance(place, str | os.PathLike) and Path(place).suffix.lower() in EXPORTED


def weight_file(path: Path) -> Path:
    """The weights of a folder, or the index of their shards; a file is its own."""
    if is_exported(path) and path.is_file():
        raise WeightsError(
            f"{path}: a file that vitkit export writes, for other runtimes; vitkit predict takes .onnx and "
            ".xml, and everything else needs the model it was made of: a run folder or a model file"
        )
    if not path.is_dir():
        return path
    if (path / ".metadata").exists():
        raise UntrustedCheckpoint(
            f"{path}: a distributed checkpoint, which can run code; load it where it was made, then save it"
        )
    run = (path / RECIPE).exists()
    for name in WEIGHTS:
        if (path / name).exists():
            return path / name if run else inside(path, name)  # in a run folder of one's own a link may do
    if run:
        raise WeightsError(
            f"{path}: a run folder without {WEIGHTS[0]}: its training is not finished; "
            "run the same command again to resume it",
            code="weights.not-found",
        )
    raise WeightsError(
        f"{path}: the folder holds no model: none of {', '.join(WEIGHTS)}", code="weights.not-found"
    )


def open_weights(path: Path) -> Arrays:
    """The arrays behind a path, of all shards where there are several."""
    weights = weight_file(path)
    if weights.name.endswith(INDEX):
        return open_shards(weights.parent, read_json(weights.parent, weights.name))
    return open_arrays(weights)


def side_files(path: Path) -> dict[str, Any]:
    """The JSON beside the weights of a Hugging Face folder, given as a folder or by its weights."""
    if not path.is_dir() and path.name not in WEIGHTS:
        return {}
    folder = path if path.is_dir() else path.parent
    return {name: read_json(folder, name) for name in SIDE_FILES if (folder / name).exists()}


def model_files(place: str | Path) -> list[Path]:
    """The files that loading a place reads, as far as they are there; none for a published name."""
    path = Path(place)
    if not str(place) or not path.exists():
        return []
    if not path.is_dir() and path.name not in WEIGHTS:
        return [path]
    folder = path if path.is_dir() else path.parent
    weights = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    files = [weights] if path.is_dir() and weights else [] if path.is_dir() else [path]
    if files and files[0].name.endswith(INDEX):
        files += sorted(folder.glob(f"*{Path(files[0].name.removesuffix(INDEX)).suffix}"))
    return [*files, *(folder / name for name in SIDE_FILES if (folder / name).exists())]


def run_model(place: str | Path) -> Path | None:
    """The model file of a run folder; None for anything else."""
    path = Path(place)
    return path / WEIGHTS[0] if (path / RECIPE).exists() and (path / WEIGHTS[0]).exists() else None


def open_shards(folder: Path, index: dict[str, Any]) -> Arrays:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(shard, str) for shard in where.values()):
        raise MalformedFile(f"{folder}: the index has no table weight_map")
    shards = {name: open_arrays(inside(folder, name)) for name in sorted(set(where.values()))}
    lost = [name for name, shard in where.items() if name not in shards[shard].shapes]
    if lost:
        raise WeightsError(
            f"{folder}: the index names arrays that its shards lack: {listed(lost)}", code="weights.names"
        )
    shapes = {name: shards[shard].shapes[name] for name, shard in where.items()}
    return Arrays(shapes, lambda name: shards[where[name]].read(name))


def inside(folder: Path, name: str) -> Path:
    """A file of a folder, refused when its name or a link leads elsewhere (but for a hub's own blobs)."""
    root = folder.resolve()
    roots = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    plain = name.isprintable() and Path(name).name == name
    if not plain or not any((root / name).resolve().is_relative_to(r) for r in roots):
        raise UntrustedCheckpoint(f"{folder}: {name!r} points outside of the folder")
    return root / name


def read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        path = inside(folder, name)
        if not path.is_file() or path.stat().st_size > LARGEST_JSON:
            raise UntrustedCheckpoint(f"{folder / name}: missing, or larger than any real one")
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, UntrustedCheckpoint):
            raise
        raise MalformedFile(f"{folder / name}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise MalformedFile(f"{folder / name}: not a JSON table")
    return content
