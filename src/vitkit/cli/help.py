"""Help: the verbs on one screen, and the options of a verb, the common ones first."""

import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vitkit.cli.arguments import Argument, Verbs, arguments_of, subcommands

GROUPS = {
    "Start": {
        "demo": "Check the models, then train and use a digit classifier",
        "doctor": "Check a data set, or this machine, before training",
        "list": "List models, published weights, formats and recipes",
    },
    "Train": {
        "finetune": "Train a classifier, segmenter or detector on your images",
        "pretrain": "Train a model from scratch or without labels",
    },
    "Use": {
        "predict": "Predict the labels of images",
        "embed": "Write the features of many images to one file",
        "evaluate": "Measure accuracy on images that the model has not seen",
        "serve": "Serve a model over HTTP, with a demo page",
        "export": "Export a model to ONNX, OpenVINO or torch.export",
        "push": "Push a model with its card to the Hugging Face Hub",
    },
    "Look inside": {
        "report": "Write the HTML report of a run, or compare several runs",
        "inspect": "Draw filters, position embeddings and attention maps",
        "show": "Show sizes, parameters, FLOPs and labels of a model",
    },
    "Research": {
        "fewshot": "Measure the few-shot accuracy of frozen features",
        "suite": "Fine-tune on many tasks with the VTAB-1k protocol",
        "study": "Reproduce the paper's studies within a time budget",
        "cost": "Compute training cost; measure speed and batch size",
    },
    "Files": {
        "convert": "Convert weights to another format and compare the outputs",
        "shard": "Write a data set as tar shards, for disk or HTTP",
        "completion": "Print a completion script for bash, zsh or fish",
    },
}
COMMON = {  # the options that --help shows, in this order; verbs that are not listed here show all
    "finetune": "task weights model recipe train out epochs steps batch lr image-size more-steps folds seed "
    "device plan json",
    "pretrain": "task teacher model weights recipe out epochs steps batch lr image-size seed device plan "
    "json",
    "suite": "data tasks rates seeds steps batch image-size out device json",
    "study run": "data downstream weights only budget seeds out device plan json",
    "evaluate": "split labels view tta merge-tokens reject batch device json",
    "fewshot": "shots seeds knn probe compare figure device json",
    "predict": "top labels template out reject tta merge-tokens unsure-below sort-into csv device json",
    "embed": "out text pool normalize dtype view batch device json",
    "serve": "host port token max-batch device",
    "inspect": "out class images layer image-size bias device json",
    "export": "precision calibrate image-size any-size pixels overwrite device json",
    "convert": "format image-size overwrite json",
    "cost": "recipe images sizes no-measure out device json",
}
ASKED = ("-h", "--help", "--help-all")
OVERVIEW = """\
usage: vitkit VERB [options]

Train, evaluate, inspect and serve Vision Transformers.

{verbs}

Examples:
  $ vitkit demo digits
  $ vitkit finetune photos/
  $ vitkit predict runs/photos cat.jpg
  $ vitkit evaluate runs/photos more-photos/

vitkit VERB --help        examples and common options; --help-all: all options
vitkit --version          the versions of vitkit, Python and PyTorch"""
COLUMN = 26  # where the descriptions begin


def requested(words: Sequence[str], verbs: Verbs) -> str:
    """The help that a command line asks for; empty if it asks for none, or names no known verb."""
    if not words or words[0] in ASKED:
        return overview(verbs)
    if words[0] not in verbs or not any(word in ASKED for word in words):
        return ""
    name, verb, everything = words[0], verbs[words[0]], "--help-all" in words
    if inner := dict(subcommands(arguments_of(verb))):
        part = words[1] if words[1] not in ASKED else ""
        if not part:
            return with_parts(name, verb, inner)
        if part not in inner:
            return ""
        name, verb = f"{name} {part}", inner[part]
    return of_verb(name, verb, everything=everything)


def print_help(text: str, code: int = 0) -> None:
    print(text)
    sys.exit(code)


