"""The published checkpoints (name, address, licence, accuracy), and their download into the cache."""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from vitkit.errors import Error, WeightsError, did_you_mean, similar_path
from vitkit.io import http
from vitkit.io.cache import cache_folder
from vitkit.io.files import sha256
from vitkit.io.http import NetworkError, Progress
from vitkit.models.card import Origin, Preprocessing
from vitkit.weights import hub
from vitkit.weights.published_dense import rf_detr
from vitkit.weights.published_modern import NON_COMMERCIAL, modern

HUB_PAGE = "https://huggingface.co/"
TRIES = 5  # in a row without a byte of progress
LIMIT = 64 * 2**30  # bytes per file
OFFLINE = (
    "Offline? Download this address on another machine and give the path of the file instead of the name "
    "(--weights FILE for training)"
)


class DownloadError(WeightsError):
    """A file could not be downloaded; the next attempt continues where this one stopped."""

    code = "network.unreachable"


def download(address: str, path: Path, *, progress: Progress | None = None, md5: str = "") -> str:
    """Download a file unless it exists already, and return its SHA-256; md5: what it must be, if known."""
    recorded = path.with_name(path.name + ".sha256")
    if path.exists():
        return check_recorded(path, recorded)
    check_reachable(address)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with download_errors(), progress_bar(path.name) if progress is None else nullcontext(progress) as report:
        http.download(address, partial, limit=LIMIT, progress=report, tries=TRIES)
    check_md5(partial, md5)
    digest = sha256(partial)
    recorded.write_text(digest + "\n", encoding="utf-8")
    os.replace(partial, path)
    return digest


def check_md5(path: Path, expected: str) -> None:
    """Delete a downloaded file whose MD5 is not the one that its publisher states, and raise an error."""
    if not expected:
        return
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if actual != expected:
        path.unlink()
        message = f"the download has the MD5 {actual}, and its publisher states {expected}; try again"
        raise DownloadError(message, code="network.changed")


def check_recorded(path: Path, recorded: Path) -> str:
    """The SHA-256 of a cached file; an error if it differs from the recorded one."""
    if not recorded.exists():
        message = f"{path} has no checksum file {recorded.name}; delete it to download it again"
        raise DownloadError(message, code="file.unreadable")
    digest = sha256(path)
    if digest != recorded.read_text(encoding="utf-8").strip():
        message = f"{path} has changed since it was downloaded; delete it to download it again"
        raise DownloadError(message, code="file.unreadable")
    return digest


def check_reachable(address: str) -> None:
    """Raise an error within seconds if the server cannot be reached."""
    with download_errors():
        http.check_reachable(address)


