"""The published checkpoints of later ViTs: fields of published.Weight, in rows."""

import re
from collections.abc import Iterator
from typing import Any

from vitkit.models.card import Preprocessing

FAIR = "https://dl.fbaipublicfiles.com"
BIG_VISION = "https://storage.googleapis.com/big_vision"
HUB = "https://huggingface.co"
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "interpolation": "bicubic"}
CLIP = Preprocessing(
    resize="crop", interpolation="bicubic", mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)  # fmt: skip
DINOV3 = "DINOv3 License"
NON_COMMERCIAL = re.compile(  # ours and the tags of the Hub
    r"cc-by-nc-.*|apple-amlr|fair-noncommercial-.*", re.IGNORECASE
)
DOWNLOADS = "https://ai.meta.com/resources/models-and-libraries/dinov3-downloads/"
ASK_META = (
    f"accept the DINOv3 License at {DOWNLOADS}, "
    "download the .pth file from the address in Meta's e-mail, and give its path instead of the name; "
    "the same weights without a form: NAME"
)


def centre(crop: float, pixel_values: dict[str, Any] | None = None) -> Preprocessing:
    return Preprocessing(resize="crop", crop=crop, **(pixel_values or IMAGENET))


def modern() -> Iterator[dict[str, Any]]:
    for family in (dinov2, dinov3, siglip, clip, deit, mae, flexivit, eva02, yolos, eomt):
        for row in family():
            yield {"licence": "Apache-2.0", "top1": None, "megabytes": None, "view": ""} | row


def dinov2() -> Iterator[dict[str, Any]]:
    """Backbones from Meta, and with their linear heads from Hugging Face, where both are in one file.

    The positions are those of 518 pixels, but Meta's linear evaluation takes a central crop of 224.
    """
    sizes = {
        "S": ("small", 84.1, 87.1, 81.1, 80.9), "B": ("base", 330.3, 336.1, 84.5, 84.6),
        "L": ("large", 1161.1, 1168.9, 86.3, 86.7), "g": ("giant", 4335.3, 4347.0, 86.5, 87.1),
    }  # fmt: skip
    for size, (word, megabytes, classifier, top1, with_registers) in sizes.items():
        stem = f"{FAIR}/dinov2/dinov2_vit{size.lower()}14/dinov2_vit{size.lower()}14"
        linear = {"megabytes": classifier, "trained_on": "LVD-142M, head on ImageNet"}
        file = f"-{word}-imagenet1k-1-layer/resolve/main/model.safetensors"
        shared = {"megabytes": megabytes, "pixels": 518, "trained_on": "LVD-142M",
                  "evaluation": "linear probe at 224 px", "preprocessing": centre(0.875)}  # fmt: skip
        model = f"DINOv2-{size}/14"
        yield shared | {"name": f"{model}.lvd142m", "model": model, "top1": top1,
                        "address": f"{stem}_pretrain.pth"}  # fmt: skip
        yield shared | linear | {"name": f"{model}.lvd142m-i1k", "model": model, "top1": top1,
                                 "address": f"{HUB}/facebook/dinov2{file}"}  # fmt: skip
        model = f"DINOv2-reg-{size}/14"
        yield shared | {"name": f"{model}.lvd142m", "model": model, "top1": with_registers,
                        "address": f"{stem}_reg4_pretrain.pth"}  # fmt: skip
        yield shared | linear | {"name": f"{model}.lvd142m-i1k", "model": model, "top1": with_registers,
                                 "address": f"{HUB}/facebook/dinov2-with-registers{file}"}  # fmt: skip


def dinov3() -> Iterator[dict[str, Any]]:
    """From timm, without a form; the originals, whose periods of RoPE are rounded, are behind one."""
    satellite = {"mean": (0.430, 0.411, 0.296), "std": (0.213, 0.156, 0.143)}
    rows = (
        ("S", "lvd1689m", "small_patch16_dinov3_qkvb", 82.4, 87.0, "08c60483"),
        ("S+", "lvd1689m", "small_plus_patch16_dinov3_qkvb", 109.5, 88.0, "4057cbaa"),
        ("B", "lvd1689m", "base_patch16_dinov3_qkvb", 326.8, 89.3, "73cec8be"),
        ("L", "lvd1689m", "large_patch16_dinov3_qkvb", 1156.4, 90.2, "8aa4cbdd"),
        ("H+", "lvd1689m", "huge_plus_patch16_dinov3_qkvb", 3206.8, 90.3, "7c1da9a5"),
        ("7B", "lvd1689m", "7b_patch16_dinov3", 25_620.0, 90.4, "a955f4ea"),
        ("L", "sat493m", "large_patch16_dinov3_qkvb", 1156.4, None, "eadcf0ff"),
        ("7B", "sat493m", "7b_patch16_dinov3", 25_620.0, None, "a6675841"),
    )
    for size, data, timm, megabytes, top1, end in rows:
        stem = f"dinov3_vit{size.lower().replace('+', '')}16{'plus' * ('+' in size)}"
        model = f"DINOv3-{size}/16"
        pixel_values = IMAGENET | (satellite if data == "sat493m" else {})
        shared = {
            "model": model, "megabytes": megabytes, "top1": top1, "licence": DINOV3,
            "evaluation": "linear probe, ReaL" if top1 else "",
            "trained_on": "LVD-1689M" if data == "lvd1689m" else "SAT-493M",
        }  # fmt: skip
        yield shared | {
            "name": f"{model}.{data}", "pixels": 256, "preprocessing": centre(1.0, pixel_values),
            "address": f"{HUB}/timm/vit_{timm}.{data}/resolve/main/model.safetensors",
        }  # fmt: skip
        yield shared | {
            "name": f"{model}.{data}-original", "pixels": 224, "preprocessing": centre(0.875, pixel_values),
            "gated": ASK_META.replace("NAME", f"{model}.{data}"),
            "address": f"{DOWNLOADS}#{stem}_pretrain_{data}-{end}.pth",
        }  # fmt: skip


