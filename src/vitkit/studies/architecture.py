"""Studies of model parts: positions, heads, shape, axial attention, augmentation (App. D, AugReg)."""

from dataclasses import replace
from itertools import product
from typing import Any

from vitkit.recipes.pretrain import AUGREG
from vitkit.recipes.recipe import Recipe
from vitkit.recipes.values import ModelOptions
from vitkit.studies.setting import Arm, Setting, pretraining, resnet, scaled_rate, vit
from vitkit.studies.study import Claim, Factor, Picture, Study, Trial, make_trial
from vitkit.training.schedule import Duration

CELLS = (  # Table 8: kinds of position embedding, and where they are added
    ("none", "stem"), ("1d", "stem"), ("1d", "every"), ("1d", "shared"),
    ("2d", "stem"), ("2d", "every"), ("2d", "shared"), ("relative", "stem"),
)  # fmt: skip
HYPER = (  # Fig. 10: name; length, rate and weight decay relative to Table 8
    ("low rate and decay", 1.0, 0.5, 0.1), ("twice as long", 2.0, 1.0, 1.0),
)  # fmt: skip
RATES = {"lower": 3 / 8, "same": 1.0, "higher": 8 / 3}  # relative to the class token's of Fig. 9
HEAD_RATES = (("token", "same"), ("gap", "same"), ("gap", "lower"), ("map", "same"))  # Fig. 9, and pooling
OTHER_RATES = (("token", "lower"), ("token", "higher"), ("gap", "higher"))
DECAYS = (0.1, 0.03)  # AugReg's weight decays
REGULARISATION = {"no": 0.0, "yes": 0.1}  # dropout and stochastic depth


def base(s: Setting) -> Arm:
    """The model that studies vary: ViT-B/16 at the paper's scale."""
    return vit(s, 1)


def positions(s: Setting) -> list[Trial]:
    """Table 8: position embeddings of all kinds; Fig. 10: other hyper-parameters."""
    trials = []
    for seed in range(s.seeds):
        for kind, where in CELLS:
            arm = base(s).having(positions=kind, injection=where)
            factors = {"positions": kind, "injection": where, "hyper": "default"}
            trials.append(make_trial(factors, pretraining(s, arm, seed)))
    for name, length, rate, decay in HYPER:  # only their embeddings are shown, so one seed is enough
        r = scaled_rate(pretraining(s, base(s), 0), rate)
        r = replace(r, optimizer=replace(r.optimizer, weight_decay=r.optimizer.weight_decay * decay))
        trials.append(make_trial({"positions": "1d", "injection": "stem", "hyper": name}, longer(r, length)))
    return trials


def longer(recipe: Recipe, factor: float) -> Recipe:
    """The recipe with its length multiplied by a factor, and the same warm-up."""
    length = recipe.length
    if length.epochs is not None:
        return replace(recipe, length=Duration(epochs=length.epochs * factor))
    return replace(recipe, length=Duration(steps=round((length.steps or 1) * factor)))


def heads(s: Setting) -> list[Trial]:
    """Fig. 9: class token and average pooling at several rates, and attention pooling.

    A short run needs a higher rate than the paper's, so miniatures have rates on both sides.
    """
    trials = []
    rates = HEAD_RATES if s.paper else HEAD_RATES + OTHER_RATES
    for seed in range(s.seeds):
        for head, rate in rates:
            evaluation: dict[str, Any] = {"evaluations": 6, "val": 0.02, "fewshot_when": "evaluations"}
            recipe = pretraining(s, base(s).having(head=head), seed, **evaluation)
            trials.append(make_trial({"head": head, "rate": rate}, scaled_rate(recipe, RATES[rate])))
    return trials


