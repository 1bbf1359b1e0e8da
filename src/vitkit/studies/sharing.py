"""Several processes on one GPU at the same time: by NVIDIA's MPS, where it is there; else they take turns.

Turns are of milliseconds, and the steps of small models are as short. What MPS lacks is a wall between the
processes: a kernel that fails in one of them, or one that is killed, may be an error in all. Their trials are
then listed as failed, and run again by the same command.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

CONTROL = "nvidia-cuda-mps-control"
KNOWN = "/usr/bin:/usr/local/nvidia/bin"  # where it may be when it is not on the path
PIPE, LOG, VISIBLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"
MOST = 48  # processes that it takes for one GPU
PATIENCE = 30.0
TRY = """
import ctypes, sys
cuda, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
well = cuda.cuInit(0) == 0
for number in map(int, sys.argv[1:]):
    well = well and cuda.cuDeviceGet(ctypes.byref(device), number) == 0
    well = well and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
raise SystemExit(not well)
"""


@contextmanager
def together(devices: Sequence[str]) -> Iterator[bool]:
    """Inside, processes that begin share a GPU's time, if several are for one; whether they do.

    devices: of each process. Whoever has an MPS of their own, by its variables, keeps it.
    """
    control = shutil.which(CONTROL) or shutil.which(CONTROL, path=KNOWN)
    if not shared(devices) or control is None or not {PIPE, LOG}.isdisjoint(os.environ):
        yield False
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        here = {PIPE: folder, LOG: folder}
        try:
            works = begun(control, devices, os.environ | here)
            os.environ.update(here if works else {})
            yield works
        finally:
            for name in here:
                os.environ.pop(name, None)
            with suppress(OSError, subprocess.SubprocessError):
                ask([control], os.environ | here, "quit -t 5\n")


def shared(devices: Sequence[str]) -> bool:
    """Whether several processes are for one GPU, and GPUs are to be seen at all."""
    hidden = os.environ.get(VISIBLE, "all").strip() in ("", "-1")
    cuda = all(device.startswith("cuda") for device in devices)
    return cuda and not hidden and 1 < max(Counter(devices).values(), default=0) <= MOST


def begun(control: str, devices: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Start it; whether a process can then use the GPUs, and does so through it.

    It sees all GPUs: those that it is shown have other numbers for the processes. A process that does not
    reach it uses the GPU alone without a word, so it is asked whether somebody came.
    """
    numbers = sorted({device.partition(":")[2] or "0" for device in devices})
    try:
        ask([control, "-d"], {name: value for name, value in environment.items() if name != VISIBLE})
        ask([sys.executable, "-c", TRY, *numbers], environment)
        return bool(ask([control], environment, "get_server_list\n", subprocess.PIPE).strip())
    except (OSError, subprocess.SubprocessError):
        return False


def ask(
    command: Sequence[str], environment: Mapping[str, str], words: str = "", answer: int = subprocess.DEVNULL
) -> str:
    """Its answer, if that is wanted; in a session of its own, which Ctrl-C does not reach."""
    done = subprocess.run(  # noqa: S603  # a fixed program, and our own Python
        command, env=environment, input=words, text=True, stdout=answer, stderr=subprocess.DEVNULL,
        timeout=PATIENCE, check=True, start_new_session=True,
    )  # fmt: skip
    return done.stdout or ""
