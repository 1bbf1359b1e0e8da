"""Recipe to run folder: build, train, evaluate, save. The only place that combines the rooms."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vitkit.data.batches import BadFiles, Batch, evaluation_batches, train_batches
from vitkit.data.order import Order
from vitkit.data.sources import Source, open_data
from vitkit.data.splits import complete
from vitkit.data.views import View, mixup, normalise
from vitkit.evaluation.accuracy import Accuracy, accuracy
from vitkit.evaluation.cost import flops, parameters
from vitkit.models.adapt import adapt
from vitkit.models.card import Origin, Preprocessing
from vitkit.models.variants import Model, configure, fresh
from vitkit.recipes.recipe import Recipe, override
from vitkit.report.live import Live
from vitkit.runs import Interrupted, claim, locked, signals
from vitkit.serving.predict import evaluation_view, logits
from vitkit.training.checkpoint import latest, load_checkpoint, save_checkpoint
from vitkit.training.journal import Journal
from vitkit.training.loop import Metrics, TrainState, train
from vitkit.training.objectives import Classify, one_hot
from vitkit.training.runtime import Runtime, data_workers, seed_step
from vitkit.weights.load import load
from vitkit.weights.save import save

MODEL = "model.safetensors"
SAVE_SECONDS = 300.0  # at most so much work is lost when a machine dies


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    run: str
    model: str
    steps: int
    test: dict[str, Any]
    cost: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    recipe: Recipe,
    out: Path,
    runtime: Runtime,
    *,
    workers: int | None = None,
    max_bad: float = 0.05,
    quiet: bool = False,
) -> Result:
    """Train by the recipe into a run folder, or go on where an earlier process stopped."""
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        claim(out, recipe)
        splits = complete(open_data(recipe.data), val=recipe.val, test=recipe.test)
        model = start_model(recipe, splits["train"]).to(runtime.device)
        state = TrainState.start(model, recipe.optimizer)
        found, damaged = latest(out / "checkpoints")
        memory = load_checkpoint(found, state) if found else {"best": None, "since": 0, "seconds": 0.0}
        total = recipe.length.in_steps(len(splits["train"]), recipe.batch)
        with Live("train", total, state.step, quiet=quiet) as live:
            for name in damaged:
                live.say(f"{name} is damaged and was passed over")
            work = Work(recipe, out, runtime, splits, state, memory, total, live, data_workers(workers))
            work.bad = BadFiles(max_bad, lambda key, why: live.say(f"not used: {key}: {why}"))
            work.train()
            return work.finish()


def start_model(recipe: Recipe, train_split: Source) -> Model:
    """Published or own weights with a new zero head at the recipe's size, or a fresh model."""
    if train_split.multilabel and recipe.loss != "sigmoid":
        raise ValueError("the data has several labels for an image: use --set loss=sigmoid")
    training: dict[str, Any] = {"dropout": recipe.dropout, "stochastic_depth": recipe.stochastic_depth}
    if recipe.weights:
        model = load(recipe.weights)
        origin = Origin(format="vitkit", source=recipe.weights, licence=model.origin.licence)
    elif recipe.model:
        config = configure(recipe.model, classes=len(train_split.classes), image_size=recipe.image_size)
        model = fresh(override(config, recipe.model_options), seed=recipe.seed)
        origin = Origin(format="vitkit", source=f"{recipe.model} from scratch")
    else:
        raise ValueError(
            "nothing to start from: give --weights FILE|NAME, or --model NAME to train from scratch"
        )
    if not hasattr(model.config, "dropout"):
        training = {}
    model = adapt(
        model, labels=train_split.classes, image_size=recipe.image_size,
        keep_representation=recipe.keep_representation, **training,
    )  # fmt: skip
    crop = {"squash": Preprocessing(), "centre": Preprocessing(resize="crop", crop=0.875)}
    if recipe.evaluation_crop not in crop:
        raise ValueError(f"evaluation_crop must be squash or centre, not {recipe.evaluation_crop!r}")
    base = model.preprocessing
    model.preprocessing = replace(crop[recipe.evaluation_crop], mean=base.mean, std=base.std)
    model.origin = origin
    return model


