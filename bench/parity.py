"""Full-size models with random weights through every format, against the library of each: a Markdown table.

    python bench/parity.py

Needs timm, transformers and torchvision.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import importable_peers  # noqa: F401

from vitkit.commands.demo import NAMES, randomised
from vitkit.weights.convert import convert
from vitkit.weights.save import save

VIT = ("official", "timm", "hf", "torchvision")
MODELS = {
    "ViT-Ti/16": VIT, "ViT-S/32": VIT, "ViT-B/16": VIT, "ViT-L/16": VIT,
    "R+ViT-Ti/16": VIT[:2], "R26+ViT-S/32": VIT[:2], "R50+ViT-B/16": VIT[:2], "R50+ViT-L/32": VIT[:2],
    "BiT-R50x1": VIT[:2], "BiT-R101x1": VIT[:2], "BiT-R50x3": VIT[:2],
}  # fmt: skip


def main() -> None:
    print("| model | format | against | logits | features | tolerance | read back |")
    print("|---|---|---|---|---|---|---|")
    for name, formats in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            start = Path(folder) / "start.safetensors"
            save(randomised(name), start)
            for format in formats:
                out = Path(folder) / f"out-{NAMES.get(format, 'model.safetensors')}"
                c = convert(start, out, format=format)
                p = c.parity
                assert p is not None and not p.skipped and c.ok, c
                back = "bit-equal" if c.read_back else "DIFFERS"
                print(f"| {name} | {c.format} | {p.peer} | {p.logits:.1e} | {p.features:.1e} | "
                      f"{p.tolerance:.0e} | {back} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
