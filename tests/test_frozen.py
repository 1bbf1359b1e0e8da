"""Frozen features: computed once and kept, few-shot accuracy as a verb and as a run goes, and bad input."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import refused
from test_cli import run
from test_experiment import go, tiny
from together import together

import vitkit
from vitkit.data.sources.source import digits
from vitkit.data.splits import complete
from vitkit.datasets.opening import open_data
from vitkit.models.variants import build
from vitkit.runs.build import SplitCache
from vitkit.runs.features import Extractor, FewShot, all_features, few_shot_features, open_frozen
from vitkit.runtime.runtime import Runtime
from vitkit.tasks.classify import Classify

SIZES = {"width": 32, "depth": 2, "heads": 2, "hidden": 32, "image_size": (8, 8), "classes": 3}


@pytest.fixture(scope="module")
def model():
    return build("ViT-Ti/4", seed=0, **SIZES).eval()


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    vitkit.save(model, path)
    return path


@pytest.fixture
def some():
    return digits().take(np.arange(40))


@pytest.fixture
def pictures(tmp_path):
    """Sixty digits of three classes as files."""
    source = digits()
    for i in [i for i in range(300) if source.labels[i] < 3][:60]:
        folder = tmp_path / "pictures" / source.classes[source.labels[i]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ascontiguousarray(source.fetch(i))).save(folder / f"{i:03d}.png")
    return tmp_path / "pictures"


class Counting:
    """A model's features, and how many images they were asked of."""

    def __init__(self, model, monkeypatch):
        self.images, real = 0, type(model).features

        def features(this, images, *rest):
            self.images += len(images)
            return real(this, images, *rest)

        monkeypatch.setattr(type(model), "features", features)


def ask(saved, cache, capsys, *arguments):
    code = run("fewshot", saved, *arguments, "--cache", cache, "--workers", 0, "--json")
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out), captured.err


# features


def test_features_are_what_the_head_sees_of_every_image(model, some):
    result = Extractor(model=model, batch=7).features(some)
    images = torch.stack([torch.from_numpy(np.array(some.fetch(i))) for i in range(40)]).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected = model.features((images - 127.5) / 127.5)
    assert torch.allclose(result.x, expected, atol=1e-6) and result.index.tolist() == list(range(40))


def test_the_official_view_is_the_centre_of_a_larger_square():
    model = build("ViT-Ti/4", seed=0, **(SIZES | {"image_size": (56, 28)}))
    extractor = Extractor(model=model, view="official")
    assert extractor.uncropped_view.size == (64, 32) and extractor.uncropped_view.crop == "squash"
    seen = []
    model.features = lambda images: seen.append(images) or images.flatten(1)
    image = torch.arange(64 * 32).reshape(1, 1, 64, 32).remainder(256).byte().expand(1, 3, -1, -1)
    extractor.head_inputs(image)
    assert torch.equal(seen[0], (image[:, :, 4:60, 2:30] - 127.5) / 127.5)
    with pytest.raises(ValueError, match="no view 'blurred'; known: model, official"):
        Extractor(model=model, view="blurred")


def share(runtime: Runtime, folder: Path) -> tuple:
    model = build("ViT-Ti/4", seed=0, **SIZES)
    source = digits().take(np.arange(9))
    result = Extractor(model=model, runtime=runtime, batch=2, cache=folder).features(source)
    again = Extractor(model=model, runtime=runtime, batch=2, cache=folder).features(source)
    return result.x.tolist(), result.index.tolist(), again.x.tolist()


@pytest.mark.slow
def test_processes_share_the_images_and_all_get_all_features(tmp_path):
    alone = share(Runtime(), tmp_path / "alone")
    for x, index, again in together(2, share, tmp_path / "two"):
        assert index == list(range(9)) and again == x
        assert np.allclose(x, alone[0], atol=1e-6)
    assert len(list((tmp_path / "two").iterdir())) == 1


# the cache


def test_features_are_computed_once_and_by_content(model, some, tmp_path, monkeypatch):
    count = Counting(model, monkeypatch)
    first = Extractor(model=model, cache=tmp_path).features(some)
    assert count.images == 40
    renamed = replace(some, name="other", keys=[f"x{i}" for i in range(40)])
    again = Extractor(model=model, cache=tmp_path, batch=3).features(renamed)
    assert count.images == 40 and torch.equal(first.x, again.x) and torch.equal(first.index, again.index)


