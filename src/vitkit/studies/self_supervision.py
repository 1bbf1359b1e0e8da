"""The study of learning without labels: what each way of training gives before fine-tuning."""

from dataclasses import replace
from typing import Any

from vitkit.recipes import RECIPES
from vitkit.recipes import recipe as named_recipe
from vitkit.recipes.recipe import Recipe, override
from vitkit.recipes.values import TaskOptions
from vitkit.runs.folder import FEATURES_OFF
from vitkit.studies.setting import RATE, Arm, Setting, finetuning, pretraining, schedule, vit
from vitkit.studies.study import Claim, Factor, Picture, Study, Trial, make_trial
from vitkit.training.schedule import Duration, Schedule

NOTHING, LABELS, DISTILLED = "nothing", "labels", "distilled"
WITHOUT_LABELS = ("masked", "mae", "dino")  # tasks, which are also the names of their recipes
DISTILLATION = "distill"  # the task of the arm `distilled`
PUBLISHED_RATE = ("dino",)  # recipes whose rate a miniature keeps
ARMS = (NOTHING, LABELS, *WITHOUT_LABELS, DISTILLED)


def exists(arm: str) -> bool:
    """Whether this version has the task of an arm."""
    recipe = DISTILLATION if arm == DISTILLED else arm
    return arm in (NOTHING, LABELS) or recipe in RECIPES


def first_recipe(s: Setting, arm: str, seed: int) -> Recipe:
    """The recipe of what comes before fine-tuning."""
    shape = vit(s, 1)
    if arm == NOTHING:  # one step at rate 0: the initial model of the other arms, saved as a run
        still = Schedule(rate=0.0)
        return pretraining(s, shape, seed, length=Duration(steps=1), schedule=still, fewshot=FEATURES_OFF)
    if arm == LABELS:
        return pretraining(s, shape, seed, fewshot=FEATURES_OFF)
    if arm == DISTILLED:
        teacher = TaskOptions({f"{DISTILLATION}.teacher": s.weights})
        return task_recipe(s, shape, DISTILLATION, seed, teacher)
    return task_recipe(s, shape, arm, seed)


def task_recipe(s: Setting, shape: Arm, name: str, seed: int, options: TaskOptions | None = None) -> Recipe:
    """The recipe of a task, in miniature with the steps, batch and model of all arms."""
    published = named_recipe(name)
    recipe = replace(
        published, auto=(), data=s.data[0], seed=seed, fewshot=FEATURES_OFF, model=shape.model,
        task_options=TaskOptions({**published.task_options, **(options or {})}),
    )  # fmt: skip
    if not s.paper:
        rate = miniature_rate(name, published, s.batch)
        recipe = replace(
            recipe, name="study", about=f"a miniature of the recipe {name}", batch=s.batch,
            model_options=published.model_options.having(**shape.options), image_size=(s.pixels, s.pixels),
            length=Duration(steps=s.steps), schedule=schedule(rate, s.steps), evaluations=0, val=0.0,
            test=0.1,
        )  # fmt: skip
    return override(recipe, s.changes)


def miniature_rate(name: str, published: Recipe, batch: int) -> float:
    """The rate of all miniatures; that of DINO is published for few images, and is in proportion to them.

    The rates of the others are for batches of thousands and hundreds of epochs. In proportion to a small
    batch they are far too low for a short run: MAE's loss falls more slowly, and its features get worse.
    """
    if name not in PUBLISHED_RATE:
        return RATE
    return published.schedule.rate * (batch / published.batch) ** published.task.rate_power


def self_supervision(s: Setting) -> list[Trial]:
    """Each way of training with the same model, data and steps, scored frozen and after fine-tuning."""
    place, trials = s.downstream or s.data[0], []
    for seed in range(s.seeds):
        for arm in ARMS:
            if not exists(arm) or (arm == DISTILLED and not s.weights):
                continue
            recipe = first_recipe(s, arm, seed)
            first = make_trial({"arm": arm, "phase": "pretrained"}, recipe, frozen=place)
            tuned = make_trial({"arm": arm, "phase": "tuned"}, finetuning(s, seed), needs=first.name)
            trials += [first, tuned]
    return trials


def notes(s: Setting) -> list[str]:
    """What is left out, and why."""
    missing = [arm for arm in ARMS if not exists(arm)]
    lines = [f"left out: {', '.join(missing)} (no such task in this version)"] if missing else []
    if exists(DISTILLED) and not s.weights:
        lines.append(f"left out: {DISTILLED}; --weights names a teacher")
    return lines


def at(arm: str, phase: str) -> dict[str, Factor]:
    return {"arm": arm, "phase": phase}


def above(text: str, better: str, worse: str, *, score: str = "", printed: float | None = None) -> Claim:
    """A claim; `printed` is what Sec. 4.6 says of a ViT-B/16 on ImageNet."""
    phase = "pretrained" if score else "tuned"
    known: dict[str, Any] = {} if printed is None else {"printed": (printed,), "source": "Sec. 4.6, ImageNet"}
    return Claim(text=text, left=at(better, phase), right=at(worse, phase), score=score, **known)


NAMES = {"masked": "masked patches", "mae": "MAE", "dino": "DINO", DISTILLED: "distillation"}
MASKED_GAIN, MASKED_GAP = 2.0, 4.0  # points above training from scratch and below labels (Sec. 4.6)
CLAIMS = (
    above("labels of the same data help a fine-tuned model", LABELS, NOTHING),
    *(
        above(f"pre-training by {name} helps a fine-tuned model", arm, NOTHING,
              printed=MASKED_GAIN if arm == "masked" else None)
        for arm, name in NAMES.items()
    ),
    above("labels are better than masked patches, fine-tuned", LABELS, "masked", printed=MASKED_GAP),
    above("MAE is better than masked patches, fine-tuned", "mae", "masked"),
    above("DINO is better than MAE by k-NN", "dino", "mae", score="knn"),
    above("labels are better than DINO by k-NN", LABELS, "dino", score="knn"),
    above("distillation is better than labels by k-NN", DISTILLED, LABELS, score="knn"),
)  # fmt: skip
FROZEN = {"knn": "k-NN", "probe": "a linear probe", "fewshot_mean": "10 images per class"}
STUDY = Study(
    name="self-supervision", shows="Sec. 4.6, MAE, DINO", make=self_supervision, score="top1", teacher=True,
    about="nothing, labels, masked patches, MAE, DINO and distillation at equal steps, then fine-tuned",
    notes=notes,
    claims=tuple(c for c in CLAIMS if all(exists(str((side or {})["arm"])) for side in (c.left, c.right))),
    pictures=(
        Picture(title="accuracy after fine-tuning", x="arm", kind="bars", lines=("phase",),
                where={"phase": "tuned"}),
        *(Picture(title=f"frozen features, by {name}", x="arm", y=score, kind="bars", lines=("phase",),
                  where={"phase": "pretrained"}) for score, name in FROZEN.items()),
    ),
)  # fmt: skip
