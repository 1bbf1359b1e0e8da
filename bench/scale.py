"""The tables of docs/lab/scaling.md: pace and memory, computed from one GPU's measured pace.

    python bench/scale.py --measured ViT-L/16=1347
    python bench/scale.py --measured ViT-L/16=1347 ViT-H/14=500 --images 64 --between 25e9 --json out.json

The formula is vitkit/metrics/speed.py. A model that was not measured is taken to use as much of the GPU
as the first that was: its pace by FLOPs. Adam, bfloat16, 224 pixels, 1,000 classes. Nothing is run.
"""

import argparse
import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from vitkit.metrics.cost import PEAKS, TRAINING, forward_flops, training_memory
from vitkit.metrics.speed import PARALLEL, Links, Work, limit, scale_out
from vitkit.models.variants import Model, skeleton, variant

MODELS = ("ViT-L/16", "ViT-H/14")
GPUS = [8, 16, 32, 64, 128, 256, 512, 1024]
MANY = [8 * 2**i for i in range(14)]  # to 65,536
SET = 7 * 300e6  # images: seven epochs of 300 million


@dataclass(frozen=True)
class Subject:
    """A model with its pace on one GPU."""

    name: str
    model: Model
    pace: float
    measured: bool

    def work(self, images: float) -> Work:
        count = sum(p.numel() for p in self.model.parameters())
        return Work(count, self.model.config.depth, images, self.pace)


def pair(text: str) -> tuple[str, float]:
    """ViT-L/16=1347 -> the name and the number."""
    name, _, number = text.partition("=")
    try:
        forward_flops(variant(name))
        return name, float(number)
    except ValueError as error:
        message = f"{text!r} is no MODEL=IMAGES_PER_SECOND, such as ViT-L/16=1347 ({error})"
        raise argparse.ArgumentTypeError(message) from None


def subjects(measured: dict[str, float]) -> list[Subject]:
    first, pace = next(iter(measured.items()))
    known = pace * forward_flops(variant(first))  # FLOPs of forward passes a second
    return [
        Subject(name, skeleton(variant(name)), measured.get(name, known / forward_flops(variant(name))),
                name in measured)
        for name in dict.fromkeys((*MODELS, *measured))
    ]  # fmt: skip


def told(heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *lines])


def one_gpu(result: list[Subject], images: int) -> str:
    rows = []
    for s in result:
        work, rate = s.work(images), TRAINING * forward_flops(s.model.config) * s.pace
        rows.append([s.name, f"{s.pace:,.0f}", "measured" if s.measured else "by FLOPs",
                     f"{rate / 1e12:.0f}", f"{rate / PEAKS['H200']:.0%}",
                     f"{1e3 * (work.forward + work.backward):.0f}"])  # fmt: skip
    heads = ["model", "images/s", "how", "TFLOP/s", "of an H200's 989", f"ms for {images} images"]
    return told(heads, rows)


def growing(result: list[Subject], images: int, links: Links) -> str:
    """Weak scaling: every GPU has as many images as the measured one."""
    rows = []
    for s in result:
        for n in GPUS:
            row = [s.name, f"{n:,}"]
            for parallel in PARALLEL:
                p = scale_out(s.work(images), n, parallel, links)
                row += [f"{p.images_per_second:,.0f}", f"{p.efficiency:.1%}",
                        f"{p.efficiency_without_overlap:.0%}", f"{p.days(SET):.3g}"]  # fmt: skip
            rows.append(row)
    columns = ["images/s", "efficiency", "nothing hidden", "days"]
    return told(["model", "GPUs"] + [f"{parallel}: {c}" for parallel in PARALLEL for c in columns], rows)


