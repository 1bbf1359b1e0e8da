"""The promises of docs/contributing/reliability.md; as a program, writes their table from the record."""

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RECORD, PAGE = HERE / "record.json", HERE.parent.parent / "docs" / "contributing" / "reliability.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
PROMISES = {
    "A1": "Bad files are reported once, good ones are used once per epoch, too many bad ones stop the run",
    "A2": "Images of every mode and orientation decode to the expected pixels",
    "A3": "A folder of any structure is read as intended or refused with a message that names the problem",
    "A4": "A class keeps its name from the folder through training, saving and exporting to every prediction",
    "A5": "A damaged image raises BadImage and nothing else, within 2 s and 300 MB",
    "A6": "Damaged shards and indexes are refused by shard and member; nothing is written or executed",
    "B1": "A run killed at any moment ends like an uninterrupted one: weights, losses, samples, bit for bit",
    "B2": "A save interrupted at any operation leaves the old checkpoint or the new one",
    "B3": "A checkpoint is fully on disk before it gets its final name",
    "B4": "On a full disk the last checkpoint loads, no shard is incomplete, finished runs stay intact",
    "B5": "Every I/O error during a save is reported, and the last checkpoint loads",
    "B6": "Flipped bits and truncated, missing or swapped files are detected; the newest valid one is used",
    "B7": "SIGTERM, SIGINT or SIGUSR1 saves after the current step or evaluation; resuming is bit for bit",
    "B8": "Any number of processes resumes from any other: the same samples, losses within 1e-5",
    "B9": "A process that dies ends the others within a minute; after a restart the result is the same",
    "B10": "A data worker that dies or hangs is an error with its images and a remedy; checkpoints are kept",
    "B11": "A non-finite loss or gradient stops the run before any weight changes; the batch is named",
    "B12": "Out of memory: smaller micro-batches on all processes, the same batch, losses within 1e-5",
    "B13": "A checkpoint written in the background holds the state at the time of the request",
    "B14": "A run folder is locked by one process; the lock of a dead process is released",
    "B15": "Changed settings are refused by name, allowed, or allowed with a message",
    "B16": "Files of this version stay readable: logits within 1e-6",
    "C1": "A malicious weight file is refused at once and executes nothing",
    "C2": "A damaged weight file loads or is refused, and nothing else happens",
    "C3": "Code that executes code from files does not pass the checks",
    "D7": "Decoders of the service that are killed are replaced; all requests are answered, it stays ready",
    "D11": "Under mixed requests, memory grows by at most 1 MB per minute; threads and files stay constant",
}  # fmt: skip
ELSEWHERE = {  # tests that keep a promise and live with the part that they test
    "A2": ("data/test_decode.py::test_odd_files_have_the_pixels_computed_by_hand",
           "data/test_decode.py::test_a_photo_comes_upright",
           "data/test_decode.py::test_control_pillows_own_conversion_gives_other_pixels",
           "data/test_decode.py::test_control_without_its_orientation_a_photo_is_not_upright"),
    "A6": ("data/test_shards.py::test_tars_that_are_not_as_they_should_be_are_refused_by_member",
           "data/test_shards.py::test_tars_cut_off_damaged_or_with_impossible_sizes_are_refused",
           "data/test_shards.py::test_an_index_that_contradicts_itself_is_refused",
           "data/test_shards.py::test_a_hundred_thousand_empty_members"),
    "B8": ("test_processes.py::test_any_number_of_processes_goes_on_from_any_other",
           "test_processes.py::test_batches_losses_and_results_do_not_depend_on_processes"),
    "B9": ("test_torchrun.py::test_processes_that_die_are_started_again_and_the_run_ends_as_if_nothing_was",
           "test_torchrun.py::test_a_process_that_dies_ends_the_others_within_a_minute"),
    "C1": ("weights/test_hostile.py::test_every_hostile_file_is_refused_at_once_and_runs_nothing",
           "weights/test_hostile.py::test_control_hostile_pickles_run_where_nothing_guards",
           "weights/test_hostile.py::test_control_without_a_look_at_a_pickle_it_takes_time_and_memory"),
    "C3": ("test_house.py::test_nothing_that_runs_code_out_of_files_is_used",),
    "D7": ("service/test_decoders.py::test_d7_decoders_that_are_killed_are_replaced_and_nobody_notices",
           "service/test_decoders.py::test_d7_all_decoders_and_their_parent_are_killed_and_come_again",
           "service/test_decoders.py::test_d7_control_where_the_dead_are_not_replaced_requests_fail"),
    "D11": ("service/test_soak.py::test_d11_nothing_grows",
            "service/test_soak.py::test_d11_control_a_leak_is_noticed"),
}  # fmt: skip
PLANTED = {  # promises of a check and not of a protection: their controls plant what it must notice
    "C3": "faults/test_damage.py::test_C3_control_",
    "D11": "service/test_soak.py::test_d11_control_",
}


