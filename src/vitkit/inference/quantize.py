"""Quantisation: to int8, calibrated on images, which changes answers; or of weights in blocks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.views import normalise
from vitkit.inference.graphs import Form, needs, quiet
from vitkit.models.variants import Model

BLOCK = 128  # weights with a scale of their own


def inputs(images: Tensor, model: Model, form: Form) -> np.ndarray:
    """uint8 images (B, 3, h, w) as a graph of this form takes them."""
    if form.pixels:
        return images.permute(0, 2, 3, 1).contiguous().numpy()
    return normalise(images, model.preprocessing.mean, model.preprocessing.std).numpy()


def quantised(graph: Any, model: Model, form: Form, calibrate: Tensor) -> Any:
    """An openvino.Model or onnx.ModelProto with int8 weights and activations where nncf finds them safe."""
    nncf = needs("nncf")
    ready = inputs(calibrate, model, form)
    items = [ready[n : n + 1] for n in range(len(ready))]
    named = type(graph).__name__ == "ModelProto"  # ONNX wants its inputs by name
    dataset = nncf.Dataset(items, (lambda item: {form.input: item}) if named else None)
    with quiet(), torch.no_grad():
        return nncf.quantize(graph, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(items))


def in_blocks(graph: Any) -> Any:
    """An onnx.ModelProto whose products take weights in 8 bits.

    Each block of a row of weights has its scale, and so has what it is multiplied with, rounded as it comes:
    nothing is calibrated, and the errors are like those of bf16.
    """
    quantization = needs("onnxruntime.quantization.matmul_nbits_quantizer")
    with quiet():
        made = quantization.MatMulNBitsQuantizer(
            graph, bits=8, block_size=BLOCK, is_symmetric=True, accuracy_level=4
        )
        made.process()
    return made.model.model