@contextmanager
def download_errors() -> Iterator[None]:
    """Turn network errors into a DownloadError that says what to do offline."""
    try:
        yield
    except NetworkError as error:
        raise DownloadError(f"{error}. {OFFLINE}", code=error.code) from None
    except Error as error:
        raise DownloadError(str(error), code=error.code) from None


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """A progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (
        "{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(f"downloading {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


VIT = "https://storage.googleapis.com/vit_models"
BIT = "https://storage.googleapis.com/bit_models"
LICENCE = "Apache-2.0"
SHARED_NAMES = ("model.safetensors", "checkpoint_best_regular.pth")  # of many models
AUGREG_VIEWS = {224: "centre:256", 384: "centre:448"}  # image size -> view, as big_vision evaluates AugReg
AUGREG = re.compile(  # file names of the 50,000 AugReg checkpoints
    r"\w+-i(?:1k|21k)-\d+ep-lr_[\d.]+-aug_\w+-wd_[\d.]+-do_[\d.]+-sd_[\d.]+"
    r"(?:--\w+-steps_\w+-lr_[\d.]+-res_(\d+))?\.npz"
)


@dataclass(frozen=True)
class Weight:
    """One published checkpoint."""

    name: str
    model: str
    address: str
    megabytes: float | None  # MiB, as published
    pixels: int
    trained_on: str
    top1: float | None = None  # ImageNet top-1 in per cent, as published
    view: str = "squash"  # preprocessing of that evaluation; "centre:N" resizes the shorter side to N first
    licence: str = LICENCE
    evaluation: str = ""  # how the top-1 of a model without a head was measured, such as "linear probe"
    gated: str = ""  # what to do where the publisher wants its licence to be accepted first
    preprocessing: Preprocessing | None = None  # that of the publisher, where the file does not hold it
    md5: str = ""  # of the file, as the publisher states it


def original() -> Iterator[Weight]:
    """The models of the paper: pre-trained on ImageNet-21k, and fine-tuned on ImageNet."""
    pretrained = {
        "ViT-B/16": 393.69, "ViT-B/32": 400.01, "ViT-B/8": 393.72, "ViT-L/16": 1249.0, "ViT-L/32": 1260.0,
        "ViT-H/14": 2519.0, "R26+ViT-B/32": 450.23, "R50+ViT-B/16": 439.85, "R50+ViT-L/32": 1341.0,
    }  # fmt: skip
    for model, size in pretrained.items():
        file = model.replace("/", "_")
        yield Weight(f"{model}.i21k", model, f"{VIT}/imagenet21k/{file}.npz", size, 224, "ImageNet-21k")
    finetuned = {  # (model, pixels, suffix of the file name): (MiB, top-1)
        ("ViT-B/16", 384, ""): (331.4, 84.53), ("ViT-B/32", 384, ""): (336.89, 81.66),
        ("ViT-L/16", 384, ""): (1167.0, 85.05), ("ViT-L/32", 384, ""): (1167.0, 81.89),
        ("R50+ViT-B/16", 384, ""): (377.57, 85.08), ("ViT-B/16", 224, "-224"): (330.29, 81.2),
        ("ViT-L/16", 224, "-224"): (1157.0, 82.7), ("ViT-B/8", 384, ""): (334.78, None),
    }  # fmt: skip
    for (model, pixels, ending), (size, top1) in finetuned.items():
        address = f"{VIT}/imagenet21k+imagenet2012/{model.replace('/', '_')}{ending}.npz"
        yield Weight(
            f"{model}.i21k-i1k-{pixels}", model, address, size, pixels, "ImageNet-21k, ImageNet", top1
        )


def augreg() -> Iterator[Weight]:
    """AugReg's recommended checkpoints (Steiner et al.): pre-trained, and fine-tuned at 384 pixels."""
    rows = {  # model: middle of the file name, MiB, learning rate of fine-tuning, top-1 at 384
        "ViT-L/16": ("aug_strong1-wd_0.1-do_0.0-sd_0.0", 1243, "0.01", 85.59),
        "ViT-B/16": ("aug_medium1-wd_0.1-do_0.0-sd_0.0", 391, "0.03", 85.49),
        "ViT-S/16": ("aug_light1-wd_0.03-do_0.0-sd_0.0", 115, "0.03", 83.73),
        "R50+ViT-L/32": ("aug_medium1-wd_0.1-do_0.1-sd_0.1", 1337, "0.01", 85.99),
        "R26+ViT-S/32": ("aug_light1-wd_0.1-do_0.0-sd_0.0", 170, "0.01", 83.85),
        "ViT-Ti/16": ("aug_none-wd_0.03-do_0.0-sd_0.0", 37, "0.03", 78.22),
        "ViT-B/32": ("aug_light1-wd_0.1-do_0.0-sd_0.0", 398, "0.01", 83.59),
        "ViT-S/32": ("aug_none-wd_0.1-do_0.0-sd_0.0", 118, "0.01", 79.58),
        "R+ViT-Ti/16": ("aug_none-wd_0.03-do_0.0-sd_0.0", 40, "0.03", 75.40),
        "ViT-B/8": ("aug_medium2-wd_0.1-do_0.0-sd_0.0", None, "0.03", None),
    }
    for model, (middle, size, rate, top1) in rows.items():
        short = model.replace("ViT-", "").replace("/", "_").replace("+", "_")
        stem = f"{VIT}/augreg/{short}-i21k-300ep-lr_0.001-{middle}"
        yield Weight(
            f"{model}.augreg-i21k", model, f"{stem}.npz", size, 224, "ImageNet-21k", view=AUGREG_VIEWS[224]
        )
        pixels = 224 if model == "ViT-B/8" else 384
        address = f"{stem}--imagenet2012-steps_20k-lr_{rate}-res_{pixels}.npz"
        name = f"{model}.augreg-i21k-i1k-{pixels}"
        view = AUGREG_VIEWS[pixels]
        yield Weight(name, model, address, None, pixels, "ImageNet-21k, ImageNet", top1, view=view)


