"""Published results in per cent, copied from the papers, and the report sections that compare with them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from markupsafe import Markup

from vitkit.metrics.intervals import decimals
from vitkit.report.html import Number, fill

PUBLISHED = "Published results"  # section title
PAPER = "Dosovitskiy et al., ICLR 2021"
Cell = str | float | None


@dataclass(frozen=True)
class Sheet:
    """A published table with its source and a note."""

    title: str
    source: str
    rows: Sequence[Mapping[str, Cell]] = ()
    note: str = ""


@dataclass(frozen=True)
class Score:
    """One published accuracy."""

    model: str
    pretrained: str
    value: float
    std: float | None
    source: str


TABLE_2 = {  # task: (mean, standard deviation over three fine-tunings) of each of MODELS_2
    "ImageNet": ((88.55, 0.04), (87.76, 0.03), (85.30, 0.02), (87.54, 0.02), (88.4, None)),
    "ImageNet ReaL": ((90.72, 0.05), (90.54, 0.03), (88.62, 0.05), (90.54, None), (90.55, None)),
    "CIFAR-10": ((99.50, 0.06), (99.42, 0.03), (99.15, 0.03), (99.37, 0.06), None),
    "CIFAR-100": ((94.55, 0.04), (93.90, 0.05), (93.25, 0.05), (93.51, 0.08), None),
    "Pets": ((97.56, 0.03), (97.32, 0.11), (94.67, 0.15), (96.62, 0.23), None),
    "Flowers-102": ((99.68, 0.02), (99.74, 0.00), (99.61, 0.02), (99.63, 0.03), None),
    "VTAB-1k": ((77.63, 0.23), (76.28, 0.46), (72.72, 0.21), (76.29, 1.70), None),
}
MODELS_2 = (
    ("ViT-H/14", "JFT-300M"), ("ViT-L/16", "JFT-300M"), ("ViT-L/16", "ImageNet-21k"),
    ("BiT-L (R152x4)", "JFT-300M"), ("Noisy Student (EfficientNet-L2)", "ImageNet, JFT-300M unlabelled"),
)  # fmt: skip
CORE_DAYS = (2500, 680, 230, 9900, 12300)  # TPUv3
TASKS_5 = ("CIFAR-10", "CIFAR-100", "ImageNet", "ImageNet ReaL", "Flowers-102", "Pets")
MODELS_5 = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14")
TABLE_5 = {  # by pre-training set: rows are tasks, columns are models
    "ImageNet": (
        (98.13, 97.77, 97.86, 97.94, None), (87.13, 86.31, 86.35, 87.07, None),
        (77.91, 73.38, 76.53, 71.16, None), (83.57, 79.56, 82.19, 77.83, None),
        (89.49, 85.43, 89.66, 86.36, None), (93.81, 92.04, 93.64, 91.35, None),
    ),
    "ImageNet-21k": (
        (98.95, 98.79, 99.16, 99.13, 99.27), (91.67, 91.97, 93.44, 93.04, 93.82),
        (83.97, 81.28, 85.15, 80.99, 85.13), (88.35, 86.63, 88.40, 85.65, 88.70),
        (99.38, 99.11, 99.61, 99.19, 99.51), (94.43, 93.02, 94.73, 93.09, 94.82),
    ),
    "JFT-300M": (
        (99.00, 98.61, 99.38, 99.19, 99.50), (91.87, 90.49, 94.04, 92.52, 94.55),
        (84.15, 80.73, 87.12, 84.37, 88.04), (88.85, 86.27, 89.99, 88.28, 90.33),
        (99.56, 99.27, 99.56, 99.45, 99.68), (95.80, 93.40, 97.11, 95.83, 97.56),
    ),
}  # fmt: skip
TASKS_6 = ("ImageNet", "ImageNet ReaL", "CIFAR-10", "CIFAR-100", "Pets", "Flowers-102")
TABLE_6 = (  # model, epochs of JFT-300M, accuracies by task, exaFLOPs of pre-training
    ("ViT-B/32", 7, (80.73, 86.27, 98.61, 90.49, 93.40, 99.27), 55),
    ("ViT-B/16", 7, (84.15, 88.85, 99.00, 91.87, 95.80, 99.56), 224),
    ("ViT-L/32", 7, (84.37, 88.28, 99.19, 92.52, 95.83, 99.45), 196),
    ("ViT-L/16", 7, (86.30, 89.43, 99.38, 93.46, 96.81, 99.66), 783),
    ("ViT-L/16", 14, (87.12, 89.99, 99.38, 94.04, 97.11, 99.56), 1567),
    ("ViT-H/14", 14, (88.08, 90.36, 99.50, 94.71, 97.11, 99.71), 4262),
    ("BiT-R50x1", 7, (77.54, 84.56, 97.67, 86.07, 91.11, 94.26), 50),
    ("BiT-R50x2", 7, (82.12, 87.94, 98.29, 89.20, 93.43, 97.02), 199),
    ("BiT-R101x1", 7, (80.67, 87.07, 98.48, 89.17, 94.08, 95.95), 96),
    ("BiT-R152x1", 7, (81.88, 87.96, 98.82, 90.22, 94.17, 96.94), 141),
    ("BiT-R152x2", 7, (84.97, 89.69, 99.06, 92.05, 95.37, 98.62), 563),
    ("BiT-R152x2", 14, (85.56, 89.89, 99.24, 91.92, 95.75, 98.75), 1126),
    ("BiT-R200x3", 14, (87.22, 90.15, 99.34, 93.53, 96.32, 99.04), 3306),
    ("R50+ViT-B/32", 7, (84.90, 89.15, 99.01, 92.24, 95.75, 99.46), 106),
    ("R50+ViT-B/16", 7, (85.58, 89.65, 99.14, 92.63, 96.65, 99.40), 274),
    ("R50+ViT-L/32", 7, (85.68, 89.04, 99.24, 92.93, 96.97, 99.43), 246),
    ("R50+ViT-L/16", 7, (86.60, 89.72, 99.18, 93.64, 97.03, 99.40), 859),
    ("R50+ViT-L/16", 14, (87.12, 89.76, 99.31, 93.89, 97.36, 99.11), 1668),
)
TABLE_7 = {  # BiT-R50x1 with Adam and SGD, BiT-R152x2 with Adam and SGD
    "ImageNet": (77.54, 78.24, 84.97, 84.37), "CIFAR-10": (97.67, 97.46, 99.06, 99.07),
    "CIFAR-100": (86.07, 85.17, 92.05, 91.06), "Pets": (91.11, 91.00, 95.37, 94.79),
    "Flowers-102": (94.26, 92.06, 98.62, 99.32), "average": (89.33, 88.79, 94.01, 93.72),
}  # fmt: skip
TABLE_8 = {  # added at the stem, before every layer, shared by all layers; ViT-B/16, ImageNet, 5 shots
    "none": (61.382, None, None), "1d": (64.206, 63.964, 64.292), "2d": (64.001, 64.046, 64.022),
    "relative": (64.032, None, None),
}  # fmt: skip
MODELS_9 = (("ViT-H/14", "JFT-300M"), ("ViT-L/16", "JFT-300M"), ("ViT-L/16", "ImageNet-21k"))
TABLE_9 = {
    "caltech101": (95.3, 95.4, 90.8), "cifar100": (85.5, 81.9, 84.1), "dtd": (75.2, 74.3, 74.1),
    "flowers102": (99.7, 99.7, 99.3), "pets": (97.2, 96.7, 92.7), "sun397": (65.0, 63.5, 61.0),
    "svhn": (88.9, 87.4, 80.9), "camelyon": (83.3, 83.6, 82.5), "eurosat": (96.7, 96.5, 95.6),
    "resisc45": (91.4, 89.7, 85.2), "retinopathy": (76.6, 77.1, 75.3), "clevr-count": (91.7, 86.4, 70.3),
    "clevr-distance": (63.8, 63.1, 56.1), "dmlab": (53.1, 49.7, 41.9),
    "dsprites-location": (79.4, 74.5, 74.7),
    "dsprites-orientation": (63.3, 60.5, 64.9), "kitti-distance": (84.5, 82.2, 79.9),
    "snorb-azimuth": (33.2, 36.2, 30.5), "snorb-elevation": (51.2, 51.1, 41.7),
}  # fmt: skip
GROUPS = ("Natural", "Specialized", "Structured", "VTAB-1k")
DRAWN = "only plotted (Fig. 2); no numbers are published"
FIG_2 = (  # Natural, Specialized, Structured and all 19 tasks; the ViT groups are means of Table 9
    ("ViT-H/14", "JFT-300M", (86.7, 87.0, 65.0, 77.63), "Tables 2 and 9"),
    ("ViT-L/16", "JFT-300M", (85.6, 86.7, 63.0, 76.28), "Tables 2 and 9"),
    ("ViT-L/16", "ImageNet-21k", (83.3, 84.7, 57.5, 72.72), "Tables 2 and 9"),
    ("BiT-L (R152x4)", "JFT-300M", (None, None, None, 76.29), "Table 2; groups are only plotted (Fig. 2)"),
    ("BiT-M (R152x4)", "ImageNet-21k", (80.77, 85.67, 61.08, 73.51), "README of big_transfer"),
    ("BiT-M (R101x3)", "ImageNet-21k", (80.29, 85.75, 59.40, 72.65), "README of big_transfer"),
    ("VIVI-Ex-100% (R50x3)", "YouTube and ImageNet", (None,) * 4, DRAWN),
    ("S4L (R50x1)", "ImageNet", (None,) * 4, DRAWN),
)  # fmt: skip
LEVELS = ("none", "light1", "light2", "medium1", "medium2", "strong1", "strong2")
AUGREG_4 = {  # ViT-B/16: upstream accuracy by augmentation level, without and with dropout 0.1
    ("ImageNet", "no"): (70, 76, 79, 79, 81, 80, 80), ("ImageNet", "yes"): (76, 79, 81, 82, 83, 82, 82),
    ("ImageNet-21k", "no"): (43, 48, 50, 51, 50, 50, 50),
    ("ImageNet-21k", "yes"): (47, 49, 49, 49, 48, 48, 48),
}  # fmt: skip
TEST_IMAGES = {
    "ImageNet": 50_000, "CIFAR-10": 10_000, "CIFAR-100": 10_000, "Pets": 3_669, "Flowers-102": 6_149,
}  # fmt: skip
RECIPES = {"imagenet": "ImageNet", "table2": "ImageNet", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100",
           "pets": "Pets", "flowers": "Flowers-102"}  # fmt: skip
ALIASES = {  # common names of data set folders and files, in lower case without punctuation
    "ImageNet": ("imagenet", "imagenet1k", "imagenet2012", "ilsvrc", "ilsvrc2012", "in1k"),
    "CIFAR-10": ("cifar10",), "CIFAR-100": ("cifar100",),
    "Pets": ("pets", "oxfordpets", "oxfordiiitpet", "oxfordiiitpets"),
    "Flowers-102": ("flowers", "flowers102", "102flowers", "oxfordflowers", "oxfordflowers102"),
}  # fmt: skip


def task_of(data: str, recipe: str = "", images: int | None = None) -> str | None:
    """The published task of a run, by the name of its data, or by its recipe and number of test images.

    A VTAB-1k task is "vtab:NAME"; None if nothing is published.
    """
    if (parts := data.split(":"))[0] == "vtab":
        return f"vtab:{parts[1]}" if len(parts) > 1 and parts[1] in TABLE_9 else None
    letters = re.sub(r"[^a-z0-9]", "", PurePath(data).stem.lower())
    for task, names in ALIASES.items():
        if letters in names:
            return task
    task = RECIPES.get(recipe.partition(".")[0], "")
    return task if task and TEST_IMAGES[task] == images else None


def scores(task: str) -> list[Score]:
    """The published scores of a task, Table 2 first."""
    if task.startswith("vtab:"):
        pairs = zip(MODELS_9, TABLE_9[task.removeprefix("vtab:")], strict=True)
        return [Score(model, data, value, None, "Table 9") for (model, data), value in pairs]
    results = [
        Score(model, data, score[0], score[1], "Table 2")
        for (model, data), score in zip(MODELS_2, TABLE_2.get(task, ()), strict=bool(TABLE_2.get(task)))
        if score
    ]
    for data, table in TABLE_5.items():
        row = dict(zip(TASKS_5, table, strict=True)).get(task, ())
        for model, value in zip(MODELS_5, row, strict=bool(row)):
            if value is not None:
                results.append(Score(model, data, value, None, "Table 5"))
    for model, epochs, values, _ in TABLE_6:
        by_task = dict(zip(TASKS_6, values, strict=True))
        if task in by_task:
            results.append(Score(f"{model}, {epochs} epochs", "JFT-300M", by_task[task], None, "Table 6"))
    return results


def sheet(name: str) -> Sheet:
    """A table by its number in the paper, or an empty one for a figure without published numbers."""
    plotted = Sheet(name, PAPER, (), "Only plotted; no numbers are published.")
    return SHEETS.get(name, plotted)


def table_row(first: Mapping[str, Cell], columns: Sequence[str], values: Sequence[Cell]) -> dict[str, Cell]:
    return dict(first) | dict(zip(columns, values, strict=True))


SHEETS = {
    "Table 5": Sheet(
        "Table 5: accuracy by pre-training set", PAPER,
        [table_row({"pre-trained on": data, "task": task}, MODELS_5, values)
         for data, table in TABLE_5.items() for task, values in zip(TASKS_5, table, strict=True)],
        "Top-1 in per cent after fine-tuning at 384 pixels. No numbers are published for the band of BiT "
        "models in Fig. 3.",
    ),
    "Table 6": Sheet(
        "Table 6: the scaling study, pre-trained on JFT-300M", PAPER,
        [table_row({"model": model, "epochs": epochs}, (*TASKS_6, "exaFLOPs"), (*values, cost))
         for model, epochs, values, cost in TABLE_6],
        "Top-1 in per cent after fine-tuning. 859 exaFLOPs is as printed, though half of 1668 would be 834.",
    ),
    "Table 7": Sheet(
        "Table 7: ResNets pre-trained with Adam or SGD", PAPER,
        [table_row({"task": task},
                   ("BiT-R50x1, Adam", "BiT-R50x1, SGD", "BiT-R152x2, Adam", "BiT-R152x2, SGD"), values)
         for task, values in TABLE_7.items()],
        "Top-1 in per cent.",
    ),
    "Table 8": Sheet(
        "Table 8: position embeddings of ViT-B/16", PAPER,
        [table_row({"positions": kind}, ("stem", "every layer", "shared by layers"), values)
         for kind, values in TABLE_8.items()],
        "ImageNet, 5 shots, in per cent.",
    ),
    "AugReg, Fig. 4": Sheet(
        "AugReg, Fig. 4: ViT-B/16 after 300 epochs", "Steiner et al., TMLR 2022",
        [table_row({"pre-trained on": data, "dropout and stochastic depth": regular}, LEVELS, values)
         for (data, regular), values in AUGREG_4.items()],
        "Accuracy on upstream validation images in per cent, rounded as printed.",
    ),
}  # fmt: skip


def number(value: float | None, std: float | None = None, digits: int = 2) -> Number:
    if value is None:
        return Number("–")
    return Number(f"{value:.{digits}f}" + ("" if std is None else f" ± {std:.2f}"))


def task_section(
    task: str | None, name: str, top1: float | None, std: float | None, images: int | None
) -> Markup:
    """The published results of a task with this run in the first row; empty if there are none."""
    if task is None or top1 is None:
        return Markup()
    digits = 2 if images is None else decimals(images)
    own_row = {
        "model": name, "pre-trained on": "", "top-1, %": number(100 * top1, std and 100 * std, digits),
        "source": "this report",
    }  # fmt: skip
    rows = [
        {"model": score.model, "pre-trained on": score.pretrained, "top-1, %": number(score.value, score.std),
         "source": score.source} for score in scores(task)
    ]  # fmt: skip
    first = [row for row in rows if row["source"] in ("Table 2", "Table 9")]
    rest = [row for row in rows if row not in first]
    expected = TEST_IMAGES.get(task)
    differs = expected is not None and images is not None and expected != images
    return fill(
        "published.html", "task", task.removeprefix("vtab:"), PAPER, [own_row, *first],
        (expected, images) if differs else None, rest,
    )  # fmt: skip


def run_section(run: Mapping[str, Any]) -> Markup:
    """The published results of a run's task."""
    test, recipe = (run["result"] or {}).get("test") or {}, run["recipe"]
    images = test.get("images")
    task = task_of(recipe.get("data") or "", recipe.get("name") or "", images)
    usable = test.get("split") != "val" and "mean_average_precision" not in test
    return task_section(task, run["name"], test.get("top1") if usable else None, None, images)


