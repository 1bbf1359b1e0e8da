"""Bulk work on a Ray cluster: one actor for each device takes one part after the other.

All machines need the model, the images and the output folder under the same paths.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vitkit.commands.bulk_request import BulkRequest
from vitkit.commands.predict import engine_for
from vitkit.datasets.images import open_images
from vitkit.errors import Error
from vitkit.inference.bulk import Bulk
from vitkit.inference.columns import format_of
from vitkit.io.parts import Parts
from vitkit.runtime.runtime import single_process

RETRIES = 3  # of an actor whose process has died
Skipped = list[tuple[str, str]]  # names of unreadable images, and why


class Worker:
    """Loads the model once and computes the parts that it is given."""

    def __init__(self, request: BulkRequest, parts: Parts, cores: int):
        model, runtime = request.open_model(), single_process(request.runtime())
        engine = None if request.verb == "embed" else engine_for(
            model, "torch" if request.engine == "auto" else request.engine, parts.rows, request.calibrate,
            request.batch,
        )  # fmt: skip
        self.skipped: Skipped = []
        self.bulk = Bulk(
            images=open_images(request.places), computation=request.computation(model, runtime, engine),
            parts=parts, format=format_of(request.out, request.endings), batch=request.batch,
            workers=cores if request.workers is None else request.workers,
            skip=lambda name, reason: self.skipped.append((name, reason)),
        )  # fmt: skip

    def compute(self, number: int) -> tuple[int, Skipped]:
        """Write a part; returns the number of its images, and the unreadable ones."""
        self.bulk.run([number])
        skipped = self.skipped.copy()
        self.skipped.clear()
        return len(self.bulk.parts.range(number)), skipped


def run_on_ray(
    request: BulkRequest,
    parts: Parts,
    missing: Sequence[int],
    advance: Callable[[int], None],
    skip: Callable[[str, str], None],
) -> None:
    """Compute parts on the cluster at RAY_ADDRESS, or on a local one for the duration of the command."""
    ray = import_ray()
    owns_cluster = not ray.is_initialized()
    if owns_cluster:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        total = ray.cluster_resources()
        gpus = 0.0 if request.device == "cpu" else total.get("GPU", 0.0)
        machines = sum(bool(node["Alive"]) for node in ray.nodes())
        count = min(request.processes or int(gpus) or machines, len(missing))
        cores = max(1, int(total.get("CPU", 1)) // count)
        actor = ray.remote(Worker).options(
            num_cpus=cores, num_gpus=min(1.0, gpus / count), max_restarts=RETRIES, max_task_retries=RETRIES
        )
        pool = ray.util.ActorPool([actor.remote(for_actor(request), parts, cores) for _ in range(count)])
        for images, skipped in pool.map_unordered(lambda one, number: one.compute.remote(number), missing):
            for name, reason in skipped:
                skip(name, reason)
            advance(images)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, Error | OSError):
            raise cause from None
        reason = str(error).strip().splitlines()[-1]
        raise ChildProcessError(f"--on ray: an actor failed: {reason}; the same command continues") from None
    finally:
        if owns_cluster:
            ray.shutdown()


def for_actor(request: BulkRequest) -> BulkRequest:
    """The request for an actor, whose device Ray decides."""
    if not isinstance(request.model, str):
        raise Error("on='ray' needs the path of a model, not a loaded one", code="request.conflict")
    return replace(request, device="cpu") if request.device == "cpu" else replace(request, device="auto")


def import_ray() -> Any:
    try:
        import ray
        import ray.util
    except ImportError:
        raise Error(
            "--on ray needs Ray; install it with pip install 'vitkit[ray]'", code="request.extra-missing"
        ) from None
    return ray
