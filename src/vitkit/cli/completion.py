"""Completion scripts for bash, zsh and fish, made from the verbs, their flags and the known names."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from vitkit import listing
from vitkit.cli.arguments import Argument, Verbs, arguments_of, subcommands, verbs_and_parts
from vitkit.cli.help import GROUPS, paragraphs
from vitkit.options import DEVICES

Shell = Literal["bash", "zsh", "fish"]
ONLY = {  # flags and arguments whose values are names; those of FILES may also be paths
    "--recipe": ("recipes",), "--task": ("tasks",), "--model": ("models",), "--format": ("formats",),
    "study run NAME": ("studies",),
}  # fmt: skip
FILES = {
    "--weights": ("weights",), "MODEL": ("weights",), "IN": ("weights",), "MODEL...": ("models", "weights"),
    "X": ("models", "weights", "recipes"),
}  # fmt: skip
SH = """\
_vitkit_words() {{  # of a verb ($1) and of the word before ($2): flags, choices, and names beside files
    flags= choices= names=
    case "$1" in
{verbs}
    esac
    case "$1 $2" in
{values}
    esac
}}
"""
BASH = """\
# Completion of vitkit for bash. In ~/.bashrc: source <(vitkit completion bash)
{words}
_vitkit() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} verb=${{COMP_WORDS[1]}}
    local flags choices names
    ((COMP_CWORD == 1)) && verb= before=
    [[ $verb == study ]] && ((COMP_CWORD > 2)) && verb="study ${{COMP_WORDS[2]}}"
    [[ $before == = ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
    _vitkit_words "$verb" "$before"
    [[ -n $word ]] && choices="$choices $names"
    [[ $word == -* ]] && choices=$flags
    COMPREPLY=($(compgen -W "$choices" -- "$word"))
}}
complete -o default -F _vitkit vitkit"""
ZSH = """\
#compdef vitkit
# Completion of vitkit for zsh. In ~/.zshrc, after compinit: source <(vitkit completion zsh)
# Or as a file _vitkit in a folder of $fpath.
{words}
_vitkit() {{
    local before=${{words[CURRENT-1]}} verb=${{words[2]}} flags choices names
    if (( CURRENT == 2 )); then verb= before=; fi
    if [[ $verb == study ]] && (( CURRENT > 3 )); then verb="study ${{words[3]}}"; fi
    if [[ $PREFIX == --*=* ]]; then before=${{PREFIX%%=*}}; compset -P '*='; fi
    _vitkit_words "$verb" "$before"
    if [[ $PREFIX == -* ]]; then compadd -- ${{=flags}}; return; fi
    if [[ -n $choices ]]; then compadd -- ${{=choices}}; return; fi
    if [[ -n $PREFIX ]]; then compadd -- ${{=names}}; fi
    _files
}}
if [[ $funcstack[1] == _vitkit ]]; then _vitkit; else compdef _vitkit vitkit; fi"""
FISH = """\
# Completion of vitkit for fish: vitkit completion fish > ~/.config/fish/completions/vitkit.fish
function __vitkit_at
    set -l given (commandline -opc)
    set -e given[1]
    set -l wanted (count $argv)
    test (count $given) -ge $wanted; and test "$given[1..$wanted]" = "$argv"
end
function __vitkit_after
    test (count (commandline -opc)) -eq $argv[1]
end
{lines}"""


def script(shell: Shell, verbs: Verbs) -> str:
    """The completion script of a shell."""
    if shell == "fish":
        return FISH.format(lines="\n".join(fish_lines(verbs)))
    return {"bash": BASH, "zsh": ZSH}[shell].format(words=sh_table(verbs))


def values(verb: str, argument: Argument) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The only values of an argument, or else its names beside paths; both are empty if neither is known."""
    if argument.choices:
        return argument.choices, ()
    if argument.flag == "--device":
        return ("auto", *DEVICES), ()
    only = ONLY.get(f"{verb} {argument.flag}", ONLY.get(argument.flag, ()))
    return listed(only), listed(FILES.get(argument.flag, ()))


