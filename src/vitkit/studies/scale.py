"""Studies of size: compute, data, pre-training sets, optimizers, resolution; and all studies by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitkit.errors import Error
from vitkit.studies.architecture import PARTS, at
from vitkit.studies.setting import (
    PAPER,
    Arm,
    Setting,
    compared,
    finetuning,
    members,
    nearest_set,
    pretraining,
    resnet,
    stochastic,
    vit,
)
from vitkit.studies.study import Claim, Factor, Factors, Picture, Study, Trial, trial
from vitkit.training.schedule import Duration

FAMILIES = ("ViT", "ResNet", "hybrid")
SHARES = ("3%", "10%", "30%", "100%")  # 9M, 30M, 90M and all 303M of JFT
FIG_4 = ("ViT-b/32", "ViT-B/32", "ViT-L/32", "ViT-L/16", "BiT-R50x1", "BiT-R152x2")
BAND = ("BiT-R50x1", "BiT-R152x2")  # between which Fig. 3's BiT models lie here
CONVENTIONS = ("official", "timm", "hf", "torchvision")


def tuned(
    s: Setting, arm: Arm, factors: Factors, seed: int, needs: Trial, *, pixels: int = 0, resize: str = ""
) -> Trial:
    """A fine-tuning of another trial's model: once in miniature, by the protocol at the paper's scale."""
    recipe = finetuning(s, seed, pixels=pixels)
    tried = compared(s, arm, recipe)
    return trial(factors, recipe, needs=needs.name, resize=resize, compared=tried)


def scaling(s: Setting) -> list[Trial]:
    """Fig. 5: three families on one axis; at the paper's scale the 18 rows of Table 6, fine-tuned too."""
    made = []
    for seed in range(s.seeds):
        for family in FAMILIES:
            for size, arm, epochs in members(s, family):
                recipe = pretraining(s, arm, seed)
                if s.paper:
                    recipe = replace(recipe, length=Duration(epochs=epochs))
                factors = {"family": family, "size": size}
                first = trial(factors, recipe)
                made.append(first)
                if s.paper:
                    made.append(tuned(s, arm, factors | {"tuned": "yes"}, seed, first))
    return made


def data_size(s: Setting) -> list[Trial]:
    """Fig. 4: nested parts of one data set, the same hyper-parameters for all, early stopping."""
    arms = {"ViT": vit(s, 0), "ViT, larger": vit(s, 1), "ResNet": resnet(s, 0)}
    if s.paper:
        arms = {model: Arm(model) for model in FIG_4}
    stop: dict[str, Any] = {"patience": 2, "evaluations": 6, "val": 0.02}
    made = []
    for seed in range(s.seeds):
        for model, arm in arms.items():
            for share in SHARES:
                recipe = pretraining(s, arm, seed, subset="" if share == "100%" else share, **stop)
                if s.paper:  # as long for a part as for all of it
                    recipe = replace(
                        recipe, length=Duration(steps=recipe.length.in_steps(s.images, recipe.batch))
                    )
                made.append(trial({"model": model, "share": share}, recipe))
    return made


def sets_of(s: Setting) -> list[tuple[str, str, str, str]]:
    """(name, data, part, part of Table 3) of each pre-training set: several data sets, or parts of one."""
    sizes = s.sizes or (s.images,)
    if len(s.data) > 1:
        tables = s.rows or tuple(map(nearest_set, sizes))
        return [(Path(place).stem or place, place, "", t) for place, t in zip(s.data, tables, strict=True)]
    parts = {"3%": 0.03, "30%": 0.3, "100%": 1.0}
    return [
        (name, s.data[0], "" if name == "100%" else name,
         s.rows[0] if s.rows else nearest_set(round(share * sizes[0])))
        for name, share in parts.items()
    ]  # fmt: skip


def pretrain_sets(s: Setting) -> list[Trial]:
    """Fig. 3: ViTs and BiT ResNets pre-trained on larger and larger sets, then fine-tuned on one."""
    arms = [("ViT", "small", vit(s, 0)), ("ViT", "large", vit(s, 2)),
            ("BiT", "small", resnet(s, 0)), ("BiT", "large", resnet(s, 2))]  # fmt: skip
    if s.paper:
        arms = [(family, model, Arm(model)) for family, models in (("ViT", PAPER["ViT"]), ("BiT", BAND))
                for model in models]  # fmt: skip
    sets, made = sets_of(s), []
    for seed in range(s.seeds):
        for number, (name, place, share, table) in enumerate(sets):
            order = "last" if number == len(sets) - 1 else "first" if not number else f"number {number + 1}"
            for family, size, arm in arms:
                if arm.model == "ViT-H/14" and table == "imagenet":
                    continue  # Table 5 has none
                factors = {"set": name, "order": order, "family": family, "size": size}
                recipe = pretraining(s, arm, seed, table=table, data=place, subset=share)
                first = trial(factors | {"phase": "pretrained"}, recipe)
                made += [first, tuned(s, arm, factors | TUNED, seed, first)]
    return made


