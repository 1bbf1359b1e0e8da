"""The measured time of a step before a run, and the FLOPs, time and energy after it."""

import copy
import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
import torch

from vitkit.data.loader import BadFiles, Samples, train_batches
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.metrics.cost import forward_flops, ledger, parameters, peak_flops
from vitkit.models.variants import Model
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.recipes.recipe import Recipe
from vitkit.runs.batches import training_order, training_view
from vitkit.runs.build import start_training
from vitkit.runtime.runtime import Runtime, single_process
from vitkit.training.loop import train
from vitkit.training.step import Metrics, TrainState

READ = 16  # images that are read to time the data loader


@dataclass(frozen=True)
class Trial:
    """The size of a timing run: images in a batch, warm-up steps, timed steps."""

    images: int
    before: int
    timed: int


CPU, GPU = (
    Trial(4, 1, 2),
    Trial(256, WARMUP_CALLS + 2, 6),
)  # a few images keep a CPU busy; a GPU needs many, and steps for its CUDA graph


def seconds_a_step(
    recipe: Recipe, model: Model, train: Source, runtime: Runtime, workers: int
) -> float | None:
    """The slower of computing a step and loading its images, which overlap on a GPU.

    None for a sharded model, which may not fit into the memory of one process.
    """
    if runtime.is_sharded:
        return None
    images = recipe.batch // runtime.world
    computing = images * seconds_an_image(recipe, model, runtime, source=train)
    preparing = images * seconds_to_prepare(recipe, train) / max(1, workers)
    if not workers or not runtime.device.startswith("cuda"):
        return computing + preparing  # on a CPU both use the same cores
    return max(computing, preparing)


def seconds_an_image(
    recipe: Recipe,
    model: Model,
    runtime: Runtime,
    trial: Trial | None = None,
    *,
    source: Source | None = None,
) -> float:
    """The time of a step for each of its images; source: the training data, which a dense task needs."""
    if trial is None:  # a smaller batch than the run has: not worth compiling for
        trial = GPU if runtime.device.startswith("cuda") else CPU
        runtime = replace(runtime, compile=False)
    count = min(recipe.micro_batch or recipe.batch // runtime.world, trial.images)
    total = count * runtime.world  # a task may compare the images of all processes, which time it together
    runtime = single_process(runtime)
    task = recipe.task.for_source(source) if source else recipe.task
    state = start_training(recipe, task, copy.deepcopy(model), runtime)
    classes = model.config.classes
    objective = task.objective(model)
    images = noise(count, model.config.channels, *recipe.image_size)
    batch = {"image": images, "label": torch.arange(count) % max(1, classes), "place": torch.arange(count)}
    for name, views in task.more_views(training_view(recipe)):
        batch[name] = noise(count, len(views), 3, *views[0].size)
    if source and (target_view := task.target_view(training_view(recipe), source)):
        batch["image"] = noise(count, model.config.channels, *target_view.size)
        rows = target_view.empty()
        batch |= {name: torch.from_numpy(np.stack([row] * count)) for name, row in rows.items()}
    prepare = task.prepare(model, Order(total, total))
    batch = runtime.to_device(prepare(0, batch) if prepare else batch)
    end_times: list[float] = []

    def watch(state: TrainState, metrics: Metrics) -> bool:
        end_times.append(time.monotonic())
        return False

    train(
        state, repeat([batch]), objective, until=trial.before + trial.timed, rate=lambda step: 0.0,
        config=recipe.optimizer, watch=watch, due=lambda step: False, call=runtime.wrap(state.model),
        runtime=runtime,
    )  # fmt: skip
    return (end_times[-1] - end_times[trial.before - 1]) / trial.timed / count


def noise(*shape: int) -> torch.Tensor:
    """Random images; a GPU multiplies zeros faster than pictures. The generator is its own."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def seconds_to_start(recipe: Recipe, train: Source, workers: int) -> float:
    """The time until worker processes deliver the first batch; 0 without workers."""
    if not workers:
        return 0.0
    order, start_time = training_order(recipe, train), time.monotonic()
    view = training_view(recipe)
    batches = train_batches(
        train, view, order, workers=workers, bad=BadFiles(allowed=1.0), more=recipe.task.more_views(view),
        target_view=recipe.task.target_view(view, train),
    )  # fmt: skip
    with closing(batches):  # type: ignore[type-var]
        next(batches)
    return time.monotonic() - start_time


def seconds_to_prepare(recipe: Recipe, train: Source) -> float:
    view = training_view(recipe)
    task = recipe.task
    samples = Samples(
        train, view, training_order(recipe, train), task.more_views(view), task.target_view(view, train)
    )
    start_time = time.monotonic()
    samples.__getitems__([(0, place) for place in range(READ)])
    return (time.monotonic() - start_time) / READ


def cost(
    model: Model, runtime: Runtime, *, seen: int, seconds: float, joules: float | None, an_hour: float | None,
    passes: float,
) -> dict[str, Any]:  # fmt: skip
    """The cost of training on `seen` images; energy is None if any process cannot measure it.

    passes: what a training step costs, in forward passes.
    """
    facts = runtime.describe()
    all_joules = runtime.all_gather_object(joules)
    costs = ledger(
        parameters=parameters(model), images_seen=seen, forward=forward_flops(model.config),
        device_seconds=runtime.world * seconds, joules=None if None in all_joules else sum(all_joules),
        price_per_hour=an_hour, peak=peak_flops(facts["device"], facts["precision"]),
        passes=passes,
    )  # fmt: skip
    rate = seen / seconds if seconds else None
    return {**costs.to_json(), "seconds": round(seconds, 2), "images_per_second": rate, **facts}
