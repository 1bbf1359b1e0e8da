"""Free memory: the cache of files counts as free, a container's limit counts, and other systems are asked."""

import os
import sys
import types

import pytest

from vitkit.io import free_memory as memory

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 1 GiB that nothing uses and 5 GiB that can be had; its control groups are folders."""
    rows = ("MemTotal: 25165824 kB", "MemFree: 1048576 kB", "MemAvailable: 5242880 kB")
    (tmp_path / "meminfo").write_text("\n".join(rows))
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    return tmp_path


def write(folder, version, limit, used, cached):
    folder.mkdir(parents=True, exist_ok=True)
    names = memory.VERSIONS[version]
    for name, text in zip(names, (limit, used), strict=False):
        (folder / name).write_text(f"{text}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {cached}\n")


def test_the_cache_of_files_counts_as_free(machine):
    assert memory.free_memory() == 5 * GIB
    memory.MEMINFO.write_text("MemFree: 1048576 kB\n")  # an old kernel, which does not say
    assert 0 < memory.free_memory() < memory.total_memory()


def test_the_limit_of_a_group_or_of_one_around_it_counts(machine):
    memory.OWN_GROUPS.write_text("0::/batch/job\n")
    write(machine / "groups/batch/job", "", "max", 2 * GIB, 0)
    assert memory.free_memory() == 5 * GIB
    write(machine / "groups/batch", "", 4 * GIB, 3 * GIB, 2 * GIB)
    assert (memory.total_memory(), memory.free_memory()) == (4 * GIB, 3 * GIB)
    write(machine / "groups/batch/job", "", GIB, 2 * GIB, 0)
    assert (memory.total_memory(), memory.free_memory()) == (GIB, 0)


def test_a_container_sees_its_own_group_at_the_root(machine):
    memory.OWN_GROUPS.write_text("5:cpu,cpuacct:/docker/1f\n4:memory:/docker/1f\n")
    write(machine / "groups/memory", "memory", 2 * GIB, GIB, GIB // 2)
    assert (memory.total_memory(), memory.free_memory()) == (2 * GIB, 3 * GIB // 2)


def test_the_memory_of_windows_is_what_it_says(monkeypatch):
    def fill(status):
        result = status._obj
        assert result.length == 64  # sizeof(MEMORYSTATUSEX)
        result.total, result.free = 16 * GIB, 5 * GIB
        return 1

    kernel = types.SimpleNamespace(GlobalMemoryStatusEx=fill)
    monkeypatch.setattr(memory.ctypes, "windll", types.SimpleNamespace(kernel32=kernel), raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    assert memory.total_memory() == 16 * GIB and memory.free_memory() == 5 * GIB


def test_macos_tells_the_memory_but_not_what_is_free(machine, monkeypatch):
    memory.MEMINFO.unlink()
    assert 0 < memory.free_memory() < memory.total_memory()
    monkeypatch.delitem(os.sysconf_names, "SC_AVPHYS_PAGES")
    assert memory.free_memory() == memory.total_memory()
