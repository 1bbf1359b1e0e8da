"""Mistyped verbs and flags: one line that names the nearest, code 2, and torch is not imported."""

import re
import subprocess
import sys

import pytest
from test_cli import run
from test_flag_ranges import WORDS, listed_flags

import vitkit
from vitkit.cli.mistakes import explain
from vitkit.cli.verbs import RENAMED, VERBS
from vitkit.errors import did_you_mean


@pytest.mark.parametrize(
    "words, wrong, right",
    [
        ("finetun photos", "finetun", "finetune"),
        ("Predict m a.png", "Predict", "predict"),
        ("train photos", "train", "finetune"),  # what others call it; pretrain is spelled more alike
        ("finetune photos --step 3", "--step", "--steps"),
        ("finetune --step 3 photos", "--step", "--steps"),
        ("finetune photos --imagesize=3", "--imagesize", "--image-size"),
        ("finetune photos --learning-rate 3", "--learning-rate", "--lr"),
        ("finetune photos --batch-size 3", "--batch-size", "--batch"),
        ("predict m a.png --jsn", "--jsn", "--json"),
        ("study lst", "lst", "list"),
        ("finetune photos --weight-decay 0.1", "--weight-decay", "--set optimizer.weight_decay=VALUE"),
        ("finetune photos --optimizer adamw", "--optimizer", "--set optimizer.kind"),
        ("finetune photos --mixup 0.2", "--mixup", "--set mixup=VALUE"),
        ("finetune photos --bs 8", "--bs", "--batch"),
        ("study run heads --data digits --budgt 3", "--budgt", "--budget"),
    ],
)
def test_the_nearest_word_is_named_in_one_line(words, wrong, right, capsys):
    assert run(*words.split()) == 2
    output = capsys.readouterr()
    assert not output.out and output.err.count("\n") == 1
    assert wrong in output.err and f"did you mean {right}?" in output.err


@pytest.mark.parametrize("verb", ["finetune", "pretrain"])
@pytest.mark.parametrize(
    ("words", "parallel", "cuda_graph"),
    [
        (["--spread", "fsdp"], "fsdp", True),
        (["--spread=fsdp"], "fsdp", True),
        (["--no-record"], "auto", False),
        (["--no-record", "--spread=ddp"], "ddp", False),
        (["--no-cuda-graph", "--parallel", "ddp"], "ddp", False),
    ],
)
def test_deprecated_flags_are_accepted_but_not_in_the_help(
    verb, words, parallel, cuda_graph, capsys, monkeypatch
):
    requests = []
    monkeypatch.setattr(
        f"vitkit.commands.finetune.{verb}", lambda data, options, **_: requests.append(options)
    )
    assert run(verb, "digits", *words) == 0
    (options,) = requests
    assert (options.parallel, options.cuda_graph) == (parallel, cuda_graph)
    capsys.readouterr()
    assert run(verb, "--help-all") == 0
    shown = capsys.readouterr().out
    assert "--parallel" in shown and "--no-cuda-graph" in shown
    assert not any(re.search(rf"{flag}\b", shown) for flag in RENAMED)


def test_a_wrong_value_of_a_deprecated_flag_names_the_current_one(capsys):
    assert run("finetune", "digits", "--spread=zzz") == 2
    assert "--parallel 'zzz': expected one of auto, ddp, fsdp" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, named",
    [
        ("zzz", "'zzz'"),
        ("--verbose", "--verbose"),
        ("finetune photos -x", "-x"),
        ("finetune photos --zzz", "--zzz"),
        ("finetune", "DATA"),
        ("finetune my holiday photos", "holiday"),
        ("finetune photos --steps", "--steps"),
        ("finetune photos --plan=yes", "--plan"),
        ("study", "report"),
        ("study run heads", "--data"),
    ],
)
def test_every_other_mistake_is_one_line_too(words, named, capsys):
    assert run(*words.split()) == 2
    output = capsys.readouterr()
    assert not output.out and output.err.count("\n") == 1 and named in output.err
    assert "did you mean" not in output.err and "--help" in output.err


@pytest.mark.parametrize("verb", WORDS)
def test_every_flag_that_help_lists_is_known(verb, capsys):
    """Each is followed by a mistake: the message is about that one, not about the flag."""
    for flag, value in listed_flags(verb, capsys).items():
        words = [*verb.split(), *WORDS[verb], flag, *["1"] * value, "--zzz"]
        mistake = explain(words, VERBS)
        assert mistake.code == "request.unknown" and "unknown flag --zzz" in str(mistake), flag


def test_flags_may_be_written_with_underscores(capsys):
    assert run("finetune", "digits", "--max_bad", "7") == 2
    assert "--max-bad 7" in capsys.readouterr().err


def test_the_version_answers_at_once_without_torch():
    code = "import sys\nfrom vitkit.cli import main\nmain(['--version'])\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:2] == ["vitkit", vitkit.__version__] and done.stdout.count("\n") == 1


PYTHON = (
    r"PosixPath|<class|<\w+ object|\b[A-Z]\w+\(\w+=|\{'|\(\d[^()]*,[^()]*\)|\btype \w+\b|NoneType|\bNone\b"
)
DIGITS = ["finetune", "digits", "--model", "ViT-Ti/4", "--image-size", "8", "--plan", "--set"]


@pytest.mark.parametrize(
    "words, named",
    [
        ([*DIGITS, "length.steps=3", "length.epochs=4"], "3 steps and 4 epochs"),
        ([*DIGITS, "image_size=3,4,5"], "3,4,5"),
        ([*DIGITS, "batch=many"], "many"),
        ([*DIGITS, "flip=perhaps"], "perhaps"),
        ([*DIGITS, "optimizer=sgd"], "sgd"),
        ([*DIGITS, "randaugment=1,2,3"], "1,2,3"),
        ([*DIGITS, "patiense=3"], "did you mean patience?"),
        ([*DIGITS, "model_options=heads=5"], "5 heads"),
        (["pretrain", "digits", "--recipe", "masked-imagenet", "--set", "masked.shares=1,1,1"], "1, 1, 1"),
        (["finetune", "digits", "--recipe", "pet"], "did you mean pets?"),
        (["finetune", "digits", "--recipe", "imagnet"], "did you mean imagenet"),
        (["predict", "/dev/null/x", "a.png"], "/dev/null/x"),
        (["report", "/dev/null/x"], "/dev/null/x"),
    ],
)
def test_messages_hold_no_python(words, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*words) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert named in err and not re.search(PYTHON, err), err


def test_a_hint_names_similar_names_without_regard_to_case():
    assert did_you_mean("Tset", ["train", "test"]) == " did you mean test?"
    assert did_you_mean("vit-b", ["ViT-B", "ViT-L", "BiT"], count=2) == " did you mean ViT-B or ViT-L?"
    assert did_you_mean("tset", ["test"], matches=["val", "all"]) == " did you mean val or all?"
    assert did_you_mean("zzz", ["train", "test"]) == ""
