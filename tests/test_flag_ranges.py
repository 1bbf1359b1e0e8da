"""Every flag of every verb with its least, largest and impossible values: code 0 or 2, one line."""

import functools
import os
import re
import subprocess
import sys

import pytest
from test_cli import run as exit_code

from vitkit.cli import verbs
from vitkit.cli.flags import FLAGS
from vitkit.cli.verbs import VERBS, main
from vitkit.options import Range

# the words that a verb cannot do without, so that the one flag under test decides
WORDS = {
    "demo": [], "doctor": ["digits"], "shard": ["digits", "out"], "finetune": ["digits"],
    "pretrain": ["digits"], "suite": ["model"], "study list": [], "study run": ["heads", "--data", "digits"],
    "study report": ["folder"], "evaluate": ["model", "digits"], "fewshot": ["model", "digits"],
    "embed": ["model", "digits", "--out", "f.parquet"], "predict": ["model", "a.png"],
    "serve": ["model"], "inspect": ["model", "a.png"], "report": ["run"],
    "cost": ["ViT-B/16", "--recipe", "pets"], "list": [], "show": ["ViT-B/16"],
    "export": ["model", "out.onnx"], "convert": ["in.npz", "out.npz"], "completion": ["bash"],
    "push": ["model", "me/photos"],
}  # fmt: skip
ODD = ("", "nan", "inf", "-1", "0", "1e400", "9" * 5000, "abc", "½")


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """The paths that WORDS names, which are looked for before anything else."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "in.npz"):
        (tmp_path / name).touch()


def listed_flags(verb: str, capsys) -> dict[str, bool]:
    """The flags as --help-all lists them, and whether each takes a value."""
    assert exit_code(*verb.split(), "--help-all") == 0
    lines = re.findall(
        r"^[│ ] (--[a-z][a-z0-9-]*)( \S+)?(?= {2}| *│?$)", capsys.readouterr().out, re.MULTILINE
    )
    assert ("--json", "") in lines or verb in ("serve", "completion")
    return {flag: bool(value) for flag, value in lines}


def around(flag: str, verb: str) -> tuple[list[str], list[str]]:
    """Values that a flag takes, and some that it does not."""
    allowed = FLAGS.get(f"{verb.split()[0]} {flag}", FLAGS.get(flag))
    if not isinstance(allowed, Range):
        return [], []
    low, high = allowed.least, allowed.largest
    below = low - 1 if isinstance(low, int) else low - abs(low) / 2
    above = high + 1 if isinstance(high, int) else high * 1.01
    return [repr(low), repr(high)], [repr(below), repr(above), "", "nan", "inf", "-inf", "1e400", "abc"]


def test_every_verb_is_walked_through():
    assert {name.split()[0] for name in WORDS} == set(VERBS)


@pytest.mark.parametrize(
    "verb", [pytest.param(v, marks=pytest.mark.slow) if v.startswith("pretrain") else v for v in WORDS]
)
def test_every_flag_takes_its_range_and_refuses_the_rest_in_one_line(verb, monkeypatch, capsys):
    name, reached = verb.split()[0], []
    real = VERBS[name]

    @functools.wraps(real)
    def stub(**values):
        reached.append(values)

    flags = [flag for flag, value in listed_flags(verb, capsys).items() if value]
    assert flags or verb in ("demo", "list", "show", "study list", "study report", "completion")
    monkeypatch.setattr(verbs, "VERBS", {name: stub})  # the real parser and checks, up to the verb's own call
    for flag in flags:
        good, bad = around(flag, verb)
        for value in dict.fromkeys((*good, *bad, *ODD)):
            reached.clear()
            code = exit_code(*verb.split(), *WORDS[verb], f"{flag}={value}")
            output, case = capsys.readouterr(), f"{verb} {flag}={value[:20]}"
            assert not output.out and code in (0, 2), case
            assert bool(reached) == (code == 0), case
            if code == 2:
                shown = value[:60] if not good else ""
                assert output.err.count("\n") == 1 and f"{flag} " in output.err and shown in output.err, case
            if value in good:
                assert code == 0, output.err
            if value in bad or not value:
                assert code == 2, case


@pytest.mark.parametrize("verb", [v for v in WORDS if WORDS[v] and v != "completion"])
def test_an_empty_word_is_no_model_data_image_or_folder(verb, capsys, tmp_path):
    for place in range(len(WORDS[verb])):
        words = [*WORDS[verb][:place], "", *WORDS[verb][place + 1 :]]
        if WORDS[verb][place].startswith("--"):
            continue
        assert exit_code(*verb.split(), *words) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "'': expected a name" in err
    assert {path.name for path in tmp_path.iterdir()} == {"model", "in.npz"}


def test_a_flag_without_a_range_is_noticed(monkeypatch, capsys):
    """The control: with a row of the table gone, the walk would fail."""
    monkeypatch.delitem(FLAGS, "--top")
    with pytest.raises(AssertionError, match="predict --top"):
        main(["predict", "model", "a.png", "--top", "3"])


def test_values_are_checked_before_torch_is_imported():
    code = "import sys\nfrom vitkit.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    words = ["finetune", "digits", "--epochs", "inf"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "False\n"
    assert "--epochs inf" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "randaugment=1"],
        ["--set", "randaugment=1,2,3"],
        ["--set", "length.epochs=inf"],
        ["--device", "meta"],
        ["--device", "hpu"],
        ["--image-size", "160000"],
        ["--batch", "0"],
    ],
)
def test_what_used_to_be_a_traceback_is_a_line(words, capsys, tmp_path):
    begin = ["finetune", "digits", "--model", "ViT-Ti/4", "--plan", "--out", tmp_path / "run"]
    assert exit_code(*begin, *words) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words[1].split("=")[0] in err


def piped(words: str) -> subprocess.CompletedProcess:
    """A command of the shell, where vitkit stands for this one."""
    text = words.replace("vitkit", f"{sys.executable} -m vitkit")
    buffered = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {text}"], capture_output=True, text=True, env=buffered
    )


@pytest.mark.parametrize("words", ["list", "--help"])
def test_a_reader_who_leaves_early_is_no_failure(words):
    done = piped(f"vitkit {words} | head -c 1 > /dev/null")
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_output_is_no_failure():
    done = piped("vitkit list >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_that_is_printed_lands_in_a_file_where_output_is_closed(tmp_path):
    """Without care the first file that is opened would be number 1."""
    code = "from vitkit.cli.mistakes import open_closed_streams as f; f(); import os; a = open('a', 'w'); "
    code += "os.write(1, b'stray'); assert a.fileno() > 2"
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" >&- 2>&-'], cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "a").read_text() == ""


def test_full_output_is_one_line_and_code_1():
    done = piped("vitkit --help > /dev/full")
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "standard output" in done.stderr and "No space left" in done.stderr


def test_an_error_that_cannot_be_told_still_has_its_code():
    assert piped("vitkit list planets 2>&-").returncode == 2
    assert piped("vitkit list planets 2>/dev/full").returncode == 2
