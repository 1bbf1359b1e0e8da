"""`vitkit cost`: training cost of a recipe, and measured speed and batch size of models (App. D.5)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vitkit.commands.shared import Emit
from vitkit.errors import Error
from vitkit.inference.predict import short_names
from vitkit.metrics.cost import TRAINING, forward_flops, parameters, tpu_v3_core_days
from vitkit.metrics.speed import images_per_second, largest_that_fits
from vitkit.models.variants import Config, Model, skeleton, variant, with_image_size
from vitkit.planning.automatic import largest_batch
from vitkit.recipes import recipe as named
from vitkit.recipes.pretrain import images_of
from vitkit.recipes.recipe import Recipe
from vitkit.report.terminal import Live, print_table, say
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.training.step import TrainState
from vitkit.weights.hub import is_hub
from vitkit.weights.load import load
from vitkit.weights.published import PUBLISHED

SIZES = (64, 128, 224, 384, 512)  # of the paper's Fig. 12
DAY = 86_400
PICTURES = (".png", ".svg")


def cost(
    models: Sequence[str],
    recipe: str,
    *,
    images: int | None = None,
    sizes: Sequence[int] = SIZES,
    rate: float | None = None,
    measure: bool = True,
    seconds: float = 2.0,
    out: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    emit: Emit = None,
) -> None:
    """Print the cost of each model. `seconds`: time per speed measurement, without warm-up."""
    check_options(sizes, rate, seconds, measure, out)
    r = named(recipe)
    seen = images_seen(r, images_of(recipe) if images is None else images)
    configs = {place: config_of(place) for place in models}
    runtime = choose_runtime(device, precision)
    rows = [{"model": place} | training_cost(place, config, r, seen) for place, config in configs.items()]
    with Live("measuring", len(rows) * len(sizes), quiet=not measure or bool(emit)) as live:
        for row, config in zip(rows, configs.values(), strict=True):
            row["sizes"] = [at_size(config, r, pixels, runtime, seconds if measure else 0, live)
                            for pixels in sizes]  # fmt: skip
            row["device_days"] = device_days(row, seen, r.image_size, rate)
    method = "tried" if runtime.device.startswith("cuda") else "by the memory formula"
    result = {
        "recipe": recipe,
        "images_seen": seen,
        **runtime.describe(),
        "largest_batch_by": method,
        "models": rows,
    }
    if out:
        draw(out, rows)
    emit(result) if emit else print_cost(result, measure, rate)


def check_options(
    sizes: Sequence[int], rate: float | None, seconds: float, measure: bool, out: Path | None
) -> None:
    """Reject invalid options before anything is measured."""
    if not sizes or min(sizes) < 1:
        raise Error(
            f"--sizes {' '.join(map(str, sizes))}: expected one or more sizes in pixels, e.g. 224 384"
        )
    if not 0 < seconds < float("inf"):
        raise Error(f"--seconds {seconds}: expected the time of one measurement, more than 0")
    if rate is not None and not 0 < rate < float("inf"):
        raise Error(f"--rate {rate}: expected the training TFLOP/s of one device, more than 0")
    if out and out.suffix.lower() not in PICTURES:
        raise Error(f"--out {out}: expected a file name ending in {' or '.join(PICTURES)}")
    if out and not measure:
        raise Error(
            "--out plots measurements and cannot be combined with --no-measure", code="request.conflict"
        )


def images_seen(r: Recipe, images: int) -> int:
    """Images seen in one training run; a recipe whose length is in epochs needs the size of its data."""
    if r.length.steps is None and images < 1:
        raise Error(
            f"recipe {r.name} is {r.length.epochs:g} epochs long; add --images N, the size of its data",
            code="request.missing",
        )
    return r.length.in_steps(images, r.batch) * r.batch


def config_of(place: str) -> Config:
    """The config of a named model, published weights, a model file or a run folder."""
    if is_hub(place) or Path(place).exists():
        return load(place).config
    return variant(PUBLISHED[place].model if place in PUBLISHED else place)


def training_cost(place: str, config: Config, r: Recipe, seen: int) -> dict[str, Any]:
    """Parameters and training FLOPs at the recipe's resolution, computed from the config alone."""
    try:
        resized = with_image_size(config, r.image_size)
    except Error as error:
        raise Error(f"{place} with recipe {r.name}: {error}", code=error.code) from None
    forward = forward_flops(resized)
    total = TRAINING * forward * seen
    return {
        "parameters": parameters(skeleton(resized)),
        "GFLOPs": forward / 1e9,
        "exaFLOPs": total / 1e18,
        "TPUv3_core_days": tpu_v3_core_days(total),
    }


