"""Read the arrays of untrusted .safetensors, .npz and .pt files without running any code in them."""

import argparse
import json
import math
import pickletools
import struct
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors
import torch
from torch import Tensor

from vitkit.errors import WeightsError

MAX_DIRECTORY = 4 * 2**20  # bytes
MAX_PICKLE = 2**20  # bytes
MAX_UNFOLDED = 10**7  # objects in a pickle; a shared object counts every time it is used
STORAGES = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
SAFE_GLOBALS = {  # all names in a pickle of tensors and training options
    "collections OrderedDict", "collections Counter", "argparse Namespace", "torch Size", "torch device",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in STORAGES),
}  # fmt: skip


def zip_directory_error(path: Path, size: int) -> str:
    """What is wrong with a zip directory, which must end where the end record begins; empty if nothing is.

    In a file with two directories, one library would read the first and another the second.
    """
    with path.open("rb") as file:
        file.seek(max(0, size - 22 - 76 - 2**16))
        tail = file.read()
    record = tail.rfind(b"PK\5\6")  # the end record
    if record < 0 or record + 22 > len(tail):
        return "a zip file without its end record; truncated?"
    stop = size - len(tail) + record
    length, start, comment = struct.unpack("<12x2LH", tail[record : record + 22])
    complete = stop + 22 + comment == size
    if record >= 76 and tail[record - 20 : record - 16] == b"PK\6\7":  # zip64: sizes above 4 GB
        stop -= 76
        length, start = struct.unpack("<40x2Q", tail[record - 76 : record - 20])
        complete = complete and struct.unpack("<8xQ4x", tail[record - 20 : record]) == (stop,)
    if not complete or start + length != stop:
        return "its zip directory is truncated or in the wrong place"
    return f"its zip directory is larger than {MAX_DIRECTORY // 2**20} MiB" if length > MAX_DIRECTORY else ""


