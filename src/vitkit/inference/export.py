"""Export to .onnx, .pt2 and OpenVINO's .xml with the model card as metadata, and running those files."""

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
LIBRARIES = {".onnx": ("onnx", "onnxscript", "onnxruntime"), ".pt2": (), ".xml": ("openvino",)}
UNSUPPORTED = {  # (ending, precision) -> reason
    (".onnx", "bf16"): "ONNX Runtime has no bf16 kernels on a CPU to check it with; use fp16",
    (".xml", "bf16"): "OpenVINO sets bf16 at run time (INFERENCE_PRECISION_HINT), not in the file; "
    "export fp32 or fp16",
    (".pt2", "int8"): "int8 is not supported for torch.export; use .onnx or .xml",
}


@dataclass(frozen=True)
class ExportInfo:
    """The metadata of an exported file."""

    card: Card  # configuration, labels in order, preprocessing, origin, task
    facts: dict[str, Any]  # precision, input, output, shapes, vitkit version


def check_kind(path: Path, form: Form, *, compiled: bool, device: str) -> None:
    """Raise an error for a file ending, a precision or a compilation that is not supported."""
    if path.suffix not in NAMES:
        raise Error(f"{path.name}: the file ending chooses the format; use one of {', '.join(NAMES)}")
    if path.is_dir():
        raise Error(f"{path} is a folder; give a file name", code="file.not-writable")
    if reason := UNSUPPORTED.get((path.suffix, form.precision)):
        raise Error(f"{path.name} in {form.precision}: {reason}", code="export.unsupported")
    if path.suffix == ".pt2" and form.precision == "bf16" and device == "cpu" and not fast_bf16():
        raise Error(
            f"{path.name} in bf16: this processor has no fast bf16 to check it with; give --device cuda",
            code="export.unsupported",
        )
    for libraries in (LIBRARIES[path.suffix], ("nncf",) if form.precision == "int8" else ()):
        if libraries:
            needs(*libraries)
    if compiled and path.suffix != ".pt2":
        raise Error(f"--compiled writes a .pt2 file, not {path.name}", code="request.conflict")
    if compiled and not compiler():
        raise Error(
            "--compiled needs a C++ compiler (g++ or clang++), and none was found; drop --compiled",
            code="export.unsupported",
        )


def make_metadata(model: Model, form: Form) -> dict[str, str]:
    """The card and the facts as ASCII JSON, so that no class name can break XML or protobuf."""
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
    """Write an exported file, and its .bin or .data file into the same folder."""
    metadata = make_metadata(model, form)
    if path.suffix == ".pt2":
        return write_program(trace(model, form), path, metadata, compiled)
    traced_form, convert = form_to_trace(form, path), to_onnx if path.suffix == ".onnx" else to_openvino
    graph = convert(trace(model, traced_form), traced_form, form.output(model))
    if form.precision == "int8":
        assert calibrate is not None
        graph = quantised(graph, model, form, calibrate)
    if path.suffix == ".onnx":
        needs("onnx").helper.set_model_props(graph, metadata)
        save_onnx(graph, path)
    else:
        for key, text in metadata.items():
            graph.set_rt_info(text, [key])
        needs("openvino").save_model(graph, path, compress_to_fp16=form.precision == "fp16")


def form_to_trace(form: Form, path: Path) -> Form:
    """fp32 for an OpenVINO file in fp16: OpenVINO itself compresses the weights when it saves the graph."""
    half = path.suffix == ".xml" and form.precision == "fp16"
    return Form(pixels=form.pixels, any_size=form.any_size) if half else form


def write_program(program: Any, path: Path, metadata: dict[str, str], compiled: bool) -> None:
    if not compiled:
        content = io.BytesIO()  # torch's own file writer aborts the process when the disk is full
        torch.export.save(program, content, extra_files={f"{k}.json": text for k, text in metadata.items()})
        path.write_bytes(content.getbuffer())
        return
    with quiet(), torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].split("/")[0]
        for key, text in metadata.items():
            archive.writestr(f"{root}/extra/{key}.json", text)


def runner(model: Model, form: Form, path: Path, *, compiled: bool = False) -> Any:
    """A function that runs the file in its own runtime: uint8 images (B, 3, h, w) to its outputs."""
    if path.suffix != ".pt2":
        exact = "fp32" if form.precision in ("fp32", "int8") else None
        session = runtimes.onnx_runtime(path) if path.suffix == ".onnx" else runtimes.openvino(path, exact)
        return lambda images: session(inputs(images, model, form))
    device = next(model.parameters()).device
    with quiet():
        program = (
            torch._inductor.aoti_load_package(str(path)) if compiled else torch.export.load(path).module()
        )

    @torch.no_grad()
    def run(images: Tensor) -> Tensor:
        return program(torch.from_numpy(inputs(images, model, form)).to(device)).float().cpu()

    return run


def describe_export(path: str | os.PathLike) -> ExportInfo:
    """Read the metadata of a file that vitkit exported, without running anything in it."""
    path = Path(path)
    if not path.is_file():
        raise Error(f"{path}: no such file", code="file.not-found")
    if path.suffix not in NAMES:
        raise Error(f"{path.name}: exported files end in {', '.join(NAMES)}", code="weights.format")
    try:
        metadata = READERS[path.suffix](path)
        return ExportInfo(from_json(metadata[CARD]), json.loads(metadata[FACTS]))
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}", code=error.code) from None
    except Error:  # a library is not installed
        raise
    except Exception as error:  # each library raises its own exceptions for unreadable files
        raise Error(
            f"{path}: no vitkit metadata found ({type(error).__name__}); the file is damaged or was not "
            "written by vitkit export",
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
