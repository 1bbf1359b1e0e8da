"""Small deliberate mistakes in a source file: which there could be, and a seeded choice of them."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.In: "not in", ast.NotIn: "in", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Pow: "*"}
SKIPPED = (ast.Raise, ast.JoinedStr, ast.Assert, ast.Import, ast.ImportFrom)  # messages, not behaviour


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str  # relative to the repository
    name: str  # unique
    start: int  # where the changed text begins in the file
    old: str
    new: str

    def applied(self, source: str) -> str:
        end = self.start + len(self.old)
        assert source[self.start : end] == self.old, f"{self.name}: the file has changed"
        return source[: self.start] + self.new + source[end:]


class Sites(ast.NodeVisitor):
    """All places of a file that can be changed, as (function, start, old, new)."""

    def __init__(self, source: str):
        self.source, self.within, self.found = source, ["module"], []
        lines = source.splitlines(keepends=True)
        self.begins = [0]
        for line in lines:
            self.begins.append(self.begins[-1] + len(line))
        self.lines = lines
        self.visit(ast.parse(source))

    def place(self, line: int, column: int) -> int:
        """Columns of the syntax tree count bytes."""
        return self.begins[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.place(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        return self.place(node.end_lineno, node.end_col_offset)

    def note(self, start: int, end: int, new: str) -> None:
        self.found.append((".".join(self.within[1:]) or "module", start, self.source[start:end], new))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, SKIPPED):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self.within.append(node.name)
            for part in node.body if isinstance(node, ast.ClassDef) else [*node.args.defaults, *node.body]:
                self.visit(part)
            self.within.pop()
            return
        if isinstance(node, ast.AnnAssign):  # its annotation is no code
            if node.value:
                self.visit(node.value)
            return
        for change in (self.constant, self.comparison, self.operator, self.boolean, self.branch, self.call):
            change(node)
        self.generic_visit(node)

    def constant(self, node: ast.AST) -> None:
        if not isinstance(node, ast.Constant) or isinstance(node.value, str | bytes):
            return
        value, start, end = node.value, self.start(node), self.end(node)
        if isinstance(value, bool):
            self.note(start, end, str(not value))
        elif isinstance(value, int):
            self.note(start, end, str(value + 1))
        elif isinstance(value, float):
            self.note(start, end, repr(2 * value if value else 1.0))

    def between(self, left: ast.expr, right: ast.expr, new: str) -> None:
        """Replace the operator between two operands; brackets around them stay."""
        start, end = self.end(left), self.start(right)
        text = self.source[start:end]
        stripped = text.strip(" ()\n")
        if stripped and "#" not in text:
            at = start + text.index(stripped)
            self.note(at, at + len(stripped), new)

    def comparison(self, node: ast.AST) -> None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            self.between(node.left, node.comparators[0], COMPARISONS[type(node.ops[0])])

    def operator(self, node: ast.AST) -> None:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            text = any(isinstance(one, ast.JoinedStr) for one in (node.left, node.right))
            if not text:
                self.between(node.left, node.right, OPERATORS[type(node.op)])

    def boolean(self, node: ast.AST) -> None:
        if isinstance(node, ast.BoolOp):
            other = "or" if isinstance(node.op, ast.And) else "and"
            self.between(node.values[0], node.values[1], other)

    def branch(self, node: ast.AST) -> None:
        """A condition that is never true."""
        if isinstance(node, ast.If | ast.IfExp):
            self.note(self.start(node.test), self.end(node.test), "False")

    def call(self, node: ast.AST) -> None:
        """A keyword that is not given."""
        if isinstance(node, ast.Call):
            for word in node.keywords:
                if word.arg and self.source[self.end(word.value) :].lstrip().startswith(","):
                    start = self.place(word.lineno, word.col_offset)
                    self.note(start, self.source.index(",", self.end(word.value)) + 1, "")


def generated(file: str, source: str, count: int, seed: int) -> Iterator[Mutant]:
    """A seeded choice of the mutants of a file, in the order of the file."""
    sites = Sites(source).found
    chosen = sorted(random.Random(f"{seed}:{file}").sample(range(len(sites)), min(count, len(sites))))
    seen: dict[str, int] = {}
    for number in chosen:
        where, start, old, new = sites[number]
        line = source.count("\n", 0, start)
        around = source.splitlines()[line].strip()
        name = f"{file}: {where}: `{' '.join(old.split())}` to `{new}` in `{around}`"
        seen[name] = seen.get(name, 0) + 1
        yield Mutant(file, name + (f" ({seen[name]})" if seen[name] > 1 else ""), start, old, new)
