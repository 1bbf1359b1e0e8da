"""What `vitkit cost` does: the price of a recipe, and how fast and how large models run here (App. D.5)."""

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
from vitkit.models.variants import Config, Model, skeleton, variant
from vitkit.planning.automatic import largest_batch
from vitkit.recipes import recipe as named
from vitkit.recipes.pretrain import images_of
from vitkit.recipes.recipe import Recipe
from vitkit.report.terminal import Live, print_table, say
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.training.step import TrainState
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
    """Tables of what each model costs. `seconds`: of timed batches for a speed, without what comes before."""
    check(sizes, rate, seconds, measure, out)
    r = named(recipe)
    seen = images_seen(r, images_of(recipe) if images is None else images)
    configs = {place: config_of(place) for place in models}
    runtime = choose_runtime(device, precision)
    rows = [{"model": place} | computed(place, config, r, seen) for place, config in configs.items()]
    with Live("measuring", len(rows) * len(sizes), quiet=not measure or bool(emit)) as live:
        for row, config in zip(rows, configs.values(), strict=True):
            row["sizes"] = [at_size(config, r, pixels, runtime, seconds if measure else 0, live)
                            for pixels in sizes]  # fmt: skip
            row["device_days"] = device_days(row, seen, r.image_size, rate)
    by = "tried" if runtime.device.startswith("cuda") else "by the memory formula"
    told = {
        "recipe": recipe,
        "images_seen": seen,
        **runtime.describe(),
        "largest_batch_by": by,
        "models": rows,
    }
    if out:
        draw(out, rows)
    emit(told) if emit else tell(told, measure, rate)


def check(sizes: Sequence[int], rate: float | None, seconds: float, measure: bool, out: Path | None) -> None:
    """Refuse before anything is measured."""
    if not sizes or min(sizes) < 1:
        raise Error(f"--sizes {' '.join(map(str, sizes))}: give one or more sizes in pixels, as in 224 384")
    if not 0 < seconds < float("inf"):
        raise Error(f"--seconds {seconds}: give how long one measurement takes, more than 0")
    if rate is not None and not 0 < rate < float("inf"):
        raise Error(f"--rate {rate}: give the TFLOP/s that one device reaches in training, more than 0")
    if out and out.suffix.lower() not in PICTURES:
        raise Error(f"--out {out}: the figure is written as {' or '.join(PICTURES)}")
    if out and not measure:
        raise Error("--out draws the measurements: leave out --no-measure", code="request.conflict")


def images_seen(r: Recipe, images: int) -> int:
    """By a training of the recipe; one that counts in epochs needs the size of its data."""
    if r.length.steps is None and images < 1:
        raise Error(
            f"recipe {r.name} is {r.length.epochs:g} epochs long: give --images N, the size of its data",
            code="request.missing",
        )
    return r.length.in_steps(images, r.batch) * r.batch


def config_of(place: str) -> Config:
    """The sizes of a named model, a published weight, a file or a run folder."""
    if Path(place).exists():
        return load(place).config
    return variant(PUBLISHED[place].model if place in PUBLISHED else place)


def computed(place: str, config: Config, r: Recipe, seen: int) -> dict[str, Any]:
    """What follows from the sizes alone, at the recipe's resolution."""
    try:
        at = replace(config, image_size=r.image_size)
    except Error as error:
        raise Error(f"{place} with recipe {r.name}: {error}", code=error.code) from None
    forward = forward_flops(at)
    total = TRAINING * forward * seen
    return {
        "parameters": parameters(skeleton(at)),
        "GFLOPs": forward / 1e9,
        "exaFLOPs": total / 1e18,
        "TPUv3_core_days": tpu_v3_core_days(total),
    }


def at_size(
    config: Config, r: Recipe, pixels: int, runtime: Runtime, seconds: float, live: Live
) -> dict[str, Any]:
    """FLOPs, images a second and the largest batch at one size; None where the model does not run there."""
    row: dict[str, Any] = {"pixels": pixels, "GFLOPs": None, "images_per_second": None, "batch": None,
                           "largest_batch": None}  # fmt: skip
    live.more(1)
    try:
        at = replace(config, image_size=(pixels, pixels))
        row["GFLOPs"] = forward_flops(at) / 1e9
        skeleton(at)
    except ValueError as error:
        return row | {"why": str(error)}
    if seconds:
        best = images_per_second(inference(at, runtime), seconds)
        row |= {"images_per_second": best and best[0], "batch": best and best[1]}
        row["largest_batch"] = largest(at, replace(r, image_size=(pixels, pixels)), runtime, seconds)
        runtime.empty_cache()
    return row


def blank(config: Config, device: str) -> Model:
    """A model of zeros: as fast as any other."""
    return skeleton(config)._apply(lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device))


def inference(config: Config, runtime: Runtime) -> Callable[[int], None]:
    """A function that computes the logits of so many images and waits for them."""
    model = blank(config, runtime.device).eval()

    @torch.inference_mode()
    def run(count: int) -> None:
        images = torch.zeros(count, config.channels, *config.image_size, device=runtime.device)
        with runtime.autocast():
            model(images)[0, 0].item()

    return run


def largest(config: Config, r: Recipe, runtime: Runtime, seconds: float) -> int:
    """Images of one training step: tried on a GPU; elsewhere by the formula, since memory there is shared."""
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
    """Days of one device: at a stated rate, else by what was measured at the recipe's size."""
    if rate is not None:
        return row["exaFLOPs"] * 1e18 / (rate * 1e12 * DAY)
    here = next((at["images_per_second"] for at in row["sizes"] if (at["pixels"],) * 2 == size), None)
    return TRAINING * seen / here / DAY if here else None


def tell(told: dict[str, Any], measured: bool, rate: float | None) -> None:
    """Two tables: the recipe's cost, and what depends on the resolution."""
    say(f"recipe {told['recipe']}: {told['images_seen']:,} images seen")
    rows = [{k: v for k, v in row.items() if k != "sizes"} for row in told["models"]]
    print_table(rows)
    if rate is not None:
        say(f"device days: at {rate:g} TFLOP/s of one device")
    elif measured:
        say(f"device days: a step costs {TRAINING} forward passes, at the images/s measured here")
    say("")
    kept = ("pixels", "GFLOPs", *(("images_per_second", "batch", "largest_batch") if measured else ()))
    print_table(
        [{"model": row["model"]} | {k: at[k] for k in kept} for row in told["models"] for at in row["sizes"]]
    )
    if measured:
        where = f"{told['device']}, {told['precision']}, {told['threads']} threads"
        say(f"images/s: inference, the best of several batches ({where})")
        say(f"largest batch: of training, {told['largest_batch_by']}")


def draw(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Fig. 12: images a second and largest batch, by resolution."""
    from vitkit.report.figures import Panel, draw_panels, render  # matplotlib is slow to import

    names = short_names(row["model"] for row in rows)

    def lines(field: str) -> dict[str, list[tuple[float, float]]]:
        return {
            names[row["model"]]: [(at["pixels"], at[field]) for at in row["sizes"] if at[field]]
            for row in rows
        }

    panels = [
        Panel("Inference speed", "Image side (pixels)", "Images a second", lines("images_per_second")),
        Panel("Memory", "Image side (pixels)", "Largest training batch", lines("largest_batch")),
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(render(draw_panels(panels, log=True), out.suffix[1:].lower()))
