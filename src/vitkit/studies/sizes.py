"""Studies of size: compute, data, pre-training sets, ResNets' optimizers, resolution (Fig. 3-5, Table 7)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitkit.studies.setting import (
    Setting,
    finetuning,
    members,
    pretraining,
    resnet,
    stochastic,
    vit,
)
from vitkit.studies.shapes import at
from vitkit.studies.study import Claim, Factor, Picture, Study, Trial, trial
from vitkit.training.schedule import Duration

FAMILIES = ("ViT", "ResNet", "hybrid")
TWICE = ("ViT-L/16", "BiT-R152x2", "R50+ViT-L/16")  # trained for 7 epochs and for 14 in Table 6
FOURTEEN = ("ViT-H/14",)  # whose patches do not fit 384 pixels
SHARES = ("3%", "10%", "30%", "100%")  # 9M, 30M, 90M and all 303M of JFT
CONVENTIONS = ("official", "timm", "hf", "torchvision")


def scaling(s: Setting) -> list[Trial]:
    """Fig. 5: three families on one axis; at the paper's scale fine-tuned too, as in Table 6."""
    made = []
    for seed in range(s.seeds):
        for family in FAMILIES:
            for size, arm in members(s, family):
                first = pretraining(s, arm, seed)
                lengths = [("", first)]
                if s.paper and arm.model in TWICE:
                    lengths.append((" 14ep", replace(first, length=Duration(epochs=14))))
                for mark, recipe in lengths:
                    factors = {"family": family, "size": size + mark}
                    made.append(trial(factors, recipe))
                    if s.paper:
                        tuned = finetuning(s, seed, pixels=392 if arm.model in FOURTEEN else 0)
                        made.append(trial(factors | {"tuned": "yes"}, tuned, needs=made[-1].name))
    return made


def data_size(s: Setting) -> list[Trial]:
    """Fig. 4: nested parts of one data set, the same hyper-parameters for all, early stopping."""
    arms = {"ViT": vit(s, 0), "ViT, larger": vit(s, 1), "ResNet": resnet(s, 0)}
    if s.paper:
        arms |= {"ViT, larger": vit(s, 3), "ResNet, larger": resnet(s, 4)}
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


def pretrain_sets(s: Setting) -> list[Trial]:
    """Fig. 3: two sizes of ViT pre-trained on larger and larger sets, then fine-tuned on one."""
    if len(s.data) > 1:
        sets = [(Path(place).stem or place, place, "") for place in s.data]
    else:
        sets = [(share, s.data[0], "" if share == "100%" else share) for share in ("3%", "30%", "100%")]
    arms = {"small": vit(s, 0), "large": vit(s, 3 if s.paper else 2)}
    made = []
    for seed in range(s.seeds):
        for number, (name, place, share) in enumerate(sets):
            order = "last" if number == len(sets) - 1 else "first" if not number else f"number {number + 1}"
            for size, arm in arms.items():
                factors = {"set": name, "order": order, "size": size}
                first = trial(
                    factors | {"phase": "pretrained"}, pretraining(s, arm, seed, data=place, subset=share)
                )
                after = trial(factors | {"phase": "tuned"}, finetuning(s, seed), needs=first.name)
                made += [first, after]
    return made


def optimizer(s: Setting) -> list[Trial]:
    """Table 7: two ResNets pre-trained with Adam and with SGD, then fine-tuned alike."""
    made = []
    for seed in range(s.seeds):
        for size, arm in (("small", resnet(s, 0)), ("large", resnet(s, 4 if s.paper else 2))):
            adam = pretraining(s, arm, seed)
            for kind, recipe in (("adam", adam), ("sgd", stochastic(adam))):
                factors = {"optimizer": kind, "size": size}
                first = trial(factors | {"phase": "pretrained"}, recipe)
                made += [
                    first,
                    trial(factors | {"phase": "tuned"}, finetuning(s, seed), needs=first.name),
                ]
    return made


def resolution(s: Setting) -> list[Trial]:
    """Sec. 3.2: one pre-training, fine-tuned at growing sizes with each way of resizing positions."""
    side = 224 if s.paper else s.pixels
    grown = {"1x": side, "larger": 288 if s.paper else side * 3 // 2, "largest": 384 if s.paper else side * 2}
    made = []
    for seed in range(s.seeds):
        first = trial({"phase": "pretrained"}, pretraining(s, vit(s, 1), seed))
        made.append(first)
        for size, pixels in grown.items():
            for convention in CONVENTIONS if pixels != side else ("none",):
                recipe = finetuning(s, seed, pixels=pixels)
                resize = "" if convention == "none" else convention
                factors = TUNED | {"size": size, "pixels": pixels, "resize": convention}
                made.append(trial(factors, recipe, needs=first.name, resize=resize))
    return made


TUNED: dict[str, Factor] = {"phase": "tuned"}
COMPARISONS = (
    Study(
        name="scaling", shows="Fig. 5, Table 6", make=scaling, score="fewshot_mean", convolutions=True,
        about="ViTs, hybrids and ResNets of growing size: transfer accuracy against training compute",
        fitted=("family",),
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
        pictures=(Picture(title="accuracy and compute (Fig. 5)", x="exaFLOPs", lines=("family",), log_x=True,
                          x_label="exaFLOPs of pre-training"),),
    ),
    Study(
        name="data-size", shows="Fig. 4", make=data_size, score="fewshot_mean", convolutions=True,
        about="nested parts of one data set, the same hyper-parameters, early stopping",
        claims=(
            Claim(text="on little data ResNets are better than ViTs", left=at(model="ResNet", share="3%"),
                  right=at(model="ViT", share="3%")),
            Claim(text="on much data ViTs are better than ResNets", left=at(model="ViT", share="100%"),
                  right=at(model="ResNet", share="100%")),
            Claim(text="ViTs gain more from data than ResNets", left=at(model="ViT", share="100%"),
                  right=at(model="ResNet", share="100%"),
                  since=(at(model="ViT", share="3%"), at(model="ResNet", share="3%"))),
            Claim(text="larger ViTs gain more from data than smaller ones",
                  left=at(model="ViT, larger", share="100%"), right=at(model="ViT", share="100%"),
                  since=(at(model="ViT, larger", share="3%"), at(model="ViT", share="3%"))),
        ),
        pictures=(Picture(title="few-shot accuracy and pre-training images (Fig. 4)", x="train_images",
                          lines=("model",), log_x=True, x_label="images to pre-train on"),),
    ),
    Study(
        name="pretrain-sets", shows="Fig. 3, Table 5", make=pretrain_sets, score="top1",
        about="two sizes of ViT pre-trained on larger and larger sets, then fine-tuned on one",
        claims=(
            Claim(text="pre-trained on the smallest set, the larger model is not better",
                  left=at(order="first", size="small", **TUNED),
                  right=at(order="first", size="large", **TUNED)),
            Claim(text="pre-trained on the largest set, it is",
                  left=at(order="last", size="large", **TUNED),
                  right=at(order="last", size="small", **TUNED)),
            Claim(text="more pre-training data is better", left=at(order="last", size="large", **TUNED),
                  right=at(order="first", size="large", **TUNED)),
        ),
        pictures=(Picture(title="accuracy after fine-tuning, by pre-training set (Fig. 3)", x="set",
                          kind="bars", lines=("size",), where=TUNED),),
    ),
    Study(
        name="optimizer", shows="Table 7", make=optimizer, score="top1", convolutions=True,
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