def at_size(
    config: Config, r: Recipe, pixels: int, runtime: Runtime, seconds: float, live: Live
) -> dict[str, Any]:
    """FLOPs, images per second and largest batch at one size; None if the model does not run at this size."""
    row: dict[str, Any] = {"pixels": pixels, "GFLOPs": None, "images_per_second": None, "batch": None,
                           "largest_batch": None}  # fmt: skip
    live.more(1)
    try:
        resized = with_image_size(config, (pixels, pixels))
        row["GFLOPs"] = forward_flops(resized) / 1e9
        skeleton(resized)
    except ValueError as error:
        return row | {"why": str(error)}
    if seconds:
        best = images_per_second(inference(resized, runtime), seconds)
        row |= {"images_per_second": best and best[0], "batch": best and best[1]}
        row["largest_batch"] = largest(resized, replace(r, image_size=(pixels, pixels)), runtime, seconds)
        runtime.empty_cache()
    return row


def blank(config: Config, device: str) -> Model:
    """A model with all parameters zero; its speed does not depend on the values."""
    return skeleton(config)._apply(lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device))


def inference(config: Config, runtime: Runtime) -> Callable[[int], None]:
    """A function that computes the logits of `count` images and synchronizes."""
    model = blank(config, runtime.device).eval()

    @torch.inference_mode()
    def run(count: int) -> None:
        images = torch.zeros(count, config.channels, *config.image_size, device=runtime.device)
        with runtime.autocast():
            model(images)[0, 0].item()

    return run


def largest(config: Config, r: Recipe, runtime: Runtime, seconds: float) -> int:
    """The largest training batch: tried on a GPU, else by the memory formula, since CPU memory is shared."""
    if not runtime.device.startswith("cuda"):
        return largest_batch(r, skeleton(config), runtime)
    task = replace(r, objective="classify").task
    model = runtime.place(task.build(blank(config, runtime.device))).train()
    state, call = TrainState.start(model, r.optimizer), runtime.wrap(model)
    objective = task.objective(blank(config, "meta"))

    def fits(count: int) -> bool:
        try:
            batch = {"image": torch.zeros(count, config.channels, *config.image_size, dtype=torch.uint8),
                     "label": torch.zeros(count, dtype=torch.int64)}  # fmt: skip
            with runtime.autocast():
                loss = objective(call, runtime.to_device(batch))["loss"]
            loss.backward()
            state.optimizer.step()
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            state.optimizer.zero_grad()
            runtime.empty_cache()

    return largest_that_fits(fits, 5 * seconds)


def device_days(row: dict[str, Any], seen: int, size: tuple[int, int], rate: float | None) -> float | None:
    """Training time in device-days: at the given rate, else from the speed measured at the recipe's size."""
    if rate is not None:
        return row["exaFLOPs"] * 1e18 / (rate * 1e12 * DAY)
    speed = next((s["images_per_second"] for s in row["sizes"] if (s["pixels"],) * 2 == size), None)
    return TRAINING * seen / speed / DAY if speed else None


def print_cost(result: dict[str, Any], measured: bool, rate: float | None) -> None:
    """Print two tables: the training cost of the recipe, and the cost by resolution."""
    say(f"recipe {result['recipe']}: {result['images_seen']:,} images seen")
    rows = [{k: v for k, v in row.items() if k != "sizes"} for row in result["models"]]
    print_table(rows)
    if rate is not None:
        say(f"device-days: at {rate:g} TFLOP/s per device")
    elif measured:
        say(f"device-days: {TRAINING} forward passes per training step, at the measured images/s")
    say("")
    columns = ("pixels", "GFLOPs", *(("images_per_second", "batch", "largest_batch") if measured else ()))
    print_table(
        {"model": row["model"]} | {k: size[k] for k in columns}
        for row in result["models"]
        for size in row["sizes"]
    )
    if measured:
        setup = f"{result['device']}, {result['precision']}, {result['threads']} threads"
        say(f"images/s: inference at the best batch size ({setup})")
        say(f"largest batch: for training, {result['largest_batch_by']}")


def draw(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Plot images per second and largest batch by resolution, as in Fig. 12."""
    from vitkit.report.figure_style import render  # matplotlib is slow to import
    from vitkit.report.figures import Panel, draw_panels

    names = short_names(row["model"] for row in rows)

    def lines(field: str) -> dict[str, list[tuple[float, float]]]:
        return {
            names[row["model"]]: [(size["pixels"], size[field]) for size in row["sizes"] if size[field]]
            for row in rows
        }

    panels = [
        Panel("Inference speed", "Image side (pixels)", "Images per second", lines("images_per_second")),
        Panel("Memory", "Image side (pixels)", "Largest training batch", lines("largest_batch")),
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(render(draw_panels(panels, log=True), out.suffix[1:].lower()))
