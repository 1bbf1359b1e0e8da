"""Other operating systems: no module needs what only POSIX has, and workers need not be forked."""

import multiprocessing
import pickle
import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from together import losses, small

from vitkit.data import loader
from vitkit.data.decoded_cache import decoded
from vitkit.data.loader import evaluation_batches
from vitkit.data.sources.shards import write_shards
from vitkit.data.sources.source import Source, digits, from_arrays
from vitkit.data.splits import join
from vitkit.data.views import View
from vitkit.datasets.opening import open_data
from vitkit.inference.agreement import agreement
from vitkit.metrics.classification import accuracy
from vitkit.metrics.frozen_features import fewshot_grid, probe
from vitkit.metrics.multilabel import multilabel_accuracy
from vitkit.ops.precision import widest_float
from vitkit.options import check_device
from vitkit.runs.folder import RunOptions
from vitkit.runs.run import run
from vitkit.runtime.runtime import Runtime, choose_runtime
from vitkit.server import decoder
from vitkit.server.monitoring import Metrics

VIEW = View(size=(8, 8), crop="squash")
IMPORTS = """
import importlib, importlib.abc, os, pkgutil, signal, sys
import matplotlib.pyplot, PIL.Image, tensorboard, torch, torch._dynamo, torch.distributed, tyro
import uvicorn, fastapi, torch.utils.data, urllib3
import concurrent.futures, asyncio, tempfile, subprocess, multiprocessing.context

GONE = ("fcntl", "resource", "pwd", "grp", "termios")


class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in GONE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


for name in GONE:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Without())
for name in ("fork", "register_at_fork", "sysconf", "sysconf_names", "pread", "pwrite", "sched_getaffinity",
             "statvfs", "getuid", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_NOFOLLOW"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD"):
    delattr(signal, name)
signal.SIGBREAK = 21
os.O_BINARY, os.O_NOINHERIT = 0x8000, 0x80
del multiprocessing.context.ForkProcess, multiprocessing.context.ForkContext
multiprocessing.get_all_start_methods = lambda: ["spawn"]
sys.platform = sys.argv[1]

import vitkit

found = 0
for module in pkgutil.walk_packages(vitkit.__path__, "vitkit."):
    if not module.name.endswith("_kernel") and not module.name.endswith("_kernels"):  # they need Triton
        importlib.import_module(module.name)
        found += 1
print(found)
"""


