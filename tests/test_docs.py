"""The documents: what they show can be run, read and found, and their tables are the code's."""

import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import make_cli_page
import make_recipe_page
import pytest

import vitkit
from vitkit.cli.mistakes import explain
from vitkit.cli.verbs import VERBS, command
from vitkit.errors import Error
from vitkit.runs.folder import MAY_CHANGE

ROOT = Path(__file__).parent.parent
DOCS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
AROUND = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
OLD_PATHS = {"cublaslt.py"}  # names a page by its former path until the next record of the GPU tests
SCALE = (ROOT / "docs" / "guides" / "many-gpus.md").read_text()
RUN_FOLDER = (ROOT / "docs" / "reference" / "run-folder.md").read_text()


def blocks(language: str) -> list:
    """Every fenced block of a language, with where it stands."""
    return [
        pytest.param(text, id=f"{path.name}:{number}")
        for path in DOCS
        for number, text in enumerate(re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.S))
    ]


@pytest.mark.parametrize("script", blocks("bash"))
def test_every_shell_script_can_be_parsed(script):
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("manifest", blocks("yaml"))
def test_every_manifest_can_be_parsed_and_says_what_it_is(manifest):
    yaml = pytest.importorskip("yaml")
    for document in yaml.safe_load_all(manifest):
        assert {"apiVersion", "kind", "metadata", "spec"} <= set(document)


def test_the_options_in_scripts_are_options_of_ours():
    from dataclasses import fields

    from vitkit.options import Training

    known = {f"--{field.name.replace('_', '-')}" for field in fields(Training)}
    yaml_words = {
        word for block in blocks("yaml") for word in re.findall(r"(--[a-z-]+)[,\]]", block.values[0])
    }
    shell = " ".join(block.values[0].replace("\\\n", " ") for block in blocks("bash"))
    shell_words = {
        word for line in re.findall(r"-m vitkit ([^\n]*)", shell) for word in re.findall(r"--[a-z-]+", line)
    }
    assert yaml_words and shell_words and yaml_words | shell_words <= known


def test_the_fields_that_may_change_are_listed_as_they_are():
    for name, why in MAY_CHANGE.items():
        assert f"| `{name}` | {why} |" in RUN_FOLDER


@pytest.mark.slow
def test_the_table_of_memory_is_what_the_formula_says():
    sys.path.insert(0, str(ROOT / "bench"))
    from memory_table import table

    for line in table(["ViT-B/16", "ViT-G/14"], 4096, [8, 32, 128, 512], 80.0).splitlines():
        assert line in SCALE, "run bench/memory_table.py and put its table into docs/guides/many-gpus.md"


def page_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(path: Path) -> list[str]:
    """The commands of ours in the blocks of code of a page, from `vitkit` to the end of the command."""
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", path.read_text(), re.S | re.M)
    lines = "\n".join(fenced).replace("\\\n", " ").splitlines()
    result = [re.match(r"(?:\$ )?(?:vitkit|[a-z].* -m vitkit)( .*)", line) for line in lines]
    return [f"vitkit{one[1]}" for one in result if one]


def words_of(line: str) -> list[str]:
    """The words after `vitkit`, up to the end of the command: a comment, a pipe or a redirection."""
    parts = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    parts.whitespace_split, parts.commenters = True, "#"
    words = list(parts)[1:]
    ends = [n for n, word in enumerate(words) if set(word) <= set("|;&<>")]
    return words[: ends[0]] if ends else words


SHOWN = {path: lines for path in DOCS if (lines := sorted(set(commands(path))))}


@pytest.mark.parametrize("path", SHOWN, ids=page_name)
def test_every_command_that_a_page_shows_is_one(path):
    wrong = {}
    for line in SHOWN[path]:
        try:
            command(words_of(line))
        except Error as error:
            wrong[line] = str(error)
    assert not wrong