def test_a_file_edited_in_its_middle_has_other_features(model, tmp_path):
    """Its size, its ends and even its time of change are those of before."""
    path = tmp_path / "data" / "cat" / "0.bmp"
    path.parent.mkdir(parents=True)
    Image.fromarray(np.zeros((160, 160, 3), np.uint8)).save(path)
    status, extractor = path.stat(), Extractor(model=model, cache=tmp_path / "cache")
    first = extractor.features(open_data(tmp_path / "data")["all"])
    content = bytearray(path.read_bytes())
    content[20_000:-20_000] = b"\xff" * (len(content) - 40_000)
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = extractor.features(open_data(tmp_path / "data")["all"])
    assert torch.equal(again.x, extractor.compute(open_data(tmp_path / "data")["all"]).x)
    assert not torch.equal(first.x, again.x)


def test_other_weights_views_numerics_or_images_are_other_features(model, some, tmp_path):
    other = build("ViT-Ti/4", seed=1, **SIZES)
    tanh = build("ViT-Ti/4", seed=0, gelu="erf", **SIZES)
    bright = build("ViT-Ti/4", seed=0, **SIZES)
    bright.preprocessing = replace(bright.preprocessing, mean=(0.1, 0.1, 0.1))
    for one in (model, other, tanh, bright):
        Extractor(model=one, cache=tmp_path).features(some)
    Extractor(model=model, cache=tmp_path, view="official").features(some)
    Extractor(model=model, cache=tmp_path).features(some.take(np.arange(39)))
    assert len(list(tmp_path.iterdir())) == 6


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def foreign(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(40, 32), "index": torch.arange(40)}, path)


DAMAGE = {
    "a bit": flip,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a cache"),
    "foreign": foreign,
    "another's": lambda path: path.write_bytes((path.parent / "other.safetensors").read_bytes()),
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_a_damaged_or_foreign_cache_file_is_computed_again_with_a_note(model, some, tmp_path, harm):
    first = Extractor(model=model, cache=tmp_path).features(some)
    path = next(tmp_path.iterdir())
    whole = path.read_bytes()
    Extractor(model=model, cache=tmp_path).features(some.take(np.arange(39)))
    next(p for p in tmp_path.iterdir() if p != path).rename(tmp_path / "other.safetensors")
    DAMAGE[harm](path)
    notes = []
    again = Extractor(model=model, cache=tmp_path, log=notes.append).features(some)
    assert len(notes) == 1 and "computed again" in notes[0] and path.name in notes[0]
    assert torch.equal(first.x, again.x) and path.read_bytes() == whole
    assert {p.name for p in tmp_path.iterdir()} == {path.name, "other.safetensors"}


def test_a_cache_that_cannot_be_written_is_told_and_no_failure(model, some, tmp_path):
    (tmp_path / "file").write_text("in the way")
    notes = []
    result = Extractor(model=model, cache=tmp_path / "file" / "cache", log=notes.append).features(some)
    assert len(result.x) == 40 and "not cached" in notes[0]


def age(path: Path, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))


def test_features_not_used_for_the_longest_time_go_where_there_are_too_many(model, tmp_path):
    def ask(count, limit):
        before = set(tmp_path.iterdir())
        Extractor(model=model, cache=tmp_path, limit=limit).features(digits().take(np.arange(count)))
        return set(tmp_path.iterdir()) - before

    (first,), (second,) = ask(40, None), ask(41, None)
    room = 2 * second.stat().st_size + 1000
    age(first, 5)
    age(second, 3)
    assert not ask(40, room), "it was there, and is now the younger one"
    (third,) = ask(42, room)
    assert set(tmp_path.iterdir()) == {first, third}
    (fourth,) = ask(43, 0)
    assert set(tmp_path.iterdir()) == {fourth}