def bit() -> Iterator[Weight]:
    """The BiT ResNets: S pre-trained on ImageNet, M on ImageNet-21k, and M fine-tuned on ImageNet."""
    tuned_top1 = {"R50x1": 80.68, "R152x2": 85.15}
    for shape in ("R50x1", "R50x3", "R101x1", "R101x3", "R152x2", "R152x4"):
        model = f"BiT-{shape}"
        for size, data in (("S", "ImageNet"), ("M", "ImageNet-21k")):
            yield Weight(f"{model}.{size}", model, f"{BIT}/BiT-{size}-{shape}.npz", None, 224, data)
        address, top1 = f"{BIT}/BiT-M-{shape}-ILSVRC2012.npz", tuned_top1.get(shape)
        yield Weight(f"{model}.M-i1k", model, address, None, 480, "ImageNet-21k, ImageNet", top1)


def later() -> Iterator[Weight]:
    """DINOv2, DINOv3, SigLIP, CLIP, DeiT, MAE, FlexiViT and EVA-02."""
    for row in modern():
        yield Weight(**row)


def dense() -> Iterator[Weight]:
    """Detectors and segmenters."""
    for row in rf_detr():
        yield Weight(**row)


FAMILIES = (original, augreg, bit, later, dense)
PUBLISHED: dict[str, Weight] = {w.name: w for family in FAMILIES for w in family()}


def cache_path(weight: Weight, cache: Path | None = None) -> Path:
    """The path of a published checkpoint in the cache, downloaded or not."""
    ending = next((e for e in (".safetensors", ".pth", ".bin") if weight.address.endswith(e)), ".npz")
    return (cache or cache_folder()) / f"{weight.name.replace('/', '_')}{ending}"


def fetch(weight: Weight, cache: Path | None = None) -> tuple[Path, str]:
    """The cached file and its SHA-256; downloaded the first time, verified every time."""
    path = cache_path(weight, cache)
    if weight.gated and not path.exists():
        raise DownloadError(f"{weight.name}: {weight.gated}", code="weights.gated")
    try:
        return path, download(weight.address, path, md5=weight.md5)
    except DownloadError as error:
        raise DownloadError(f"{weight.name}: {error}", code=error.code) from None


def published_view(source: str) -> str:
    """The view of a checkpoint's published evaluation, by address or file name; empty if unknown."""
    name = source.rpartition("/")[2]
    if match := AUGREG.fullmatch(name):
        return AUGREG_VIEWS.get(int(match[1] or 224), "")
    weight = by_source(source)
    return weight.view if weight else ""


def by_source(source: str) -> Weight | None:
    """The published checkpoint of an address or file name; names that many files share say nothing."""
    name = source.rpartition("/")[2]
    for weight in PUBLISHED.values():
        same_name = name not in SHARED_NAMES and weight.address.endswith((f"/{name}", f"#{name}"))
        if weight.address == source or same_name:
            return weight
    return None


def licence_note(origin: Origin) -> tuple[str, ...]:
    """What the licence forbids, also of a file that has the name of a published one; often nothing."""
    published = by_source(origin.source)
    licence = origin.licence or (published.licence if published else "")
    return (f"the licence {licence} forbids commercial use",) if NON_COMMERCIAL.fullmatch(licence) else ()


def unknown(source: str) -> WeightsError:
    """The error of a name that is neither a path nor published."""
    if source.startswith(HUB_PAGE):
        name = f"{hub.PREFIX}{source.removeprefix(HUB_PAGE)}"
        return WeightsError(f"{source!r} is a page of the Hub; give {name!r}", code="weights.not-found")
    matches = [known for known in PUBLISHED if known.startswith(f"{source}.")]
    hint = did_you_mean(source, PUBLISHED, matches=matches[:4], count=3, cutoff=0.7)
    hint = hint or similar_path(source) or " vitkit list weights shows the published names"
    return WeightsError(f"no file, folder or published weights {source!r};{hint}", code="weights.not-found")


def check_known(source: str) -> None:
    """Refuse what is neither a path nor a published name, without a download and without torch.

    Of a name on the Hub only the form is checked.
    """
    if hub.is_hub(source):
        hub.parse(source)
    elif not Path(source).exists() and source not in PUBLISHED:
        raise unknown(source)


def check_obtainable(source: str) -> None:
    """As check_known, and refuse a name that is neither cached nor reachable."""
    check_known(source)
    if hub.is_hub(source):
        return hub.check_obtainable(source)
    weight = None if Path(source).exists() else PUBLISHED[source]
    if weight and not cache_path(weight).exists():
        if weight.gated:
            raise DownloadError(f"{weight.name}: {weight.gated}", code="weights.gated")
        try:
            check_reachable(weight.address)
        except DownloadError as error:
            raise DownloadError(f"{source}: {error}", code=error.code) from None
