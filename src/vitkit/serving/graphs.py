"""A model as a graph for other runtimes: torch.export, ONNX, OpenVINO. Their libraries load when used."""

# B batch; H, W pixels

import contextlib
import importlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitkit.data.views import make_levels
from vitkit.errors import Error
from vitkit.models.resnet import ResNetConfig
from vitkit.models.variants import Model
from vitkit.models.vit import ViT, ViTConfig
from vitkit.serving.anysize import MOST, AnyGrid
from vitkit.tasks.task import task_of
from vitkit.weights.parity import with_config

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}
EXTRAS = {"onnx": "export", "onnxscript": "export", "onnxruntime": "export"}
ONE_FILE = 2**31 - 2**20  # bytes that one protobuf message holds
LARGEST = 8192  # pixels of a side, for models that have no patches


@dataclass(frozen=True, kw_only=True)
class Form:
    """What a graph takes and gives."""

    precision: str = "fp32"
    pixels: bool = False  # uint8 (B, H, W, 3) to probabilities, not normalised (B, 3, H, W) to logits
    any_size: bool = False

    @property
    def input(self) -> str:
        return "pixels" if self.pixels else "images"

    def output(self, model: Model) -> str:
        return task_of(model).output_names[self.pixels] if model.config.classes else "features"


class Graph(nn.Module):
    """The model with what a form asks for around it; its own parameters are shared or cast, never changed."""

    shift: Tensor
    scale: Tensor

    def __init__(self, model: Model, form: Form):
        super().__init__()
        self.form, self.task = form, task_of(model)
        self.model = with_config(model, model.config).requires_grad_(False)
        if form.any_size and isinstance(self.model, ViT):
            self.model.positions = AnyGrid(self.model.positions)  # type: ignore[assignment]
        for part in self.model.modules():
            part.portable = True  # type: ignore[assignment]
        self.model.to(TYPES[form.precision])
        device = next(model.parameters()).device
        for name, values in (("shift", model.preprocessing.mean), ("scale", model.preprocessing.std)):
            self.register_buffer(name, make_levels(values, device), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if not self.form.pixels:
            return self.model(images.to(TYPES[self.form.precision])).float()
        ready = (images.permute(0, 3, 1, 2) - self.shift) / self.scale  # as data.views.normalise
        logits = self.model(ready.to(TYPES[self.form.precision])).float()
        return self.task.activate(logits)


def check_form(model: Model, form: Form) -> None:
    """Refuse what no graph can do, with the reason."""
    c = model.config
    if form.any_size and isinstance(c, ViTConfig) and c.positions == "relative":
        raise Error(
            f"--any-size: relative positions belong to the {c.grid} grid they were learned on; "
            "leave --any-size out to fix the size",
            code="export.unsupported",
        )
    if form.any_size and isinstance(c, ResNetConfig) and c.attention == "axial":
        raise Error(
            f"--any-size: relative positions of an AxialResNet belong to its image size, {c.image_size}; "
            "leave --any-size out to fix the size",
            code="export.unsupported",
        )
    if form.pixels and not c.classes:
        raise Error(
            "--pixels gives probabilities, and the model has no head; fine-tune it first",
            code="export.unsupported",
        )
    if form.pixels and c.channels != 3:
        raise Error(f"--pixels takes RGB, and the model has {c.channels} channels", code="export.unsupported")


def trace(model: Model, form: Form) -> ExportedProgram:
    """The model as an exported program: any batch, and any size that fits the patches where asked."""
    check_form(model, form)
    graph = Graph(model, form)
    height, width = model.config.image_size
    if form.any_size:  # one row would be traced as a constant
        least = 64 if isinstance(model.config, ResNetConfig) else 2 * model.config.stride
        height, width = model.config.covered if isinstance(model.config, ViTConfig) else (height, width)
        height, width = max(height, least), max(width, least)
    shape = (2, height, width, 3) if form.pixels else (2, model.config.channels, height, width)
    example = torch.zeros(
        shape, dtype=torch.uint8 if form.pixels else torch.float32, device=graph.shift.device
    )
    dynamic: dict[int, Any] = {0: Dim("batch", min=1)}
    if form.any_size:
        first = 1 if form.pixels else 2
        dynamic |= {first: side(model, "height"), first + 1: side(model, "width")}
    with quiet(), torch.no_grad():  # strict: it follows len() of a batch without fixing it
        program = torch.export.export(graph, (example,), dynamic_shapes=(dynamic,), strict=True)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # paths of this machine belong in no file
    return program


def side(model: Model, name: str) -> Any:
    """A side of the image that is known only when the graph runs."""
    if isinstance(model.config, ResNetConfig):
        return Dim(name, min=64, max=LARGEST)
    return model.config.stride * Dim(f"{name}_in_patches", min=2, max=MOST)


def to_onnx(program: ExportedProgram, form: Form, output: str) -> Any:
    """An onnx.ModelProto."""
    needs("onnx", "onnxscript")
    with quiet():
        made = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=[form.input], output_names=[output]
        )
    assert made is not None
    model = made.model_proto
    del model.graph.value_info[:]  # every runtime infers the shapes; ONNX Runtime's quantiser stumbles here
    for part in (model.graph, *model.graph.node, *model.graph.initializer, *model.graph.input):
        del part.metadata_props[:]  # the exporter's notes: longer than a small model
    keep_padding(model, TYPES[form.precision])
    return model


