"""Small detectors and segmenters for tests, whose answers differ from image to image."""

import numpy as np
import torch
from PIL import Image

from vitkit.models.dense.eomt import EomtConfig
from vitkit.models.dense.linear_segmenter import LinearSegmenterConfig
from vitkit.models.dense.pyramid_detector import fcos_config
from vitkit.models.dense.yolos import yolos_config
from vitkit.models.variants import fresh
from vitkit.models.vit import ViTConfig

NAMES = ("sky", "<b>road</b>", "=car")


def vit(size=(32, 48)):
    return ViTConfig(width=32, depth=2, heads=2, hidden=48, patch=8, image_size=size, classes=0)


def model_of(config, seed=0):
    """A model with random weights, large enough for scores on both sides of the threshold."""
    model = fresh(config, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" not in name else 0.05
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale * 0.5)
    model.labels, model.task = NAMES, config.task
    model.preprocessing = model.preprocessing.__class__(resize="fit")
    return model.eval()


def detector(size=(32, 48), kind="fcos", **options):
    make = {"fcos": fcos_config, "yolos": yolos_config}[kind]
    options = {"detections": 6} | options
    if kind == "fcos":
        options = {"head_depth": 1, "levels": 2, "candidates": 40} | options
    model = model_of(make(vit(size), len(NAMES), **options))
    if kind == "fcos":
        with torch.no_grad():
            model.head.classify.bias.zero_()  # scores about a half
    return model


def segmenter(size=(32, 48), **options):
    return model_of(LinearSegmenterConfig(vit=vit(size), classes=len(NAMES), **({"upscale": 1} | options)))


def instance_segmenter(size=(32, 48), **options):
    options = {"queries": 5, "joint": 1, "upscale": 1} | options
    return model_of(EomtConfig(vit=vit(size), classes=len(NAMES), output="masks", **options))


def photograph(height, width, seed=0):
    """A smooth picture, uint8 (H, W, 3)."""
    small = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