def test_only_the_users_cache_folder_is_kept_small(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("vitkit.commands.fewshot.LIMIT", 0)
    ask(saved, tmp_path / "own", capsys, "digits", "--shots", 1)
    assert len(list((tmp_path / "own").iterdir())) == 2
    assert run("fewshot", saved, "digits", "--shots", 1, "--workers", 0) == 0
    assert len(list((tmp_path / "home" / "vitkit" / "features").iterdir())) == 1


# the choice of images


def test_only_the_chosen_images_are_computed(model, monkeypatch):
    train = complete({"all": digits()}, val=0.0)["train"]
    count = Counting(model, monkeypatch)
    few = few_shot_features(Extractor(model=model), train, 2, 3)
    assert count.images == len(few.features.index) <= 60
    every = all_features(Extractor(model=model), train, 2, 3)
    for seed in range(3):
        a, b = few.rows(seed, 2), every.rows(seed, 2)
        assert (few.chosen[seed] == every.chosen[seed]).all()
        assert torch.allclose(few.features.x[a], every.features.x[b], atol=1e-6)
        assert torch.equal(few.labels[a], every.labels[b])


def test_an_unusable_image_gives_its_place_to_the_next_of_its_class(model, pictures):
    before = few_shot_features(Extractor(model=model), open_frozen(str(pictures))[0], 2, 2)
    victim = before.source.keys[before.chosen[0][1, 0]]
    (pictures / victim).write_bytes(b"no image")
    notes = []
    train, _ = open_frozen(str(pictures))
    after = few_shot_features(Extractor(model=model, log=notes.append), train, 2, 2)
    every = all_features(Extractor(model=model), train, 2, 2)
    chosen = {train.keys[i] for seed in after.chosen for i in seed.flatten()}
    assert victim in train.keys  # the test images are chosen by content, but it is not among them
    assert any(victim in note for note in notes) and victim not in chosen
    assert all((a == b).all() for a, b in zip(after.chosen, every.chosen, strict=True))


# the verb


def test_fewshot_tells_mean_and_spread_over_the_whole_test_split(saved, tmp_path, capsys):
    output, _ = ask(saved, tmp_path, capsys, "digits", "--knn", 5, "--probe")
    assert list(output["shots"]) == ["1", "5", "10", "25"] and output["images"] == 179
    means = [row["mean"] for row in output["shots"].values()]
    assert 0.15 < means[0] < means[3] and all(row["std"] > 0 for row in output["shots"].values())
    assert {row["l2"] for row in output["shots"].values()} == {1024.0}
    assert output["knn"]["k"] == 5 and output["knn"]["top1"] > 0.4 and output["probe"]["top1"] > 0.4


def test_the_verb_is_the_library_on_the_same_features(saved, model, tmp_path, capsys):
    output, _ = ask(saved, tmp_path, capsys, "digits", "--shots", 3, "--seeds", 1, "--l2", 2)
    train, test = open_frozen("digits")
    learning = few_shot_features(Extractor(model=model), train, 3, 1)
    rows, seen = learning.rows(0, 3), Extractor(model=model).features(test)
    result = vitkit.fewshot(learning.features.x[rows], learning.labels[rows], seen.x, test.labels, l2=2.0)
    low, high = output["shots"]["3"].pop("interval")
    assert low < result < high and high - low == pytest.approx(
        2 * 1.96 * (result * (1 - result) / 179) ** 0.5, rel=0.03
    )
    assert output["shots"] == {"3": {"mean": pytest.approx(result), "std": None, "l2": 2.0}}
    assert output["knn"] is None and output["probe"] is None


def test_a_second_time_nothing_is_computed(saved, tmp_path, capsys, model, monkeypatch):
    first, _ = ask(saved, tmp_path, capsys, "digits", "--shots", 1, 5)
    count = Counting(model, monkeypatch)
    again, _ = ask(saved, tmp_path, capsys, "digits", "--shots", 1, 5)
    assert first == again and count.images == 0


def test_several_data_sets_choose_one_penalty_together(saved, pictures, tmp_path, capsys):
    arguments = ("--l2", "grid", "--shots", 1, 5, "--seeds", 2)
    output, err = ask(saved, tmp_path / "c", capsys, "digits", pictures, *arguments)
    assert list(output) == ["data"] and list(output["data"]) == ["digits", str(pictures)] and not err
    for shots in ("1", "5"):
        assert len({facts["shots"][shots]["l2"] for facts in output["data"].values()}) == 1
    alone, err = ask(saved, tmp_path / "c", capsys, "digits", *arguments)
    assert "chosen on the test images" in err
    assert all(alone["shots"][s]["mean"] >= output["data"]["digits"]["shots"][s]["mean"] for s in ("1", "5"))


def test_it_is_told_as_a_table_and_kept_in_the_users_cache_folder(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("fewshot", saved, "digits", "--shots", 2, "--workers", 0, "--probe", "--knn", 3) == 0
    out = capsys.readouterr().out
    assert "digits" in out and "%" in out and "3 nearest" in out and "linear probe (learning rate" in out
    assert len(list((tmp_path / "vitkit" / "features").iterdir())) == 2


def test_usual_shots_that_a_class_lacks_are_left_out_and_asked_ones_are_an_error(
    saved, pictures, tmp_path, capsys
):
    for path in sorted((pictures / "1").iterdir())[7:]:
        path.unlink()
    output, err = ask(saved, tmp_path / "c", capsys, pictures)
    assert list(output["shots"]) == ["1", "5"] and "skipping 10, 25 shots" in err
    assert run("fewshot", saved, pictures, "--shots", 1, 10) == 2
    assert "class '1' has 6 usable training images, fewer than 10 shots" in capsys.readouterr().err


def test_one_class_alone_is_an_error(saved, pictures, capsys):
    for name in ("1", "2"):
        for path in (pictures / name).iterdir():
            path.unlink()
        (pictures / name).rmdir()
    assert run("fewshot", saved, pictures) == 2
    err = capsys.readouterr().err
    assert str(pictures) in err and "'0'" in err and err.count("\n") == 1


def test_broken_weights_are_an_error(tmp_path, capsys):
    model = build("ViT-Ti/4", seed=0, **SIZES)
    torch.nn.init.constant_(model.project.bias, float("nan"))
    vitkit.save(model, tmp_path / "nan.safetensors")
    code = run("fewshot", tmp_path / "nan.safetensors", "digits", "--cache", tmp_path / "c", "--workers", 0)
    assert code == 2 and "not finite" in capsys.readouterr().err
    torch.nn.init.zeros_(model.encoder.norm.weight)
    torch.nn.init.zeros_(model.project.bias)
    vitkit.save(model, tmp_path / "dead.safetensors")
    code = run("fewshot", tmp_path / "dead.safetensors", "digits", "--cache", tmp_path / "c", "--workers", 0)
    assert code == 2 and "the same features: the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits", "--l2", "much"], "--l2 'much': expected a number"),
        (["digits", "--l2", "-1"], "--l2 '-1': expected a number"),
        (["digits", "--shots", "0"], "--shots 0: expected"),
        (["digits", "--seeds", "0"], "--seeds 0: expected"),
        (["digits", "--knn", "0"], "--knn 0: expected"),
        (["digits", "--knn", "5000"], "--knn 5000: digits has only 1618 training images"),
        (["nowhere"], "no data at 'nowhere'"),
        (["several.csv"], "several labels for each image"),
        (["strange.npz"], "Classes of test without an image in train: '2'"),
    ],
)
def test_mistakes_are_told_before_anything_takes_time(
    saved, arguments, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 8)).save("a.png")
    Path("several.csv").write_text("path,label\na.png,x;y\nb.png,x\nc.png,y\n")
    x = np.random.default_rng(0).integers(0, 255, (6, 8, 8), dtype=np.uint8)
    y = np.array([0, 1, 0, 1, 2, 1])
    np.savez("strange.npz", x_train=x[:4], y_train=y[:4], x_test=x[4:], y_test=y[4:], classes=list("012"))
    assert run("fewshot", saved, *arguments) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


