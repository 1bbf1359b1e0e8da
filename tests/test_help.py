"""Help on one screen, common options first, the nearest name for every mistake, and completion scripts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from test_cli import run
from test_flag_ranges import WORDS, listed_flags
from test_starts import HEAVY, started

from vitkit import listing
from vitkit.cli import verbs
from vitkit.cli.arguments import arguments_of, subcommands, verbs_and_parts
from vitkit.cli.help import COMMON, GROUPS
from vitkit.cli.verbs import VERBS
from vitkit.errors import similar_path

PARTS = {name: verb for name, verb in verbs_and_parts(VERBS) if name != "study"}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def shown(capsys, *words: str) -> str:
    assert run(*words) == 0
    output = capsys.readouterr()
    assert not output.err
    return output.out


# the verbs


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"], ["--help-all"], []])
def test_the_verbs_fit_on_one_screen(words, capsys):
    assert run(*words) == (0 if words else 2)  # without a verb nothing was done
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert not output.err and len(lines) <= 40 and max(map(len, lines)) <= 80
    for name in VERBS:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1
    examples = [
        line.removeprefix("  $ vitkit ").split()[0] for line in lines if line.startswith("  $ vitkit ")
    ]
    assert 3 <= len(examples) <= 4 and set(examples) <= set(VERBS)
    assert "vitkit VERB --help" in output.out and "--version" in output.out


def test_every_verb_is_in_one_group():
    assert sorted(name for group in GROUPS.values() for name in group) == sorted(VERBS)


def test_a_verb_without_a_group_is_still_shown(monkeypatch, capsys):
    def greet(name: str = "you") -> None:
        """Say hello."""

    monkeypatch.setitem(verbs.VERBS, "greet", greet)
    assert "Other:\n  greet       Say hello." in shown(capsys, "--help")
    assert "--name TEXT             (default: you)" in shown(capsys, "greet", "--help")


def test_the_verbs_are_shown_quickly_and_without_torch(tmp_path):
    done, modules = started(tmp_path, "--help")
    assert done.returncode == 0 and not modules & (HEAVY | {"numpy", "PIL"})
    before = os.times()
    subprocess.run([sys.executable, "-m", "vitkit", "--help"], check=True, capture_output=True)
    after = os.times()
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    assert spent < 0.5  # processor time: other processes may be busy


# the options of a verb


@pytest.mark.parametrize("name", PARTS)
def test_help_shows_the_common_options_and_help_all_the_rest(name, capsys):
    short, full = shown(capsys, *name.split(), "--help"), shown(capsys, *name.split(), "--help-all")
    flags = [argument.flag for argument in arguments_of(PARTS[name]) if not argument.positional]
    common = [f"--{flag}" for flag in COMMON[name].split()] if name in COMMON else flags
    row = re.compile(r"^  (--[a-z0-9-]+)", re.MULTILINE)
    assert row.findall(short) == common + ["--help-all"] * (len(common) < len(flags))
    assert row.findall(full)[: len(common)] == common and sorted(row.findall(full)) == sorted(flags)
    for text in (short, full):
        examples = text[text.index("Examples:") : text.index("\n\n", text.index("Examples:"))]
        assert f"vitkit {name}" in examples and text.startswith(f"usage: vitkit {name}")
        assert max(len(line) for line in text.replace(examples, "").splitlines()) <= 80


def test_the_table_of_common_options_names_flags_that_exist():
    for name, words in COMMON.items():
        flags = {argument.flag for argument in arguments_of(PARTS[name])}
        assert {f"--{word}" for word in words.split()} < flags, f"{name}: if all are common, leave it out"


@pytest.mark.parametrize("name", PARTS)
def test_defaults_that_say_nothing_are_not_shown(name, capsys):
    text = shown(capsys, *name.split(), "--help-all")
    assert not re.search(r"\(default:\s*(''|None|True|False|\(\))?\s*\)", text)
    for argument in arguments_of(PARTS[name]):
        assert argument.description, f"{name} {argument.flag} has no description"


def test_defaults_that_mean_something_are_shown(capsys):
    text = " ".join(shown(capsys, "predict", "--help").split())
    assert "--top N Number of labels per image. (default: 5)" in text
    text = " ".join(shown(capsys, "cost", "--help-all").split())
    assert "(default: 64 128 224 384 512)" in text and "(required)" in text
    assert "(default: 0.05)" in shown(capsys, "finetune", "--help-all")


@pytest.mark.parametrize("name", WORDS)
def test_help_lists_the_flags_that_the_parser_has(name, capsys):
    with pytest.raises(SystemExit):
        verbs.parser([*name.split(), "--help"])()
    row = r"^\W (--[a-z][a-z0-9-]*)(?: \S+)?(?= {2}| *\W?$)"
    theirs = re.findall(row, capsys.readouterr().out, re.MULTILINE)
    assert theirs or name == "completion"
    assert set(theirs) == set(listed_flags(name, capsys))


def test_the_verbs_of_study_have_one_line_each(capsys):
    text = shown(capsys, "study", "--help")
    for part in dict(subcommands(arguments_of(VERBS["study"]))):
        assert f"\n  {part} " in text
    assert shown(capsys, "help", "study", "run") == shown(capsys, "study", "run", "-h")


@pytest.mark.parametrize("words", ["finetun --help", "help finetun", "study rn --help", "--help-me"])
def test_help_of_an_unknown_verb_is_an_error(words, capsys):
    assert run(*words.split()) == 2
    output = capsys.readouterr()
    assert not output.out and output.err.count("\n") == 1


# mistakes


@pytest.mark.parametrize(
    "kind, words, nearest",
    [
        ("verb", "finetnue photos", "finetune"),
        ("flag", "finetune photos --stesp 3", "--steps"),
        ("recipe", "finetune digits --plan --recipe flower", "flowers"),
        ("recipe", "cost ViT-B/16 --recipe flower", "flowers"),
        ("model", "finetune digits --plan --model ViTB/16", "ViT-B/16"),
        ("model", "cost vit-l/16 --recipe pets --no-measure", "ViT-L/16"),
        ("model", "show vit-l/16", "ViT-L/16"),
        ("weights", "finetune digits --weights ViT-B/16.augrg-i21k", "ViT-B/16.augreg-i21k"),
        ("weights", "show ViT-B/16.augrg-i21k", "ViT-B/16.augreg-i21k"),
        ("path", "finetune photo", "photos"),
        ("path", "doctor photso/train", "photos/train"),
        ("path", "finetune digts", "digits"),
        ("path", "predict runs/photo a.png", "runs/photos"),
        ("path", "show runs/photo/model.safetensors", "runs/photos/model.safetensors"),
        ("path", "finetune digits --weights runs/photo", "runs/photos"),
        ("path", "report runs/photo", "runs/photos"),
        ("path", "report runs/photo runs/other", "runs/photos"),
        ("path", "suite runs/photos --data photo", "photos"),
        ("path", "study report runs/photo", "runs/photos"),
        ("study", "study run haeds --data digits --plan", "heads"),
    ],
)
def test_a_mistyped_name_names_the_nearest(kind, words, nearest, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos" / "train").mkdir(parents=True)
    (tmp_path / "runs" / "photos").mkdir(parents=True)
    (tmp_path / "runs" / "photos" / "model.safetensors").touch()
    assert run(*words.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and re.search(rf"did you mean {re.escape(nearest)}(\?| or )", err)


def test_a_similar_path_is_one_that_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    assert similar_path("Photo/cat.jpg") == " did you mean photos/cat.jpg?"
    assert similar_path("photo/dog.jpg") == " did you mean photos?"
    assert (
        similar_path(tmp_path / "photos" / "cat.jpeg") == f" did you mean {tmp_path / 'photos' / 'cat.jpg'}?"
    )
    for place in ("photos", "zzz", "", "\0", "photos/cat.jpg/x", "x" * 5000, "/dev/null/x", "/"):
        assert similar_path(place) == ""
    (tmp_path / "ab\ncd").touch()
    assert similar_path("abcd") == "", "a name that would break the line"


def test_a_missing_image_names_the_nearest(tmp_path, small, monkeypatch, capsys):
    import vitkit

    monkeypatch.chdir(tmp_path)
    (tmp_path / "cat.png").touch()
    vitkit.save(small(classes=3), "m.npz")
    assert run("predict", "m.npz", "cta.png", "--device", "cpu") == 1
    assert "did you mean cat.png?" in capsys.readouterr().err


# completion


def completed(script: str, *words: str) -> list[str]:
    """What bash offers for the last of these words."""
    ask = 'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _vitkit; printf "%s\\n" "${COMPREPLY[@]}"'
    code = f'eval "$1"; shift; {ask}'
    done = subprocess.run(
        ["bash", "-c", code, "bash", script, *words], capture_output=True, text=True, check=True
    )
    assert not done.stderr
    return done.stdout.split()


def test_the_script_of_bash_completes_verbs_flags_and_names(capsys):
    script = shown(capsys, "completion", "bash")
    assert not subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=True).stderr
    assert completed(script, "vitkit", "fin") == ["finetune"]
    assert completed(script, "vitkit", "") == list(VERBS)
    assert completed(script, "vitkit", "--v") == ["--version"]
    assert completed(script, "vitkit", "finetune", "--step") == ["--steps"]
    assert completed(script, "vitkit", "finetune", "--no") == ["--no-cuda-graph"]
    assert completed(script, "vitkit", "finetune", "digits", "--recipe", "pe") == ["pets"]
    assert completed(script, "vitkit", "finetune", "digits", "--recipe", "=", "pe") == ["pets"]
    assert "ViT-B/16.augreg-i21k" in completed(script, "vitkit", "predict", "ViT-B/16.a")
    assert completed(script, "vitkit", "predict", "") == []  # bash offers the files
    assert completed(script, "vitkit", "finetune", "--out", "r") == []
    assert completed(script, "vitkit", "list", "w") == ["weights"]
    assert completed(script, "vitkit", "study", "") == ["list", "run", "report", "pack", "unpack", "index"]
    assert completed(script, "vitkit", "study", "run", "hea") == ["heads"]
    assert completed(script, "vitkit", "study", "run", "heads", "--bu") == ["--budget"]
    assert completed(script, "vitkit", "study", "run", "heads", "--scale", "") == ["mini", "paper"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_has_all_verbs_flags_and_names(shell, capsys):
    script = shown(capsys, "completion", shell)
    for name, verb in PARTS.items():
        assert re.search(rf"\b{name}\b", script)
        for argument in arguments_of(verb):
            assert argument.positional or re.search(rf"(--|-l ){argument.flag[2:]}\b", script)
    for kind in ("models", "weights", "recipes", "formats", "studies"):
        for row in listing.rows(kind):
            assert next(iter(row.values())) in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_names_need_no_quotes_in_a_script():
    for kind in ("models", "weights", "recipes", "formats", "studies"):
        for row in listing.rows(kind):
            assert re.fullmatch(r"[A-Za-z0-9+./_-]+", next(iter(row.values())))


def test_completion_needs_no_torch(tmp_path):
    done, modules = started(tmp_path, "completion", "bash")
    assert done.returncode == 0 and not modules & (HEAVY | {"numpy", "PIL"})


COMPLETED = {  # what is typed before TAB, and what the command then is
    "vitkit fin": "finetune",
    "vitkit finetune --step": "finetune --steps",
    "vitkit finetune digits --recipe pe": "finetune digits --recipe pets",
    "vitkit finetune digits --recipe=pe": "finetune digits --recipe=pets",
    "vitkit predict ViT-B/16.augreg-i21k-": "predict ViT-B/16.augreg-i21k-i1k-384",
    "vitkit predict cat": "predict cat.jpg",
    "vitkit finetune --out cat": "finetune --out cat.jpg",
    "vitkit study run hea": "study run heads",
    "vitkit study run heads --bu": "study run heads --budget",
}
SHELLS = {
    "bash": ["bash", "--noprofile", "--rcfile", "rc", "-i"],
    "zsh": ["zsh", "-d", "-i"],  # reads .zshrc in ZDOTDIR
}
START = {"bash": "", "zsh": "autoload -Uz compinit && compinit -D -u\n"}


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_itself_completes(shell, tmp_path, capsys):
    """An interactive shell, asked by TAB."""
    if not shutil.which(shell):
        pytest.skip(f"no {shell} here")
    (tmp_path / "cat.jpg").touch()
    rc = START[shell] + shown(capsys, "completion", shell)
    rc += "\nPS1='ready> '\nvitkit() { echo \"ran:$*\"; }\n"
    (tmp_path / {"bash": "rc", "zsh": ".zshrc"}[shell]).write_text(rc)
    screen = typed_with_tab(SHELLS[shell], tmp_path, list(COMPLETED))
    ran = [line.removeprefix("ran:").strip() for line in screen.splitlines() if line.startswith("ran:")]
    assert ran == list(COMPLETED.values())


def typed_with_tab(line: list[str], folder: Path, inputs: list[str]) -> str:
    """Start a shell, type each input with TAB and RETURN, and return all that it showed."""
    import pty
    import select
    import time

    pid, terminal = pty.fork()
    if not pid:
        os.chdir(folder)
        os.execvpe(line[0], line, os.environ | {"ZDOTDIR": str(folder), "TERM": "dumb"})
    seen, sent, stop = "", 0, time.monotonic() + 60
    try:
        while seen.count("\nran:") < len(inputs) and time.monotonic() < stop:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 4096).decode(errors="replace")
            if sent < len(inputs) and "ready> " in seen and seen.count("\nran:") == sent:
                os.write(terminal, f"{inputs[sent]}\t\n".encode())
                sent += 1
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    return seen


def test_fish_itself_completes(tmp_path, capsys):
    if not shutil.which("fish"):
        pytest.skip("no fish here")
    (tmp_path / "cat.jpg").touch()
    (tmp_path / "vitkit.fish").write_text(shown(capsys, "completion", "fish"))
    asked = "\n".join(f"echo '>{line}'; complete -C '{line}'" for line in COMPLETED)
    (tmp_path / "ask.fish").write_text(f"source vitkit.fish\n{asked}\n")
    done = subprocess.run(
        ["fish", "--no-config", "ask.fish"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    offered = {}
    for answer in done.stdout.removeprefix(">").split("\n>"):
        line, *words = answer.splitlines()
        offered[line] = [word.partition("\t")[0] for word in words]
    assert offered == {line: [whole.split()[-1]] for line, whole in COMPLETED.items()} and not done.stderr


def test_an_autoloaded_function_completes_at_the_first_time(tmp_path, capsys):
    """As a file in $fpath: the first TAB runs the file itself."""
    if not shutil.which("zsh"):
        pytest.skip("no zsh here")
    (tmp_path / "_vitkit").write_text(shown(capsys, "completion", "zsh"))
    rc = f"fpath=({tmp_path} $fpath)\n{START['zsh']}PS1='ready> '\nvitkit() {{ echo \"ran:$*\"; }}\n"
    (tmp_path / ".zshrc").write_text(rc)
    assert "ran:finetune" in typed_with_tab(SHELLS["zsh"], tmp_path, ["vitkit fin"])


def test_the_parser_is_still_tyro():
    assert verbs.parser(["list"]).func is tyro.extras.subcommand_cli_from_dict
