"""Post-training quantisation to int8, calibrated on images. It changes answers, so it is asked for."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit.data.views import normalise
from vitkit.models.variants import Model
from vitkit.serving.graphs import Form, needs, quiet


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