# as a run goes


def numbers(out: Path) -> list[dict]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "fewshot_mean" in row]


def test_a_run_tells_few_shot_accuracy_as_it_goes_and_is_not_changed_by_it(tmp_path):
    go(tmp_path / "without", tiny())
    go(tmp_path / "with", tiny(fewshot="digits", shots=2))
    output = numbers(tmp_path / "with")
    assert [row["step"] for row in output] == [4, 8, 12] and not numbers(tmp_path / "without")
    assert all(row["fewshot_images"] == 179 and row["fewshot_shots"] == 2 for row in output)
    assert all(0.05 < row["fewshot_mean"] < 1 for row in output)
    a, b = (vitkit.load(tmp_path / n / "model.safetensors").state_dict() for n in ("with", "without"))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_few_shot_accuracy_at_the_end_is_that_of_the_model_which_is_kept(tmp_path, capsys):
    go(tmp_path / "run", tiny(fewshot="digits", shots=2, fewshot_when="end"))
    [output] = numbers(tmp_path / "run")
    test = json.loads((tmp_path / "run" / "result.json").read_text())["test"]
    assert output["step"] == 12 and output["fewshot_mean"] == test["fewshot_mean"]
    assert run("fewshot", tmp_path / "run", "digits", "--shots", 2, "--workers", 0, "--json") == 0
    again = json.loads(capsys.readouterr().out)["shots"]["2"]
    assert again["mean"] == pytest.approx(test["fewshot_mean"], abs=1e-9)