def overview(verbs: Verbs) -> str:
    """All verbs by group, on one screen."""
    grouped = {name for group in GROUPS.values() for name in group}
    others = {name: paragraphs(verb)[0] for name, verb in verbs.items() if name not in grouped}
    groups = {**GROUPS, "Other": others} if others else GROUPS
    lines = []
    for title, group in groups.items():
        lines += [f"{title}:", *(f"  {name:<12}{about}" for name, about in group.items())]
    return OVERVIEW.format(verbs="\n".join(lines))


def of_verb(name: str, verb: Callable[..., Any], *, everything: bool = False) -> str:
    """The help of a verb: usage, description, examples, arguments and options."""
    arguments = list(arguments_of(verb))
    positionals = [argument for argument in arguments if argument.positional]
    common, rest = split_options(name, [argument for argument in arguments if not argument.positional])
    shown = [(f"{option.flag} {option.metavar}".rstrip(), option.description) for option in common]
    shown.append(("-h, --help", "Show this help."))
    if rest and not everything:
        shown.append(("--help-all", f"Show all {len(common) + len(rest)} options."))
    required = [f"{o.flag} {o.metavar}".rstrip() for o in (*common, *rest) if o.required]
    words = [usage_word(argument) for argument in positionals] + required
    parts = [f"usage: vitkit {' '.join([name, *words])} [options]", *opening(verb)]
    if positionals:
        parts.append(section("Arguments", [(a.flag.strip("[]"), a.description) for a in positionals]))
    parts.append(section("Common options" if rest else "Options", shown))
    if rest and everything:
        more = [(f"{option.flag} {option.metavar}".rstrip(), option.description) for option in rest]
        parts.append(section("More options", more))
    return "\n\n".join(parts)


def with_parts(name: str, verb: Callable[..., Any], inner: dict[str, type]) -> str:
    """The help of a verb that has subcommands."""
    rows = [(part, paragraphs(run)[0]) for part, run in inner.items()]
    usage = f"usage: vitkit {name} {{{','.join(inner)}}} [options]"
    ending = f"vitkit {name} VERB --help shows the options of a verb."
    return "\n\n".join([usage, *opening(verb), section("Verbs", rows), ending])


def split_options(name: str, options: Sequence[Argument]) -> tuple[list[Argument], list[Argument]]:
    """The common options in the order of the table, and the rest."""
    if name not in COMMON:
        return list(options), []
    by_flag = {option.flag: option for option in options}
    common = [by_flag.pop(f"--{flag}") for flag in COMMON[name].split() if f"--{flag}" in by_flag]
    return common, list(by_flag.values())


def usage_word(argument: Argument) -> str:
    return argument.flag if argument.required else f"[{argument.flag.strip('[]')}]"


def opening(verb: Callable[..., Any]) -> Iterator[str]:
    """The description of a verb and its examples, from its docstring."""
    texts = paragraphs(verb)
    yield from (wrapped(text) for text in texts if not text.startswith("$ "))
    for text in texts:
        if text.startswith("$ "):
            yield "Examples:\n" + textwrap.indent(text, "  ")


def paragraphs(verb: Callable[..., Any]) -> list[str]:
    return (inspect.getdoc(verb) or "").split("\n\n")


def section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """A heading and rows of two columns; a long first column has a line of its own."""
    lines = [f"{title}:"]
    for left, right in rows:
        text = wrapped(right, COLUMN)
        lines.append(
            f"  {left:<{COLUMN - 2}}{text.lstrip()}" if len(left) <= COLUMN - 4 else f"  {left}\n{text}"
        )
    return "\n".join(line.rstrip() for line in lines)


def wrapped(text: str, indent: int = 0) -> str:
    """The text in the width of the terminal, at most 100 columns."""
    width, space = min(100, max(60, shutil.get_terminal_size().columns)), " " * indent
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent=space, subsequent_indent=space,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