@pytest.mark.slow
def test_every_module_is_imported_where_there_is_nothing_of_posix():
    done = subprocess.run([sys.executable, "-c", IMPORTS, "win32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) > 200


@pytest.mark.slow
def test_the_check_notices_what_only_posix_has():
    code = IMPORTS.replace("import vitkit\n", "import vitkit\nimport resource\n", 1)
    done = subprocess.run([sys.executable, "-c", code, "win32"], capture_output=True, text=True)
    assert done.returncode and "No module named 'resource'" in done.stderr


@pytest.fixture
def spawned(monkeypatch):
    """Workers are started as on macOS and Windows; returns the names of the classes that were started."""
    started, start = [], loader.Worker.start

    def noted(self: loader.Worker) -> None:
        started.append(type(self).__name__)
        start(self)

    monkeypatch.setattr(loader, "start_method", lambda: "spawn")
    monkeypatch.setattr(loader.Worker, "start", noted)
    return started


@pytest.mark.slow
def test_a_run_with_spawned_workers_has_the_same_losses(tmp_path, spawned, monkeypatch):
    recipe, runtime, options = small(steps=6), choose_runtime("cpu"), RunOptions(workers=1, quiet=True)
    run(recipe, tmp_path / "spawned", runtime, options)
    assert set(spawned) == {"SpawnedWorker"}
    monkeypatch.setattr(loader, "start_method", lambda: "fork")
    run(recipe, tmp_path / "forked", runtime, options)
    assert "ForkedWorker" in spawned
    assert losses(tmp_path / "spawned") == losses(tmp_path / "forked")
    assert len(losses(tmp_path / "forked")) >= 2


def encoded(number: int) -> bytes:
    out = BytesIO()
    Image.new("RGB", (10, 8), (7 * number, 40, 90)).save(out, "PNG")
    return out.getvalue()


def names(count: int = 6) -> list[str]:
    return [f"{'ab'[i % 2]}/{i}.png" for i in range(count)]


def folder(path):
    for i, name in enumerate(names()):
        (path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "images" / name).write_bytes(encoded(i))
    return path / "images"


def opened(kind: str, path) -> Source:
    """A source of each kind, of the same images."""
    images = folder(path)
    if kind == "arrays":
        return from_arrays("arrays", np.arange(6 * 64, dtype=np.uint8).reshape(6, 8, 8), np.arange(6) % 2)
    if kind == "zip":
        with zipfile.ZipFile(path / "x.zip", "w") as archive:
            for i, name in enumerate(names()):
                archive.writestr(name, encoded(i))
        return open_data(str(path / "x.zip"))["all"]
    if kind == "tar":
        with tarfile.open(path / "x.tar", "w") as archive:
            archive.add(images, ".")
        return open_data(str(path / "x.tar"))["all"]
    if kind == "csv":
        (path / "x.csv").write_text("path,label\n" + "".join(f"images/{n},{n[0]};c\n" for n in names()))
        return open_data(str(path / "x.csv"))["all"]
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        table = {"image": [{"bytes": encoded(i)} for i in range(6)], "label": [i % 2 for i in range(6)]}
        parquet.write_table(arrow.table(table), path / "x.parquet")
        return open_data(str(path / "x.parquet"))["all"]
    plain = open_data(str(images))["all"]
    if kind == "shards":
        write_shards({"all": plain}, path / "shards", images=4)
        return open_data(str(path / "shards"))["all"]
    if kind == "decoded":
        return decoded(plain, path / "decoded", 0)
    if kind == "taken":
        return plain.take(np.array([4, 1, 5]))
    return join(plain, plain.take(np.array([2]))) if kind == "joined" else plain


KINDS = ("arrays", "folder", "zip", "tar", "csv", "parquet", "shards", "decoded", "taken", "joined")


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_is_the_same_in_another_process(kind, tmp_path):
    source = opened(kind, tmp_path)
    for index in range(len(source)):
        source.fetch(index)
    content = pickle.dumps(source)
    copy = pickle.loads(content)
    assert list(copy.keys) == list(source.keys) and copy.classes == source.classes
    assert (np.asarray(copy.labels[0]) == np.asarray(source.labels[0])).all()
    for index in range(len(source)):
        assert np.array_equal(copy.fetch(index), source.fetch(index))
        assert (copy.digest is None) == (source.digest is None)
        if source.digest:
            assert copy.digest(index) == source.digest(index)
        if source.size:
            assert copy.size(index) == source.size(index)


def test_pixels_are_sent_once_and_a_mapped_index_not_at_all(tmp_path):
    assert len(pickle.dumps(digits())) < 1.5 * 1797 * 64 + 60_000  # not three times, for the three channels
    source = opened("shards", tmp_path)
    assert b"images/" not in pickle.dumps(source.fetch) and len(pickle.dumps(source.fetch)) < 1000


def test_spawned_workers_decode_what_this_process_does(tmp_path, spawned):
    source = opened("zip", tmp_path)
    here, there = (list(evaluation_batches(source, VIEW, 4, workers=workers)) for workers in (0, 2))
    assert spawned == ["SpawnedWorker"] * 2 and len(here) == len(there) == 2
    for one, other in zip(here, there, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_spawned_workers_fill_the_cache_of_decoded_images(tmp_path, spawned):
    plain = open_data(str(folder(tmp_path)))["all"]
    filled = decoded(plain, tmp_path / "decoded", 1)
    assert spawned and filled.fetch(1).tolist()[0][0] == [14, 40, 90]


def test_a_source_that_cannot_be_sent_is_refused(spawned):
    source = Source("odd", ("a",), ["x"], np.zeros(1, np.int64), lambda i: encoded(i))
    with refused("request.conflict", "odd"):
        list(evaluation_batches(source, VIEW, 1, workers=1))


def test_decoders_that_are_spawned_decode_and_are_replaced(monkeypatch):
    monkeypatch.setattr(decoder, "context", multiprocessing.get_context("spawn"))
    decoder.start_forkserver()  # starts none
    service = decoder.Decoder(1, 10**6, Metrics())
    try:
        before = next(iter(service.workers)).process
        assert service.submit(encoded(3), VIEW).result(60).pixels[:, 0, 0].tolist() == [21, 40, 90]
        before.kill()
        assert service.submit(encoded(2), VIEW).result(60).pixels[:, 0, 0].tolist() == [14, 40, 90]
        assert next(iter(service.workers)).process is not before
    finally:
        service.close()


class AppleTensor(torch.Tensor):
    """A tensor as on Apple's GPUs: nothing computed from it is float64, until it is on the CPU."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        actual = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.cpu or (func is torch.Tensor.to and "cpu" in args[1:]):
            return actual.as_subclass(torch.Tensor)
        for value in actual if isinstance(actual, tuple | list) else [actual]:
            if isinstance(value, AppleTensor) and value.dtype == torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64")
        return actual


def apple(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(AppleTensor)


def test_the_stand_in_for_apples_gpus_has_no_float64():
    with pytest.raises(TypeError):
        apple(torch.zeros(2)).sum().double()
    assert apple(torch.zeros(2)).sum().cpu().double() == 0


def test_features_on_apples_gpus_are_measured_without_float64():
    x, y = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2
    x[:, 0] += 4 * y
    actual = probe(apple(x), y, apple(x), y, rates=(0.1,), epochs=5)
    assert actual == probe(x, y, x, y, rates=(0.1,), epochs=5)
    assert fewshot_grid(apple(x), y, apple(x), y) == fewshot_grid(x, y, x, y)
    assert agreement(apple(x), apple(x)).same_top1 == 1


@pytest.mark.parametrize("several", [False, True])
def test_predictions_on_apples_gpus_are_measured_without_float64(several):
    images, labels = torch.randn(6, 7, generator=torch.Generator().manual_seed(0)), torch.arange(6)
    labels = labels[:, None] if several else labels
    measure = multilabel_accuracy if several else accuracy
    actual, plain = (
        measure(lambda x, wrap=wrap: wrap(x), [{"image": images, "label": labels}], 7)
        for wrap in (apple, lambda x: x)
    )
    assert actual.loss == plain.loss and actual.top1 == plain.top1


def test_apples_gpus_are_asked_for_by_name_and_refused_where_there_are_none():
    check_device("mps")
    if not torch.backends.mps.is_available():
        with refused("device.unavailable", "mps"):
            choose_runtime("mps")
    assert Runtime("mps").to_device({}) == {}
    assert widest_float(torch.device("mps")) == torch.float32
