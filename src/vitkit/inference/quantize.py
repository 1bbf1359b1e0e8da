"""Quantisation: int8 calibrated on images, which changes predictions, or 8-bit weights in blocks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.views import normalise
from vitkit.inference.graphs import Form, needs, quiet
from vitkit.models.variants import Model

BLOCK = 128  # weights that share a scale


def inputs(images: Tensor, model: Model, form: Form) -> np.ndarray:
    """uint8 images (B, 3, h, w) as inputs for a graph of this form."""
    if form.pixels:
        return images.permute(0, 2, 3, 1).contiguous().numpy()
    return normalise(images, model.preprocessing.mean, model.preprocessing.std).numpy()


def quantised(graph: Any, model: Model, form: Form, calibrate: Tensor) -> Any:
    """An openvino.Model or onnx.ModelProto with int8 weights and activations where nncf allows it."""
    nncf = needs("nncf")
    batch = inputs(calibrate, model, form)
    items = [batch[n : n + 1] for n in range(len(batch))]
    is_onnx = type(graph).__name__ == "ModelProto"  # whose inputs go by name
    dataset = nncf.Dataset(items, (lambda item: {form.input: item}) if is_onnx else None)
    with quiet(), torch.no_grad():
        return nncf.quantize(graph, dataset, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(items))


def in_blocks(graph: Any) -> Any:
    """An onnx.ModelProto whose matrix multiplications use 8-bit weights.

    Each block of weights has its own scale, and activations are quantised dynamically in the same blocks, so
    no calibration is needed; the errors are similar to those of bf16.
    """
    quantization = needs("onnxruntime.quantization.matmul_nbits_quantizer")
    with quiet():
        quantizer = quantization.MatMulNBitsQuantizer(
            graph, bits=8, block_size=BLOCK, is_symmetric=True, accuracy_level=4
        )
        quantizer.process()
    return quantizer.model.model