def siglip() -> Iterator[dict[str, Any]]:
    squash = Preprocessing(interpolation="bicubic")
    first = {("base", "B/16"): {224: 76.0, 256: 76.5, 384: 78.5, 512: 79.1},
             ("large", "L/16"): {256: 80.5, 384: 82.1},
             ("so400m", "So400m/14"): {224: 82.0, 384: 83.1}}  # fmt: skip
    for (word, size), results in first.items():
        for pixels, top1 in results.items():
            model, patch = f"SigLIP-{size}", size.partition("/")[2]
            folder = f"{HUB}/google/siglip-{word}-patch{patch}-{pixels}"
            yield {"name": f"{model}.webli-{pixels}", "model": model, "pixels": pixels, "top1": top1,
                   "evaluation": "zero-shot", "trained_on": "WebLI", "preprocessing": squash,
                   "address": f"{folder}/resolve/main/model.safetensors"}  # fmt: skip
    second = {"B/32": {256: 74.0}, "B/16": {224: 78.2, 256: 79.1, 384: 80.6, 512: 81.2},
              "L/16": {256: 82.5, 384: 83.1, 512: 83.5}, "So400m/14": {224: 83.2, 384: 84.1},
              "So400m/16": {256: 83.4, 384: 84.1, 512: 84.3}, "g-opt/16": {256: 84.5, 384: 85.0}}  # fmt: skip
    for size, results in second.items():
        for pixels, top1 in results.items():
            model, word = f"SigLIP2-{size}", size.replace("/", "").lower()
            yield {"name": f"{model}.webli-{pixels}", "model": model, "pixels": pixels, "top1": top1,
                   "evaluation": "zero-shot", "trained_on": "WebLI", "preprocessing": Preprocessing(),
                   "address": f"{BIG_VISION}/siglip2/siglip2_{word}_{pixels}.npz"}  # fmt: skip


def clip() -> Iterator[dict[str, Any]]:
    rows = {"B/32": ("base-patch32", 224, 63.3), "B/16": ("base-patch16", 224, 68.3),
            "L/14": ("large-patch14", 224, 75.5), "L/14 336": ("large-patch14-336", 336, 76.6)}  # fmt: skip
    for size, (word, pixels, top1) in rows.items():
        model = f"CLIP-{size.partition(' ')[0]}"
        yield {"name": f"{model}.openai{'-336' if pixels == 336 else ''}", "model": model, "pixels": pixels,
               "top1": top1, "evaluation": "zero-shot", "trained_on": "WIT-400M", "licence": "MIT",
               "preprocessing": CLIP,
               "address": f"{HUB}/openai/clip-vit-{word}/resolve/main/model.safetensors"}  # fmt: skip


def deit() -> Iterator[dict[str, Any]]:
    rows = {("Ti", ""): ("tiny", "a1311bcf", 72.2), ("S", ""): ("small", "cd65a155", 79.9),
            ("B", ""): ("base", "b5f2ef4d", 81.8), ("Ti", "-distilled"): ("tiny", "b40b3cf7", 74.5),
            ("S", "-distilled"): ("small", "649709d9", 81.2),
            ("B", "-distilled"): ("base", "df68dfff", 83.4)}  # fmt: skip
    for (size, kind), (word, end, top1) in rows.items():
        model, token = f"DeiT{kind}-{size}/16", "_distilled" if kind else ""
        yield {"name": f"{model}.i1k", "model": model, "pixels": 224, "top1": top1,
               "trained_on": "ImageNet", "preprocessing": centre(0.875),
               "address": f"{FAIR}/deit/deit_{word}{token}_patch16_224-{end}.pth"}  # fmt: skip
    third = {"S/16": ("small", {(224, "1k"): 81.4, (384, "1k"): 83.4, (224, "21k"): 83.1}),
             "M/16": ("medium", {(224, "1k"): 83.0, (224, "21k"): 84.5}),
             "B/16": ("base", {(224, "1k"): 83.8, (384, "1k"): 85.0, (224, "21k"): 85.7}),
             "L/16": ("large", {(224, "1k"): 84.9, (384, "1k"): 85.8, (224, "21k"): 87.0}),
             "H/14": ("huge", {(224, "1k"): 85.2, (224, "21k"): 87.2})}  # fmt: skip
    for size, (word, results) in third.items():
        for (pixels, data), top1 in results.items():
            model, end = f"DeiT3-{size}", "_v1" if (word, data) == ("huge", "21k") else ""
            trained = "ImageNet" if data == "1k" else "ImageNet-21k, ImageNet"
            yield {"name": f"{model}.i{data}-{pixels}", "model": model, "pixels": pixels, "top1": top1,
                   "trained_on": trained, "preprocessing": centre(1.0),
                   "address": f"{FAIR}/deit/deit_3_{word}_{pixels}_{data}{end}.pth"}  # fmt: skip


