"""What the training and prediction verbs do: choose, say what was chosen, run, and tell the result."""

import csv as csv_module
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitkit.data.batches import BadFiles
from vitkit.data.doctor import examine
from vitkit.data.sources import open_data
from vitkit.data.splits import complete, same_classes
from vitkit.evaluation.cost import flops
from vitkit.experiment import MODEL, Result, run, start_model
from vitkit.experiment import evaluate as evaluate_model
from vitkit.models.variants import Model
from vitkit.recipes import finetune as finetuning
from vitkit.recipes.recipe import Recipe, override
from vitkit.report.live import Live
from vitkit.report.terminal import print_facts, print_table, say
from vitkit.serving.predict import find_images, predict_many
from vitkit.training.runtime import choose, data_workers
from vitkit.training.schedule import Duration
from vitkit.weights.load import load

Emit = Callable[[Any], None] | None
STYLES = {"error": "bold red", "warning": "yellow", "note": ""}


def make_recipe(data: str, name: str, options: dict[str, Any]) -> Recipe:
    """The named recipe with the command's options on it; each is checked by the recipe itself."""
    name = name or ("scratch" if options["model"] else "finetune")
    r = replace(finetuning.recipe(name), data=data, weights=options["weights"], model=options["model"])
    if options["image_size"]:
        r = replace(r, image_size=options["image_size"])
    for field in ("batch", "seed"):
        if options[field] is not None:
            r = replace(r, **{field: options[field]})
    if options["steps"] is not None and options["epochs"] is not None:
        raise ValueError("give --steps or --epochs, not both")
    if options["steps"] is not None or options["epochs"] is not None:
        r = replace(r, length=Duration(options["steps"], options["epochs"]))
    if options["rate"] is not None:
        r = replace(r, schedule=replace(r.schedule, rate=options["rate"]))
    return override(r, options["set"])


def finetune(
    data: str, out: Path | None, name: str, options: dict[str, Any], *, device: str, precision: str,
    workers: int | None, max_bad: float, compile: bool, plan: bool, emit: Emit,
) -> None:  # fmt: skip
    recipe = make_recipe(data, name, options)
    out = out or Path("runs") / (Path(data).stem or "run")
    runtime = choose(device, precision, compile)
    if plan:
        facts = planned(recipe, out) | runtime.facts()
        return emit(facts) if emit else print_facts(facts)
    result = run(recipe, out, runtime, workers=workers, max_bad=max_bad, quiet=bool(emit))
    if emit:
        emit(result.to_json())
    else:
        tell(result)


def planned(recipe: Recipe, out: Path) -> dict[str, Any]:
    """What a run would do, without doing it."""
    splits = complete(open_data(recipe.data), val=recipe.val, test=recipe.test)
    model = start_model(recipe, splits["train"])
    steps = recipe.length.in_steps(len(splits["train"]), recipe.batch)
    each = flops(model, model.config.image_size, model.config.channels)
    return {
        "run": str(out), "recipe": recipe.name, "start": recipe.weights or f"{recipe.model} from scratch",
        **{f"{name}_images": len(part) for name, part in splits.items()},
        "classes": len(splits["train"].classes), "steps": steps, "images_seen": steps * recipe.batch,
        "epochs": steps * recipe.batch / len(splits["train"]),
        "training_FLOPs": 3 * each * steps * recipe.batch,
    }  # fmt: skip


def tell(result: Result) -> None:
    test = result.test
    say(f"{test['top1']:.2%} of {test['images']} test images right")
    say(f"the model: {result.model}")
    say(f"  vitkit predict {result.run} IMAGE...")
    say(f"  vitkit evaluate {result.run} DATA")


def doctor(data: str, *, quick: bool = False, workers: int | None = None, emit: Emit = None) -> bool:
    """Whether nothing was found that would spoil a training."""
    splits = open_data(data)
    total = sum(len(part) for part in splits.values())
    with Live("looking", total, quiet=bool(emit) or quick) as live:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            live.step(done)

        report = examine(splits, deep=not quick, workers=data_workers(workers), advance=advance)
    if emit:
        emit(report.to_json())
        return report.ok
    print_table([{"split": name, **split_row(row)} for name, row in report.to_json()["splits"].items()])
    for finding in report.findings:
        say(f"{finding.severity}: {finding.text} {finding.remedy}", style=STYLES[finding.severity])
    say("nothing that would spoil a training" if report.ok else "mend the errors before training")
    return report.ok


def split_row(row: dict[str, Any]) -> dict[str, Any]:
    spread = row["per_class"]
    fewest = {"fewest_in_a_class": spread["min"], "median": spread["median"], "most": spread["max"]}
    return {"images": row["images"], "classes": row["classes"]} | fewest


def load_model(place: str, device: str) -> Model:
    """A model file, a run folder or a published name, on its device."""
    folder = Path(place) / MODEL
    model = load(folder if folder.exists() else place)
    return model.to(choose(device, "fp32").device).eval()


def evaluate(
    place: str, data: str, split: str | None, batch: int, workers: int | None, device: str, emit: Emit
) -> None:
    model = load_model(place, device)
    splits = open_data(data)
    split = split or next((s for s in ("test", "val", "all", "train") if s in splits), "all")
    if split not in splits:
        raise ValueError(f"{data} has no split {split!r}, only {', '.join(splits)}")
    source = same_classes(splits[split], model.labels, data) if model.labels else splits[split]
    bad = BadFiles(1.0, lambda key, why: print(f"not used: {key}: {why}", file=sys.stderr))
    found = evaluate_model(model, source, batch, data_workers(workers), bad)
    facts = found.to_json(model.labels or source.classes) | {"split": split, "unusable": len(bad.found)}
    if emit:
        return emit(facts)
    rows = [{"class": name, **row} for name, row in facts["per_class"].items()]
    print_table(rows)
    say(
        f"{found.top1:.2%} of {found.images} images right"
        + (f", top-5 {found.top5:.2%}" if found.top5 else "")
    )


def predict(place: str, images: tuple[str, ...], top: int, device: str, *, csv: bool, emit: Emit) -> bool:
    """Whether every image could be read."""
    model = load_model(place, device)
    found = list(predict_many(model, find_images(images), top=top))
    if emit:
        emit([p.to_json() for p in found])
    elif csv:
        table = csv_module.writer(sys.stdout)
        table.writerow(("image", "label", "probability"))
        table.writerows((p.image, *(p.top[0] if p.top else ("", ""))) for p in found)
    else:
        for p in found:
            if p.top:
                said = ", ".join(f"{label} {probability:.3f}" for label, probability in p.top)
                say(f"{p.image}: {said}")
    for p in found:
        if p.error:
            print(f"not read: {p.image}: {p.error}", file=sys.stderr)
    return not any(p.error for p in found)


__all__ = ["doctor", "evaluate", "finetune", "predict"]