def shape(s: Setting) -> list[Trial]:
    """Fig. 8: each dimension alone scaled 2x and 4x, then all together."""
    if s.paper:
        sizes, patch, head_count = {"width": 1024, "depth": 8, "hidden": 2048}, 32, 16
        arm = Arm("ViT-B/32", ModelOptions(representation=0))
    else:
        sizes = {"width": 64 << s.level, "depth": 2, "hidden": 128 << s.level}
        patch, head_count = s.patch, 2 << s.level
        arm = vit(s, 0)
    trials = []
    for seed in range(s.seeds):
        for scaled, factor, options, patch_size in shapes(sizes, patch):
            head_options = {"heads": head_count * options["width"] // sizes["width"]}
            variant = arm.having(**options, **head_options, patch=patch_size)
            trials.append(make_trial({"scaled": scaled, "factor": factor}, pretraining(s, variant, seed)))
    return trials


def shapes(sizes: dict[str, int], patch: int) -> list[tuple[str, int, dict[str, int], int]]:
    """(scaled dimension, factor, sizes, patch size) of every point of Fig. 8."""
    points = [("nothing", 1, sizes, patch)]
    for factor in (2, 4):
        for name, field in (("depth", "depth"), ("width", "width"), ("MLP width", "hidden")):
            points.append((name, factor, sizes | {field: sizes[field] * factor}, patch))
    points.append(("patch", 2, sizes, patch // 2))
    points.append(("all", 2, {name: value * 2 for name, value in sizes.items()}, patch // 2))
    return points


def axial(s: Setting) -> list[Trial]:
    """Fig. 13: axial and full attention at two patch sizes, and a ResNet with and without axial attention."""
    trials = []
    for seed in range(s.seeds):
        for factor, size in ((1, "large"), (2, "small")):
            name = f"B/{32 // factor}" if s.paper else f"Ti/{s.patch // factor}"
            options = ModelOptions() if s.paper else vit(s, 1).options
            for attention, prefix in (("full", "ViT"), ("axial", "Axial-ViT")):
                arm = Arm(f"{prefix}-{name}", options)
                trials.append(make_trial({"attention": attention, "patch": size}, pretraining(s, arm, seed)))
        convolutional = resnet(s, 0)
        axial_resnet = Arm("AxialResNet-50", convolutional.options)
        for attention, arm in (("ResNet", convolutional), ("AxialResNet", axial_resnet)):
            trials.append(make_trial({"attention": attention, "patch": "none"}, pretraining(s, arm, seed)))
    return trials


def augreg(s: Setting) -> list[Trial]:
    """AugReg: augmentation and regularisation, on all of the data and on parts of it.

    At the paper's scale this is its sweep of 28 runs on ImageNet-21k with two weight decays, and four more.
    """
    levels = tuple(AUGREG) if s.paper else ("none", "light2", "medium2", "strong2")
    grid = [(level, regular, "100%") for level in levels for regular in REGULARISATION]
    grid += [(level, "no", "10%") for level in ("none", "medium2")]
    grid += [] if s.paper else [("none", "no", "30%")]  # between them, to say what augmentation is worth
    trials = []
    for seed, (level, regular, share) in product(range(s.seeds), grid):
        layers, magnitude, mixup = AUGREG[level]
        recipe = pretraining(
            s, base(s), seed, row="augreg-i21k.ViT-B/16", mixup=mixup,
            randaugment=(layers, magnitude) if layers else (), dropout=REGULARISATION[regular],
            stochastic_depth=REGULARISATION[regular], subset="" if share == "100%" else share,
        )  # fmt: skip
        factors = at(augmentation=level, regularisation=regular, share=share)
        for decay in DECAYS if s.paper else (recipe.optimizer.weight_decay,):
            decayed = replace(recipe, optimizer=replace(recipe.optimizer, weight_decay=decay))
            trials.append(make_trial(factors | ({"weight decay": decay} if s.paper else {}), decayed))
    return trials


def at(**factors: Factor) -> dict[str, Factor]:
    """A setting of some factors, written as keyword arguments."""
    return factors


def cell(kind: str, where: str) -> dict[str, Factor]:
    return at(positions=kind, injection=where, hyper="default")


def augmented(share: str) -> dict[str, Factor]:
    """AugReg's augmentation without regularisation, on a share of the data."""
    return at(augmentation="medium2", regularisation="no", share=share)


def without(share: str) -> dict[str, Factor]:
    """Neither augmentation nor regularisation."""
    return NEITHER | at(share=share)


NEITHER = at(augmentation="none", regularisation="no")
FIG_9 = (
    Claim(text="average pooling at the learning rate of the class token is worse", source="Fig. 9",
          left=at(head="token", rate="same"), right=at(head="gap", rate="same")),
    Claim(text="average pooling at a lower learning rate is as good", source="Fig. 9",
          left=at(head="gap", rate="lower"), right=at(head="token", rate="same"), relation="not below"),
)  # fmt: skip
AUGREG_4 = "AugReg, Fig. 4, ImageNet-21k"
STEM = cell("1d", "stem")
PARTS = (
    Study(
        name="positions", shows="Table 8, Fig. 10", make=positions, score="fewshot_mean",
        published=("Table 8",),
        about="four kinds of position embedding, added at the stem, before every layer, or shared by layers",
        claims=(
            Claim(text="without position embeddings a model is worse than with any",
                  left=STEM, right=cell("none", "stem"), printed=(2.82,), source="Table 8"),
            Claim(text="2-D embeddings are not better than 1-D ones", printed=(0.21,), source="Table 8",
                  left=STEM, right=cell("2d", "stem"), relation="not below"),
            Claim(text="relative embeddings are not better than 1-D ones", printed=(0.17,), source="Table 8",
                  left=STEM, right=cell("relative", "stem"), relation="not below"),
            Claim(text="it makes little difference whether 1-D embeddings are added before every layer",
                  left=STEM, right=cell("1d", "every"), relation="equal", printed=(0.24,), source="Table 8"),
            Claim(text="it makes little difference whether the layers share 1-D embeddings",
                  left=STEM, right=cell("1d", "shared"), relation="equal", printed=(-0.09,),
                  source="Table 8"),
        ),
        pictures=(Picture(title="Table 8 as a figure", x="positions", lines=("injection",), kind="bars",
                          where=at(hyper="default")),
                  Picture(title="similarity of position embeddings (Fig. 10)", x="", kind="similarity",
                          lines=("hyper",), where=at(positions="1d", injection="stem"))),
    ),
    Study(
        name="heads", shows="Fig. 9", paper=FIG_9, make=heads, score="fewshot_mean",
        published=("Fig. 9",),
        about="class token and average pooling at several learning rates, and attention pooling",
        claims=(
            *FIG_9,
            Claim(text="each at its best learning rate, average pooling is as good as the class token",
                  left=at(head="gap"), right=at(head="token"), relation="not below", best="rate",
                  source="Fig. 9"),
        ),
        pictures=(
            Picture(title="few-shot accuracy during training (Fig. 9)", x="step", lines=("head", "rate"),
                    kind="history"),
            Picture(title="at the end", x="head", lines=("rate",), kind="bars"),
        ),
    ),
    Study(
        name="shape", shows="Fig. 8", make=shape, score="fewshot_mean", fitted=("scaled",),
        published=("Fig. 8",),
        about="depth, width, MLP width and patch size, each alone and all together",
        claims=(
            Claim(text="depth helps more than width",
                  left=at(scaled="depth", factor=4), right=at(scaled="width", factor=4), source="Fig. 8"),
            Claim(text="depth helps",
                  left=at(scaled="depth", factor=4), right=at(scaled="nothing", factor=1),
                  source="Fig. 8"),
            Claim(text="smaller patches help, without more parameters",
                  left=at(scaled="patch", factor=2), right=at(scaled="nothing", factor=1),
                  source="Fig. 8"),
            Claim(text="all dimensions together help",
                  left=at(scaled="all", factor=2), right=at(scaled="nothing", factor=1), source="Fig. 8"),
        ),
        pictures=(Picture(title="accuracy and compute by enlarged dimension (Fig. 8)", x="relative_compute",
                          lines=("scaled",), log_x=True,
                          x_label="compute per image, relative to the smallest model"),),
    ),
    Study(
        name="axial", shows="Fig. 13", make=axial, score="fewshot_mean", convolutions=True,
        published=("Fig. 13",),
        about="axial attention (rows, then columns) in two ViTs and a ResNet, compared with standard models",
        claims=(
            Claim(text="axial attention is better than full attention with large patches, at more compute",
                  left=at(attention="axial", patch="large"), right=at(attention="full", patch="large"),
                  source="Fig. 13"),
            Claim(text="axial attention is better than full attention with small patches",
                  left=at(attention="axial", patch="small"), right=at(attention="full", patch="small"),
                  source="Fig. 13"),
            Claim(text="a ResNet is better with axial attention instead of 3x3 convolutions",
                  left=at(attention="AxialResNet"), right=at(attention="ResNet"), source="Fig. 13"),
        ),
        pictures=(
            Picture(title="accuracy and compute (Fig. 13, left)", x="exaFLOPs", lines=("attention",),
                    log_x=True, x_label="exaFLOPs of training"),
            Picture(title="accuracy and speed (Fig. 13, right)", x="images_per_second", lines=("attention",),
                    log_x=True, x_label="training images per second"),
        ),
    ),
    Study(
        name="augreg", shows="AugReg, Fig. 4", make=augreg, score="top1",
        published=("AugReg, Fig. 4",),
        about="augmentation and regularisation, on all of the data and on parts of it",
        claims=(
            Claim(text="augmentation helps more than dropout and stochastic depth",
                  left=augmented("100%"), right=at(augmentation="none", regularisation="yes", share="100%"),
                  printed=(3.0,), source=AUGREG_4),
            Claim(text="with augmentation, regularisation does not help",
                  left=augmented("100%"), printed=(2.0,), source=AUGREG_4,
                  right=at(augmentation="medium2", regularisation="yes", share="100%")),
            Claim(text="augmentation helps more with little data than with much data",
                  left=augmented("10%"), right=augmented("100%"), baseline=(without("10%"), without("100%")),
                  printed=(4.0,), source="AugReg, Fig. 4, ImageNet-1k less ImageNet-21k"),
            Claim(text="on a tenth of the data, augmentation is worth more than twice the data",
                  left=augmented("10%"), right=NEITHER, measure="data", printed=(10.0,),
                  source="AugReg, abstract"),
        ),
        pictures=(Picture(title="accuracy by augmentation", x="augmentation", kind="bars",
                          lines=("regularisation", "share")),),
    ),
)  # fmt: skip