@pytest.mark.parametrize("path", DOCS, ids=page_name)
def test_commands_within_sentences_have_verbs_and_flags_that_exist(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    wrong = {}
    for line in re.findall(r"`vitkit ([a-z][^`]*)`", prose):
        error = explain(shlex.split(line), VERBS)
        if error and error.code != "request.missing":  # a sentence need not name the data
            wrong[line] = str(error)
    assert not wrong


def test_commands_are_found_and_mistakes_in_them_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```\n$ vitkit train x\nvitkit show \\\n  a | head  # b\ntorchrun -m vitkit list\n```\nvitkit no"
    )
    assert commands(page) == ["vitkit train x", "vitkit show    a | head  # b", "vitkit list"]
    assert words_of("vitkit show 'a b' --json | head -1  # c") == ["show", "a b", "--json"]
    assert sum(map(len, SHOWN.values())) > 80
    for words in (["train", "photos/"], ["finetune", "photos/", "--learning-rate", "1"], ["finetune"]):
        with pytest.raises(Error):
            command(words)


def test_the_generated_pages_are_current():
    for module in (make_cli_page, make_recipe_page):
        assert module.PAGE.read_text() == module.page(), f"run python tests/{module.__name__}.py"


def test_the_page_of_the_command_line_has_the_flags_of_every_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for name, verb in make_cli_page.commands():
        with pytest.raises(SystemExit):
            command([*name.split(), "--help-all"])()
        printed = set(re.findall(r"^[│|]? {1,2}(--[a-z][a-z0-9-]*)", capsys.readouterr().out, re.M))
        assert printed == {row.flag for row in make_cli_page.rows(verb) if row.flag.startswith("-")}, name


def test_the_page_of_the_api_has_every_public_name():
    names = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.M)
    assert sorted(name.rpartition(".")[2] for name in names) == sorted(vitkit.__all__)
    for name in names:
        module, _, last = name.rpartition(".")
        assert getattr(importlib.import_module(module), last) is getattr(vitkit, last)


def test_the_navigation_of_the_site_has_every_page():
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in DOCS[:-1])


@pytest.mark.parametrize("path", DOCS[:-1], ids=page_name)
def test_lists_and_tables_begin_after_an_empty_line(path):  # they would be shown as text otherwise
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    blocks = [block.splitlines() for block in re.split(r"\n\s*\n", prose)]
    starts = [(lines[0], line) for lines in blocks for line in lines[1:] if re.match(r"- |\d+\. |\|", line)]
    assert [line for first, line in starts if not re.match(r"\s*- |\s*\d+\. |\|", first)] == []


@pytest.mark.parametrize("path", AROUND, ids=page_name)
def test_links_from_outside_the_site_lead_to_files(path):  # mkdocs checks those within
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text())
    assert [link for link in links if "://" not in link and not (ROOT / link).exists()] == []


def headings(path: Path) -> set[str]:
    """The anchors of a page, as GitHub and the site make them from its headings."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    titles = (re.sub(r"\]\([^)]*\)", "", title) for title in re.findall(r"^#+ (.*)$", prose, re.M))
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [*DOCS, *AROUND[1:]], ids=page_name)
def test_links_to_a_part_of_a_page_lead_to_a_heading(path):
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    links = [link.split("#") for link in re.findall(r"\]\(([^)\s:]*\.md#[^)\s]+|#[^)\s]+)\)", prose)]
    targets = [(path.parent / name if name else path, anchor) for name, anchor in links]
    assert [anchor for page, anchor in targets if anchor not in headings(page)] == []


@pytest.mark.parametrize("path", DOCS, ids=page_name)
def test_code_in_tables_has_no_bar(path):  # on GitHub it ends the cell, and the site shows its backslash
    rows = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    assert [
        row for row in rows for code in re.findall(r"`([^`]+)`", row) if "|" in code and " | " not in code
    ] == []


def test_pages_that_the_code_names_exist():
    files = [path for room in ("src", "tests", "bench") for path in (ROOT / room).rglob("*.py")]
    named = {
        f"{path.name}: {name}": ROOT / name
        for path in files
        if path.name not in OLD_PATHS
        for name in re.findall(r"\bdocs/[\w/-]+\.md", path.read_text())
    }
    assert [text for text, page in named.items() if not page.exists()] == []
