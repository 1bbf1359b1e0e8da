"""`vitkit push`: a model as a repository on the Hugging Face Hub, in one commit, with a model card."""

import copy
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitkit import __version__
from vitkit.commands.shared import Emit
from vitkit.errors import Error
from vitkit.inference.predict import describe_view
from vitkit.metrics.cost import parameters
from vitkit.models.dense.dense_model import DenseConfig
from vitkit.models.variants import VARIANTS, Config, Model
from vitkit.models.vit import ViTConfig
from vitkit.report.model_card import LIBRARIES, model_card
from vitkit.report.terminal import say, warn
from vitkit.runs.page import gather
from vitkit.weights import hub
from vitkit.weights.convert import save_and_check
from vitkit.weights.formats import formats
from vitkit.weights.formats.timm_config import architecture
from vitkit.weights.load import load
from vitkit.weights.locate import RECIPE, WEIGHTS
from vitkit.weights.published import PUBLISHED
from vitkit.weights.save import differences, rounded_periods

README = "README.md"
ORDER = ("hf", "timm", "vitkit")
PATHS = ("data", "weights", "against", "split_of", "fewshot")  # fields of a recipe
OMITTED = ("name", "about", "micro_batch", "rates", "convolution_rates")


@dataclass(frozen=True)
class Pushed:
    """A repository on the Hub as it was written, or the folder of a dry run."""

    repo: str
    format: str
    why: str  # this format
    files: tuple[str, ...]
    bytes: int
    url: str = ""  # empty for a dry run
    commit: str = ""
    folder: str = ""  # of a dry run

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def push(
    model: Model | str,
    repo: str,
    *,
    format: str | None = None,
    private: bool = False,
    message: str = "",
    license: str = "",
    dry_run: Path | None = None,
    note: Callable[[str], None] = warn,
) -> Pushed:
    """Write the files of a repository, check that they hold the model, and upload them in one commit.

    dry_run: a new folder for the files, instead of the upload.
    """
    repo = repo.removeprefix(hub.PREFIX)
    hub.check_repo(repo)
    if dry_run and (dry_run.is_file() or (dry_run.is_dir() and any(dry_run.iterdir()))):
        raise Error(f"{dry_run} exists; give a new folder", code="file.exists")
    if not dry_run:
        hub.check_login(repo)  # before a model is loaded
    run = run_of(model)
    model = public_model(load(model) if isinstance(model, str) else model)
    format, why = choose_format(model, format)
    with working_folder(dry_run) as folder:
        for line in write_files(model, folder, repo, format, run, license):
            note(line)
        paths = sorted(folder.iterdir())
        done = Pushed(repo, format, why, tuple(p.name for p in paths), sum(p.stat().st_size for p in paths))
        if dry_run:
            return replace(done, folder=str(dry_run))
        text = message or f"{repo.partition('/')[2]}, pushed by vitkit {__version__}"
        url, commit = hub.upload(repo, paths, private=private, message=text)
    return replace(done, url=url, commit=commit)