def optimizer(s: Setting) -> list[Trial]:
    """Table 7: two ResNets pre-trained with Adam and with SGD, then fine-tuned alike."""
    made = []
    for seed in range(s.seeds):
        for size, arm in (("small", resnet(s, 0)), ("large", resnet(s, 4 if s.paper else 2))):
            adam = pretraining(s, arm, seed)
            for kind, recipe in (("adam", adam), ("sgd", stochastic(adam, paper=s.paper))):
                factors = {"optimizer": kind, "size": size}
                first = trial(factors | {"phase": "pretrained"}, recipe)
                made += [first, tuned(s, arm, factors | TUNED, seed, first)]
    return made


def resolution(s: Setting) -> list[Trial]:
    """Sec. 3.2: one pre-training, fine-tuned at growing sizes with each way of resizing positions."""
    side = 224 if s.paper else s.pixels
    grown = {"1x": side, "larger": 288 if s.paper else side * 3 // 2, "largest": 384 if s.paper else side * 2}
    made = []
    arm = vit(s, 1)
    for seed in range(s.seeds):
        first = trial({"phase": "pretrained"}, pretraining(s, arm, seed))
        made.append(first)
        for size, pixels in grown.items():
            for convention in CONVENTIONS if pixels != side else ("none",):
                resize = "" if convention == "none" else convention
                factors = TUNED | {"size": size, "pixels": pixels, "resize": convention}
                made.append(tuned(s, arm, factors, seed, first, pixels=pixels, resize=resize))
    return made


TUNED: dict[str, Factor] = {"phase": "tuned"}
TABLE_6: dict[str, Any] = {"tuned": "yes"}  # at the paper's scale accuracy is that after fine-tuning


def model_of(family: str, size: str) -> dict[str, Factor]:
    return at(family=family, size=size, **TABLE_6)


def data_claims(small: str, large: str, convolutional: str) -> tuple[Claim, ...]:
    """Fig. 4 for three models, of which the first and the last take about as much compute."""
    return (
        Claim(text="on little data ResNets are better than ViTs", left=at(model=convolutional, share="3%"),
              right=at(model=small, share="3%")),
        Claim(text="on much data ViTs are better than ResNets", left=at(model=small, share="100%"),
              right=at(model=convolutional, share="100%")),
        Claim(text="ViTs gain more from data than ResNets", left=at(model=small, share="100%"),
              right=at(model=convolutional, share="100%"),
              since=(at(model=small, share="3%"), at(model=convolutional, share="3%"))),
        Claim(text="larger ViTs gain more from data than smaller ones",
              left=at(model=large, share="100%"), right=at(model=small, share="100%"),
              since=(at(model=large, share="3%"), at(model=small, share="3%"))),
    )  # fmt: skip


def set_claims(small: str, large: str, convolutional: str) -> tuple[Claim, ...]:
    """Fig. 3 for a ViT, a larger one with the same patches, and a BiT ResNet."""
    vits = {size: at(family="ViT", size=size, **TUNED) for size in (small, large)}
    bit = at(family="BiT", size=convolutional, **TUNED)
    first, last = at(order="first"), at(order="last")
    return (
        Claim(text="pre-trained on the smallest set, the larger model is not better",
              left=first | vits[small], right=first | vits[large]),
        Claim(text="pre-trained on the largest set, it is", left=last | vits[large],
              right=last | vits[small]),
        Claim(text="more pre-training data is better", left=last | vits[large], right=first | vits[large]),
        Claim(text="pre-trained on the smallest set, a large ViT is worse than a BiT ResNet",
              left=first | bit, right=first | vits[large]),
        Claim(text="pre-trained on the largest set, it is better", left=last | vits[large],
              right=last | bit),
    )  # fmt: skip


COMPARISONS = (
    Study(
        name="scaling", shows="Fig. 5, Table 6", make=scaling, score="fewshot_mean", convolutions=True,
        about="ViTs, hybrids and ResNets of growing size: transfer accuracy against training compute",
        fitted=("family",), published=("Table 6",),
        claims=(
            Claim(text="ViTs need less compute than ResNets for the same accuracy (2 to 4 times less)",
                  left=at(family="ViT"), right=at(family="ResNet"), measure="compute"),
            Claim(text="at small compute hybrids are ahead of ViTs", left=at(family="hybrid", size="small"),
                  right=at(family="ViT", size="small")),
            Claim(text="for larger models that difference vanishes", left=at(family="hybrid", size="large"),
                  right=at(family="ViT", size="large"), says="equal"),
            Claim(text="ViTs do not saturate in the range that was tried",
                  left=at(family="ViT", size="large"), right=at(family="ViT", size="medium")),
        ),
        paper=(
            Claim(text="ViTs need less compute than ResNets for the same accuracy (2 to 4 times less)",
                  left=at(family="ViT", **TABLE_6), right=at(family="ResNet", **TABLE_6), measure="compute",
                  score="top1"),
            Claim(text="at small compute hybrids are ahead of ViTs (R50+ViT-B/16 and ViT-B/16, 7 epochs)",
                  left=model_of("hybrid", "R50+ViT-B/16 7ep"), right=model_of("ViT", "ViT-B/16 7ep"),
                  score="top1"),
            Claim(text="for larger models that difference vanishes (R50+ViT-L/16 and ViT-L/16, 14 epochs)",
                  left=model_of("hybrid", "R50+ViT-L/16 14ep"), right=model_of("ViT", "ViT-L/16 14ep"),
                  says="equal", score="top1"),
            Claim(text="ViTs do not saturate in the range that was tried (ViT-H/14 above ViT-L/16)",
                  left=model_of("ViT", "ViT-H/14 14ep"), right=model_of("ViT", "ViT-L/16 14ep"),
                  score="top1"),
        ),
        pictures=(Picture(title="few-shot accuracy and compute (Fig. 5)", x="exaFLOPs", lines=("family",),
                          log_x=True, x_label="exaFLOPs of pre-training"),
                  Picture(title="accuracy after fine-tuning and compute (Fig. 5)", x="pretrain_exaFLOPs",
                          y="top1", lines=("family",), log_x=True, x_label="exaFLOPs of pre-training",
                          where=TABLE_6)),
    ),
    Study(
        name="data-size", shows="Fig. 4", make=data_size, score="fewshot_mean", convolutions=True,
        published=("Fig. 4",),
        about="nested parts of one data set, the same hyper-parameters, early stopping",
        claims=data_claims("ViT", "ViT, larger", "ResNet"),
        paper=data_claims("ViT-B/32", "ViT-L/16", "BiT-R50x1"),
        pictures=(Picture(title="few-shot accuracy and pre-training images (Fig. 4)", x="train_images",
                          lines=("model",), log_x=True, x_label="images to pre-train on"),),
    ),
    Study(
        name="pretrain-sets", shows="Fig. 3, Table 5", make=pretrain_sets, score="top1", convolutions=True,
        about="ViTs and BiT ResNets pre-trained on larger and larger sets, then fine-tuned on one",
        published=("Table 5",),
        claims=set_claims("small", "large", "large"),
        paper=set_claims("ViT-B/16", "ViT-L/16", "BiT-R152x2"),
        pictures=(Picture(title="accuracy after fine-tuning, by pre-training set (Fig. 3)", x="set",
                          kind="bars", lines=("size",), where=TUNED | at(family="ViT"),
                          band=TUNED | at(family="BiT")),),
    ),
    Study(
        name="optimizer", shows="Table 7", make=optimizer, score="top1", convolutions=True,
        published=("Table 7",),
        about="ResNets pre-trained with Adam or SGD, then fine-tuned alike",
        claims=(
            Claim(text="a small ResNet pre-trained with Adam transfers better than with SGD",
                  left=at(optimizer="adam", size="small", **TUNED),
                  right=at(optimizer="sgd", size="small", **TUNED)),
            Claim(text="and so does a large one", left=at(optimizer="adam", size="large", **TUNED),
                  right=at(optimizer="sgd", size="large", **TUNED)),
        ),
        pictures=(Picture(title="accuracy after fine-tuning (Table 7)", x="size", kind="bars",
                          lines=("optimizer",), where=TUNED),),
    ),
    Study(
        name="resolution", shows="Sec. 3.2, App. B.1", make=resolution, score="top1",
        about="one pre-training, fine-tuned at growing sizes by four conventions of resizing positions",
        claims=(
            Claim(text="fine-tuning at a higher resolution helps",
                  left=at(size="largest", resize="official", **TUNED), right=at(size="1x", **TUNED)),
            Claim(text="the convention of resizing positions does not matter once fine-tuned (timm's)",
                  left=at(size="largest", resize="official", **TUNED),
                  right=at(size="largest", resize="timm", **TUNED), says="equal"),
            Claim(text="the convention of resizing positions does not matter once fine-tuned (torchvision's)",
                  left=at(size="largest", resize="official", **TUNED),
                  right=at(size="largest", resize="torchvision", **TUNED), says="equal"),
        ),
        pictures=(Picture(title="accuracy and resolution", x="pixels", lines=("resize",), where=TUNED,
                          x_label="pixels of a side"),),
    ),
)  # fmt: skip
STUDIES: dict[str, Study] = {study.name: study for study in (*COMPARISONS, *PARTS)}


def study(name: str) -> Study:
    if name not in STUDIES:
        raise Error(f"no study {name!r}; known: {', '.join(STUDIES)}", code="study.unknown")
    return STUDIES[name]


def listed() -> list[dict[str, Any]]:
    """For whoever asks what there is."""
    return [{"study": one.name, "shows": one.shows, "about": one.about} for one in STUDIES.values()]
