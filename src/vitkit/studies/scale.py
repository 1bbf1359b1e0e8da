"""Studies of scale: compute, data, pre-training sets, optimizers, resolution; and all studies by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitkit.errors import Error, did_you_mean
from vitkit.studies.architecture import PARTS, at
from vitkit.studies.recipe_changes import STUDY as RECIPES
from vitkit.studies.self_supervision import STUDY as SELF_SUPERVISION
from vitkit.studies.setting import (
    LARGEST,
    PAPER,
    Arm,
    Setting,
    finetuning,
    finetuning_candidates,
    members,
    nearest_set,
    pretraining,
    resnet,
    vit,
    with_sgd,
)
from vitkit.studies.study import Claim, Factor, Factors, Picture, Study, Trial, make_trial
from vitkit.training.schedule import Duration

FAMILIES = ("ViT", "ResNet", "hybrid")
SHARES = ("3%", "10%", "30%", "100%")  # of JFT: 9M, 30M, 90M and 303M images
FIG_4 = ("ViT-b/32", "ViT-B/32", "ViT-L/32", "ViT-L/16", "BiT-R50x1", "BiT-R152x2")
BAND = ("BiT-R50x1", "BiT-R152x2")  # the smallest and the largest BiT model of Fig. 3's band
CONVENTIONS = ("official", "timm", "hf", "torchvision")


def tuned(
    s: Setting, arm: Arm, factors: Factors, seed: int, needs: Trial, *, pixels: int = 0, resize: str = ""
) -> Trial:
    """Fine-tune another trial's model: one run in miniature, the protocol at the paper's scale."""
    recipe = finetuning(s, seed, pixels=pixels)
    recipes = finetuning_candidates(s, arm, recipe)
    return make_trial(factors, recipe, needs=needs.name, resize=resize, compared=recipes)


def scaling(s: Setting) -> list[Trial]:
    """Fig. 5: three model families; at the paper's scale the 18 rows of Table 6, also fine-tuned."""
    trials = []
    for seed in range(s.seeds):
        for family in FAMILIES:
            for size, arm, epochs in members(s, family):
                recipe = pretraining(s, arm, seed)
                if s.paper:
                    recipe = replace(recipe, length=Duration(epochs=epochs))
                factors = {"family": family, "size": size}
                first = make_trial(factors, recipe)
                trials.append(first)
                if s.paper:
                    trials.append(tuned(s, arm, factors | {"tuned": "yes"}, seed, first))
    return trials


def data_size(s: Setting) -> list[Trial]:
    """Fig. 4: nested subsets of one data set with the same hyper-parameters and early stopping."""
    arms = {"ViT": vit(s, 0), "ViT, larger": vit(s, 1), "ResNet": resnet(s, 0)}
    if s.paper:
        arms = {model: Arm(model) for model in FIG_4}
    stop: dict[str, Any] = {"patience": 2, "evaluations": 6, "val": 0.02}
    trials = []
    for seed in range(s.seeds):
        for model, arm in arms.items():
            for share in SHARES:
                recipe = pretraining(s, arm, seed, subset="" if share == "100%" else share, **stop)
                if s.paper:  # a subset is trained for as many steps as the whole
                    recipe = replace(
                        recipe, length=Duration(steps=recipe.length.in_steps(s.images, recipe.batch))
                    )
                attention = s.downstream or s.data[0] if "ViT" in model else ""
                trials.append(make_trial({"model": model, "share": share}, recipe, attention=attention))
    return trials


