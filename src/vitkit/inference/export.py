"""Exported files: .onnx, .pt2 and OpenVINO's .xml, each with the model's card in it, and what runs them."""

import io
import json
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit import __version__
from vitkit.errors import Error, WeightsError
from vitkit.inference import runtimes
from vitkit.inference.builders import compiler, fast_bf16
from vitkit.inference.exported import CARD, FACTS
from vitkit.inference.graphs import Form, needs, quiet, save_onnx, to_onnx, to_openvino, trace
from vitkit.inference.quantize import inputs, quantised
from vitkit.models.variants import Model
from vitkit.models.vit import ViTConfig
from vitkit.weights.card import Card, card_of, from_json, to_json

NAMES = {".onnx": "ONNX", ".pt2": "torch.export", ".xml": "OpenVINO"}
NEEDED = {".onnx": ("onnx", "onnxscript", "onnxruntime"), ".pt2": (), ".xml": ("openvino",)}
NONE = {  # (ending, precision) that is not possible, and why
    (".onnx", "bf16"): "ONNX Runtime has no bf16 kernels on a CPU to check it with; use fp16",
    (".xml", "bf16"): "OpenVINO computes in bf16 by a setting (INFERENCE_PRECISION_HINT), not by its file; "
    "export fp32 or fp16",
    (".pt2", "int8"): "torch.export has no int8 here; use .onnx or .xml",
}


@dataclass(frozen=True)
class Described:
    """What an exported file says about itself."""

    card: Card  # configuration, labels in order, preprocessing, origin, task
    facts: dict[str, Any]  # precision, input, output, shapes, the version of vitkit


def check_kind(path: Path, form: Form, *, compiled: bool, device: str) -> None:
    """Refuse an ending, a precision or a compilation that cannot be had, with the reason."""
    if path.suffix not in NAMES:
        raise Error(f"{path.name}: the format follows from the ending, one of {', '.join(NAMES)}")
    if path.is_dir():
        raise Error(f"{path} is a folder; give the name of a file", code="file.not-writable")
    if reason := NONE.get((path.suffix, form.precision)):
        raise Error(f"{path.name} in {form.precision}: {reason}", code="export.unsupported")
    if path.suffix == ".pt2" and form.precision == "bf16" and device == "cpu" and not fast_bf16():
        raise Error(
            f"{path.name} in bf16: this processor has no fast bf16 to check it with; give --device cuda",
            code="export.unsupported",
        )
    for libraries in (NEEDED[path.suffix], ("nncf",) if form.precision == "int8" else ()):
        if libraries:
            needs(*libraries)
    if compiled and path.suffix != ".pt2":
        raise Error(f"--compiled makes a .pt2, not {path.name}", code="request.conflict")
    if compiled and not compiler():
        raise Error(
            "--compiled needs a C++ compiler (g++ or clang++), and there is none; leave it out",
            code="export.unsupported",
        )


def metadata(model: Model, form: Form) -> dict[str, str]:
    """The card and the facts as JSON in ASCII: no class name can break an XML or a protobuf."""
    c = model.config
    height, width = ("height", "width") if form.any_size else c.image_size
    step = c.stride if isinstance(c, ViTConfig) else 1
    facts = {
        "vitkit": __version__,
        "precision": form.precision,
        "any_size": form.any_size,
        "sizes_are_multiples_of": step if form.any_size else None,
        "input": form.input,
        "input_type": "uint8" if form.pixels else "float32, normalised by preprocessing",
        "input_shape": ["batch", height, width, 3] if form.pixels else ["batch", c.channels, height, width],
        "output": form.output(model),
    }
    return {CARD: json.dumps(json.loads(to_json(card_of(model, "vitkit")))), FACTS: json.dumps(facts)}


def write(
    model: Model, form: Form, path: Path, *, calibrate: Tensor | None = None, compiled: bool = False
) -> None:
    """Write the model into a folder that may hold siblings (.bin, .data)."""
    told = metadata(model, form)
    if path.suffix == ".pt2":
        return write_program(trace(model, form), path, told, compiled)
    program, output = trace(model, plain(form, path)), form.output(model)
    made = (to_onnx if path.suffix == ".onnx" else to_openvino)(program, plain(form, path), output)
    if form.precision == "int8":
        assert calibrate is not None
        made = quantised(made, model, form, calibrate)
    if path.suffix == ".onnx":
        needs("onnx").helper.set_model_props(made, told)
        save_onnx(made, path)
    else:
        for key, text in told.items():
            made.set_rt_info(text, [key])
        needs("openvino").save_model(made, path, compress_to_fp16=form.precision == "fp16")


def plain(form: Form, path: Path) -> Form:
    """OpenVINO compresses the weights of an fp32 graph to fp16 when it writes them, and wants it so."""
    half = path.suffix == ".xml" and form.precision == "fp16"
    return Form(pixels=form.pixels, any_size=form.any_size) if half else form


def write_program(program: Any, path: Path, told: dict[str, str], compiled: bool) -> None:
    if not compiled:
        content = io.BytesIO()  # torch's own writer ends the whole process where a disk is full
        torch.export.save(program, content, extra_files={f"{k}.json": text for k, text in told.items()})
        path.write_bytes(content.getbuffer())
        return
    with quiet(), torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].split("/")[0]
        for key, text in told.items():
            archive.writestr(f"{root}/extra/{key}.json", text)


def runner(model: Model, form: Form, path: Path, *, compiled: bool = False) -> Any:
    """The file in its own runtime: uint8 images (B, 3, h, w) to what it says of them."""
    if path.suffix != ".pt2":
        exact = "fp32" if form.precision in ("fp32", "int8") else None
        start = runtimes.onnx_runtime(path) if path.suffix == ".onnx" else runtimes.openvino(path, exact)
        return lambda images: start(inputs(images, model, form))
    device = next(model.parameters()).device
    with quiet():
        program = (
            torch._inductor.aoti_load_package(str(path)) if compiled else torch.export.load(path).module()
        )

    @torch.no_grad()
    def run(images: Tensor) -> Tensor:
        return program(torch.from_numpy(inputs(images, model, form)).to(device)).float().cpu()

    return run


def describe_export(path: str | os.PathLike) -> Described:
    """The card of a file that vitkit exported; nothing in the file is run."""
    path = Path(path)
    if not path.is_file():
        raise Error(f"{path}: there is no such file", code="file.not-found")
    if path.suffix not in NAMES:
        raise Error(f"{path.name}: exported files end in {', '.join(NAMES)}", code="weights.format")
    try:
        told = READERS[path.suffix](path)
        return Described(from_json(told[CARD]), json.loads(told[FACTS]))
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}", code=error.code) from None
    except Error:  # a library that is not installed
        raise
    except Exception as error:  # each library has kinds of its own for a file that it cannot read
        raise Error(
            f"{path}: no card of vitkit in it ({type(error).__name__}): it is damaged, or vitkit export did "
            "not write it",
            code="weights.format",
        ) from None


def read_onnx(path: Path) -> dict[str, str]:
    model = needs("onnx").load(path, load_external_data=False)
    return {entry.key: entry.value for entry in model.metadata_props}


def read_openvino(path: Path) -> dict[str, str]:
    model = runtimes.core().read_model(path)
    return {key: model.get_rt_info([key]).astype(str) for key in (CARD, FACTS)}


def read_program(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        extra = {Path(name).name: name for name in archive.namelist() if "/extra/" in name}
        return {key: archive.read(extra[f"{key}.json"]).decode() for key in (CARD, FACTS)}


READERS = {".onnx": read_onnx, ".pt2": read_program, ".xml": read_openvino}
