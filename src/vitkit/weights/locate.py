"""Find the files of a model: a file, a run folder, a Hugging Face or timm folder, a published name, the Hub.

A vitkit card in the weights describes the whole model. Without one, config.json and preprocessor_config.json
in the same folder do, or open_clip_config.json beside open_clip's weights, for a path to the folder and for a
path to the weights in it.
"""

import json
import os
import re
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.errors import Error, WeightsError
from vitkit.models.card import Origin
from vitkit.models.variants import variant
from vitkit.weights import hub
from vitkit.weights.hub import INDEX, WEIGHTS, described_by
from vitkit.weights.published import PUBLISHED, check_known, fetch, unknown
from vitkit.weights.untrusted import Arrays, MalformedFile, UntrustedCheckpoint, listed, open_arrays

RECIPE = "recipe.json"  # every run folder has one
EXPORTED = (".onnx", ".xml", ".pt2")  # what vitkit export writes
MAE_WIDTHS = {"base": 768, "large": 1024, "huge": 1280}
LARGEST_JSON = 4 * 2**20  # bytes


def locate(source: str | Path) -> tuple[Path, Origin]:
    """The file or folder behind a path, a published name or a name on the Hub."""
    if hub.is_hub(source):
        return hub.fetch(str(source))
    path = Path(source)
    if str(source) and path.exists():
        return path, Origin(source=path.name)
    if str(source) in PUBLISHED:
        weight = PUBLISHED[str(source)]
        path, sha256 = fetch(weight)
        return path, Origin(source=weight.address, licence=weight.licence, sha256=sha256)
    raise unknown(str(source))


def check_place(source: str | Path) -> None:
    """Refuse what is not a model, without downloading anything or reading arrays."""
    check_known(str(source))
    if Path(source).exists():
        weight_file(Path(source))


def is_exported(place: object) -> bool:
    """Whether a path is a file for another runtime, which has a graph and no arrays that we can read."""
    return isinstance(place, str | os.PathLike) and Path(place).suffix.lower() in EXPORTED


def weight_file(path: Path) -> Path:
    """The weight file or the shard index in a folder; a file is returned as it is."""
    if is_exported(path) and path.is_file():
        raise WeightsError(
            f"{path}: a file of vitkit export, for other runtimes; vitkit predict takes .onnx and .xml, "
            "all other commands need the original model: a run folder or a model file"
        )
    if not path.is_dir():
        return path
    if (path / ".metadata").exists():
        raise UntrustedCheckpoint(
            f"{path}: a distributed checkpoint, which can run code; load it with the program that wrote it "
            "and save the weights as safetensors"
        )
    run = (path / RECIPE).exists()
    for name in WEIGHTS:
        if (path / name).exists():
            return path / name if run else inside(path, name)  # links are allowed in a run folder
    if run:
        raise WeightsError(
            f"{path}: a run folder without {WEIGHTS[0]}: the training is not finished; "
            "run the same command again to resume it",
            code="weights.not-found",
        )
    raise WeightsError(
        f"{path}: no model in this folder: none of {', '.join(WEIGHTS)}", code="weights.not-found"
    )


def open_weights(path: Path) -> Arrays:
    """The arrays of a model, from all its shards."""
    weights = weight_file(path)
    if weights.name.endswith(INDEX):
        return open_shards(weights.parent, read_json(weights.parent, weights.name))
    return open_arrays(weights)


def side_files(path: Path) -> dict[str, Any]:
    """The JSON files of a Hugging Face folder, for a path to the folder or to its weights."""
    weights = weight_file(path)
    if weights.name not in WEIGHTS:
        return {}
    names, folder = described_by(weights.name), weights.parent
    return {name: read_json(folder, name) for name in names if (folder / name).exists()}


def model_files(place: str | Path) -> list[Path]:
    """The existing files that loading this path reads; none for a published name."""
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
    names = described_by(files[0].name if files else "")
    return [*files, *(folder / name for name in names if (folder / name).exists())]


def run_model(place: str | Path) -> Path | None:
    """The model file of a run folder; None for anything else."""
    path = Path(place)
    return path / WEIGHTS[0] if (path / RECIPE).exists() and (path / WEIGHTS[0]).exists() else None


class Pretraining(NamedTuple):
    """How weights were trained without labels: the task, empty if unknown, and the width of the model."""

    task: str = ""
    width: int = 0


def pretraining(place: str | Path) -> Pretraining:
    """What is known of these weights' training without labels, without a download and without any array.

    Model files of vitkit name their task. MAE's are known by published or usual names and by config.json.
    """
    path = Path(place)
    if not path.exists():
        weight = PUBLISHED.get(str(place))
        if weight is not None:
            made_by_mae = weight.model.startswith("MAE-") and weight.evaluation == "fine-tuned"
            return Pretraining("mae", variant(weight.model).width) if made_by_mae else Pretraining()
        return pretraining_by_name(str(place)) if hub.is_hub(place) else Pretraining()
    try:
        weights = weight_file(path)
        card = open_arrays(weights).card if weights.suffix == ".safetensors" else ""
        if card:
            content = json.loads(card)
            return Pretraining(str(content.get("task") or ""), int(content["config"]["width"]))
        settings = side_files(path).get("config.json", {})
        if settings.get("model_type") == "vit_mae":
            return Pretraining("mae", int(settings["hidden_size"]))
    except (Error, ValueError, TypeError, LookupError, OSError, AttributeError, RecursionError):
        return Pretraining()  # the loader says what is wrong
    return pretraining_by_name(path.name)


def pretraining_by_name(name: str) -> Pretraining:
    """The names of MAE's own files, of transformers' and of timm's, which all have one of three sizes."""
    if not re.search(r"mae_pretrain_vit_|vit-mae-|\.mae\b", name):
        return Pretraining()
    return Pretraining("mae", next((w for word, w in MAE_WIDTHS.items() if word in name), 0))


def open_shards(folder: Path, index: dict[str, Any]) -> Arrays:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(s, str) for s in weight_map.values()):
        raise MalformedFile(f"{folder}: the index has no table weight_map")
    shards = {name: open_arrays(inside(folder, name)) for name in sorted(set(weight_map.values()))}
    missing = [name for name, shard in weight_map.items() if name not in shards[shard].shapes]
    if missing:
        raise WeightsError(
            f"{folder}: the index lists arrays that its shards lack: {listed(missing)}", code="weights.names"
        )
    shapes = {name: shards[shard].shapes[name] for name, shard in weight_map.items()}
    return Arrays(shapes, lambda name: shards[weight_map[name]].read(name))


def inside(folder: Path, name: str) -> Path:
    """A file in a folder; names and links that leave it are refused, except into the blobs of a hub cache."""
    root = folder.resolve()
    repo, in_cache = root.parent.parent, root.parent.name == "snapshots"
    roots = [root, *(place / "blobs" for place in (repo, repo.parent) if in_cache)]  # its own and shared ones
    is_file_name = name.isprintable() and Path(name).name == name
    if not is_file_name or not any((root / name).resolve().is_relative_to(r) for r in roots):
        raise UntrustedCheckpoint(f"{folder}: {name!r} points outside the folder")
    return root / name


def read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        path = inside(folder, name)
        if not path.is_file() or path.stat().st_size > LARGEST_JSON:
            raise UntrustedCheckpoint(f"{folder / name}: missing, or larger than {LARGEST_JSON // 2**20} MiB")
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        if isinstance(error, UntrustedCheckpoint):
            raise
        raise MalformedFile(f"{folder / name}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise MalformedFile(f"{folder / name}: not a JSON table")
    return content