def sets_of(s: Setting) -> list[tuple[str, str, str, str]]:
    """(name, data, subset, set of Table 3) of each pre-training set: several data sets or subsets of one."""
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
    """Fig. 3: ViTs and BiT ResNets pre-trained on sets of increasing size, then fine-tuned on one."""
    arms = [("ViT", "small", vit(s, 0)), ("ViT", "large", vit(s, 2)),
            ("BiT", "small", resnet(s, 0)), ("BiT", "large", resnet(s, 2))]  # fmt: skip
    if s.paper:
        arms = [(family, model, Arm(model)) for family, models in (("ViT", PAPER["ViT"]), ("BiT", BAND))
                for model in models]  # fmt: skip
    sets, trials = sets_of(s), []
    for seed in range(s.seeds):
        for number, (name, place, share, table) in enumerate(sets):
            order = "last" if number == len(sets) - 1 else "first" if not number else f"number {number + 1}"
            for family, size, arm in arms:
                if arm.model == "ViT-H/14" and table == "imagenet":
                    continue  # Table 5 has no such result
                factors = {"set": name, "order": order, "family": family, "size": size}
                recipe = pretraining(s, arm, seed, table=table, data=place, subset=share)
                first = make_trial(factors | {"phase": "pretrained"}, recipe)
                trials += [first, tuned(s, arm, factors | TUNED, seed, first)]
    return trials


def optimizer(s: Setting) -> list[Trial]:
    """Table 7: two ResNets pre-trained with Adam or SGD, then fine-tuned in the same way."""
    trials = []
    for seed in range(s.seeds):
        for size, arm in (("small", resnet(s, 0)), ("large", resnet(s, 4 if s.paper else 2))):
            adam = pretraining(s, arm, seed)
            for kind, recipe in (("adam", adam), ("sgd", with_sgd(adam, paper=s.paper))):
                factors = {"optimizer": kind, "size": size}
                first = make_trial(factors | {"phase": "pretrained"}, recipe)
                trials += [first, tuned(s, arm, factors | TUNED, seed, first)]
    return trials