def suite_section(suite: Mapping[str, Any]) -> Markup:
    """Table 9 by task, and the means of Fig. 2; empty if the suite has no VTAB-1k task."""
    tasks = {row["task"]: row for row in suite["tasks"] if row["task"] in TABLE_9}
    if not tasks:
        return Markup()
    columns = [f"{model}, {data}" for model, data in MODELS_9]
    rows = [
        {"task": task, "this suite, %": number(100 * row["top1"], digits=decimals(row["images"]))}
        | {column: number(v, digits=1) for column, v in zip(columns, TABLE_9[task], strict=True)}
        for task, row in tasks.items()
    ]  # fmt: skip
    own_row: dict[str, Any] = {"model": suite["model"], "pre-trained on": ""}
    for group in GROUPS:
        row = suite["means"].get(group) or {"mean": None, "complete": True}
        value = None if row["mean"] is None else 100 * row["mean"]
        own_row[group] = Number(number(value) + ("" if row["complete"] or value is None else " *"))
    means = [own_row | {"source": "this report"}]
    for model, data, values, source in FIG_2:
        cells = (Number("–" if value is None else str(value)) for value in values)
        group_cells = dict(zip(GROUPS, cells, strict=True))
        means.append({"model": model, "pre-trained on": data} | group_cells | {"source": source})
    partial = any(not row["complete"] for row in suite["means"].values())
    return fill("published.html", "suite", PAPER, means, partial, rows)


def study_section(names: Sequence[str]) -> Markup:
    """The published tables that a study reproduces."""
    sheets = []
    for published in map(sheet, names):
        rows = [
            {key: number(cell) if isinstance(cell, float) else cell for key, cell in row.items()}
            for row in published.rows
        ]
        sheets.append((published, rows))
    return fill("published.html", "study", sheets)
