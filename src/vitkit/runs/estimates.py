"""How long a step will take, tried on copies; and the FLOPs, time and energy of a run."""

import copy
import time
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch

from vitkit.data.loader import BadFiles, Samples, train_batches
from vitkit.data.order import Order
from vitkit.data.sources.source import Source
from vitkit.metrics.cost import forward_flops, ledger, parameters, peak_flops
from vitkit.models.variants import Model
from vitkit.ops.cuda_graph import WARMUP_CALLS
from vitkit.recipes.recipe import Recipe
from vitkit.runs.batches import training_view
from vitkit.runtime.runtime import Runtime, single_process
from vitkit.training.loop import train
from vitkit.training.step import Metrics, TrainState

READ = 16  # images


@dataclass(frozen=True)
class Trial:
    """How much is tried: images at a time, steps that are not counted, steps that are."""

    images: int
    before: int
    timed: int


CPU, GPU = (
    Trial(4, 1, 2),
    Trial(256, WARMUP_CALLS + 2, 6),
)  # few images keep a CPU busy; a GPU wants many, recorded


def seconds_a_step(
    recipe: Recipe, model: Model, train: Source, runtime: Runtime, workers: int
) -> float | None:
    """The slower of computing and preparing the images of one step, which go on at the same time.

    None for a model that is cut over processes, since none of them may be able to try it alone.
    """
    if runtime.is_sharded:
        return None
    each = recipe.batch // runtime.world
    computing = each * seconds_an_image(recipe, model, runtime)
    preparing = each * seconds_to_prepare(recipe, train) / max(1, workers)
    if not workers or not runtime.device.startswith("cuda"):
        return computing + preparing  # on a CPU both want the same cores
    return max(computing, preparing)


def seconds_an_image(recipe: Recipe, model: Model, runtime: Runtime, trial: Trial | None = None) -> float:
    if trial is None:  # of fewer images than the run has, for which nothing is compiled
        trial = GPU if runtime.device.startswith("cuda") else CPU
        runtime = replace(runtime, compile=False)
    count = min(recipe.micro_batch or recipe.batch // runtime.world, trial.images)
    runtime = single_process(runtime)
    task = recipe.task
    work = runtime.place(task.build(copy.deepcopy(model)))
    state = TrainState.start(work, recipe.optimizer)
    classes = model.config.classes
    objective = task.objective(model)
    images = torch.zeros(count, model.config.channels, *recipe.image_size, dtype=torch.uint8)
    batch = {"image": images, "label": torch.arange(count) % max(1, classes), "place": torch.arange(count)}
    prepare = task.prepare(model, Order(count, count))
    batch = runtime.to_device(prepare(0, batch) if prepare else batch)
    ended: list[float] = []

    def watch(state: TrainState, metrics: Metrics) -> bool:
        ended.append(time.monotonic())
        return False

    train(
        state, repeat([batch]), objective, until=trial.before + trial.timed, rate=lambda step: 0.0,
        config=recipe.optimizer, watch=watch, due=lambda step: False, call=runtime.wrap(work),
        runtime=runtime,
    )  # fmt: skip
    return (ended[-1] - ended[trial.before - 1]) / trial.timed / count


def seconds_to_start(recipe: Recipe, train: Source, workers: int) -> float:
    """Until the first batch is there, where processes are started to prepare them."""
    if not workers:
        return 0.0
    order, begun = Order(len(train), recipe.batch, recipe.seed), time.monotonic()
    batches = train_batches(train, training_view(recipe), order, workers=workers, bad=BadFiles(allowed=1.0))
    with closing(batches):  # type: ignore[type-var]
        next(batches)
    return time.monotonic() - begun


def seconds_to_prepare(recipe: Recipe, train: Source) -> float:
    samples = Samples(train, training_view(recipe), Order(len(train), recipe.batch, recipe.seed))
    begun = time.monotonic()
    samples.__getitems__([(0, place) for place in range(READ)])
    return (time.monotonic() - begun) / READ


def cost(
    model: Model, runtime: Runtime, *, seen: int, seconds: float, joules: float | None, an_hour: float | None
) -> dict[str, Any]:
    """Of a model that has seen so many images; energy is summed over the processes, if each can tell it."""
    facts = runtime.describe()
    used = runtime.all_gather_object(joules)
    found = ledger(
        parameters=parameters(model), images_seen=seen, forward=forward_flops(model.config),
        device_seconds=runtime.world * seconds, joules=None if None in used else sum(used),
        price_per_hour=an_hour, peak=peak_flops(facts["device"], facts["precision"]),
    )  # fmt: skip
    rate = seen / seconds if seconds else None
    return {**found.to_json(), "seconds": round(seconds, 2), "images_per_second": rate, **facts}