def mae() -> Iterator[dict[str, Any]]:
    rows = {"B/16": ("base", 327.3, 83.66), "L/16": ("large", 1157.0, 85.95), "H/14": ("huge", 2406.3, 86.93)}
    for size, (word, megabytes, top1) in rows.items():
        model = f"MAE-{size}"
        shared = {"model": model, "pixels": 224, "top1": top1, "trained_on": "ImageNet",
                  "licence": "CC-BY-NC-4.0", "preprocessing": centre(0.875)}  # fmt: skip
        yield shared | {"name": f"{model}.i1k", "megabytes": megabytes, "evaluation": "fine-tuned",
                        "address": f"{FAIR}/mae/pretrain/mae_pretrain_vit_{word}.pth"}  # fmt: skip
        yield shared | {"name": f"{model}.i1k-finetuned",
                        "address": f"{FAIR}/mae/finetune/mae_finetuned_vit_{word}.pth"}  # fmt: skip


def flexivit() -> Iterator[dict[str, Any]]:
    for size, top1 in {"S": 82.58, "B": 84.68, "L": 85.65}.items():
        model = f"FlexiViT-{size}/16"
        yield {"name": f"{model}.i1k", "model": model, "pixels": 240, "top1": top1, "trained_on": "ImageNet",
               "preprocessing": Preprocessing(),
               "address": f"{BIG_VISION}/flexivit/flexivit_{size.lower()}_i1k.npz"}  # fmt: skip


def eva02() -> Iterator[dict[str, Any]]:
    rows = {"B": "eva02_base_patch14_448.mim_in22k_ft_in22k_in1k",
            "L": "eva02_large_patch14_448.mim_m38m_ft_in22k_in1k"}  # fmt: skip
    squash = Preprocessing(interpolation="bicubic", mean=CLIP.mean, std=CLIP.std)
    for size, repository in rows.items():
        model = f"EVA02-{size}/14"
        yield {"name": f"{model}.i22k-i1k-448", "model": model, "pixels": 448, "licence": "MIT",
               "trained_on": "ImageNet-22k, ImageNet", "preprocessing": squash,
               "address": f"{HUB}/timm/{repository}/resolve/main/model.safetensors"}  # fmt: skip


def yolos() -> Iterator[dict[str, Any]]:
    """Detectors of 91 COCO numbers, as transformers has them; their names are those of their encoders."""
    rows = {"tiny": ("Ti", ""), "small": ("S", ""), "small-300": ("S", "-300"), "base": ("B", "")}
    fit = Preprocessing(resize="fit", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    for word, (size, ending) in rows.items():
        model = f"ViT-{size}/16"
        yield {"name": f"{model}.yolos{ending}-coco", "model": model, "trained_on": "ImageNet, COCO",
               "pixels": 512 if size == "Ti" else 800, "preprocessing": fit,
               "address": f"{HUB}/hustvl/yolos-{word}/resolve/main/model.safetensors"}  # fmt: skip


def eomt() -> Iterator[dict[str, Any]]:
    """Segmenters with the encoder of DINOv2 with registers, in patches of 16; their licence is the code's.

    Those with DINOv3 are published as differences to weights that are behind a form.
    """
    fit = Preprocessing(resize="fit", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    sizes = {"small": "S", "base": "B", "large": "L", "giant": "g"}
    kinds = {
        "ade20k_semantic_eomt": ("large_512",),
        "cityscapes_semantic_eomt": ("large_1024",),
        "coco_panoptic_eomt": ("small_640_2x", "base_640_2x", "large_640", "large_1280", "giant_640",
                               "giant_1280"),
        "ade20k_panoptic_eomt": ("large_640", "large_1280", "giant_640", "giant_1280"),
        "coco_instance_eomt": ("large_640", "large_1280"),
    }  # fmt: skip
    for kind, endings in kinds.items():
        for ending in endings:
            word, pixels = ending.split("_")[:2]
            data, task, _ = kind.split("_")
            model = f"DINOv2-reg-{sizes[word]}/14"
            yield {"name": f"{model}.eomt-{data}-{task}-{pixels}", "model": model, "pixels": int(pixels),
                   "trained_on": f"LVD-142M, {data}", "licence": "MIT", "preprocessing": fit,
                   "address": f"{HUB}/tue-mps/{kind}_{ending}/resolve/main/pytorch_model.bin"}  # fmt: skip
