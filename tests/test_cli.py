"""The command line: exit codes, JSON, messages for mistakes, and help that does not wait for torch."""

import json
import re
import subprocess
import sys

import pytest
import torch

import vitkit
from vitkit.cli.verbs import VERBS, joined, main


def run(*arguments) -> int:
    """The exit code of one command."""
    try:
        main([str(a) for a in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def npz(small, tmp_path):
    vitkit.save(small(classes=3), tmp_path / "m.npz")
    return tmp_path / "m.npz"


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_answers_without_importing_torch(verb):
    code = "import sys; sys.argv = ['vitkit'] + [v for v in sys.argv[1:] if v]\n"
    code += "from vitkit.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, verb, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr
    assert "usage: vitkit" in done.stdout and (not verb or f"$ vitkit {verb}" in done.stdout)


def test_importing_vitkit_does_not_import_torch():
    code = (
        "import sys, vitkit; assert 'torch' not in sys.modules; vitkit.build; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_public_names_are_all_there():
    for name in vitkit.__all__:
        assert getattr(vitkit, name).__name__ == name
    assert set(vitkit.__all__) <= set(dir(vitkit))
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = vitkit.train


def test_list_prints_every_model(capsys):
    assert run("list") == 0
    out = capsys.readouterr().out
    assert "ViT-H/14" in out and "632,045,800" in out and "BiT-R152x4" in out


def test_list_as_json_is_one_value(capsys):
    assert run("list", "weights", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"name", "pixels", "ImageNet_top1", "licence", "address"} <= set(rows[0])
    assert run("list", "formats", "--json") == 0
    assert {row["format"] for row in json.loads(capsys.readouterr().out)} >= {"official", "hf"}


def test_show_tells_all_of_a_name(capsys):
    assert run("show", "ViT-B/16", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 86_567_656 and facts["GFLOPs_224"] == pytest.approx(35.128)
    assert facts["GFLOPs_384"] == pytest.approx(110.969) and facts["width"] == 768


def test_show_tells_all_of_a_file(npz, capsys):
    assert run("show", npz, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["origin"]["format"] == "official" and facts["classes"] == 3 and facts["patch"] == 8
    assert run("show", npz) == 0
    assert "GFLOPs 384" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["ViT-B/16", "R50+ViT-L/32.augreg-i21k-i1k-384", "pets", "file"])
def test_show_prints_columns_and_no_dictionaries(what, npz, capsys):
    assert run("show", npz if what == "file" else what) == 0
    out = capsys.readouterr().out
    assert not re.search(r"[{}\[\]()]|None|True|False", out.replace("(labels= overrides this)", ""))
    pairs = dict(re.findall(r"^ *(\S.*?) {2,}(\S.*?) *$", out, re.MULTILINE))
    if what == "file":
        assert pairs["interpolation"] == "bilinear" and pairs["mean"] == "0.5, 0.5, 0.5"
        assert pairs["image size"] == "32 x 32" and pairs["format"] == "official"
    elif what == "pets":
        assert pairs["steps"] == "500" and pairs["rates"] == "0.001, 0.003, 0.01, 0.03"
    else:
        assert pairs["parameters"].replace(",", "").isdigit() and int(pairs["depth"]) in (12, 24)


def test_show_tells_of_published_weights_without_fetching_them(capsys):
    assert run("show", "R50+ViT-L/32.augreg-i21k-i1k-384", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert (
        facts["top1"] == 85.99 and facts["stem_blocks"] == [3, 4, 6, 3] and facts["image_size"] == [384, 384]
    )


def test_show_tells_the_cost_of_whole_patches(capsys):
    assert run("show", "ViT-g/14", "--json") == 0
    assert json.loads(capsys.readouterr().out)["GFLOPs_384"] == pytest.approx(1596.4, rel=2e-3)


def test_show_says_when_an_image_is_smaller_than_a_patch(capsys):
    assert run("show", "ViT-Ti/300", "--json") == 0
    assert "fits: 300" in json.loads(capsys.readouterr().out)["GFLOPs_224"]


def test_convert_prints_its_parity_report(npz, tmp_path, capsys):
    assert run("convert", npz, tmp_path / "out.safetensors", "--format", "timm") == 0
    out = capsys.readouterr().out
    assert "all tensors bit-identical" in out and "against timm" in out and "equal" in out
    assert "act_layer='gelu_tanh'" in out and "change the logits" in out
    back = vitkit.load(tmp_path / "out.safetensors")
    assert torch.equal(back.head.weight, vitkit.load(npz).head.weight)


def test_convert_as_json(npz, tmp_path, capsys):
    assert run("convert", npz, tmp_path / "folder", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["read_back"] and report["format"] == "hf"
    assert report["parity"]["logits"] <= 1e-5 and report["parity"]["peer"].startswith("transformers")


def test_convert_leaves_what_exists_unless_told(npz, tmp_path, capsys):
    (tmp_path / "out.safetensors").write_text("precious")
    assert run("convert", npz, tmp_path / "out.safetensors") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (tmp_path / "out.safetensors").read_text() == "precious"
    assert run("convert", npz, tmp_path / "out.safetensors", "--overwrite") == 0
    assert vitkit.load(tmp_path / "out.safetensors").config.classes == 3


def test_convert_fails_above_tolerance_and_writes_nothing(npz, tmp_path, capsys, monkeypatch):
    """A peer that computes something else must be noticed: here one whose LayerNorm has another epsilon."""
    from vitkit.weights import convert

    right = convert.timm_vit

    def wrong(config):
        peer = right(config)
        for module in peer.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-2
        return peer

    monkeypatch.setattr(convert, "timm_vit", wrong)
    assert run("convert", npz, tmp_path / "out.pth", "--format", "timm") == 1
    out = capsys.readouterr().out
    assert "NOT EQUAL" in out and "nothing was written" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.npz"]


def test_convert_says_when_there_is_no_peer(npz, tmp_path, capsys, monkeypatch):
    from vitkit.weights import convert

    monkeypatch.setattr(convert, "unusable", lambda name: "not installed")
    assert run("convert", npz, tmp_path / "out.pth", "--format", "timm") == 0
    assert "not compared: not installed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["show", "ViT-Q/16"], 2, "no model 'ViT-Q/16'"),
        (["show", "README.nowhere"], 2, "no model"),
        (["convert", "nothing.npz", "x.safetensors"], 2, "no file, folder or published weights"),
        (["convert", ".", "x.safetensors", "--image-size", "big"], 2, "expected N or HxW"),
        (["list", "planets"], 2, "'planets': expected one of models"),
        (["lsit"], 2, "lsit"),
        (["help", "lsit"], 2, "did you mean list?"),
    ],
)
def test_mistakes_get_a_message_and_code_2_and_no_traceback(arguments, code, message, capsys):
    assert run(*arguments) == code
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


@pytest.mark.slow
def test_the_demos_journey_ends_where_it_began():
    from vitkit.commands.demo import journey

    legs = journey("ViT-Ti/16")
    assert [leg["format"] for leg in legs] == ["official", "timm", "hf", "torchvision", "vitkit"]
    assert all(leg["equal"] and leg["arrays"] == "bit-equal" and leg["logits_moved"] == 0 for leg in legs)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("finetune d --set a=1 --steps 3 --set b=2", "finetune d --set a=1 b=2 --steps 3"),
        ("finetune d --set a=1 x=y --set=b=2 --plan", "finetune d --set a=1 x=y b=2 --plan"),
        ("fewshot m d --shots 1 5 --seeds 2 --shots 10", "fewshot m d --shots 1 5 10 --seeds 2"),
        ("finetune d --steps 3 --steps 4", "finetune d --steps 3 --steps 4"),  # the last, as everywhere
        ("inspect m i --class cat --class dog", "inspect m i --class cat --class dog"),
        ("predict m i --labels a --template x --labels b --template y",
         "predict m i --labels a b --template x --template y"),
        ("nothing --set a=1 --set b=2", "nothing --set a=1 --set b=2"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_repeated_flag_of_several_values_keeps_all_of_them(words, expected):
    assert joined(words.split()) == expected.split()


def test_every_set_of_a_command_counts(tmp_path, capsys):
    options = ["--set", "model.depth=1", "--steps", "3", "--set", "model.width=48"]
    run("finetune", "digits", "--model", "ViT-Ti/4", "--out", tmp_path / "run", "--plan", "--json", *options)
    assert json.loads(capsys.readouterr().out)["parameters"] == 237_706  # of one layer of width 48
