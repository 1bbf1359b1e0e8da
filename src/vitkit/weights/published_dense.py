"""The published checkpoints of detectors: fields of published.Weight, in rows.

Addresses and MD5 sums are those that the publishers' packages state. No file was downloaded for this table.
"""

from collections.abc import Iterator
from typing import Any

from vitkit.models.card import Preprocessing

RF_DETR = "https://storage.googleapis.com/rfdetr"
SQUASHED = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def rf_detr() -> Iterator[dict[str, Any]]:
    """RF-DETR on COCO, of which nano to large are Apache-2.0; larger ones have another licence."""
    rows = {  # address below the folder, pixels, box AP on COCO, MiB, MD5
        "nano": (
            "nano_coco/checkpoint_best_regular.pth", 384, 48.4, 349.3, "fb6504cce7fbdc783f7a46991f07639f",
        ),
        "small": (
            "small_coco/checkpoint_best_regular.pth", 512, 53.0, None, "fb37061c1af7bace359c91b723a8d5c1",
        ),
        "medium": (
            "medium_coco/checkpoint_best_regular.pth", 576, 54.7, None, "7223f764a87b863f02eb8d52bf0ce2ee",
        ),
        "large": ("rf-detr-large-2026.pth", 704, 56.5, None, "5cb72153541cbcb9aa6efa26222acc75"),
    }  # fmt: skip
    for size, (file, pixels, ap, megabytes, md5) in rows.items():
        model = f"RF-DETR-{size}"
        yield {
            "name": f"{model}.coco", "model": model, "address": f"{RF_DETR}/{file}", "pixels": pixels,
            "megabytes": megabytes, "trained_on": "COCO", "evaluation": f"box AP {ap} on COCO",
            "licence": "Apache-2.0", "view": "", "preprocessing": SQUASHED, "md5": md5,
        }  # fmt: skip
