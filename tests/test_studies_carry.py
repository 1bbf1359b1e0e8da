"""A study is packed, unpacked elsewhere and goes on there, with its data under another path."""

import json
import random
import shlex
import shutil
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from refusals import refused
from test_cli import run
from test_studies_stop import go, numbers, plan_of

from vitkit.io.files import locked
from vitkit.studies import time_use as times
from vitkit.studies.conduct import command
from vitkit.studies.folder import claim_folder, read_plan, table_rows
from vitkit.studies.pack import KEPT, MANIFEST, MARK, OBJECTS, Packed, hash_of, lines, pack
from vitkit.studies.prepare import Request
from vitkit.studies.scale import STUDIES
from vitkit.studies.setting import Setting
from vitkit.studies.study import Plan, to_json
from vitkit.studies.study_inputs import check_inputs, relocated, renamed, resumed_plan
from vitkit.studies.trial import WorkerConfig, run_trial
from vitkit.studies.unpack import unpack

MB = 10**6


def photos(folder, seed=0):
    """Twelve noisy images of each of three classes."""
    draw = np.random.default_rng(seed)
    for name, level in (("dark", 30), ("grey", 120), ("light", 220)):
        (folder / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(level + draw.normal(0, 20, (16, 16, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def plan_on(data):
    plan = plan_of()
    asked = plan.asked | {"data": [str(data)]}
    return relocated(plan, {"digits": str(data)}, asked)


def stopped(tmp_path):
    """A study with its first trial finished, from which another starts, and its second one interrupted."""
    data, out = photos(tmp_path / "photos"), tmp_path / "study"
    plan = plan_on(data)
    out.mkdir()
    check_inputs(out, plan)
    claim_folder(out, plan)
    first, second = plan.trials[:2]
    run_trial(first, out, WorkerConfig(threads=1))
    with pytest.raises(KeyboardInterrupt):
        run_trial(second, out, WorkerConfig(threads=1, stop_at=0.0))
    times.append(out, {"trial": first.name, "seconds": 2.0, "ended": "finished"})
    times.append(out, {"trial": second.name, "seconds": 1.0, "ended": "stopped"})
    return plan, data, out


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return stopped(tmp_path_factory.mktemp("carry"))


def copied(study, tmp_path):
    plan, data, out = study
    return plan, data, shutil.copytree(out, tmp_path / "study")


def interrupted(out):
    return sorted(p.parent.parent.name for p in out.glob("trials/*/checkpoints/step-*"))


def test_a_packed_study_goes_on_elsewhere_to_the_same_results(study, tmp_path):
    plan, data, out = copied(study, tmp_path)
    packed = pack(out, tmp_path / "s.zip", 60 * MB)
    assert packed.files == [tmp_path / "s.zip"] and packed.interrupted == len(interrupted(out)) == 1
    assert packed.restarted == {} and packed.logs and packed.size == (tmp_path / "s.zip").stat().st_size
    there = tmp_path / "far" / "away"
    manifest = unpack(packed.files, there)
    assert manifest["study"] == "heads" and interrupted(there) == interrupted(out)
    assert numbers(there, plan) == numbers(out, plan) and times.read(there) == times.read(out)
    assert not list(there.rglob("*.tfevents*")) and not (there / "table.csv").exists()

    moved = shutil.copytree(data, tmp_path / "moved")
    plan_there = resumed_plan(there, plan.asked | {"data": [str(moved)]})
    assert {trial.recipe.data for trial in plan_there.trials} == {str(moved)}
    assert [trial.name for trial in plan_there.trials] == [trial.name for trial in plan.trials]
    check_inputs(there, plan_there)
    assert read_plan(there) == plan_there
    go(plan_there, there)
    go(plan, out)
    assert numbers(there, plan_there) == numbers(out, plan) and len(numbers(out, plan)) == len(plan.trials)
    assert any("checkpoints/step-00000001" in path for path in manifest["files"])
    tuned = json.loads((there / "trials" / plan.trials[-1].name / "recipe.json").read_text())
    assert tuned["data"] == str(moved) and tuned["weights"].startswith(str(there.absolute()))
    assert [row["train_images"] for row in table_rows(there, plan_there)] == [1618] * 5


def test_a_trial_whose_state_is_left_out_starts_again(study, tmp_path):
    plan, _, out = copied(study, tmp_path)
    (checkpoint,) = out.glob("trials/*/checkpoints/step-*")
    name = checkpoint.parent.parent.name
    (checkpoint / "large").write_bytes(random.Random(0).randbytes(2 * MB))
    times.append(out, {"trial": name, "seconds": 90.0, "ended": "stopped"})
    packed = pack(out, tmp_path / "s.zip", MB)
    assert packed.interrupted == 0 and list(packed.restarted) == [name] and packed.restarted[name] >= 90
    assert packed.size <= MB
    unpack(packed.files, tmp_path / "there")
    assert not (tmp_path / "there" / "trials" / name).exists()
    go(plan, tmp_path / "there")
    assert len(numbers(tmp_path / "there", plan)) == len(plan.trials)


def test_models_that_other_trials_need_are_packed_in_parts_where_they_are_large(study, tmp_path):
    plan, _, out = copied(study, tmp_path)
    first = out / "trials" / plan.trials[0].name
    (first / "model.safetensors").write_bytes(random.Random(0).randbytes(250_000))
    packed = pack(out, tmp_path / "s.zip", 100_000)
    names = [path.name for path in packed.files]
    assert names == [f"s.zip.{i}of{len(names)}" for i in range(1, len(names) + 1)] and len(names) >= 3
    assert max(path.stat().st_size for path in packed.files) == 100_000
    assert not (tmp_path / "s.zip").exists() and not packed.logs
    shuffled = random.Random(0).sample(packed.files, len(packed.files))
    unpack(shuffled, tmp_path / "there")
    model = tmp_path / "there" / "trials" / first.name / "model.safetensors"
    assert model.read_bytes() == (first / "model.safetensors").read_bytes()
    with refused("file.not-found", "s.zip.2of"):
        unpack([packed.files[0], *packed.files[2:]], tmp_path / "other")
    with refused("file.not-found", "s.zip.1of"):
        unpack(packed.files[1:2], tmp_path / "other")
    other = packed.files[0].rename(tmp_path / f"t.zip.1of{len(names)}")
    with refused("request.value", "t.zip"):
        unpack([other, *packed.files[1:]], tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_any_flipped_byte_and_any_missing_end_is_refused(study, tmp_path):
    _, _, out = study
    (file,) = pack(out, tmp_path / "s.zip", 60 * MB).files
    content = file.read_bytes()
    places = [0, 5, 14, 40, len(content) // 2, len(content) - 100, len(content) - 70, len(content) - 1]
    for place in [*places, *random.Random(0).sample(range(len(content)), 20)]:
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        with refused("study.corrupt", "s.zip"):
            unpack([file], tmp_path / "there")
    for size in (len(content) - 1, len(content) // 2, 10):
        file.write_bytes(content[:size])
        with refused("study.corrupt", "s.zip"):
            unpack([file], tmp_path / "there")
    file.write_bytes(b"something else")
    with refused("file.unreadable", "s.zip"):
        unpack([file], tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["s.zip"]
    file.write_bytes(content)
    unpack([file], tmp_path / "there")  # the control: the same file as it was written


def forged(path, files, content=b"{}", digest=None):
    """A pack with these names in its manifest, and a digest that fits."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(OBJECTS + (digest or files["plan.json"]), content)
        archive.writestr(MANIFEST, json.dumps({"format": 1, "study": "heads", "files": files}))
        archive.comment = MARK + bytes(64)
    with path.open("r+b") as file:
        total = hash_of(file, path.stat().st_size - 64)
        file.seek(-64, 2)
        file.write(total.encode())
    return path


@pytest.mark.parametrize(
    "name", ["../out", "/etc/x", "a/../../x", "a\\..\\x", "C:x", "a//b", "./a", "", "a/\n", "x\0"]
)
def test_paths_outside_of_the_folder_are_refused(name, tmp_path):
    digest = "0" * 64
    with refused("data.unsafe", "s.zip"):
        unpack([forged(tmp_path / "s.zip", {"plan.json": digest, name: digest})], tmp_path / "there")
    assert [path.name for path in tmp_path.iterdir()] == ["s.zip"]


def test_content_that_is_not_what_the_manifest_names_is_refused(tmp_path):
    for files in ({"plan.json": "0" * 64}, {"table": "0" * 64}, {"plan.json": "../../x"}):
        with refused("study.corrupt", "s.zip"):
            unpack([forged(tmp_path / "s.zip", files, digest="0" * 64)], tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_no_folder_is_overwritten(study, tmp_path):
    _, _, out = study
    (file,) = pack(out, tmp_path / "s.zip", 60 * MB).files
    there = tmp_path / "there"
    there.mkdir()
    (there / "mine").write_text("mine")
    with refused("file.exists", "there"):
        unpack([file], there)
    with refused("file.not-writable", "s.zip"):
        unpack([file], file)
    with refused("file.not-found", "nothing.zip"):
        unpack([tmp_path / "nothing.zip"], tmp_path / "new")
    with refused("request.value", str(out)):
        pack(out, out / "s.zip", 60 * MB)
    with locked(out), refused("run.locked", out):
        pack(out, tmp_path / "t.zip", 60 * MB)
    assert (there / "mine").read_text() == "mine"
    (there / "mine").unlink()
    unpack([file], there)  # an empty folder is taken
    assert all((there / "trials" / path.name).is_dir() for path in out.glob("trials/*"))
    assert "task.json" in KEPT and list(there.glob("trials/*/task.json"))


def test_other_data_is_refused_wherever_it_is(study, tmp_path):
    plan, data, out = copied(study, tmp_path)
    other = photos(tmp_path / "other", seed=1)
    asked = plan.asked | {"data": [str(other)]}
    with refused("data.changed", other, out):
        check_inputs(out, resumed_plan(out, asked))
    assert read_plan(out) == plan
    fewer = shutil.copytree(data, tmp_path / "fewer")
    (fewer / "dark" / "0.png").unlink()
    with refused("data.changed", fewer, "images"):
        check_inputs(out, resumed_plan(out, plan.asked | {"data": [str(fewer)]}))
    shutil.rmtree(fewer / "dark")
    with refused("data.changed", "3 classes -> 2"):
        check_inputs(out, resumed_plan(out, plan.asked | {"data": [str(fewer)]}))
    with refused("run.changed", "seeds"):
        resumed_plan(out, asked | {"seeds": 5})
    (out / "inputs.json").unlink()
    with refused("run.changed", "inputs.json"):
        check_inputs(out, resumed_plan(out, asked))


def test_which_requests_differ_only_in_paths(tmp_path):
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(b"x")
    old = {"study": "recipes", "data": ["a:10%", "b"], "downstream": "", "weights": "/w", "seeds": 3}
    new = old | {"data": ["c:10%", "b"], "weights": str(weights)}
    assert renamed(old, new) == {"a": "c", "/w": str(weights)}
    assert renamed(old, old) == {}
    for changes in ({"data": ["c:20%", "b"]}, {"data": ["c:10%"]}, {"seeds": 2}, {"downstream": "b"},
                    {"weights": "ViT-S/16"}, {"weights": ""}):  # fmt: skip
        assert renamed(old, new | changes) == {}
    twice = {"study": "heads", "data": ["a"], "downstream": "a"}
    assert renamed(twice, twice | {"data": ["c"]}) == {}  # one path cannot become two
    assert renamed(twice, twice | {"data": ["c"], "downstream": "c"}) == {"a": "c"}


def test_every_path_of_every_study_moves(tmp_path):
    for name in ("data-size", "recipes", "self-supervision", "pretrain-sets"):
        asked = {
            "study": name,
            "data": ["/here/a.npz"],
            "downstream": "/here/b.npz",
            "weights": "/here/w.npz",
        }
        setting = Setting(
            data=("/here/a.npz",),
            downstream="/here/b.npz",
            weights="/here/w.npz",
            seeds=1,
            steps=2,
            images=900,
            sizes=(900,),
        )
        trials = tuple(STUDIES[name].make(setting))
        counted = {"a" if STUDIES[name].base else "/here/a.npz": 900}
        plan = Plan(study=name, asked=asked, chosen={"train_images": counted}, trials=trials)
        paths = {f"/here/{file}.npz": f"/there/{file}.npz" for file in "abw"}
        moved = relocated(
            plan, paths, {k: paths.get(v, v) for k, v in asked.items() if k != "data"} | {"data": []}
        )
        assert "/here/" in to_json(plan) and "/here/" not in to_json(moved), name


def test_the_command_that_goes_on_can_be_pasted(tmp_path):
    request = Request(
        study="heads", data=("my pictures/",), set=("model.width=32", "optimizer.betas=0.9, 0.95")
    )
    plan = replace(plan_of(), asked=request.to_json())
    words = shlex.split(command(plan, tmp_path / "my study"))
    assert words[:6] == ["vitkit", "study", "run", "heads", "--data", "my pictures/"]
    assert words[-3:] == ["optimizer.betas=0.9, 0.95", "--out", str(tmp_path / "my study")]
    packed = Packed([tmp_path / "my study.zip"], 1, 1, 0, {}, logs=True)
    assert str(tmp_path / "my study.zip") in shlex.split([*lines(packed)][-1].partition(": ")[2])


def test_the_verbs_pack_and_unpack(study, tmp_path, capsys):
    _, _, out = copied(study, tmp_path)
    assert run("study", "pack", out, "--json") == 0
    packed = json.loads(capsys.readouterr().out)
    assert packed["files"] == [str(tmp_path / "study.study.zip")] and packed["interrupted"] == 1
    assert run("study", "pack", out, "--to", tmp_path / "parts.zip", "--max-size", "10kB") == 0
    assert "finished trials: 1" in capsys.readouterr().out
    parts = sorted(tmp_path.glob("parts.zip.*"))
    assert len(parts) >= 2
    assert run("study", "unpack", *parts, "--to", tmp_path / "there", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["finished"] == 1 and (tmp_path / "there" / "page.html").exists()
    assert run("study", "pack", out, "--max-size", "much") == 2
    assert "--max-size 'much'" in capsys.readouterr().err
    assert run("study", "pack", tmp_path) == 2 and "plan.json" in capsys.readouterr().err