def listed(kinds: Iterable[str]) -> tuple[str, ...]:
    """The names in these tables of the listing: the first column."""
    return tuple(next(iter(row.values())) for kind in kinds for row in listing.rows(kind))


def sh_table(verbs: Verbs) -> str:
    """The function that bash and zsh share: two tables, by verb and by verb and flag."""
    rows = [sh_row("", "--help --version", tuple(verbs))]
    flags: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for name, verb in verbs_and_parts(verbs):
        arguments = list(arguments_of(verb))
        if inner := tuple(dict(subcommands(arguments))):
            rows.append(sh_row(name, "--help", inner))
            continue
        known = [argument.flag for argument in arguments if not argument.positional]
        rows.append(sh_row(name, " ".join([*known, "--help", "--help-all"]), *positional(name, arguments)))
        for argument in arguments:
            if not argument.positional and argument.max_values:
                flags.setdefault(values(name, argument), []).append(f"'{name} {argument.flag}'")
    cases = [
        f"        {'|'.join(keys)}) choices='{' '.join(only)}' names='{' '.join(names)}' ;;"
        for (only, names), keys in flags.items()
    ]
    return SH.format(verbs="\n".join(rows), values="\n".join(cases))


def sh_row(name: str, flags: str, only: Iterable[str] = (), names: Iterable[str] = ()) -> str:
    return f"        '{name}') flags='{flags}' choices='{' '.join(only)}' names='{' '.join(names)}' ;;"


def positional(name: str, arguments: Iterable[Argument]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The values of all positional arguments of a verb."""
    pairs = [values(name, argument) for argument in arguments if argument.positional]
    return tuple(v for only, _ in pairs for v in only), tuple(v for _, names in pairs for v in names)


def fish_lines(verbs: Verbs) -> Iterator[str]:
    yield "complete -c vitkit -n '__vitkit_after 1' -l version -d 'Print the versions'"
    yield "complete -c vitkit -l help -d 'Show help'"
    yield "complete -c vitkit -l help-all -d 'Show all options'"
    about = {name: text for group in GROUPS.values() for name, text in group.items()}
    for name, verb in verbs.items():
        yield fish_word("__vitkit_after 1", name, about.get(name) or summary(verb))
    for name, verb in verbs_and_parts(verbs):
        arguments = list(arguments_of(verb))
        if inner := dict(subcommands(arguments)):
            for part, run in inner.items():
                yield fish_word(f"__vitkit_after 2; and __vitkit_at {name}", part, summary(run))
            continue
        begin = f"complete -c vitkit -n '__vitkit_at {name}'"
        only, names = positional(name, arguments)
        if only or names:
            yield f"{begin} {'-f ' if only else ''}-a '{' '.join(only or names)}'"
        for argument in arguments:
            if not argument.positional:
                yield f"{begin} {fish_flag(name, argument)}"


def fish_word(condition: str, word: str, about: str) -> str:
    return f"complete -c vitkit -f -n '{condition}' -a {word} -d {quoted(about)}"


def fish_flag(name: str, argument: Argument) -> str:
    only, names = values(name, argument)
    takes = f" -x -a '{' '.join(only)}'" if only else " -r -F" if argument.max_values else ""
    takes += f" -a '{' '.join(names)}'" if names else ""
    return f"-l {argument.flag[2:]}{takes} -d {quoted(first_sentence(argument.setting('help')))}"


def summary(verb: Callable[..., Any]) -> str:
    return first_sentence(paragraphs(verb)[0])


def first_sentence(text: str) -> str:
    """The first sentence without its full stop.

    >>> first_sentence("Total time, e.g. 20min. Sizes follow from it."), first_sentence("cpu, cuda, ...")
    ('Total time, e.g. 20min', 'cpu, cuda, ...')
    """
    return re.split(r"(?<!e\.g)(?<!Fig)(?<!\.)\.(?:\s+|$)", text)[0]


def quoted(text: str) -> str:
    """The text in the single quotes of fish."""
    inner = " ".join(text.split()).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{inner}'"