def promise_of(test: str) -> str | None:
    """The promise that a test keeps, by its name or by the table."""
    named = re.search(r"::test_([ABC]\d+)_", test)
    short = test.removeprefix("tests/").removesuffix(" (control)")
    return named[1] if named else next((i for i, tests in ELSEWHERE.items() if short in tests), None)


@cache
def listed() -> dict[str, tuple[str, ...]]:
    """All tests of this folder and those that live elsewhere, and what their markers say is switched off."""
    elsewhere = {f"tests/{name}" for names in ELSEWHERE.values() for name in names}
    files = {*HERE.glob("test_*.py"), *(HERE.parent.parent / name.partition("::")[0] for name in elsewhere)}
    result = {}
    for path in sorted(files):
        module = ast.parse(path.read_text()).body
        lists = {ast.unparse(n.targets[0]): n.value for n in module if isinstance(n, ast.Assign)}
        for node in module:
            name = f"{path.relative_to(HERE.parent.parent)}::{getattr(node, 'name', '')}"
            if isinstance(node, ast.FunctionDef) and (
                name in elsewhere or (path.parent == HERE and node.name.startswith("test_"))
            ):
                result[name] = markers(node, lists)
    return result


def markers(test: ast.FunctionDef, lists: dict[str, ast.expr]) -> tuple[str, ...]:
    """The words of every pytest.mark.control above a test, also of its cases, which may be in a list."""
    above = [node for decorator in test.decorator_list for node in ast.walk(decorator)]
    named = [lists[node.id] for node in above if isinstance(node, ast.Name) and node.id in lists]
    calls = [*above, *(node for value in named for node in ast.walk(value))]
    return tuple(
        ast.literal_eval(word)
        for call in calls
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.control"
        for word in call.args
    )


def is_control(test: str, told: dict[str, Any]) -> bool:
    """Whether a test of the record had a protection switched off, or planted what must be noticed."""
    return bool(told.get("off")) or test.removeprefix("tests/").startswith(tuple(PLANTED.values()))


def row(identity: str, tests: dict[str, dict[str, Any]]) -> str:
    mine = {name: told for name, told in tests.items() if promise_of(name) == identity}
    files = sorted({name.partition("::")[0].removeprefix("tests/") for name in mine})
    counts: dict[str, float] = {}
    for told in mine.values():
        for word, number in told["tally"].items():
            counts[word] = counts.get(word, 0) + number
    cases = sum(told["passed"] for name, told in mine.items() if not is_control(name, told))
    figures = [f"{int(number):,} {word.replace('_', ' ')}" for word, number in counts.items() if number]
    failed = sum(told["failed"] for told in mine.values())
    skipped = sum(told["skipped"] for told in mine.values())
    figures += [f"**{failed} failed**"] if failed else []
    figures += [f"{skipped} skipped"] if skipped else []
    controls = sum(told["passed"] for name, told in mine.items() if is_control(name, told))
    shown = "; ".join([f"{cases} tests", *figures])
    return (
        f"| {PROMISES[identity]} | {identity} | {', '.join(f'`{f}`' for f in files)} | {shown} | {controls} |"
    )


def table(record: dict[str, Any]) -> str:
    minutes = sum(told["seconds"] for told in record["tests"].values()) / 60
    size = "make faults" if record["size"] == "full" else "make faults-push"
    head = f"`{size}` on {record['date']}: {record['machine']}; {minutes:.0f} minutes of tests.\n"
    head += f"\n**Combined from several runs:** {record['note']}\n" if record.get("note") else ""
    lines = ["| guarantee | ID | tests (in `tests/`) | result | controls |", "|---|---|---|---|---|"]
    return "\n".join([head, *lines, *(row(identity, record["tests"]) for identity in PROMISES)])


def written(page: str, record: dict[str, Any]) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(record)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if sys.argv[1:] == ["tests"]:
        print(*(f"tests/{test}" for tests in ELSEWHERE.values() for test in tests))
    else:
        PAGE.write_text(written(PAGE.read_text(), json.loads(RECORD.read_text())))