def save_onnx(made: Any, path: Path) -> None:
    """Into one file, or with its weights in another one beside it."""
    large = made.ByteSize() > ONE_FILE
    needs("onnx").save(made, path, save_as_external_data=large, location=f"{path.name}.data")


def keep_padding(model: Any, dtype: torch.dtype) -> None:
    """A ResNet's zeros before its max pooling stay zeros.

    ONNX Runtime folds such a Pad into the MaxPool after it, whose padding is minus infinity: other answers,
    without a word. A Max with the lowest number stands between them from now on, and changes no number.
    """
    import numpy as np
    from onnx import helper, numpy_helper

    nodes, lowest = model.graph.node, "vitkit_lowest"
    padded = {node.output[0] for node in nodes if node.op_type == "Pad"}
    pools = [n for n in range(len(nodes)) if nodes[n].op_type == "MaxPool" and nodes[n].input[0] in padded]
    for place in reversed(pools):
        before, after = nodes[place].input[0], f"{nodes[place].input[0]}_kept"
        nodes[place].input[0] = after
        nodes.insert(place, helper.make_node("Max", [before, lowest], [after]))
    if pools:
        value = np.array(torch.finfo(dtype).min, np.float16 if dtype == torch.float16 else np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, lowest))


def to_openvino(program: ExportedProgram, form: Form, output: str) -> Any:
    """An openvino.Model with the shapes of the program."""
    openvino = needs("openvino")
    with quiet():
        model = openvino.convert_model(program)
    sizes = next(node for node in program.graph.nodes if node.op == "placeholder" and node.target == "images")
    shape = [n if isinstance(n, int) else -1 for n in sizes.meta["val"].shape]
    model.reshape(openvino.PartialShape(shape))
    model.inputs[0].set_names({form.input})
    model.outputs[0].set_names({output})
    return model


def needs(*libraries: str) -> Any:
    """The first of optional libraries, or how to get them.

    OpenVINO and nncf report their use to their maker where openvino_telemetry can be imported, unasked. With
    us it cannot, and they do without it.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    try:
        modules = [importlib.import_module(name) for name in libraries]
    except ImportError as error:
        extra = EXTRAS.get(libraries[0], "openvino")
        raise Error(
            f"{error}; this needs {libraries[0]}: pip install 'vitkit[{extra}]'", code="request.extra-missing"
        ) from None
    return modules[0]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporters tell of their own inner life; what matters, the comparison afterwards shows."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