@contextmanager
def working_folder(out: Path | None) -> Iterator[Path]:
    """An empty folder; it becomes `out`, or is deleted if there is an error or no `out`."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent if out else None, prefix=".push-") as temporary:
        folder = Path(temporary) / "repository"
        folder.mkdir()
        yield folder
        if out:
            with suppress(FileNotFoundError):
                out.rmdir()
            os.rename(folder, out)


def push_verb(place: str, repo: str, *, emit: Emit, **options: Any) -> None:
    """Push a model and print where it is."""
    done = push(place, repo, **options)
    if emit:
        return emit(done.to_json())
    say(f"format {done.format} ({done.why})")
    what = f"{', '.join(done.files)} ({done.bytes / 1e6:,.1f} MB)"
    if done.folder:
        return say(f"would upload to {done.repo}, now in {done.folder}: {what}")
    say(f"{done.url}: {what}, commit {done.commit[:12]}")
    say(f"  vitkit predict {hub.PREFIX}{done.repo} IMAGE...")


def run_of(model: Model | str) -> Path | None:
    """The run folder that the model at a path is the result of."""
    if not isinstance(model, str):
        return None
    path = Path(model)
    folder = path.parent if path.name == WEIGHTS[0] else path
    return folder if (folder / RECIPE).exists() else None


def choose_format(model: Model, format: str | None) -> tuple[str, str]:
    """The format, and why: transformers if it can hold the model, else timm, else our own."""
    if format:
        return format, "as requested"
    reasons = []
    for name in ORDER:
        if reason := unfit(model, name):
            reasons.append(reason)
        else:
            return name, "; ".join([f"{LIBRARIES[name]} loads it", *reasons])
    raise AssertionError("our own format holds every model")


def unfit(model: Model, format: str) -> str:
    """Why a library would not load this model and compute the same; empty if it would."""
    model = formats()[format].equivalent(model)
    layout = formats()[format].layout_for(model.config)
    if reason := layout.unsupported(model.config) or rounded_periods(model, layout):
        return reason
    if format == "timm" and not architecture(model.config):
        return "timm has no architecture of these sizes or with this head"
    return next(differences(model.config, layout, in_json=True), "")


def write_files(
    model: Model, folder: Path, repo: str, format: str, run: Path | None, license: str
) -> tuple[str, ...]:
    """Write the weights, the JSON files and the model card into a folder; returns notes on the weights."""
    place = folder if "" in formats()[format].endings else folder / WEIGHTS[0]
    result = save_and_check(model, model.origin.source, place, place, format)
    if not result.ok:
        raise Error(
            f"{repo}: {LIBRARIES[format]} does not compute what this model does; nothing was uploaded. "
            "Give --format vitkit",
            code="export.disagrees",
        )
    (folder / README).write_text(model_card(card_facts(model, repo, format, run, license)), "utf-8")
    return result.notes


def card_facts(model: Model, repo: str, format: str, run: Path | None, license: str) -> dict[str, Any]:
    """All that the card states, without a path of this machine."""
    gathered = gather(run) if run else None
    recipe = {key: value for key, value in (gathered or {}).get("recipe", {}).items() if key not in OMITTED}
    recipe |= {key: public_value(recipe[key]) for key in PATHS if key in recipe}
    machine = ((gathered or {}).get("environment") or {}).get("machine") or {}
    source = model.origin.source
    return {
        "repo": repo, "name": repo.partition("/")[2], "format": format, "license": license, "run": gathered,
        "labels": model.labels or tuple(map(str, range(model.config.classes))),
        "task": model.task,
        "pooled": bool(getattr(model.config, "representation", 0)),
        "data": str(recipe.get("data") or ""), "recipe": recipe, "model": model_facts(model, recipe),
        "base_model": hub.parse(source).repo if hub.is_hub(source) else "",
        "versions": {name: machine[name] for name in ("vitkit", "torch", "python") if name in machine}
        or {"vitkit": __version__, "torch": version("torch")},
    }  # fmt: skip


def model_facts(model: Model, recipe: Mapping[str, Any]) -> dict[str, Any]:
    config, origin = model.config, model.origin
    facts = {
        "architecture": kind_of(config)
        if isinstance(config, DenseConfig)
        else recipe.get("model") or kind_of(config),
        "parameters": f"{parameters(model):,}",
        "input": describe_view(model.preprocessing, config.image_size),
        "mean and std": f"{list(model.preprocessing.mean)}, {list(model.preprocessing.std)}",
        "started from": origin.source or None,
        "licence of these weights": origin.licence or None,
    }
    return {name: value for name, value in facts.items() if value}


def kind_of(config: Config) -> str:
    """The name of a ViT by its sizes, such as ViT-B/16, or the family of another model."""
    if isinstance(config, DenseConfig):
        return f"{config.kind} on a {kind_of(config.vit)}"
    if not isinstance(config, ViTConfig):
        return "BiT ResNet"
    sizes = {k: getattr(config, k) for k in ("width", "depth", "heads", "hidden")}
    name = next((f"ViT-{name}/{config.patch}" for name, known in VARIANTS.items() if known == sizes), "ViT")
    return "hybrid ViT" if config.stem else name


def public_model(model: Model) -> Model:
    """The model without the paths of this machine in its card."""
    public = copy.copy(model)  # shares the parameters
    public.origin = replace(model.origin, source=public_value(model.origin.source), notes=())
    return public


def public_value(value: Any) -> Any:
    """A path or an address as others may see it: only its last part, without folders, names or tokens."""
    if isinstance(value, list | tuple):
        return [public_value(part) for part in value]
    if not isinstance(value, str) or value in PUBLISHED or hub.is_hub(value):
        return value
    address = value.startswith(("https://", "http://")) and not re.search(r"[@?#]", value)
    if address or value.endswith(" from scratch"):
        return value
    return re.split(r"[\\/]", re.sub(r"[?#].*", "", value).rstrip("\\/"))[-1]
