"""Predictions as a person reads them: each label with its per cent, on one line or in aligned columns."""

from collections.abc import Sequence

from rich.cells import cell_len

from vitkit.report.terminal import printable

Answers = Sequence[tuple[str, float]]
UNSURE = "unsure"


def percent(probability: float) -> str:
    """10.5 %; what would round to nothing or to certainty is told apart from it."""
    if probability < 0.0005:
        return "<0.1 %"
    return ">99.9 %" if probability >= 0.9995 else f"{100 * probability:.1f} %"


def in_one_line(answers: Answers) -> str:
    """tabby cat 10.5 %; tiger cat 3.1 %. Labels may hold commas, so a semicolon stands between them."""
    return "; ".join(f"{printable(label)} {percent(probability)}" for label, probability in answers)


def in_words(image: str, answers: Answers, *, unsure: bool, width: int) -> str:
    """A line for an image: its name, then as many answers as the width has room for, at least the first."""
    for shown in range(len(answers), 0, -1):
        line = in_one_line(answers[:shown]) + ("; ..." if shown < len(answers) else "")
        text = f"{printable(image)}: {UNSURE} ({line})" if unsure else f"{printable(image)}: {line}"
        if cell_len(text) <= width:
            break
    return text


def in_rows(image: str, answers: Answers, *, unsure: bool) -> str:
    """The same with a line for each answer, probabilities below each other."""
    rows = [f"  {percent(probability):>7}  {printable(label)}" for label, probability in answers]
    return "\n".join([f"{printable(image)}:{f' {UNSURE}' * unsure}", *rows])
