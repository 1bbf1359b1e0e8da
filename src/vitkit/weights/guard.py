"""What is wrong with a zip file's directory or with a pickle, found out before any library reads them."""

import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

MAX_DIRECTORY = 4 * 2**20  # bytes
MAX_PICKLE = 2**20  # bytes
MAX_UNFOLDED = 10**7  # objects in a pickle, those that it shares counted anew each time
STORAGES = ("Float", "Half", "BFloat16", "Double", "Long", "Int", "Short", "Char", "Byte", "Bool")
SAFE_GLOBALS = {  # all that a pickle of plain tensors and training options names
    "collections OrderedDict", "collections Counter", "argparse Namespace", "torch Size", "torch device",
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in STORAGES),
}  # fmt: skip


def directory_objection(path: Path, size: int) -> str:
    """Why a zip file is not read: its one directory must end where its end record begins.

    Of two directories, one library believes the first and another the second.
    """
    with path.open("rb") as file:
        file.seek(max(0, size - 22 - 76 - 2**16))
        tail = file.read()
    at = tail.rfind(b"PK\5\6")
    if at < 0 or at + 22 > len(tail):
        return "a zip file without its end; cut off?"
    stop = size - len(tail) + at
    length, start, comment = struct.unpack("<12x2LH", tail[at : at + 22])
    whole = stop + 22 + comment == size
    if at >= 76 and tail[at - 20 : at - 16] == b"PK\6\7":  # sizes above 4 GB have a record of their own
        stop -= 76
        length, start = struct.unpack("<40x2Q", tail[at - 76 : at - 20])
        whole = whole and struct.unpack("<8xQ4x", tail[at - 20 : at]) == (stop,)
    if not whole or start + length != stop:
        return "its zip directory is cut off or not where it should be"
    return "its zip directory is larger than any real one" if length > MAX_DIRECTORY else ""


def pickle_objection(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> str:
    """Why a pickle is not read: it names more than plain tensors need, or unfolds without end."""
    if member.file_size > MAX_PICKLE:
        return f"{member.filename} is larger than any real one"
    stack: list[int] = []  # how many objects each object is
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for op, arg, _ in pickletools.genops(archive.read(member)):
        names = "GLOBAL" in op.name or op.name in ("INST", "OBJ", "EXT1", "EXT2", "EXT4")
        if names and arg not in SAFE_GLOBALS:
            return f"its pickle asks for {str(arg)[:80]!r}, which no weights need; it may run code"
        if "PUT" in op.name:
            memo[arg] = stack[-1]
        elif "GET" in op.name:
            stack.append(memo[arg])
        elif op.name == "MARK":
            marks.append(len(stack))
        else:
            taken = len(op.stack_before)
            if pickletools.markobject in op.stack_before:
                taken = len(stack) - marks.pop() + op.stack_before.index(pickletools.markobject)
            below = len(stack) - taken
            count = 1 + sum(stack[below:])
            stack[below:] = [count] * len(op.stack_after)
            if count > MAX_UNFOLDED:
                return f"its pickle unfolds to more than {MAX_UNFOLDED} objects"
    return ""
