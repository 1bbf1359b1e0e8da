"""Several processes that train together, for tests: forked from one that has torch, joined by real gloo."""

import hashlib
import json
import multiprocessing
import os
import signal
import socket
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitkit.recipes import recipe as named
from vitkit.recipes.recipe import Recipe, override
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.training.schedule import Duration

OPTIONS = ("width=32", "depth=2", "heads=2", "hidden=32")
PATIENCE = 150.0
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["vitkit.runs.run", "torch.distributed.fsdp", "torch._dynamo"])


def small(steps: int = 40, **changes: Any) -> Recipe:
    """Some steps on the digits with everything random but dropout, which is each process's own."""
    base = override(
        named("scratch"),
        ["image_size=8", "batch=16", "schedule.warmup=2", "evaluations=2"],
    )
    base = replace(base, data="digits", model="ViT-Ti/4", model_options=OPTIONS, length=Duration(steps=steps))
    return replace(base, **({"mixup": 0.2, "randaugment": (1, 5), "crop": "squash", "flip": False} | changes))


def together(world: int, act: Any, *args: Any, parallel: str = "ddp", recompute: bool = False) -> list[Any]:
    """What act(runtime, *args) comes to in each of `world` processes; a ValueError comes back as one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [forks.Pipe(duplex=False) for _ in range(world)]
    processes = [
        forks.Process(target=one, args=(rank, world, port, (parallel, recompute), pipes[rank][1], act, args))
        for rank in range(world)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        result = [ours.recv() if ours.poll(PATIENCE) else "came to no end" for ours, _ in pipes]
    finally:
        for process in processes:
            process.join(20)
            process.kill()
    for value in result:
        assert not isinstance(value, str), value
    return result


def one(rank: int, world: int, port: int, how: tuple[str, bool], pipe: Any, act: Any, args: tuple) -> None:
    import torch

    torch.set_num_threads(1)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in where.items()})
    try:
        runtime = choose_runtime("cpu", parallel=how[0], recompute=how[1])
        with runtime.process_group():
            pipe.send(act(runtime, *args))
    except ValueError as error:
        pipe.send(ValueError(str(error)))
    except BaseException:
        pipe.send(traceback.format_exc())


def go(runtime: Runtime, recipe: Recipe, out: Path, options: dict[str, Any]) -> dict[str, Any]:
    """One process of a run: workers and save_aside as in RunOptions, `stop` a step at which one is told to
    stop, `save` the seconds between checkpoints. Comes back with the result, or the step of the stop.
    """
    from vitkit.runs import checkpointer, folder
    from vitkit.runs import run as experiment
    from vitkit.runs.folder import Interrupted

    options = {"workers": 0, "max_bad": 0.2} | options
    stop, checkpointer.SAVE_SECONDS = options.pop("stop", None), options.pop("save", 300.0)
    note_batches(runtime.rank, out)
    watch = experiment.Trainer.watch

    def stopping(self: Any, state: Any, metrics: Any) -> bool:
        if state.step == stop and runtime.rank == runtime.world - 1:  # one hears it, all answer
            os.kill(os.getpid(), signal.SIGTERM)
        return watch(self, state, metrics)

    experiment.Trainer.watch = stopping
    try:
        return experiment.run(recipe, out, runtime, folder.RunOptions(quiet=True, **options)).to_json()
    except Interrupted:
        return {"stopped": stop}


def in_bfloat16(runtime: Runtime, recipe: Recipe, out: Path) -> None:
    """For a process of its own: where a CPU has no such products, torch multiplies otherwise ever after."""
    from vitkit.runs.folder import RunOptions
    from vitkit.runs.run import run

    run(recipe, out, replace(runtime, precision="bf16"), RunOptions(workers=0, quiet=True))


def timed(runtime: Runtime, recipe: Recipe) -> float:
    """The time that a plan measures before a run: every process does."""
    from vitkit.runs.build import build_model, open_splits
    from vitkit.runs.estimates import seconds_an_image

    train = open_splits(recipe)["train"]
    return seconds_an_image(recipe, build_model(recipe, train), runtime, source=train)


def note_batches(rank: int, out: Path) -> None:
    """From now on each process writes down which samples it trains on, where they stand, and their pixels."""
    from vitkit.runs import run as experiment

    supply = experiment.training_batches

    def noted(*args: Any, start: int, **options: Any) -> Any:
        with (out / f"seen-{rank}.jsonl").open("a") as file:
            for step, pieces in enumerate(supply(*args, start=start, **options), start=start):
                for piece in pieces:
                    rows = zip(piece["place"].tolist(), piece["index"].tolist(), piece["image"], strict=True)
                    for place, index, image in rows:
                        pixels = hashlib.sha256(image.numpy().tobytes()).hexdigest()[:16]
                        file.write(json.dumps([step, place, index, pixels]) + "\n")
                file.flush()
                yield pieces

    experiment.training_batches = noted


def batches(out: Path) -> dict[int, list[list[Any]]]:
    """The global batch of each step, out of what its processes have written down."""
    result: dict[int, dict[int, list[Any]]] = {}
    for path in sorted(out.glob("seen-*.jsonl")):
        for line in path.read_text().splitlines():
            step, place, index, pixels = json.loads(line)
            before = result.setdefault(step, {}).setdefault(place, [place, index, pixels])
            assert before == [place, index, pixels], f"{path}: step {step} was not the same again"
    return {step: [rows[place] for place in sorted(rows)] for step, rows in sorted(result.items())}


def losses(out: Path) -> list[float]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]