def dividing(result: list[Subject], batch: int, images: int, links: Links) -> str:
    """A fixed batch shared by more and more GPUs, and the number from which the links set the pace."""
    counts = [n for n in GPUS if n <= batch]
    rows = []
    for s in result:
        for parallel in PARALLEL:
            paces = [scale_out(s.work(batch / n), n, parallel, links) for n in counts]
            bounds = limits(s, parallel, batch, images, links)
            rows.append([s.name, parallel, *(f"{p.efficiency:.0%}" for p in paces), *bounds])
    heads = ["model", "parallel"] + [f"{n:,} GPUs, {batch // n} each" for n in counts]
    return told(heads + ["links limit from", f"with {images} each, from"], rows)


def limits(s: Subject, parallel: str, batch: int, images: int, links: Links) -> list[str]:
    """GPUs from which the links set the pace: of a fixed batch, and of as many images on each."""
    shared = limit(lambda n: s.work(batch / n), [n for n in MANY if n <= batch], parallel, links)
    alike = limit(lambda n: s.work(images), MANY, parallel, links)
    return [f"{bound:,}" if bound else "no number" for bound in (shared, alike)]


def memory(result: list[Subject], images: int) -> str:
    rows = []
    for s in result:
        for recompute in (False, True):
            row = [s.name, "yes" if recompute else "no"]
            for cut in (1, 8, 64, 1024):
                m = training_memory(s.model, images, half=True, slots=2, recompute=recompute, shards=cut)
                row.append(f"{m.total / 1e9:.1f}")
                if cut == 1:
                    parts = (m.parameters, m.optimizer, m.copies, m.gradients, m.activations)
                    row += [f"{part / 1e9:.1f}" for part in parts]
            rows.append(row)
    heads = ["model", "recompute", "ddp: total", "weights", "optimizer", "copies", "gradients", "activations"]
    return told(heads + [f"fsdp over {n:,}: total" for n in (8, 64, 1024)], rows)


def halved(result: list[Subject], images: int, batch: int, links: Links) -> str:
    """Efficiencies if a link gives less than was assumed."""
    cases = {
        "as assumed": links,
        "network half": replace(links, between=links.between / 2),
        "NVLink half": replace(links, inside=links.inside / 2),
        "hops twice": replace(links, inside_hop=2 * links.inside_hop, between_hop=2 * links.between_hop),
        "all of them": replace(
            links, between=links.between / 2, inside=links.inside / 2, inside_hop=2 * links.inside_hop,
            between_hop=2 * links.between_hop,
        ),
    }  # fmt: skip
    rows = []
    for s in result:
        for n, each in ((1024, images), (128, batch / 128)):
            for parallel in PARALLEL:
                paces = [scale_out(s.work(each), n, parallel, case) for case in cases.values()]
                rows.append(
                    [s.name, parallel, f"{n:,}, {each:g} each", *(f"{p.efficiency:.1%}" for p in paces)]
                )
    return told(["model", "parallel", "GPUs and images", *cases], rows)


def tables(result: list[Subject], images: int, batch: int, links: Links) -> list[str]:
    return [
        one_gpu(result, images), growing(result, images, links), dividing(result, batch, images, links),
        memory(result, images), halved(result, images, batch, links),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measured", nargs="+", type=pair, required=True, help="MODEL=IMAGES_PER_SECOND")
    parser.add_argument("--images", type=int, default=128, help="of one GPU, at which it was measured")
    parser.add_argument("--batch", type=int, default=4096, help="of all, where it is fixed")
    for field in fields(Links):
        name, kind = field.name.replace("_", "-"), type(field.default)
        parser.add_argument(f"--{name}", type=kind, default=field.default, help="of the links: see Links")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    links = Links(**{field.name: getattr(options, field.name) for field in fields(Links)})
    result = subjects(dict(options.measured))
    print("\n\n".join(tables(result, options.images, options.batch, links)))
    if options.json:
        paces = [
            {"model": s.name, "parallel": parallel}
            | asdict(scale_out(s.work(options.images), n, parallel, links))
            for s in result
            for parallel in PARALLEL
            for n in GPUS
        ]
        options.json.write_text(json.dumps({"links": asdict(links), "paces": paces}, indent=1))


if __name__ == "__main__":
    main()
