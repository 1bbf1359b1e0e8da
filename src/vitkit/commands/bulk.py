"""`vitkit embed` and `vitkit predict --out`: many images to one table, resumable, on several processes."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from vitkit import __version__
from vitkit.commands.bulk_ray import run_on_ray
from vitkit.commands.bulk_request import BulkRequest
from vitkit.commands.predict import engine_for
from vitkit.datasets.images import Images, open_images
from vitkit.errors import Error
from vitkit.inference.bulk import Bulk, Embedding
from vitkit.inference.columns import format_of
from vitkit.inference.predict import Classifier, describe_view
from vitkit.inference.rejection import rejection_threshold
from vitkit.io.files import sha256
from vitkit.io.parts import Parts, claim, folder_of, read_manifest, take
from vitkit.models.variants import Model
from vitkit.report.terminal import Live, printable, warn
from vitkit.runs.features import Extractor
from vitkit.runtime.runtime import Runtime, data_workers

LONG = timedelta(days=1)  # for choosing an engine, while the other processes wait
ROW = 100  # bytes of an image's predictions, roughly
POLL = 0.5  # seconds between looks at the parts of other processes


@dataclass(frozen=True)
class Written:
    """A finished table: its path, the images in it, and the speed of this start."""

    path: Path
    images: int
    unreadable: int  # images without a value; their column `error` says why (counted by the main process)
    computed: int  # images computed by this start; the others are of an earlier one
    seconds: float
    main: bool = True  # whether this is the main process, which prints

    @property
    def images_per_second(self) -> float:
        return self.computed / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        speed = {"images_per_second": round(self.images_per_second, 2)}
        facts = vars(self) | {"path": str(self.path), "seconds": round(self.seconds, 3)} | speed
        return {name: value for name, value in facts.items() if name != "main"}

    def text(self) -> str:
        computed = f"{self.computed:,} of them now, " if self.computed != self.images else ""
        bad = f"; {self.unreadable:,} unreadable, see the column error" if self.unreadable else ""
        return (
            f"{self.path}: {self.images:,} images ({computed}{self.seconds:.1f} s, "
            f"{self.images_per_second:.1f} images/s){bad}"
        )


def run_bulk(request: BulkRequest, *, quiet: bool = False) -> Written:
    """Compute what is missing; the main process then writes the table."""
    kind, runtime = format_of(request.out, request.endings), request.runtime()
    kind.check(request.out)
    if request.on == "ray" and runtime.world > 1:
        raise Error("--on ray starts its own processes; omit torchrun", code="request.conflict")
    with runtime.process_group(), ExitStack() as stack:
        runtime.on_main_first(partial(take, request.out, stack, restart=request.restart))
        work = prepare(request, runtime)
        missing: list[int] = runtime.on_main_first(work.parts.missing)
        start, rows = time.monotonic(), sum(len(work.parts.range(number)) for number in missing)
        if missing:
            if runtime.is_main:
                check_space(request, work, runtime, rows)
            compute(request, work, missing, runtime, quiet)
        seconds = time.monotonic() - start
        if not runtime.is_main:
            return Written(request.out, len(work.images), 0, rows, seconds, main=False)
        parts, about = work.parts, facts_of(request, work)
        lengths = [len(parts.range(number)) for number in range(parts.count)]
        unreadable = parts.merge(lambda path, files: kind.merge(path, files, lengths, about))
    parts.remove()  # after the lock is released, since Windows keeps locked files
    return Written(request.out, len(work.images), unreadable, rows, seconds if missing else 0.0)


@dataclass(frozen=True)
class Prepared:
    """The opened model and images, and the parts of the table."""

    model: Classifier
    images: Images
    engine_name: str
    engine: Callable[[Tensor], Tensor] | None  # None: not built, or the model itself
    parts: Parts


def prepare(request: BulkRequest, runtime: Runtime) -> Prepared:
    """Open images and model; the main process compares the request with the parts of an earlier start."""
    images, model = open_images(request.places), request.open_model()
    if request.verb == "embed":
        request.computation(model, runtime, None)  # raises what the model does not support
    old = runtime.on_main_first(lambda: read_manifest(request.out))
    name, engine = request.engine, None
    if request.verb == "embed" or not isinstance(model, Model):
        name = "torch" if isinstance(model, Model) else "exported"
    elif request.on == "ray":
        name = "torch" if name == "auto" else name
    else:
        name = str(old["engine"]) if old and name == "auto" and "engine" in old else name
        if old is None or name != "torch":
            name, engine = choose(request, runtime, model, name, len(images))
    manifest = {
        "verb": request.verb, "data": data_hash(request.places, images), "images": len(images),
        "model": model_hash(model), "view": describe_view(model.preprocessing, model.config.image_size),
        "part size": request.part_size, "engine": name,
    }  # fmt: skip
    manifest |= settings(request, model, runtime)
    parts = runtime.on_main_first(lambda: claim(request.out, manifest, len(images), request.part_size))
    return Prepared(model, images, name, engine, parts)


def settings(request: BulkRequest, model: Classifier, runtime: Runtime) -> dict[str, Any]:
    """The options of a verb that decide its values."""
    if request.verb == "predict":
        threshold = (
            {"reject": rejection_threshold(model, request.reject)} if request.reject is not None else {}
        )
        augmentation = {"tta": request.tta} if request.tta != "none" else {}
        return {"top": request.top, **threshold, **augmentation}
    return {"pool": request.pool, "normalize": request.normalize, "dtype": request.dtype,
            "precision": runtime.precision}  # fmt: skip


def choose(
    request: BulkRequest, runtime: Runtime, model: Classifier, name: str, images: int
) -> tuple[str, Callable[[Tensor], Tensor] | None]:
    """The engine that the main process chooses, by its name, and built in this process."""
    built: list[Any] = []

    def on_main() -> str:
        built.append(engine_for(model, name, images // runtime.world, request.calibrate, request.batch))
        return built[0].name if built[0] else "torch"

    chosen: str = runtime.on_main_first(on_main, timeout=LONG)
    if not runtime.is_main:
        built.append(engine_for(model, chosen, images, request.calibrate, request.batch))
    return chosen, built[0]


def model_hash(model: Classifier) -> str:
    """SHA-256 of everything in a model that decides its values."""
    digest = hashlib.sha256(json.dumps([list(model.labels), model.task]).encode())
    if isinstance(model, Model):
        digest.update(Extractor(model=model).config_hash)
    else:
        path: Path = model.path  # type: ignore[attr-defined]
        files = (path, path.with_suffix(".bin"), path.with_name(f"{path.name}.data"))
        digest.update(" ".join(sha256(file) for file in files if file.exists()).encode())
    return digest.hexdigest()


def data_hash(places: Sequence[str], images: Images) -> str:
    """SHA-256 of the names of the images, and of size and time of the archives and tables they are in."""
    stats = [os.stat(place) for place in places if os.path.isfile(place)]
    facts = [(status.st_size, status.st_mtime_ns) for status in stats]
    return hashlib.sha256(f"{images.digest()} {facts}".encode()).hexdigest()


def facts_of(request: BulkRequest, work: Prepared) -> dict[str, Any]:
    """What the table says of itself."""
    origin = work.model.origin
    return {
        "vitkit": __version__, "verb": request.verb,
        "model": request.model if isinstance(request.model, str) else "", "engine": work.engine_name,
        "origin": {"format": origin.format, "source": origin.source, "licence": origin.licence},
        "view": describe_view(work.model.preprocessing, work.model.config.image_size, request.tta),
    }  # fmt: skip


def check_space(request: BulkRequest, work: Prepared, runtime: Runtime, rows: int) -> None:
    """Refuse to start if the parts and the table do not fit on the disk."""
    values = request.computation(work.model, runtime, work.engine)
    needed = (rows + len(work.images)) * (4 * values.width if isinstance(values, Embedding) else ROW)
    free = shutil.disk_usage(folder_of(work.parts.out)).free
    if free < needed:
        raise Error(
            f"{work.parts.out}: about {needed / 1e9:.3g} GB are needed for the parts and the table, and "
            f"{free / 1e9:.3g} GB are free; choose another disk with --out",
            code="disk.full",
        )


def compute(request: BulkRequest, work: Prepared, missing: list[int], runtime: Runtime, quiet: bool) -> None:
    """Compute the missing parts; the main process returns when all of them are there."""
    parts, mine = work.parts, missing[runtime.rank :: runtime.world]
    rows, listed = sum(len(parts.range(number)) for number in missing), f"the column error of {parts.out}"
    with Live(request.verb, rows, quiet=quiet or not runtime.is_main, listed=listed) as live:
        progress = Progress(live, parts, sorted(set(missing) - set(mine)))
        try:
            if request.on == "ray":
                return run_on_ray(request, parts, missing, progress.add, partial(skipped, live))
            computation = request.computation(work.model, runtime, work.engine)
            Bulk(
                images=work.images, computation=computation, parts=parts,
                format=format_of(request.out, request.endings), batch=request.batch,
                workers=data_workers(request.workers), advance=progress.add,
                skip=partial(skipped, live if runtime.is_main else None),
            ).run(mine)  # fmt: skip
            while runtime.is_main and progress.waits():
                time.sleep(POLL)
        except KeyboardInterrupt:
            kept = len(work.images) - sum(len(parts.range(number)) for number in parts.missing())
            raise KeyboardInterrupt(
                f"stopped; {kept:,} of {len(work.images):,} images are done, and the same command continues"
            ) from None


def skipped(live: Live | None, name: str, reason: str) -> None:
    if live:
        live.skip(printable(name), reason)
    else:
        warn(f"skipped: {printable(name)}: {reason}")


class Progress:
    """Counts the images of this process and of the parts that other processes have written."""

    def __init__(self, live: Live, parts: Parts, others: list[int]):
        self.live, self.parts, self.others = live, parts, others
        self.own, self.theirs = 0, 0
        self.start = self.looked = time.monotonic()

    def add(self, count: int) -> None:
        if not count:
            return
        self.own += count
        now = time.monotonic()
        if self.others and now - self.looked > 2 * POLL:
            self.waits()
        done = self.own + self.theirs
        self.live.step(done, **{"images/s": done / max(now - self.start, 1e-6)})

    def waits(self) -> bool:
        """Look for parts of other processes; whether some are still missing."""
        self.looked = time.monotonic()
        done = [number for number in self.others if self.parts.path(number).exists()]
        self.theirs += sum(len(self.parts.range(number)) for number in done)
        self.others = [number for number in self.others if number not in set(done)]
        if done:
            self.live.step(self.own + self.theirs)
        return bool(self.others)
