"""The total and the available memory of this machine, or of the container that the process runs in."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

MEMINFO, OWN_GROUPS, GROUPS = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# of cgroups v2 and v1, by controller: files of limit and usage, and the file cache's line of memory.stat
VERSIONS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def total_memory() -> int:
    """The memory of this machine in bytes, or less, if a container has less."""
    if sys.platform == "win32":
        return windows_memory()[0]
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *(limit for limit, _ in container_limits())])


def free_memory() -> int:
    """The available memory in bytes, in a container at most what is left to it; on macOS, the total.

    The cache of files counts as free: the system gives it up when memory is asked for.
    """
    if sys.platform == "win32":
        return windows_memory()[1]
    left = [limit - used for limit, used in container_limits()]
    return max(0, min([available_memory(), *left]))


def available_memory() -> int:
    """The available memory of this machine in bytes."""
    with suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if sys.platform != "win32" and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return total_memory()


def container_limits() -> Iterator[tuple[int, int]]:
    """The limit and the used memory of each cgroup of this process with a limit, parents included.

    /proc names the cgroup as the host sees it or as the container does, so not every folder exists.
    """
    groups = ""
    with suppress(OSError):
        groups = OWN_GROUPS.read_text(encoding="utf-8")
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller, (limit, used, cache) in VERSIONS.items():
            if controller not in controllers.split(","):
                continue
            root = GROUPS / controller
            folder = root / path.lstrip("/")
            for group in (folder, *(parent for parent in folder.parents if parent.is_relative_to(root))):
                with suppress(OSError, ValueError, KeyError):  # no such group here, or "max"
                    rows = (group / "memory.stat").read_text(encoding="utf-8").splitlines()
                    cached = int(dict(row.split() for row in rows)[cache])
                    most = int((group / limit).read_text("utf-8"))
                    yield most, max(0, int((group / used).read_text("utf-8")) - cached)


class MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = [
        ("length", ctypes.c_uint32), ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64), ("free", ctypes.c_uint64), ("others", ctypes.c_uint64 * 5),
    ]  # fmt: skip


def windows_memory() -> tuple[int, int]:
    """The total and the free memory in bytes, as Windows tells them."""
    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    windll: Any = getattr(ctypes, "windll")  # noqa: B009  # only there
    if not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("GlobalMemoryStatusEx failed")
    return status.total, status.free
