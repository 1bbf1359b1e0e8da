"""Models as graphs for other runtimes: torch.export, ONNX and OpenVINO, which are imported lazily."""

# B batch; H, W pixels; in position tables H, W their own grid, h, w the grid of the image, D width

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
from vitkit.models.dense.dense_model import DenseConfig
from vitkit.models.positions import RESIZE, Grid, Positions, sincos2d
from vitkit.models.resnet import ResNetConfig
from vitkit.models.variants import Model
from vitkit.models.vit import ViT, ViTConfig
from vitkit.ops.fused import exporting
from vitkit.tasks.task import task_of
from vitkit.weights.convert import with_config

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.float32}
EXTRAS = {"onnx": "export", "onnxscript": "export", "onnxruntime": "export"}  # of pip, by library
MAX_PROTOBUF = 2**31 - 2**20  # bytes
MAX_SIDE = 8192  # pixels, for models without patches
MAX_PATCHES = 512  # per side of the image, for graphs of any size


class AnyGrid(nn.Module):
    """Positions for a grid whose size is known only when the graph runs."""

    line: Tensor

    def __init__(self, positions: Positions):
        super().__init__()
        self.learned = positions
        if positions.kind.startswith("sincos2d"):  # the graph slices a table instead of computing sines
            table = sincos2d((MAX_PATCHES, 1), positions.width, kind=positions.kind)
            column = table[0, :, positions.width // 2 :]
            self.register_buffer("line", column.float(), persistent=False)

    def forward(self, z: Tensor, grid: Grid, layer: int, chosen: None = None) -> Tensor:
        """Add the positions of this layer to its input z, which has all patches."""
        p = self.learned
        if p.kind in ("none", "relative") or (layer and p.injection == "stem"):
            return z
        return z + self.at(grid, layer if p.injection == "every" else 0)

    def at(self, grid: Grid, layer: int) -> Tensor:
        """The position table of one layer on a grid, (1, T, D)."""
        p, (h, w) = self.learned, grid
        if p.kind.startswith("sincos2d"):
            table = grid_table(self.line[:h], self.line[:w])
            return torch.cat([torch.zeros_like(table[:, : p.lead]), table], 1)
        if p.kind == "2d":
            y, x = resize_axis(p.y[layer], h, p.resize), resize_axis(p.x[layer], w, p.resize)
            table = grid_table(y, x)
            return torch.cat([p.first[layer][None], table], 1) if p.lead else table
        return self.resized(p.table[layer], grid)

    def resized(self, table: Tensor, grid: Grid) -> Tensor:
        p, (h, w) = self.learned, grid
        square = table[p.lead :].unflatten(0, p.grid)  # (H, W, D)
        rows = resize_matrix(p.grid[0], h, p.resize, table.device)
        columns = resize_matrix(p.grid[1], w, p.resize, table.device)
        if p.resize == "dinov2":  # which resizes by grid + 0.1, but leaves the table alone on its own grid
            unchanged = is_length(rows, p.grid[0]) & is_length(columns, p.grid[1])
            rows, columns = (torch.where(unchanged, identity(m), m) for m in (rows, columns))
        square = (rows @ square.flatten(1)).unflatten(1, square.shape[1:])  # (h, W, D)
        return torch.cat([table[: p.lead], (columns @ square).flatten(0, 1)])[None]


def resize_axis(axis: Tensor, length: int, method: str) -> Tensor:
    """Resize one axis of a 2d table, (n, D/2), to another length."""
    matrix = resize_matrix(axis.shape[0], length, method, axis.device)
    if method == "dinov2":
        matrix = torch.where(is_length(matrix, axis.shape[0]), identity(matrix), matrix)
    return matrix @ axis


def grid_table(y: Tensor, x: Tensor) -> Tensor:
    """Combine positions of rows (h, D/2) and columns (w, D/2) into (1, h*w, D), x first."""
    h, w = y.shape[0], x.shape[0]
    return torch.cat([x[None].expand(h, -1, -1), y[:, None].expand(-1, w, -1)], -1).flatten(0, 1)[None]


def resize_matrix(old: int, new: int, method: str, device: torch.device | None = None) -> Tensor:
    """Interpolation weights (new, old) of resize_positions along one axis.

    >>> resize_matrix(3, 5, "official")[1]
    tensor([0.5000, 0.5000, 0.0000])
    """
    target = torch.arange(new, device=device, dtype=torch.float32)
    last = target.amax(0)  # new - 1 as a tensor: in a graph its value is dynamic
    if RESIZE[method]["align_corners"]:
        scale = (old - 1) / last.clamp(min=1)
        position = target * scale
    else:
        scale = old / (last + (1.1 if method == "dinov2" else 1.0))
        position = (target + 0.5) * scale - 0.5
    source = torch.arange(-2, old + 2, device=device)  # padded by two copies of each end
    distance = (position[:, None] - source).abs()
    if RESIZE[method].get("antialias"):
        inside = distance[:, 2:-2] / scale.clamp(min=1)
        linear = RESIZE[method]["mode"] == "bilinear"
        kernel = (1 - inside).clamp(min=0) if linear else cubic(inside, -0.5)
        return kernel / kernel.sum(1, keepdim=True)
    kernel = (1 - distance).clamp(min=0) if RESIZE[method]["mode"] == "bilinear" else cubic(distance, -0.75)
    clamped = source.clamp(0, old - 1)[:, None] == torch.arange(old, device=device)
    return kernel @ clamped.float()


def cubic(x: Tensor, a: float) -> Tensor:
    """The cubic convolution kernel of Keys at a distance x >= 0."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def is_length(matrix: Tensor, length: int) -> Tensor:
    """Whether a matrix has `length` rows, as a tensor that a graph can compute."""
    return torch.arange(matrix.shape[0], device=matrix.device).amax(0) == length - 1


def identity(matrix: Tensor) -> Tensor:
    """An identity matrix of the same shape."""
    rows, columns = (torch.arange(n, device=matrix.device) for n in matrix.shape)
    return (rows[:, None] == columns).to(matrix.dtype)


@dataclass(frozen=True, kw_only=True)
class Form:
    """Precision, input and output of a graph."""

    precision: str = "fp32"
    pixels: bool = False  # uint8 (B, H, W, 3) to probabilities, instead of normalised (B, 3, H, W) to logits
    any_size: bool = False

    @property
    def input(self) -> str:
        return "pixels" if self.pixels else "images"

    def output(self, model: Model) -> str:
        return task_of(model).output_names[self.pixels] if model.config.classes else "features"


class Graph(nn.Module):
    """The model wrapped for a form; its parameters are shared or cast to a copy, never changed."""

    shift: Tensor
    scale: Tensor

    def __init__(self, model: Model, form: Form):
        super().__init__()
        self.form, self.task = form, task_of(model)
        self.model = with_config(model, model.config).requires_grad_(False)
        if form.any_size and isinstance(self.model, ViT):
            self.model.positions = AnyGrid(self.model.positions)  # type: ignore[assignment]
        self.model.to(TYPES[form.precision])
        device = next(model.parameters()).device
        for name, values in (("shift", model.preprocessing.mean), ("scale", model.preprocessing.std)):
            self.register_buffer(name, make_levels(values, device), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if not self.form.pixels:
            return self.model(images.to(TYPES[self.form.precision])).float()
        normalised = (images.permute(0, 3, 1, 2) - self.shift) / self.scale  # like data.views.normalise
        logits = self.model(normalised.to(TYPES[self.form.precision])).float()
        return self.task.activate(logits)


def check_form(model: Model, form: Form) -> None:
    """Raise an error for a form that this model does not support."""
    c = model.config
    if isinstance(c, DenseConfig):
        refuse_dense(c, form)
    if form.any_size and isinstance(c, ViTConfig) and c.positions == "relative":
        raise Error(
            f"--any-size does not support relative positions, which were learned on a fixed {c.grid} grid; "
            "drop --any-size to fix the size",
            code="export.unsupported",
        )
    if form.any_size and isinstance(c, ViTConfig) and c.merge_tokens:
        raise Error(
            f"--any-size does not support merge_tokens={c.merge_tokens}: how many tokens are left depends on "
            "the size; drop --any-size to fix it",
            code="export.unsupported",
        )
    if form.any_size and isinstance(c, ResNetConfig) and c.attention == "axial":
        raise Error(
            "--any-size does not support an AxialResNet, whose relative positions have a fixed size, "
            f"{c.image_size}; drop --any-size to fix the size",
            code="export.unsupported",
        )
    if form.pixels and not c.classes:
        raise Error(
            "--pixels returns probabilities, but the model has no head; fine-tune it first",
            code="export.unsupported",
        )
    if form.pixels and c.channels != 3:
        raise Error(f"--pixels takes RGB, but the model has {c.channels} channels", code="export.unsupported")


def refuse_dense(config: DenseConfig, form: Form) -> None:
    """Raise an error for a form that models for segmentation and detection do not support."""
    if form.any_size:
        raise Error(
            f"--any-size does not support a model for {config.task}, whose levels and boxes are laid "
            "out for one size; drop --any-size, and choose the size by --image-size",
            code="export.unsupported",
        )
    if form.precision == "int8":
        raise Error(
            f"--precision int8 does not support a model for {config.task}: calibration "
            "is checked with classifiers alone; use fp16 or fp32",
            code="export.unsupported",
        )


def trace(model: Model, form: Form) -> ExportedProgram:
    """Export the model with a dynamic batch; with any_size also a dynamic height and width."""
    check_form(model, form)
    graph = Graph(model, form)
    height, width = model.config.image_size
    if form.any_size:  # a grid of one row would be traced as a constant
        smallest = 64 if isinstance(model.config, ResNetConfig) else 2 * model.config.stride
        height, width = model.config.covered if isinstance(model.config, ViTConfig) else (height, width)
        height, width = max(height, smallest), max(width, smallest)
    shape = (2, height, width, 3) if form.pixels else (2, model.config.channels, height, width)
    example = torch.zeros(
        shape, dtype=torch.uint8 if form.pixels else torch.float32, device=graph.shift.device
    )
    dynamic: dict[int, Any] = {0: Dim("batch", min=1)}
    if form.any_size:
        first = 1 if form.pixels else 2
        dynamic |= {first: dynamic_side(model, "height"), first + 1: dynamic_side(model, "width")}
    with quiet(), exporting(), torch.no_grad():  # strict: does not specialize on len() of the batch
        program = torch.export.export(graph, (example,), dynamic_shapes=(dynamic,), strict=True)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # local paths do not belong in the file
    return program


def dynamic_side(model: Model, name: str) -> Any:
    """The dynamic dimension of one side of the image."""
    if isinstance(model.config, ResNetConfig):
        return Dim(name, min=64, max=MAX_SIDE)
    return model.config.stride * Dim(f"{name}_in_patches", min=2, max=MAX_PATCHES)


def to_onnx(program: ExportedProgram, form: Form, output: str) -> Any:
    """An onnx.ModelProto."""
    needs("onnx", "onnxscript")
    with quiet():
        onnx_program = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=[form.input], output_names=[output]
        )
    assert onnx_program is not None
    model = onnx_program.model_proto
    del model.graph.value_info[:]  # runtimes infer the shapes; ONNX Runtime's quantiser fails on these
    for part in (model.graph, *model.graph.node, *model.graph.initializer, *model.graph.input):
        del part.metadata_props[:]  # debug information, larger than a small model
    keep_padding(model, TYPES[form.precision])
    return model


def save_onnx(model: Any, path: Path) -> None:
    """Save an onnx.ModelProto; above the limit of protobuf its weights go into a .data file."""
    large = model.ByteSize() > MAX_PROTOBUF
    needs("onnx").save(model, path, save_as_external_data=large, location=f"{path.name}.data")


def keep_padding(model: Any, dtype: torch.dtype) -> None:
    """Keep the zero padding before the max pooling of a ResNet.

    ONNX Runtime silently fuses such a Pad into the MaxPool, which pads with minus infinity and changes the
    outputs. A Max with the lowest number between the two prevents the fusion and changes no value.
    """
    import numpy as np
    from onnx import helper, numpy_helper

    nodes, lowest = model.graph.node, "vitkit_lowest"
    padded = {node.output[0] for node in nodes if node.op_type == "Pad"}
    pools = [n for n in range(len(nodes)) if nodes[n].op_type == "MaxPool" and nodes[n].input[0] in padded]
    for index in reversed(pools):
        before, after = nodes[index].input[0], f"{nodes[index].input[0]}_kept"
        nodes[index].input[0] = after
        nodes.insert(index, helper.make_node("Max", [before, lowest], [after]))
    if pools:
        value = np.array(torch.finfo(dtype).min, np.float16 if dtype == torch.float16 else np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, lowest))


def to_openvino(program: ExportedProgram, form: Form, output: str) -> Any:
    """Convert to an openvino.Model with the dynamic shapes of the program."""
    openvino = needs("openvino")
    with quiet():
        model = openvino.convert_model(program)
    inputs = (node for node in program.graph.nodes if node.op == "placeholder" and node.target == "images")
    shape = [n if isinstance(n, int) else -1 for n in next(inputs).meta["val"].shape]
    model.reshape(openvino.PartialShape(shape))
    model.inputs[0].set_names({form.input})
    model.outputs[0].set_names({output})
    return model


def needs(*libraries: str) -> Any:
    """Import optional libraries and return the first, or raise an error with the pip command.

    OpenVINO and nncf send usage data if openvino_telemetry can be imported, so its import is blocked.
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
    """Silence the exporters' logs and warnings: the outputs are compared with the model's afterwards."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
