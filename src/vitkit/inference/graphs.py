"""A model as a graph for other runtimes: torch.export, ONNX, OpenVINO. Their libraries load when used."""

# B batch; H, W pixels
# H, W the table's own grid; h, w that of the image; D width

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
from vitkit.models.positions import RESIZE, Grid, Positions, sincos2d
from vitkit.models.resnet import ResNetConfig
from vitkit.models.variants import Model
from vitkit.models.vit import ViT, ViTConfig
from vitkit.tasks.task import task_of
from vitkit.weights.convert import with_config

MOST = 512  # rows or columns of patches that an exported graph takes


class AnyGrid(nn.Module):
    """Adds what Positions adds, on a grid that is known only when the graph runs."""

    line: Tensor

    def __init__(self, positions: Positions):
        super().__init__()
        self.learned = positions
        if positions.kind == "sincos2d":  # exact: the runtime takes rows of a table, it computes no sine
            column = sincos2d((MOST, 1), positions.width)[0, :, positions.width // 2 :]
            self.register_buffer("line", column.float(), persistent=False)

    def forward(self, z: Tensor, grid: Grid, layer: int) -> Tensor:
        """z plus the positions that belong before this layer."""
        p = self.learned
        if p.kind in ("none", "relative") or (layer and p.injection == "stem"):
            return z
        return z + self.at(grid, layer if p.injection == "every" else 0)

    def at(self, grid: Grid, layer: int) -> Tensor:
        """The table of one layer on a grid, (1, T, D)."""
        p, (h, w) = self.learned, grid
        if p.kind == "sincos2d":
            table = crossed(self.line[:h], self.line[:w])
            return torch.cat([torch.zeros_like(table[:, : p.lead]), table], 1)
        if p.kind == "2d":
            y, x = resized_line(p.y[layer], h, p.resize), resized_line(p.x[layer], w, p.resize)
            return torch.cat([p.first[layer][None], crossed(y, x)], 1) if p.lead else crossed(y, x)
        return self.resized(p.table[layer], grid)

    def resized(self, table: Tensor, grid: Grid) -> Tensor:
        p, (h, w) = self.learned, grid
        square = table[p.lead :].unflatten(0, p.grid)  # (H, W, D)
        rows = resize_matrix(p.grid[0], h, p.resize, table.device)
        columns = resize_matrix(p.grid[1], w, p.resize, table.device)
        if p.resize == "dinov2":  # on its own grid that table is not touched, and the 0.1 would touch it
            own = is_length(rows, p.grid[0]) & is_length(columns, p.grid[1])
            rows, columns = (torch.where(own, diagonal(m), m) for m in (rows, columns))
        square = (rows @ square.flatten(1)).unflatten(1, square.shape[1:])  # (h, W, D)
        return torch.cat([table[: p.lead], (columns @ square).flatten(0, 1)])[None]


def resized_line(axis: Tensor, length: int, method: str) -> Tensor:
    """One axis of a 2d table, (n, D/2), on another length."""
    matrix = resize_matrix(axis.shape[0], length, method, axis.device)
    if method == "dinov2":
        matrix = torch.where(is_length(matrix, axis.shape[0]), diagonal(matrix), matrix)
    return matrix @ axis


def crossed(y: Tensor, x: Tensor) -> Tensor:
    """Rows (h, D/2) and columns (w, D/2) to the table of their grid, (1, h*w, D), x first."""
    h, w = y.shape[0], x.shape[0]
    return torch.cat([x[None].expand(h, -1, -1), y[:, None].expand(-1, w, -1)], -1).flatten(0, 1)[None]


def resize_matrix(old: int, new: int, method: str, device: torch.device | None = None) -> Tensor:
    """How much of each old place is in each new one, (new, old): resize_positions along one axis.

    >>> resize_matrix(3, 5, "official")[1]
    tensor([0.5000, 0.5000, 0.0000])
    """
    place = torch.arange(new, device=device, dtype=torch.float32)
    last = place.amax(0)  # new - 1 as a tensor: a graph computes with it, whatever it will be
    corners = RESIZE[method]["align_corners"]
    if corners:
        scale = (old - 1) / last.clamp(min=1)
        at = place * scale
    else:
        scale = old / (last + (1.1 if method == "dinov2" else 1.0))
        at = (place + 0.5) * scale - 0.5
    own = torch.arange(-2, old + 2, device=device)  # two beyond each end, which stand for the end itself
    distance = (at[:, None] - own).abs()
    if RESIZE[method].get("antialias"):
        inside = distance[:, 2:-2] / scale.clamp(min=1)
        kernel = cubic(inside, -0.5)
        return kernel / kernel.sum(1, keepdim=True)
    kernel = (1 - distance).clamp(min=0) if RESIZE[method]["mode"] == "bilinear" else cubic(distance, -0.75)
    ends = own.clamp(0, old - 1)[:, None] == torch.arange(old, device=device)
    return kernel @ ends.float()


def cubic(x: Tensor, a: float) -> Tensor:
    """Keys' kernel at a distance of 0 or more."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def is_length(matrix: Tensor, length: int) -> Tensor:
    """Whether a matrix has that many rows, as a tensor."""
    return torch.arange(matrix.shape[0], device=matrix.device).amax(0) == length - 1


def diagonal(matrix: Tensor) -> Tensor:
    """Ones on the diagonal, in a matrix of the same shape."""
    rows, columns = (torch.arange(n, device=matrix.device) for n in matrix.shape)
    return (rows[:, None] == columns).to(matrix.dtype)


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
