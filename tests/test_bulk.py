"""Bulk work: every image once and in order, whatever is killed; all kinds of data; what is refused."""

import csv
import io
import json
import os
import shutil
import signal
import sys
import tarfile
import time
import zipfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, randomise
from PIL import Image
from refusals import refused
from test_cli import run as command
from together import forks, together

import vitkit
from vitkit.commands.bulk import run_bulk
from vitkit.commands.bulk_request import BulkRequest
from vitkit.datasets.images import lead_of, open_images
from vitkit.datasets.opening import open_data, shard
from vitkit.inference import bulk, columns
from vitkit.io import parts
from vitkit.models.variants import build

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
fsspec = pytest.importorskip("fsspec")
COUNT, BAD = 40, "photos/cat/017.png"  # images, and the unreadable one


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A small model and forty images of two classes, one of them broken."""
    folder, rng = tmp_path_factory.mktemp("bulk"), np.random.default_rng(0)
    vitkit.save(randomise(build("ViT-Ti/8", **SMALL)), folder / "model.safetensors")
    for n in range(COUNT):
        path = folder / "photos" / ("cat" if n % 2 else "dog") / f"{n:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)).save(path)
    (folder / BAD).write_bytes(b"nothing")
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A working folder with the model and the images."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def request(out: str, *places: str, verb: str = "embed", **options) -> BulkRequest:
    usual = {"model": "model.safetensors", "places": places or ("photos",), "batch": 4, "part_size": 8,
             "workers": 0, "device": "cpu"}  # fmt: skip
    return BulkRequest(verb=verb, out=Path(out), **(usual | options))


def written(out: str, *places: str, **options):
    """The table that a request writes."""
    run_bulk(request(out, *places, **options), quiet=True)
    return parquet.read_table(out)


def names() -> list[str]:
    return sorted(str(path) for path in Path("photos").rglob("*.png"))


def vectors(table) -> np.ndarray:
    return np.array(table["embedding"].drop_null().to_pylist(), np.float32)


# values


def test_features_are_those_of_each_image_alone_in_the_order_of_the_data(here):
    done = run_bulk(request("f.parquet"), quiet=True)
    table = parquet.read_table("f.parquet")
    assert table["image"].to_pylist() == names() and len(set(names())) == COUNT
    assert table["label"].to_pylist() == [Path(name).parent.name for name in names()]
    readable = [name for name in names() if name != BAD]
    alone = vitkit.embed("model.safetensors", readable, batch=1)
    assert np.abs(vectors(table) - alone).max() < 1e-5 and alone.std() > 0.1
    assert [bool(error) for error in table["error"].to_pylist()] == [name == BAD for name in names()]
    assert table["embedding"].null_count == 1 and table.schema.field("embedding").type.list_size == 32
    assert (done.images, done.unreadable, done.computed) == (COUNT, 1, COUNT)
    about = json.loads(table.schema.metadata[b"vitkit"])
    assert about["vitkit"] == vitkit.__version__ and about["model"] == "model.safetensors" and about["view"]
    assert not parts.folder_of(Path("f.parquet")).exists()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("batch", "size"), [(3, 7), (64, 1024), (5, 1)])
def test_parts_batches_and_workers_change_nothing(here, workers, batch, size):
    one = written("a.parquet")
    other = written("b.parquet", batch=batch, part_size=size, workers=workers)
    assert other.drop(["embedding"]).equals(one.drop(["embedding"]))
    assert np.abs(vectors(other) - vectors(one)).max() < 1e-5


def test_pooling_length_and_type_of_the_numbers(here):
    model = vitkit.load("model.safetensors")
    good = [name for name in names() if name != BAD]
    view = np.stack([bulk_view(model, name) for name in good])
    tokens = model.tokens(normalised(model, view)).detach().numpy()
    lead = int(model.class_token is not None)
    assert np.abs(vectors(written("c.parquet", pool="cls")) - tokens[:, 0]).max() < 1e-5
    assert np.abs(vectors(written("m.parquet", pool="mean")) - tokens[:, lead:].mean(1)).max() < 1e-5
    unit = vectors(written("n.parquet", normalize=True))
    assert np.abs(np.linalg.norm(unit, axis=1) - 1).max() < 1e-5
    half = written("h.parquet", dtype="float16")
    assert half.schema.field("embedding").type.value_type == pyarrow.float16()


def bulk_view(model, name):
    from vitkit.inference.predict import view_of

    return view_of(name, model).numpy()


def normalised(model, view):
    import torch

    from vitkit.inference.predict import prepare_batch

    return prepare_batch(model, torch.from_numpy(view))


def test_predictions_are_those_of_each_image_alone(here):
    table = written("a.parquet", verb="predict", top=3).to_pylist()
    assert [row["image"] for row in table] == names()
    for row in table:
        if row["image"] == BAD:
            assert row["error"] and row["label"] is row["probability"] is row["labels"] is None
            continue
        alone = vitkit.predict("model.safetensors", row["image"], top=3)
        assert row["labels"] == [label for label, _ in alone] and row["label"] == alone[0][0]
        assert row["probabilities"] == pytest.approx([p for _, p in alone], abs=1e-5)
    run_bulk(request("a.csv", verb="predict", top=3), quiet=True)
    with open("a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["image"], row["label"], bool(row["error"])) for row in rows] == [
        (row["image"], row["label"] or "", bool(row["error"])) for row in table
    ]
    assert json.loads(rows[0]["labels"]) == table[0]["labels"]


def test_an_npz_holds_the_same(here):
    table = written("f.parquet")
    assert run_bulk(request("f.npz"), quiet=True).unreadable == 1
    with np.load("f.npz") as arrays:
        bad = np.array(table["error"].to_pylist()) != None  # noqa: E711
        assert np.array_equal(arrays["embedding"][~bad], vectors(table))
        assert np.isnan(arrays["embedding"][bad]).all() and arrays["error"][bad][0]
        for name in ("image", "label"):
            assert arrays[name].tolist() == table[name].to_pylist()


def test_python_and_the_command_write_the_same_file(here, capsys):
    line = "embed model.safetensors photos --batch 4 --part-size 8 --workers 0 --device cpu --json --out"
    words = line.split()
    assert command(*words, "a.parquet") == 1  # one image is unreadable
    shown = json.loads(capsys.readouterr().out)
    assert (shown["images"], shown["unreadable"], shown["path"]) == (COUNT, 1, "a.parquet")
    assert shown["seconds"] > 0 and shown["images_per_second"] > 0
    options = {"batch": 4, "part_size": 8, "workers": 0, "device": "cpu"}
    done = vitkit.embed("model.safetensors", "photos", out="b.parquet", **options)
    assert done.path == Path("b.parquet") and done.unreadable == 1
    assert Path("a.parquet").read_bytes() == Path("b.parquet").read_bytes()
    (here / BAD).unlink()
    assert command(*words, "c.parquet") == 0
    assert json.loads(capsys.readouterr().out)["images"] == COUNT - 1


def test_speed_and_time_left_are_shown(here, capsys):
    run_bulk(request("f.parquet"))
    shown = capsys.readouterr().err
    assert f"{COUNT}/{COUNT}" in shown and "images/s" in shown and "left" in shown and BAD in shown


def test_a_table_without_any_readable_image(here):
    for path in Path("photos").rglob("*.png"):
        path.write_bytes(b"nothing")
    table = written("f.parquet")
    assert table["embedding"].null_count == table.num_rows == COUNT and all(table["error"].to_pylist())
    assert written("a.parquet", verb="predict")["probability"].null_count == COUNT


# killed and continued


def slowly(job: BulkRequest, delay: float) -> None:
    """The request with a pause after each batch and before the end of the merge."""
    compute, merge = bulk.Embedding.compute, columns.Parquet.merge

    def paused(self, images):
        time.sleep(delay)
        return compute(self, images)

    def paused_merge(self, *words):
        result = merge(self, *words)
        time.sleep(100 * delay)
        return result

    bulk.Embedding.compute, columns.Parquet.merge = paused, paused_merge
    run_bulk(job, quiet=True)


def killed_when(job: BulkRequest, reached) -> None:
    """Kill a process of the request with SIGKILL as soon as something is reached."""
    process = forks.Process(target=slowly, args=(job, 0.05))
    process.start()
    end = time.monotonic() + 60
    while not reached():
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def present(out: str = "f.parquet") -> list[str]:
    return sorted(path.name for path in Path(f"{out}.parts").glob("part-*"))


@pytest.mark.slow
def test_a_killed_command_continues_and_writes_the_same_bytes(here):
    job = replace(
        request("whole.parquet"), places=(str(here / "photos"),), model=str(here / "model.safetensors")
    )
    run_bulk(job, quiet=True)
    for moment in (0, 1, 4, "merge"):
        job = replace(job, out=here / f"{moment}.parquet")
        folder, partial = here / f"{moment}.parquet.parts", here / f".{moment}.parquet.partial"

        def reached(moment=moment, folder=folder, partial=partial) -> bool:
            if moment == "merge":
                return partial.exists() and len(list(folder.glob("part-*"))) == COUNT / 8
            return (folder / parts.MANIFEST).exists() and len(list(folder.glob("part-*"))) >= moment

        killed_when(job, reached)
        assert not job.out.exists() and folder.exists()
        before = len(list(folder.glob("part-*")))
        done = run_bulk(job, quiet=True)
        assert done.computed == COUNT - 8 * before and done.unreadable == 1
        assert job.out.read_bytes() == (here / "whole.parquet").read_bytes()
        assert not folder.exists() and not partial.exists()


def test_continuing_computes_no_part_twice(here, monkeypatch):
    interrupt_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt, match="16 of 40"):
        run_bulk(request("f.parquet"), quiet=True)
    before = {name: (Path("f.parquet.parts") / name).stat().st_mtime_ns for name in present()}
    monkeypatch.undo()
    monkeypatch.chdir(here)
    seen = []
    real = bulk.Bulk.write
    monkeypatch.setattr(
        bulk.Bulk, "write", lambda self, number, rows: seen.append(number) or real(self, number, rows)
    )
    assert run_bulk(request("f.parquet"), quiet=True).computed == COUNT - 16 and len(before) == 2
    assert seen == [2, 3, 4]


def interrupt_after(monkeypatch, count: int) -> None:
    """Ctrl-C when so many parts are written."""
    real = bulk.Bulk.write

    def write(self, number, rows):
        if number == count:
            raise KeyboardInterrupt
        real(self, number, rows)

    monkeypatch.setattr(bulk.Bulk, "write", write)


@pytest.fixture
def stopped(here, monkeypatch):
    """f.parquet with two of its five parts."""
    with monkeypatch.context() as inner:
        interrupt_after(inner, 2)
        with pytest.raises(KeyboardInterrupt):
            run_bulk(request("f.parquet"), quiet=True)
    assert len(present()) == 2
    return here


@pytest.mark.parametrize(
    ("change", "value"),
    [({"normalize": True}, "normalize"), ({"part_size": 9}, "part size"), ({"view": "centre"}, "view"),
     ({"dtype": "float16"}, "dtype"), ({"pool": "cls"}, "pool"), ({"places": ("photos/cat",)}, "data")],
)  # fmt: skip
def test_other_options_or_images_do_not_continue(stopped, change, value):
    with refused("run.changed", value, "--out", "--restart"):
        run_bulk(request("f.parquet", **change), quiet=True)
    assert len(present()) == 2


def test_another_model_does_not_continue_but_restarts(stopped):
    vitkit.save(build("ViT-Ti/8", **SMALL, seed=5), "model.safetensors")
    with refused("run.changed", "model"):
        run_bulk(request("f.parquet"), quiet=True)
    done = run_bulk(request("f.parquet", restart=True), quiet=True)
    assert done.computed == COUNT and parquet.read_table("f.parquet").equals(written("g.parquet"))


def test_an_added_or_removed_image_is_noticed(stopped):
    (stopped / "photos/cat/001.png").unlink()
    with refused("run.changed", "data", "images"):
        run_bulk(request("f.parquet"), quiet=True)


def test_without_the_comparison_two_models_would_be_mixed(stopped, monkeypatch):
    """The control: the parts of the first model would go into the table of the second."""
    vitkit.save(build("ViT-Ti/8", **SMALL, seed=5), "model.safetensors")
    old = parts.read_manifest(Path("f.parquet"))
    monkeypatch.setattr(parts, "read_manifest", lambda out: None)
    monkeypatch.setattr("vitkit.commands.bulk.claim", lambda out, new, *sizes: parts.claim(out, old, *sizes))
    mixed = vectors(written("f.parquet"))
    monkeypatch.undo()
    monkeypatch.chdir(stopped)
    second = vectors(written("g.parquet"))
    differ = np.abs(mixed - second).max(1) > 1e-3
    assert differ[:15].all() and not differ[16:].any()


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".npz"])
def test_a_part_that_is_not_whole_is_noticed(here, monkeypatch, ending):
    """The control: what a write without a rename leaves behind."""
    verb = "predict" if ending == ".csv" else "embed"
    out = f"f{ending}"
    with monkeypatch.context() as inner:
        interrupt_after(inner, 2)
        with pytest.raises(KeyboardInterrupt):
            run_bulk(request(out, verb=verb), quiet=True)
    part = Path(f"{out}.parts") / present(out)[1]
    part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    with refused("run.corrupt", part.name):
        run_bulk(request(out, verb=verb), quiet=True)
    assert not Path(out).exists()
    part.unlink()
    assert run_bulk(request(out, verb=verb), quiet=True).images == COUNT


def test_two_commands_do_not_write_one_file(here):
    with ExitStack() as stack:
        parts.take(Path("f.parquet"), stack, restart=False)
        with refused("run.locked", str(os.getpid())):
            run_bulk(request("f.parquet"), quiet=True)
    assert run_bulk(request("f.parquet"), quiet=True).images == COUNT


def embed_together(runtime, job: BulkRequest) -> int:
    return run_bulk(job, quiet=True).main


@pytest.mark.slow
def test_two_processes_write_what_one_writes_and_continue_it(here, monkeypatch):
    job = replace(
        request("one.parquet"), places=(str(here / "photos"),), model=str(here / "model.safetensors")
    )
    run_bulk(job, quiet=True)
    assert together(2, embed_together, replace(job, out=here / "two.parquet")) == [True, False]
    with monkeypatch.context() as inner:
        interrupt_after(inner, 2)
        with pytest.raises(KeyboardInterrupt):
            run_bulk(replace(job, out=here / "three.parquet"), quiet=True)
    assert together(2, embed_together, replace(job, out=here / "three.parquet")) == [True, False]
    for name in ("two.parquet", "three.parquet"):
        assert (here / name).read_bytes() == (here / "one.parquet").read_bytes()


@pytest.mark.slow
def test_torchrun_writes_what_one_process_writes(here):
    import subprocess

    words = "-m vitkit embed model.safetensors photos --batch 4 --part-size 8 --device cpu --out two.parquet"
    how = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*how, *words.split()], capture_output=True, text=True)
    assert done.returncode == 1 and "1 unreadable" in done.stdout
    assert parquet.read_table("two.parquet").equals(written("one.parquet"))


@pytest.mark.slow
def test_ray_writes_what_one_process_writes(here):
    pytest.importorskip("ray")
    job = replace(
        request("one.parquet"), places=(str(here / "photos"),), model=str(here / "model.safetensors")
    )
    run_bulk(job, quiet=True)
    done = run_bulk(replace(job, out=here / "ray.parquet", on="ray", processes=2), quiet=True)
    assert done.unreadable == 1 and done.computed == COUNT
    assert (here / "ray.parquet").read_bytes() == (here / "one.parquet").read_bytes()


# kinds of data


def test_archives_shards_tables_and_addresses_give_the_same_features(here):
    (here / BAD).unlink()
    want = vectors(written("f.parquet"))
    files = {name.removeprefix("photos/"): Path(name).read_bytes() for name in names()}
    with zipfile.ZipFile("photos.zip", "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    with tarfile.open("photos.tar", "w") as packed:
        packed.add("photos", ".")
    shard("photos", Path("shards"))
    memory = fsspec.filesystem("memory")
    for name, content in files.items():
        memory.pipe(f"/bulk/photos/{name}", content)
    memory.pipe("/bulk/photos.zip", Path("photos.zip").read_bytes())
    memory.pipe("/bulk/photos.tar", Path("photos.tar").read_bytes())
    for path in Path("shards").iterdir():
        memory.pipe(f"/bulk/shards/{path.name}", path.read_bytes())
    places = {
        "photos.zip": "photos.zip!", "photos.tar": "photos.tar!", "shards": "shards/",
        "memory://bulk/photos": "memory://bulk/photos/", "memory://bulk/photos.zip": "memory://bulk/photos.zip!",
        "memory://bulk/photos.tar": "memory://bulk/photos.tar!", "memory://bulk/shards": "memory://bulk/shards/",
        f"file://{here}/photos": f"file://{here}/photos/",
    }  # fmt: skip
    for number, (place, lead) in enumerate(places.items()):
        table = written(f"{number}.parquet", place, workers=number % 2)
        assert table["image"].to_pylist() == [lead + name for name in files], place
        assert table["label"].to_pylist() == [name.split("/")[0] for name in files], place
        assert np.abs(vectors(table) - want).max() < 1e-5, place


def test_images_without_labels(here):
    flat = here / "flat"
    flat.mkdir()
    for name in names()[:6]:
        shutil.copy(name, flat)
    with zipfile.ZipFile("flat.zip", "w") as packed:
        for path in sorted(flat.iterdir()):
            packed.write(path, path.name)
    Path("list.csv").write_text("path\n" + "".join(f"flat/{path.name}\n" for path in sorted(flat.iterdir())))
    contents = [path.read_bytes() for path in sorted(flat.iterdir())]
    labels = [0, None, 1, 0, 1, None]
    parquet.write_table(pyarrow.table({"image": contents}), "bare.parquet")
    parquet.write_table(pyarrow.table({"image": contents, "label": labels}), "some.parquet")
    memory = fsspec.filesystem("memory")
    memory.pipe("/tables/some.parquet", Path("some.parquet").read_bytes())
    want = written("f.parquet", "flat")
    assert want["image"].to_pylist() == sorted(str(path.relative_to(here)) for path in flat.iterdir())
    others = [
        "flat.zip",
        "list.csv",
        "bare.parquet",
        "some.parquet",
        "flat/*.png",
        "memory://tables/some.parquet",
    ]
    for number, place in enumerate(others):
        table = written(f"{number}.parquet", place)
        assert ("label" in table.column_names) == ("some" in place), place
        assert np.array_equal(vectors(table), vectors(want)), place
    assert parquet.read_table("3.parquet")["label"].to_pylist() == ["0", None, "1", "0", "1", None]
    with refused("data.layout", "flat.zip"):  # training still needs classes
        open_data("flat.zip")


def test_splits_and_several_labels_are_columns(here):
    rows = [
        "photos/dog/000.png,dog;young,train",
        "photos/cat/001.png,cat,test",
        "photos/none.png,cat;old,test",
    ]
    Path("list.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    table = written("f.parquet", "list.csv").to_pylist()
    assert [(row["labels"], row["split"]) for row in table] == [
        (["dog", "young"], "train"), (["cat"], "test"), (["cat", "old"], "test")
    ]  # fmt: skip
    assert table[2]["error"] and table[2]["image"] == "photos/none.png" and table[2]["embedding"] is None


def test_several_places_list_each_image_once(here):
    images = open_images(("photos/cat/001.png", "photos", "photos/cat/*.png"))
    listed = [images.name(index) for index in range(len(images))]
    assert listed[0] == "photos/cat/001.png" and sorted(listed) == names()
    with refused("data.empty"):
        open_images(("nothing/*.png",))


def test_a_name_that_is_not_utf8_is_written_escaped(here):
    path = os.fsencode(here) + b"/photos/cat/\xff.png"
    shutil.copy("photos/cat/001.png", path)
    assert r"photos/cat/\xff.png" in written("f.parquet", "photos/cat")["image"].to_pylist()
    run_bulk(request("a.csv", "photos/cat", verb="predict"), quiet=True)
    assert rb"photos/cat/\xff.png" in Path("a.csv").read_bytes()


# what is refused, and when


def test_pyarrow_and_fsspec_are_named_where_they_are_missing(here, monkeypatch):
    with monkeypatch.context() as inner:
        inner.setitem(sys.modules, "pyarrow", None)
        inner.setitem(sys.modules, "pyarrow.parquet", None)
        with refused("request.extra-missing", "pyarrow", "pip install 'vitkit[parquet]'"):
            run_bulk(request("f.parquet"), quiet=True)
        assert run_bulk(request("f.npz"), quiet=True).images == COUNT
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with refused("request.extra-missing", "fsspec", "pip install 'vitkit[remote]'"):
        open_images(("s3://missing/photos",))


@pytest.mark.parametrize(
    ("place", "code"),
    [("memory://nothing-there", "data.not-found"), ("memory://nothing.zip", "data.not-found"),
     ("nowhere-at-all://x", "request.value")],
)  # fmt: skip
def test_an_address_without_images(here, place, code):
    with refused(code, place):
        open_images((place,))


def test_a_service_that_fails_ends_the_command_and_loses_nothing(here, monkeypatch):
    """An image that cannot be fetched for now is not unreadable: the same command fetches it later."""
    (here / BAD).unlink()
    memory = fsspec.filesystem("memory")
    for name in names():
        memory.pipe(f"/flaky/{name}", Path(name).read_bytes())
    real, fetched = type(memory).cat_file, []

    def cat_file(self, path, **words):
        fetched.append(path)
        if len(fetched) > 20:
            raise TimeoutError("no answer")
        return real(self, path, **words)

    with monkeypatch.context() as inner:
        inner.setattr(type(memory), "cat_file", cat_file)
        with refused("network.unreachable", "memory://flaky", "no answer"):
            run_bulk(request("f.parquet", "memory://flaky"), quiet=True)
    assert len(present()) == 2
    done = run_bulk(request("f.parquet", "memory://flaky"), quiet=True)
    assert done.unreadable == 0 and done.images == COUNT - 1 and done.computed == COUNT - 1 - 16


def test_out_is_checked_before_anything_is_loaded(here, monkeypatch):
    monkeypatch.setattr("vitkit.commands.bulk.open_images", None)  # would raise a TypeError
    for out, code in (("f.xlsx", "request.value"), ("f", "request.value"), ("f.csv", "request.value")):
        with refused(code, out, ".parquet"):
            run_bulk(request(out), quiet=True)
    Path("old.parquet").touch()
    with refused("file.exists", "old.parquet", "--restart"):
        run_bulk(request("old.parquet"), quiet=True)
    Path("folder.parquet").mkdir()
    with refused("file.not-writable", "folder.parquet"):
        run_bulk(request("folder.parquet"), quiet=True)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        run_bulk(request("model.safetensors/f.parquet"), quiet=True)


def test_a_command_that_fails_before_it_computes_leaves_nothing(here):
    before = sorted(path.name for path in here.iterdir())
    for change in ({"model": "typo.safetensors"}, {"places": ("photos/cat/*.gif",)}, {"view": "sideways"}):
        with pytest.raises(vitkit.Error):
            run_bulk(request("f.parquet", **change), quiet=True)
    assert sorted(path.name for path in here.iterdir()) == before


def test_passwords_of_addresses_are_not_written():
    assert lead_of("ftp://me:secret@host/photos", []) == "ftp://host/photos/"
    assert lead_of("ftp://me:secret@host/a.parquet", ["a.parquet:1"]) == "ftp://host/"


def test_a_full_disk_is_named_before_anything_is_loaded(here, small_disk, monkeypatch):
    disk = small_disk(64 * 1024)
    with monkeypatch.context() as inner:
        inner.setattr("vitkit.commands.bulk.open_images", None)
        (disk / "filled").write_bytes(bytes(60 * 1024))
        with pytest.raises(OSError, match=str(disk)) as caught:
            run_bulk(request(str(disk / "f.parquet")), quiet=True)
        assert vitkit.errors.code_of(caught.value) == "disk.full"
    (disk / "filled").write_bytes(bytes(48 * 1024))
    with refused("disk.full", "f.parquet", "GB"):
        run_bulk(request(str(disk / "f.parquet"), "digits"), quiet=True)


@pytest.mark.parametrize(
    ("words", "code"),
    [("predict model.safetensors photos --out a.parquet --csv", "request.conflict"),
     ("predict model.safetensors photos --restart", "request.conflict"),
     ("predict model.safetensors photos --out a.npz", "request.value"),
     ("embed model.safetensors photos --out a.csv", "request.value"),
     ("embed model.safetensors no/*.jpg --out a.parquet", "data.not-found"),
     ("embed model.safetensors photoz --out a.parquet", "data.not-found"),
     ("embed model.safetensors photos", "request.missing")],
)  # fmt: skip
def test_mistakes_have_codes_and_leave_nothing(here, words, code, capsys):
    before = sorted(path.name for path in here.iterdir())
    assert command(*words.split(), "--json") == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == code
    assert sorted(path.name for path in here.iterdir()) == before


def test_models_without_tokens_or_a_class_token(here, small_resnet):
    vitkit.save(small_resnet(), "resnet.safetensors")
    with refused("model.unsupported", "--pool cls"):
        run_bulk(request("f.parquet", model="resnet.safetensors", pool="cls"), quiet=True)
    vitkit.save(build("ViT-Ti/8", **SMALL, head="gap", class_token=False), "gap.safetensors")
    with refused("model.unsupported", "class token"):
        run_bulk(request("f.parquet", model="gap.safetensors", pool="cls"), quiet=True)


def test_a_picture_in_memory_is_not_data(here):
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    assert vitkit.embed("model.safetensors", picture.getvalue()).shape == (32,)
    with refused("request.conflict", "normalize"):
        vitkit.embed("model.safetensors", picture.getvalue(), normalize=True)
