"""The few top-level keys of a data.yaml: text, numbers, lists and maps of them; nothing else of YAML."""

import re
from collections.abc import Sequence
from typing import Any

from vitkit.errors import Error

KEY = re.compile(r"""(?P<key>[\w.-]+|'[^']*'|"[^"]*")\s*:(?:\s+(?P<value>.*))?""")
MOST_LINES = 200_000


def read_yaml(text: str, where: str, keys: Sequence[str]) -> dict[str, Any]:
    """The values of these keys; other keys are not read, whatever they hold."""
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        raise Error(f"{where}: {len(lines)} lines", code="data.too-large")
    values: dict[str, Any] = {}
    n = 0
    while n < len(lines):
        line = without_comment(lines[n])
        match = KEY.fullmatch(line.rstrip()) if line[:1] not in ("", " ", "-", "\t") else None
        n += 1
        if match is None:
            continue
        start = n
        while n < len(lines) and (not without_comment(lines[n]).strip() or lines[n][:1] in (" ", "\t", "-")):
            n += 1
        key = scalar(match["key"])
        if key not in keys:
            continue
        if key in values:
            raise Error(f"{where}, line {start}: {key} is there twice; keep one", code="data.labels")
        block = [without_comment(inner).rstrip() for inner in lines[start:n]]
        block = [inner for inner in block if inner.strip() and inner.strip() != "---"]
        values[key] = value_of((match["value"] or "").strip(), block, f"{where}, line {start}")
    return values


def value_of(inline: str, block: Sequence[str], where: str) -> Any:
    """The value after a key: on its line, or on the indented lines below."""
    if inline[:1] in ("[", "{"):
        whole = " ".join([inline, *(line.strip() for line in block)])
        closing = {"[": "]", "{": "}"}[whole[0]]
        if not whole.endswith(closing):
            raise unreadable(where, whole)
        parts = split_commas(whole[1:-1], where)
        return [scalar(part, where) for part in parts] if closing == "]" else pairs(parts, where)
    if inline:
        if block:
            raise unreadable(where, block[0])
        return scalar(inline, where)
    entries = [line.strip() for line in block]
    if entries and all(entry.startswith("- ") or entry == "-" for entry in entries):
        return [scalar(entry[1:].strip(), where) for entry in entries]
    return pairs(entries, where) if entries else ""


def pairs(entries: Sequence[str], where: str) -> dict[str, str]:
    """A map of `key: value` entries."""
    result: dict[str, str] = {}
    for entry in entries:
        match = KEY.fullmatch(entry)
        if match is None or (key := scalar(match["key"])) in result:
            raise unreadable(where, entry)
        result[key] = scalar((match["value"] or "").strip(), where)
    return result


def scalar(text: str, where: str = "") -> str:
    """A value as text, without quotes; anchors, tags and nested values are refused."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace("''", "'") if text[0] == "'" else text[1:-1].replace('\\"', '"')
    if text[:1] in ("&", "*", "!", "[", "{", "|", ">", "%", "@", "'", '"'):
        raise unreadable(where, text)
    return "" if text in ("null", "~") else text


def split_commas(text: str, where: str) -> list[str]:
    """The parts between commas outside of quotes."""
    parts, quote = [""], ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and not parts[-1].rpartition(":")[2].strip():
            quote = letter
        if letter == "," and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    if quote:
        raise unreadable(where, text)
    return [part.strip() for part in parts if part.strip()]


def without_comment(line: str) -> str:
    """A line up to a # that begins a comment: at its start or after a space, outside of quotes."""
    quote = ""
    for i, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and (i == 0 or line[i - 1] in " \t[{,:-"):
            quote = letter
        elif letter == "#" and (i == 0 or line[i - 1] in " \t"):
            return line[:i]
    return line


def unreadable(where: str, text: str) -> Error:
    return Error(
        f"{where}: {text[:60]!r} is not read; write names as a list, [cat, dog] or one '- cat' per line, and "
        "train, val and test as text or lists",
        code="data.labels",
    )