def pickle_error(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    """Why a pickle is refused: it imports more than tensors need, or expands too far; empty if it is safe."""
    if member.file_size > MAX_PICKLE:
        return f"{member.filename} is larger than {MAX_PICKLE // 2**20} MiB"
    stack: list[int] = []  # the number of objects in each object
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for op, arg, _ in pickletools.genops(archive.read(member)):
        imports = "GLOBAL" in op.name or op.name in ("INST", "OBJ", "EXT1", "EXT2", "EXT4")
        if imports and arg not in SAFE_GLOBALS:
            return f"its pickle imports {str(arg)[:80]!r}, which weights do not need; it may run code"
        if "PUT" in op.name:
            memo[arg] = stack[-1]
        elif "GET" in op.name:
            stack.append(memo[arg])
        elif op.name == "MARK":
            marks.append(len(stack))
        else:
            popped = len(op.stack_before)
            if pickletools.markobject in op.stack_before:
                popped = len(stack) - marks.pop() + op.stack_before.index(pickletools.markobject)
            below = len(stack) - popped
            count = 1 + sum(stack[below:])
            stack[below:] = [count] * len(op.stack_after)
            if count > MAX_UNFOLDED:
                return f"its pickle expands to more than {MAX_UNFOLDED} objects"
    return ""


MAX_ARRAYS = 10_000
MAX_AXIS = 2**40
MAX_LISTED = 6  # names in an error message before "and N more"
MAX_HEADER = 8 * 2**20  # bytes; parsed JSON takes about 25 times as much memory
SAFE_DTYPES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
# first bytes -> what an unsupported file is
PICKLE = b"\x80"
FOREIGN = {
    PICKLE: "a pickle file, which can run code; save the weights again with torch.save or as safetensors",
    b"7z\xbc\xaf": "a 7z archive; unpack it first, if you trust it",
    b"\x1f\x8b": "a gzip archive; unpack it first, if you trust it",
    b"\x93NUMPY": "a single .npy array, not a set of named arrays",
    b"\x89HDF": "an HDF5 file, which is not supported",
    b"version https://git-lfs": "a Git LFS pointer; run git lfs pull to download the weights",
    b"<": "a web page, perhaps the error page of a failed download",
}


class UntrustedCheckpoint(WeightsError):
    """A weight file is damaged, hostile or not a weight file; nothing in it was used."""

    code = "weights.untrusted"


class MalformedFile(UntrustedCheckpoint):
    """A weight file is damaged, truncated, or in an unknown format."""

    code = "weights.format"


@dataclass(frozen=True)
class Arrays:
    """The named arrays of a file: all shapes, and a function that reads the values of one array."""

    shapes: dict[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    card: str = ""  # vitkit's metadata; empty if another library wrote the file
    notes: tuple[str, ...] = ()


def open_arrays(path: Path) -> Arrays:
    """Open a file in the format that its content shows."""
    if path.exists() and not path.is_file():  # a pipe would block, and a device might never end
        raise WeightsError(f"cannot read {path}: not a file", code="file.unreadable")
    try:
        with path.open("rb") as file:
            start = file.read(300)
        size = path.stat().st_size
    except OSError as error:
        code = "weights.not-found" if isinstance(error, FileNotFoundError) else "file.unreadable"
        raise WeightsError(f"cannot read {path}: {error.strerror}", code=code) from None
    if start.startswith(b"PK\x03\x04"):
        reader = open_zip
    elif len(start) > 8 and start[8:9] == b"{":
        reader = open_safetensors
    else:
        kind = UntrustedCheckpoint if start.startswith(PICKLE) else MalformedFile
        raise kind(f"{path}: {describe_content(start, size)}")
    try:
        return reader(path, size)
    except UntrustedCheckpoint:
        raise
    except Exception as error:  # a parser may raise anything on hostile bytes
        raise malformed(path, error) from None


def malformed(path: Path, error: Exception) -> Exception:
    """The error for an exception of a library while it reads a file."""
    return MalformedFile(f"{path}: damaged or not a weight file ({one_line(error)})")


def describe_content(start: bytes, size: int) -> str:
    """What an unsupported file is, by its first bytes."""
    if not size:
        return "the file is empty"
    if start[257:262] == b"ustar":
        return (
            "a tar archive, perhaps of an old torch; save the weights again with torch.save or as safetensors"
        )
    known = next((text for magic, text in FOREIGN.items() if start.startswith(magic)), None)
    return known or f"not a weight file: begins with {start[:8].hex(' ')}; expected .safetensors, .npz or .pt"


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(ascii(name)[1:-1][:120] for name in names[:MAX_LISTED]) + more


# --- safetensors


def open_safetensors(path: Path, size: int) -> Arrays:
    header = safetensors_header(path, size)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise MalformedFile(f"{path}: the metadata is not a table of strings")

    def read(name: str) -> Tensor:
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                return file.get_tensor(name).clone()  # a copy, because the file may change later
        except Exception as error:
            raise MalformedFile(f"{path}: array {name!r}: {one_line(error)}") from None

    shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
    return Arrays(shapes, read, metadata.get("vitkit", ""))


def safetensors_header(path: Path, size: int) -> dict[str, Any]:
    """The checked header: known dtypes, sizes that match the shapes, arrays without gaps or overlap."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER, size - 8):
            raise MalformedFile(f"{path}: a header of {length} bytes in a file of {size}")
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=unique_keys)
    if not isinstance(header, dict):
        raise MalformedFile(f"{path}: the header is not a table")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    if len(entries) > MAX_ARRAYS:
        raise UntrustedCheckpoint(f"{path}: {len(entries)} arrays; the limit is {MAX_ARRAYS}")
    offset = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        shape, kind = entry["shape"], entry["dtype"]
        if kind not in SAFE_DTYPES:
            raise MalformedFile(
                f"{path}: array {name!r} is of type {str(kind)[:20]!r}, which is not supported"
            )
        if any(type(n) is not int or not 0 <= n < MAX_AXIS for n in [*shape, begin, end]):
            raise MalformedFile(f"{path}: array {name!r} has no valid shape or offsets")
        if begin != offset or end - begin != math.prod(shape) * SAFE_DTYPES[kind]:
            raise MalformedFile(f"{path}: array {name!r} at bytes {begin}-{end}: overlap, gap or wrong size")
        offset = end
    if offset != size - 8 - length:
        raise MalformedFile(
            f"{path}: the header describes {offset} bytes of arrays, the file has {size - 8 - length}; "
            "truncated?"
        )
    return header


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise MalformedFile("two arrays in the header have the same name")
    return table


# --- zip files: .npz and .pt


def open_zip(path: Path, size: int) -> Arrays:
    if reason := zip_directory_error(path, size):
        raise MalformedFile(f"{path}: {reason}")
    with zipfile.ZipFile(path) as archive:
        members, comment, directory = archive.infolist(), archive.comment, archive.start_dir
    names = [m.filename for m in members]
    if len(names) != len(set(names)) or len(names) > 2 * MAX_ARRAYS:
        raise UntrustedCheckpoint(f"{path}: {len(names)} members: too many, or two with the same name")
    if any(
        name.rpartition("/")[2] in ("constants.pkl", "bytecode.pkl") or "/code/" in name for name in names
    ):
        raise UntrustedCheckpoint(
            f"{path}: a TorchScript program, not weights; save model.state_dict() instead"
        )
    if any(m.compress_type != zipfile.ZIP_STORED or m.flag_bits & 1 for m in members):
        raise UntrustedCheckpoint(
            f"{path}: has compressed or encrypted members, whose size cannot be checked before reading; "
            "save it again without compression (numpy.savez)"
        )
    if sum(m.file_size for m in members) > size or any(m.file_size != m.compress_size for m in members):
        raise UntrustedCheckpoint(f"{path}: its members declare more bytes than the file has")
    spans = sorted(
        (m.header_offset, m.header_offset + 30 + len(m.orig_filename) + m.file_size) for m in members
    )
    if any(end > begin for (_, end), (begin, _) in pairwise([*spans, (directory, directory)])):
        raise UntrustedCheckpoint(f"{path}: its members overlap")
    if names and all(name.endswith(".npy") for name in names):
        return open_npz(path, members, comment)
    if any(name.rpartition("/")[2] == "data.pkl" for name in names):
        return open_torch(path, size, members)
    raise MalformedFile(f"{path}: a zip archive of neither numpy nor torch, with {', '.join(names[:3])}")


def open_npz(path: Path, members: list[zipfile.ZipInfo], comment: bytes) -> Arrays:
    by_name = {m.filename.removesuffix(".npy"): m for m in members}
    shapes: dict[str, tuple[int, ...]] = {}
    archive = zipfile.ZipFile(path)  # closed with the last reference: opening it parses all of its directory
    for name, member in by_name.items():
        with archive.open(member) as file:
            shapes[name] = npy_shape(path, name, file, member.file_size)  # type: ignore[arg-type]

    def read(name: str) -> Tensor:
        try:
            with archive.open(by_name[name]) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
                file.read()  # zipfile compares the checksum at the end
        except Exception as error:
            raise MalformedFile(f"{path}: array {name!r}: {one_line(error)}") from None
        if array.dtype == np.dtype("V2"):  # bfloat16 as jax saves it
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        array = array.astype(
            array.dtype.newbyteorder("="), copy=False
        )  # torch supports only the native byte order
        return torch.from_numpy(np.ascontiguousarray(array)).reshape(array.shape)

    return Arrays(shapes, read, comment.decode("utf-8", "replace"))


def npy_shape(path: Path, name: str, file: BinaryIO, size: int) -> tuple[int, ...]:
    """The shape in a .npy header, which must match the number of bytes after it."""
    version = np.lib.format.read_magic(file)
    readers = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    if version not in readers:
        raise MalformedFile(f"{path}: array {name!r} has .npy version {version}, which is not supported")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject or not ((dtype.kind in "fiub" and dtype.itemsize <= 8) or dtype == np.dtype("V2")):
        raise UntrustedCheckpoint(f"{path}: array {name!r} has dtype {dtype}, not numbers")
    if math.prod(shape) * dtype.itemsize != size - file.tell() or any(not 0 <= n < MAX_AXIS for n in shape):
        raise UntrustedCheckpoint(
            f"{path}: array {name!r} declares shape {shape}, which does not match its size"
        )
    return tuple(int(n) for n in shape)


def open_torch(path: Path, size: int, members: list[zipfile.ZipInfo]) -> Arrays:
    """A .pt file, read only with torch's weights_only loader."""
    with zipfile.ZipFile(path) as archive:
        for member in members:
            if member.filename.endswith(".pkl") and (reason := pickle_error(archive, member)):
                raise UntrustedCheckpoint(f"{path}: {reason}")
    tensors, notes = state_dict_in(path, restricted_load(path))
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise MalformedFile(f"{path}: {name!r} is not a dense tensor")
        if tensor.is_quantized or tensor.numel() * tensor.element_size() > size:
            raise UntrustedCheckpoint(
                f"{path}: {name!r} declares shape {tuple(tensor.shape)}, which is larger than the file"
            )
    if sum(t.numel() * t.element_size() for t in tensors.values()) > size:
        raise UntrustedCheckpoint(f"{path}: its tensors share memory and together are larger than the file")
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors.values()}
    if Counter(storages.values()) - Counter(m.file_size for m in members):
        raise UntrustedCheckpoint(f"{path}: a tensor is larger than its stored values")
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    return Arrays(shapes, lambda name: tensors[name].detach().clone(), notes=notes)


def restricted_load(path: Path) -> Any:
    with torch.serialization.safe_globals([argparse.Namespace]):  # training options
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)


def state_dict_in(path: Path, loaded: Any) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The state dict in a training checkpoint, without the prefixes of wrapper modules."""
    notes = []
    for key in ("model", "state_dict", "model_state_dict", "teacher", "student"):
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            notes.append(f"read {key!r} from a checkpoint with {', '.join(map(str, list(loaded)[:8]))}")
            loaded = loaded[key]
            break
    if not isinstance(loaded, dict) or not any(isinstance(v, Tensor) for v in loaded.values()):
        raise MalformedFile(f"{path}: has no state dict")
    tensors = {str(k): v for k, v in loaded.items() if isinstance(v, Tensor)}
    if len(tensors) > MAX_ARRAYS:
        raise UntrustedCheckpoint(f"{path}: {len(tensors)} arrays; the limit is {MAX_ARRAYS}")
    for prefix in ("module.", "_orig_mod.", "backbone."):
        if any(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): t for name, t in tensors.items()}
            notes.append(f"removed the prefix {prefix!r}")
    return tensors, tuple(notes)
