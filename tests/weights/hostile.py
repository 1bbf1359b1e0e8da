"""Containers that lie, and the hostile files made of them: each kind of file is a generator."""

import io
import json
import os
import pickle
import pkgutil
import struct
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

Files = Iterator[tuple[str, bytes | dict[str, bytes]]]  # a name and its content: of a file, or of a folder
KINDS: dict[str, Callable[["Good", Path], Files]] = {}


@dataclass(frozen=True)
class Good:
    """One small model in every container; canary is a path that must never come to be."""

    own: bytes
    npz: bytes
    pth: bytes
    hf: dict[str, bytes]
    state: dict[str, torch.Tensor]
    arrays: dict[str, np.ndarray]
    members: dict[str, bytes]  # of the .pth, under a/
    canary: Path


def kind(make: Callable[[Good, Path], Files]) -> Callable[[Good, Path], Files]:
    KINDS[make.__name__] = make
    return make


# --- containers


def js(content: Any) -> bytes:
    return json.dumps(content).encode()


def safe(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else js(header)
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def carded(good: Good, card: Any = None, **config: Any) -> bytes:
    """Our own file with another card, or with some fields of its card or configuration changed."""
    header, body = parts(good.own)
    output = json.loads(header["__metadata__"]["vitkit"])
    output |= {"config": output["config"] | config} | (card if isinstance(card, dict) else {})
    header["__metadata__"]["vitkit"] = card if isinstance(card, str) else json.dumps(output)
    return safe(header, body)


def unzipped(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def npz(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npy(shape: str, body: bytes, dtype: str = "'<f4'", version: bytes = b"\1\0") -> bytes:
    text = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY" + version + struct.pack("<H" if version[0] == 1 else "<I", len(text)) + text + body


def pth(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@dataclass
class Member:
    """A member of a zip file as the directory tells it; what is None is told truly."""

    name: str
    data: bytes
    size: int | None = None
    packed: int | None = None
    at: int | None = None
    method: int = 0
    flags: int = 0
    inside: bool = False  # lies in the data of the member before, at its end

    def local(self) -> bytes:
        head = (20, self.flags, self.method, 0, 33, zlib.crc32(self.data), len(self.data), len(self.data))
        return struct.pack("<4s5H3L2H", b"PK\3\4", *head, len(self.name), 0) + self.name.encode() + self.data

    def entry(self, at: int) -> bytes:
        size, packed = (len(self.data) if n is None else n for n in (self.size, self.packed))
        head = (20, 20, self.flags, self.method, 0, 33, zlib.crc32(self.data), packed, size)
        rest = (len(self.name), 0, 0, 0, 0, 0, at if self.at is None else self.at)
        return struct.pack("<4s6H3L5H2L", b"PK\1\2", *head, *rest) + self.name.encode()


def rows(members: dict[str, bytes]) -> list[Member]:
    return [Member(*item) for item in members.items()]


def zipped(members: list[Member] | dict[str, bytes], directory: bytes = b"") -> bytes:
    """A zip file; a second directory may follow the first, to which the end record still points."""
    body, entries, at = [], [], 0
    for row in rows(members) if isinstance(members, dict) else members:
        local = row.local()
        entries.append(row.entry(at - len(local) if row.inside else at))
        body += [] if row.inside else [local]
        at += 0 if row.inside else len(local)
    listing = b"".join(entries)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, len(members), len(members), len(listing), at, 0)
    return b"".join(body) + listing + directory + end


# --- files that would run code


class Call:
    """Pickles as a call, which any unpickler but a restricted one makes."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        """Only to look like a function to pickle, when the function is itself the answer of a call."""


def calls(canary: Path) -> dict[str, Call]:
    write, touch = f"open({str(canary)!r}, 'w')", f"touch {canary}"
    return {
        "system": Call(os.system, touch), "popen": Call(subprocess.Popen, ["touch", str(canary)]),
        "eval": Call(eval, write), "exec": Call(exec, write), "open": Call(open, str(canary), "w"),
        "resolve": Call(Call(pkgutil.resolve_name, "os:system"), touch),
        "import": Call(Call(getattr, Call(__import__, "os"), "system"), touch),
    }  # fmt: skip


@kind
def pickles(good: Good, folder: Path) -> Files:
    for name, call in calls(good.canary).items():
        yield f"{name}.bin", pickle.dumps({"model": call}, protocol=2)
        yield f"{name}0.safetensors", pickle.dumps(call, protocol=0)
        yield f"{name}_folder", {"pytorch_model.bin": pickle.dumps([call], protocol=4)}
        for protocol in (2, 4):
            evil = {"a/data.pkl": pickle.dumps(good.state | {"x": call}, protocol)}
            yield f"{name}{protocol}.pt", zipped(good.members | evil)


@kind
def programs(good: Good, folder: Path) -> Files:
    script, evil = folder / "script.pt", calls(good.canary)["system"]
    torch.jit.script(torch.nn.Linear(2, 2)).save(script)
    yield "script.pt", script.read_bytes()
    yield "script_constants.pt", zipped(good.members | {"a/constants.pkl": b"\x80\2)."})
    yield "script_beside_weights.pt", zipped(good.members | {"a/code/evil.py": b"import os"})
    yield "site.pth", f"import os; os.system('touch {good.canary}')\n".encode()
    yield "site_brace.pth", f"#2345678{{\nimport os; os.system('touch {good.canary}')\n".encode()
    yield "legacy.pt", pth(good.state, _use_new_zipfile_serialization=False)
    yield "legacy_evil.pt", pth(evil, _use_new_zipfile_serialization=False)
    (folder / "pickle").write_bytes(pickle.dumps(evil))
    for mode in ("w", "w:gz"):
        with tarfile.open(folder / "tar.pt", mode) as tar:
            for name in ("sys_info", "pickle", "storages", "tensors"):
                tar.add(folder / "pickle", name)
        yield f"tar{mode[2:]}.pt", (folder / "tar.pt").read_bytes()
    yield "object.npz", npz({"x": np.array([evil], dtype=object)})
    yield "beside.npz", zipped({"x.npy": npy("(1,)", bytes(4)), "y.pkl": pickle.dumps(evil)})
    yield "checkpoint", good.hf | {".metadata": pickle.dumps(evil), "__0_0.distcp": pickle.dumps(evil)}


# --- damaged files and other things


@kind
def strangers(good: Good, folder: Path) -> Files:
    yield from {
        "zip_in_zip.pt": zipped({"model.pt": good.pth}), "empty_zip.npz": zipped([]), "one_byte.pt": b"P",
        "npz_in_zip.npz": zipped({"model.npz": good.npz}), "seven.pt": b"7z\xbc\xaf\x27\x1c" + good.pth,
        "gzip.pt": b"\x1f\x8b\x08\0" + zlib.compress(good.pth), "stub.pt": b"#!/bin/sh\n" + good.pth,
        "pointer.pt": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "empty.pt": b"",
        "page.npz": b"<!DOCTYPE html><html>404</html>", "single.npy": npy("(1,)", bytes(4)),
        "book.h5": b"\x89HDF\r\n\x1a\n" + bytes(99), "zeros.pt": bytes(5000),
    }.items()  # fmt: skip


@kind
def truncated(good: Good, folder: Path) -> Files:
    for name, data in (("own.safetensors", good.own), ("official.npz", good.npz), ("timm.pth", good.pth)):
        for cut in (3, 8, 9, 100, 1000, len(data) // 2, len(data) - 1000, len(data) - 1):
            yield f"{cut}_{name}", data[:cut]
    for cut in (1, 100, -1):
        yield f"hf{cut}", good.hf | {"model.safetensors": good.hf["model.safetensors"][:cut]}


@kind
def zips(good: Good, folder: Path) -> Files:
    inner = Member("a/inner.npy", npy("(1,)", bytes(4)), inside=True)
    for end, members in ((".npz", rows(unzipped(good.npz))), (".pth", rows(good.members))):
        *most, last = members
        size = len(last.data)
        lies = {
            "encrypted": {"flags": 1}, "more": {"size": 10**9, "packed": 10**9}, "same_place": {"at": 0},
            "bit_more": {"size": size + 2000, "packed": size + 2000}, "beyond": {"at": 10**9},
            "unequal": {"size": size + 8}, "negative": {"at": 2**32 - 1},
        }  # fmt: skip
        for name, lie in lies.items():
            yield name + end, zipped([*most, Member(last.name, last.data, **lie)])
        yield "twice" + end, zipped([*members, last])
        outer = Member("a/outer.npy", npy("(50,)", bytes(200 - len(inner.local())) + inner.local()))
        yield "overlap" + end, zipped([*members, outer, inner])


@kind
def headers(good: Good, folder: Path) -> Files:
    head, body = parts(good.own)
    text, (_, first, second, *_) = js(head), head
    end = head[first]["data_offsets"][1]
    fields = {
        "shape": [[-1, -8], [2**62, 4], [2**64, 0], ["1"], [1.0], [True], [None], "12", 7, {"a": 1}],
        "data_offsets": [[4, end], [end, 0], [-4, end], [0], [0, 1, 2], ["0", "4"], 3, [0, 10**30]],
        "dtype": ["F31", "F8_E4M3", "C64", ["F32"], None, 4, "I4" * 10**5],
    }
    wrong = [{first: head[first] | {field: bad}} for field, values in fields.items() for bad in values]
    wrong += [{second: head[second] | {"data_offsets": [0, end]}}]
    wrong += [{"__metadata__": bad} for bad in ([], "x", 5, {"vitkit": 1}, {"vitkit": {}})]
    texts = [js(head | change) for change in wrong]
    texts += [b"{}", b"{", b'{"a"}', b'{"a": 1}', b'{"a": {}}', b'{"a": NaN}', text[:-1] + b"," + text[1:]]
    texts += [text.replace(b"vit", b"\xe9\xff"), text.replace(b'"dtype":', b'"dtype": "F32", "dtype":', 1)]
    for n, bad in enumerate(texts):
        yield f"text{n}.safetensors", safe(bad, body)
    for n, length in enumerate((10**15, 2**63, 2**64 - 1, 0, 1, len(good.own))):
        yield f"length{n}.safetensors", safe(head, body, length=length)
    yield "hole.safetensors", safe(head, bytes(4) + body)
    yield "tail.safetensors", safe(head, body + bytes(4))


# --- bombs


def deflated(megabytes: int) -> bytes:
    packer = zlib.compressobj(1, wbits=-15)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(megabytes)) + packer.flush()


@kind
def compressed(good: Good, folder: Path) -> Files:
    bomb = {"data": deflated(400), "size": 400 * 2**20, "method": zipfile.ZIP_DEFLATED}
    first, version = Member("a/data.pkl", **bomb), Member("a/version", b"3\n")
    yield "bomb.pt", zipped([first, version])
    yield "bomb_storage.pt", zipped([*rows(good.members), Member("a/data/99", **bomb)])
    yield "bomb.npz", zipped([*rows(unzipped(good.npz)), Member("x.npy", **bomb)])
    modest = b"".join(Member(row.name, bytes(9)).entry(0) for row in (first, version))
    yield "two_directories.pt", zipped([first, version], directory=modest)
    np.savez_compressed(folder / "zeros.npz", **good.arrays, more=np.zeros(5 * 10**7, np.float32))
    yield "zeros.npz", (folder / "zeros.npz").read_bytes()


@kind
def bombs(good: Good, folder: Path) -> Files:
    deep, wide = b"[" * 10**5 + b"]" * 10**5, b"[" + b"[]," * (6 * 10**6) + b"0]"
    for name, value in (("deep", deep), ("wide", wide), ("digits", b"9" * 10**6)):
        text = b'{"x":' + value + b"}"
        yield f"{name}.safetensors", safe(text)
        yield f"{name}_config", good.hf | {"config.json": text}
    yield "deep_index", {"model.safetensors.index.json": b'{"weight_map":' + deep + b"}"}
    yield "deep_tables.safetensors", safe(b'{"x":' * 10**5 + b"0" + b"}" * 10**5)
    entry = '"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    yield "million.safetensors", safe(b"{" + ",".join(entry % n for n in range(10**6)).encode() + b"}")
    listing = Member("x.npy", b"").entry(0) * 10**6
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0, 0, len(listing), 35, 0)
    yield "million.npz", Member("x.npy", b"").local() + listing + end
    yield "million.pt", zipped(good.members | {"a/data.pkl": b"\x80\2" + b"]" * (20 * 2**20) + b"."})