def test_what_is_wrong_with_the_few_shot_data_is_told_before_training(tmp_path):
    with refused("evaluation.unsupported", "5000 shots"):
        go(tmp_path, tiny(fewshot="digits", shots=5000))
    with refused("data.not-found", "'nowhere'"):
        go(tmp_path / "other", tiny(fewshot="nowhere"))
    assert not (tmp_path / "metrics.jsonl").exists()


def test_features_that_tell_nothing_do_not_end_a_run():
    model = build("ViT-Ti/4", seed=0, **SIZES)
    torch.nn.init.zeros_(model.encoder.norm.weight)
    notes = []
    assert FewShot("digits")(Classify(), model, Runtime(), 64, 0, notes.append) == {}
    assert "the same features: the model" in notes[0]


def test_data_that_is_kept_open_is_not_read_again(tmp_path, model):
    """The trials of a study are on one data set; to read it may take longer than to judge a model."""
    source, path = digits(), tmp_path / "some.npz"
    images = np.stack([source.fetch(i) for i in range(400)])
    np.savez(path, x_train=images[:300], y_train=source.labels[:300],
             x_test=images[300:], y_test=source.labels[300:400])  # fmt: skip
    opened = SplitCache()
    splits = opened(tiny(data=str(path), val=0.0, test=0.1))
    path.unlink()
    result = FewShot(str(path), 2, 2, opened)
    assert result.train is splits["train"] and result.test is splits["test"]
    assert result(Classify(), model, Runtime(), 64, 0, lambda text: None)["fewshot_images"] == 100


def judged(runtime: Runtime) -> dict:
    model = runtime.place(build("ViT-Ti/4", seed=0, **SIZES))
    return FewShot("digits", 2, 2)(Classify(), model, runtime, 64, 0, lambda text: None)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_that_train_together_judge_together(parallel):
    alone = judged(Runtime())
    for output in together(2, judged, parallel=parallel):
        assert output == pytest.approx(alone, abs=0.01)


# several models


def test_several_models_are_compared_on_the_same_images_and_drawn(model, saved, pictures, tmp_path, capsys):
    other = tmp_path / "other.safetensors"
    vitkit.save(build("ViT-Ti/4", seed=1, **SIZES), other)
    figure = tmp_path / "shots.svg"
    words = [pictures, "--shots", "1", "5", "--compare", other, saved, "--figure", figure]
    output, _ = ask(saved, tmp_path / "cache", capsys, *words)
    assert list(output["models"]) == [str(saved), str(other)]  # a model named twice is measured once
    for name in (saved, other):
        alone, _ = ask(name, tmp_path / "cache", capsys, pictures, "--shots", "1", "5")
        assert output["models"][str(name)][str(pictures)] == alone
    drawn = figure.read_text()
    assert "images per class" in drawn
    assert drawn.count("LineCollection") >= 2 and "tiny" in drawn and "other" in drawn
    assert (
        run(
            "fewshot", saved, *words[:-1], tmp_path / "two.png", "--cache", tmp_path / "cache", "--workers", 0
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (tmp_path / "two.png").read_bytes()[:4] == b"\x89PNG" and "other" in out


@pytest.mark.parametrize("name", ["shots.gif", "nowhere/shots.png"])
def test_a_figure_that_cannot_be_written_is_refused_before_any_work(saved, pictures, tmp_path, capsys, name):
    path = tmp_path / name
    assert run("fewshot", saved, pictures, "--figure", path, "--cache", tmp_path / "cache") == 2
    assert str(path) in capsys.readouterr().err and not (tmp_path / "cache").exists()