def resolution(s: Setting) -> list[Trial]:
    """Sec. 3.2: one pre-training, fine-tuned at increasing sizes with each way of resizing positions."""
    side = 224 if s.paper else s.pixels
    sides = {"1x": side, "larger": 288 if s.paper else side * 3 // 2, "largest": 384 if s.paper else side * 2}
    trials = []
    arm = vit(s, 1)
    for seed in range(s.seeds):
        first = make_trial({"phase": "pretrained"}, pretraining(s, arm, seed))
        trials.append(first)
        for size, pixels in sides.items():
            for convention in CONVENTIONS if pixels != side else ("none",):
                resize = "" if convention == "none" else convention
                factors = TUNED | {"size": size, "pixels": pixels, "resize": convention}
                trials.append(tuned(s, arm, factors, seed, first, pixels=pixels, resize=resize))
    return trials


TUNED: dict[str, Factor] = {"phase": "tuned"}
TABLE_6: dict[str, Any] = {"tuned": "yes"}  # at the paper's scale, accuracy is measured after fine-tuning


def model_of(family: str, size: str) -> dict[str, Factor]:
    return at(family=family, size=size, **TABLE_6)


def data_claims(small: str, large: str, convolutional: str) -> tuple[Claim, ...]:
    """The claims of Fig. 4; `small` and `convolutional` need about the same compute."""
    return (
        Claim(text="with little data, ResNets are better than ViTs", left=at(model=convolutional, share="3%"),
              right=at(model=small, share="3%"), source="Fig. 4"),
        Claim(text="with much data, ViTs are better than ResNets", left=at(model=small, share="100%"),
              right=at(model=convolutional, share="100%"), source="Fig. 4"),
        Claim(text="the curves cross: ResNets are ahead on little data, ViTs on much",
              left=at(model=small), right=at(model=convolutional), measure="crossing",
              source="Fig. 4: between 9 and 90 million images"),
        Claim(text="ViTs gain more from data than ResNets", left=at(model=small, share="100%"),
              right=at(model=convolutional, share="100%"), source="Fig. 4",
              baseline=(at(model=small, share="3%"), at(model=convolutional, share="3%"))),
        Claim(text="larger ViTs gain more from data than smaller ones", source="Fig. 4",
              left=at(model=large, share="100%"), right=at(model=small, share="100%"),
              baseline=(at(model=large, share="3%"), at(model=small, share="3%"))),
        Claim(text="attention distance grows with depth", left=at(model=large, share="100%"), right=None,
              score="attention_growth", unit=UNIFORM, source="Fig. 7, right"),
        Claim(text="with little data, the first layer attends less locally than with much",
              left=at(model=large, share="3%"), right=at(model=large, share="100%"), score="attention_first",
              unit=UNIFORM, source="Raghu et al., NeurIPS 2021"),
    )  # fmt: skip


UNIFORM = "points of the distance of uniform attention"


TABLE_5 = "Table 5, ImageNet, ViT-B/16 and L/16"


def set_claims(small: str, large: str, convolutional: str) -> tuple[Claim, ...]:
    """The claims of Fig. 3 for a ViT, a larger ViT with the same patch size, and a BiT ResNet."""
    vits = {size: at(family="ViT", size=size, **TUNED) for size in (small, large)}
    bit = at(family="BiT", size=convolutional, **TUNED)
    first, last = at(order="first"), at(order="last")
    return (
        Claim(text="pre-trained on the smallest set, the larger model is not better",
              left=first | vits[small], right=first | vits[large], printed=(1.38,), source=TABLE_5),
        Claim(text="pre-trained on the largest set, the larger model is better", left=last | vits[large],
              right=last | vits[small], printed=(2.97,), source=TABLE_5),
        Claim(text="more pre-training data is better", left=last | vits[large], right=first | vits[large],
              printed=(10.59,), source=TABLE_5),
        Claim(text="pre-trained on the smallest set, a large ViT is worse than a BiT ResNet",
              left=first | bit, right=first | vits[large], source="Fig. 3"),
        Claim(text="pre-trained on the largest set, a large ViT is better than a BiT ResNet",
              left=last | vits[large], right=last | bit, source="Fig. 3"),
        Claim(text="the curves cross: BiT ResNets are ahead on small sets, a large ViT on large ones",
              left=vits[large], right=bit, measure="crossing", along="pretrain_images", source="Fig. 3"),
    )  # fmt: skip


COMPARISONS = (
    Study(
        name="scaling", shows="Fig. 5, Table 6", make=scaling, score="fewshot_mean", convolutions=True,
        about="ViTs, hybrids and ResNets of growing size: transfer accuracy against training compute",
        fitted=("family",), predicted=at(size=LARGEST), published=("Table 6",),
        claims=(
            Claim(text="ViTs need less compute than ResNets for the same accuracy (2 to 4 times less)",
                  left=at(family="ViT"), right=at(family="ResNet"), measure="compute", printed=(2.0, 4.0),
                  source="Fig. 5"),
            Claim(text="at small compute, hybrids are better than ViTs",
                  left=at(family="hybrid", size="small"), right=at(family="ViT", size="small"),
                  printed=(1.43,), source="Table 6, ImageNet, R50+ViT-B/16"),
            Claim(text="for larger models, hybrids and ViTs are equally good",
                  left=at(family="hybrid", size="large"), right=at(family="ViT", size="large"),
                  relation="equal", printed=(0.0,), source="Table 6, ImageNet, R50+ViT-L/16"),
            Claim(text="ViTs do not saturate in the range tested",
                  left=at(family="ViT", size="large"), right=at(family="ViT", size="medium"),
                  printed=(0.96,), source="Table 6, ImageNet, ViT-H/14 and L/16"),
        ),
        paper=(
            Claim(text="ViTs need less compute than ResNets for the same accuracy (2 to 4 times less)",
                  left=at(family="ViT", **TABLE_6), right=at(family="ResNet", **TABLE_6), measure="compute",
                  score="top1"),
            Claim(text="at small compute, hybrids are better than ViTs (R50+ViT-B/16 and ViT-B/16, 7 epochs)",
                  left=model_of("hybrid", "R50+ViT-B/16 7ep"), right=model_of("ViT", "ViT-B/16 7ep"),
                  score="top1"),
            Claim(text="for larger models, both are equally good (R50+ViT-L/16 and ViT-L/16, 14 epochs)",
                  left=model_of("hybrid", "R50+ViT-L/16 14ep"), right=model_of("ViT", "ViT-L/16 14ep"),
                  relation="equal", score="top1"),
            Claim(text="ViTs do not saturate in the range tested (ViT-H/14 above ViT-L/16)",
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
        about="nested subsets of one data set, the same hyperparameters, early stopping",
        claims=data_claims("ViT", "ViT, larger", "ResNet"),
        paper=data_claims("ViT-B/32", "ViT-L/16", "BiT-R50x1"),
        pictures=(Picture(title="few-shot accuracy and pre-training images (Fig. 4)", x="train_images",
                          lines=("model",), log_x=True, x_label="images to pre-train on"),
                  Picture(title="attention distance of the first layer, and pre-training images",
                          x="train_images", y="attention_first", lines=("model",), log_x=True,
                          x_label="images to pre-train on")),
    ),
    Study(
        name="pretrain-sets", shows="Fig. 3, Table 5", make=pretrain_sets, score="top1", convolutions=True,
        about="ViTs and BiT ResNets pre-trained on data sets of growing size, then fine-tuned on one",
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
        about="ResNets pre-trained with Adam or SGD, then fine-tuned the same way",
        claims=(
            Claim(text="a small ResNet pre-trained with Adam transfers better than with SGD",
                  left=at(optimizer="adam", size="small", **TUNED),
                  right=at(optimizer="sgd", size="small", **TUNED), printed=(0.54,),
                  source="Table 7, average"),
            Claim(text="a large ResNet pre-trained with Adam transfers better than with SGD",
                  left=at(optimizer="adam", size="large", **TUNED),
                  right=at(optimizer="sgd", size="large", **TUNED), printed=(0.29,),
                  source="Table 7, average"),
        ),
        pictures=(Picture(title="accuracy after fine-tuning (Table 7)", x="size", kind="bars",
                          lines=("optimizer",), where=TUNED),),
    ),
    Study(
        name="resolution", shows="Sec. 3.2, App. B.1", make=resolution, score="top1",
        about="one pre-training, fine-tuned at growing resolutions with four ways to resize positions",
        claims=(
            Claim(text="fine-tuning at a higher resolution helps",
                  left=at(size="largest", resize="official", **TUNED), right=at(size="1x", **TUNED),
                  source="Sec. 3.2"),
            Claim(text="how positions are resized does not matter after fine-tuning (timm's)",
                  left=at(size="largest", resize="official", **TUNED),
                  right=at(size="largest", resize="timm", **TUNED), relation="equal"),
            Claim(text="how positions are resized does not matter after fine-tuning (torchvision's)",
                  left=at(size="largest", resize="official", **TUNED),
                  right=at(size="largest", resize="torchvision", **TUNED), relation="equal"),
        ),
        pictures=(Picture(title="accuracy and resolution", x="pixels", lines=("resize",), where=TUNED,
                          x_label="pixels of a side"),),
    ),
)  # fmt: skip
STUDIES: dict[str, Study] = {study.name: study for study in (*COMPARISONS, *PARTS, SELF_SUPERVISION, RECIPES)}


def study(name: str) -> Study:
    if name not in STUDIES:
        raise Error(
            f"unknown study {name!r};{did_you_mean(name, STUDIES)} known: {', '.join(STUDIES)}",
            code="study.unknown",
        )
    return STUDIES[name]


def listed() -> list[dict[str, Any]]:
    """The rows of `vitkit study list`."""
    return [{"study": s.name, "shows": s.shows, "about": s.about} for s in STUDIES.values()]