@dataclass
class Work:
    """One run in the making."""

    recipe: Recipe
    out: Path
    runtime: Runtime
    splits: dict[str, Source]
    state: TrainState
    memory: dict[str, Any]
    total: int
    live: Live
    workers: int
    bad: BadFiles | None = None

    def train(self) -> None:
        """The loop, with everything that happens beside it."""
        self.journal = Journal(self.out, self.state.step)
        self.saved, self.waited = time.monotonic(), 0.0
        self.every = max(1, self.total // self.recipe.evaluations) if self.recipe.evaluations else 0
        with signals() as self.asked:
            model = self.runtime.callable(self.state.model)
            self.clock = time.monotonic()
            train(
                self.state,
                self.batches(),
                self.objective(),
                until=self.total,
                rate=lambda step: self.recipe.schedule.at(step, self.total),
                config=self.recipe.optimizer,
                watch=self.watch,
                call=model,
                before=lambda step: seed_step(self.recipe.seed, step),
                computing=self.runtime.computing,
            )
            self.save()

    def objective(self) -> Classify:
        p: Preprocessing = self.state.model.preprocessing  # type: ignore[assignment]
        return Classify(
            mean=p.mean, std=p.std, loss=self.recipe.loss, label_smoothing=self.recipe.label_smoothing
        )

    def batches(self) -> Iterator[list[Batch]]:
        """Micro-batches of each step on the device, from the state's step on."""
        r, source, objective = self.recipe, self.splits["train"], self.objective()
        order = Order(len(source), r.batch, r.seed)
        augment = (r.randaugment[0], r.randaugment[1]) if r.randaugment else None
        view = View(size=r.image_size, crop=r.crop, flip=r.flip, randaugment=augment)
        start = self.state.step
        stream = train_batches(source, view, order, start=start, workers=self.workers, bad=self.bad)
        step = start
        while True:
            begun = time.monotonic()
            batch = self.runtime.place(next(stream))
            self.waited += time.monotonic() - begun
            if r.mixup:  # before the batch is cut in pieces, so that the pieces do not matter
                images = normalise(batch["image"], objective.mean, objective.std)
                labels = one_hot(batch["label"], len(source.classes))
                batch["image"], batch["label"] = mixup(images, labels, r.mixup, order.rng(step, -1))
            yield micro(batch, r.micro_batch)
            step += 1

    def watch(self, state: TrainState, metrics: Metrics) -> bool:
        """Log, evaluate, save; whether the run is to stop early."""
        now = time.monotonic()
        numbers = {name: float(value) for name, value in metrics.items()}
        spent, self.clock = max(1e-9, now - self.clock), now
        shown = {k: numbers[k] for k in ("loss", "accuracy", "rate")}
        shown |= {"images/s": numbers["images"] / spent, "waiting": self.waited / spent}
        self.waited = 0.0
        self.live.step(state.step, **shown)
        self.journal.write(state.step, **numbers, seconds=round(spent, 4))
        self.memory["seconds"] += spent
        if self.every and state.step % self.every == 0 and state.step < self.total:
            self.validate()
            self.clock = time.monotonic()
        if self.asked:
            self.save()
            raise Interrupted(self.asked[0], state.step)
        if now - self.saved > SAVE_SECONDS:
            self.save()
        return bool(self.recipe.patience and self.memory["since"] >= self.recipe.patience)

    def validate(self) -> None:
        found = self.evaluate("val")
        self.journal.write(self.state.step, val_top1=found.top1, val_loss=found.loss, val_images=found.images)
        self.live.say(f"step {self.state.step}: {found.top1:.2%} of {found.images} validation images right")
        best = self.memory["best"]
        self.memory["since"] = 0 if best is None or found.top1 > best else self.memory["since"] + 1
        if self.memory["since"] == 0:
            self.memory["best"] = found.top1
            if self.recipe.patience:
                save(self.state.model, self.out / "best.safetensors")  # type: ignore[arg-type]

    def evaluate(self, split: str) -> Accuracy:
        return evaluate(self.state.model, self.splits[split], self.recipe.batch, self.workers)  # type: ignore[arg-type]

    def save(self) -> None:
        save_checkpoint(self.out / "checkpoints", self.state, self.memory)
        self.saved = time.monotonic()

    def finish(self) -> Result:
        """The averaged or the best or the last weights, tested on every test image, saved as one file."""
        if self.state.average:
            self.state.model.load_state_dict(self.state.average, strict=False)
        best = self.out / "best.safetensors"
        if self.recipe.patience and best.exists():
            self.state.model.load_state_dict(load(best).state_dict())
        found = self.evaluate("test")
        model: Model = self.state.model  # type: ignore[assignment]
        save(model.cpu(), self.out / MODEL)
        test = found.to_json(model.labels)
        seen = self.state.step * self.recipe.batch
        per_image = flops(model, model.config.image_size, model.config.channels)
        cost = {
            "images_seen": seen, "training_FLOPs": 3 * per_image * seen, "parameters": parameters(model),
            "seconds": round(self.memory["seconds"], 2), "device_hours": self.memory["seconds"] / 3600,
            **self.runtime.facts(),
        }  # fmt: skip
        self.journal.write(self.state.step, test_top1=found.top1, test_images=found.images)
        self.journal.close()
        result = Result(str(self.out), str(self.out / MODEL), self.state.step, test, cost)
        (self.out / "result.json").write_text(json.dumps(result.to_json(), indent=2))
        return result


def evaluate(model: Model, source: Source, batch: int, workers: int, bad: BadFiles | None = None) -> Accuracy:
    """Accuracy over every image of a source, with the model's own preprocessing."""
    model.eval()
    view = evaluation_view(model.preprocessing, model.config.image_size)
    batches = evaluation_batches(source, view, batch, workers=workers, bad=bad)
    return accuracy(lambda images: logits(model, images), batches, model.config.classes)


def micro(batch: Batch, size: int) -> list[Batch]:
    """A batch in pieces of at most `size` images (0: whole)."""
    n = len(batch["image"])
    if not size or size >= n:
        return [batch]
    return [{k: t[at : at + size] for k, t in batch.items()} for at in range(0, n, size)]
