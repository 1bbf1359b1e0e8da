"""What a short run does not do twice: prepare validation images, read file sizes, time steps beforehand."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitkit.data.loader import BadFiles, evaluation_batches
from vitkit.data.sources.source import Source
from vitkit.data.views import View
from vitkit.options import Training
from vitkit.planning import plan as planning
from vitkit.planning.resume import Request
from vitkit.recipes import recipe
from vitkit.runs import evaluation
from vitkit.runs.build import SplitCache
from vitkit.runs.evaluation import KeptBatches, local_batches
from vitkit.runs.folder import RunOptions
from vitkit.runs.provenance.fingerprint import check_data
from vitkit.runtime.runtime import Runtime
from vitkit.training.schedule import Duration

VIEW = View(size=(8, 8), crop="squash")


class Files:
    """Ten images, of which number 3 is damaged; counts what is read."""

    def __init__(self):
        self.fetched, self.sized = [], []

    def fetch(self, index: int) -> bytes:
        self.fetched.append(index)
        return b"damaged" if index == 3 else self.png(index)

    def png(self, index: int) -> bytes:
        file = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), 20 * index, np.uint8)).save(file, "PNG")
        return file.getvalue()

    def size(self, index: int) -> int:
        self.sized.append(index)
        if index == 4:
            raise FileNotFoundError
        return 100 + index

    def source(self) -> Source:
        keys, labels = [f"{i}.png" for i in range(10)], np.arange(10) % 2
        return Source("ten", ("a", "b"), keys, labels, self.fetch, size=self.size)


def passes(source: Source, kept: KeptBatches | None, times: int = 3, world: int = 1, rank: int = 0):
    """The batches of several evaluations of a source, and the reports of unusable files."""
    reports: list[str] = []
    bad = BadFiles(1.0, lambda key, reason: reports.append(key))
    runtime = Runtime(world=world, rank=rank)
    every = [list(local_batches(source, VIEW, 4, 0, bad, runtime, lambda: None, kept)) for _ in range(times)]
    return every, reports


def same(left: list[dict], right: list[dict]) -> bool:
    return len(left) == len(right) and all(
        x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
        for x, y in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_images_of_repeated_evaluations_are_prepared_once(rank):
    files, again = Files(), Files()
    every, reports = passes(files.source(), KeptBatches(), world=2, rank=rank)
    expected, others = passes(again.source(), None, world=2, rank=rank)
    assert files.fetched == list(range(rank, 10, 2)) and len(again.fetched) == 3 * len(files.fetched)
    assert all(same(batches, expected[0]) for batches in every + expected)
    assert reports == others == (["3.png"] if rank else [])


@pytest.mark.parametrize(("limit", "value"), [("KEPT_BYTES", 10 * 192 - 1), ("KEPT_SHARE", 0.0)])
def test_large_images_are_not_kept(limit, value, monkeypatch):
    monkeypatch.setattr(evaluation, limit, value)
    files = Files()
    every, reports = passes(files.source(), KeptBatches(), times=2)
    assert files.fetched == [*range(10)] * 2 and same(*every) and reports == ["3.png"]


def test_an_evaluation_that_was_stopped_keeps_nothing():
    files, kept = Files(), KeptBatches()
    batches = evaluation_batches(files.source(), VIEW, 4)
    next(kept(batches, 10 * 192, 1))
    assert kept.batches is None
    every, _ = passes(files.source(), kept, times=1)
    assert sum(len(batch["index"]) for batch in every[0]) == 9


def test_no_more_workers_than_batches(monkeypatch):
    started = []
    monkeypatch.setattr("vitkit.data.loader.prefetch", lambda samples, groups, n: started.append(n) or ())
    list(evaluation_batches(Files().source(), VIEW, 4, workers=16))
    list(evaluation_batches(Files().source(), VIEW, 4, workers=2))
    assert started == [3, 2]


def test_file_sizes_are_read_once(tmp_path):
    files = Files()
    for _ in range(2):  # the second time, they are compared with those of the first
        files.sized.clear()
        splits, changed = check_data(
            {"train": files.source()}, tmp_path, Runtime(), accept=None, labelled=True, say=print
        )
        assert files.sized == [*range(10)] and not changed
    assert splits["train"].size(5) == 105 and splits["train"].size(4) == -1


@pytest.mark.parametrize(
    ("device", "steps", "only", "is_timed"),
    [("cuda", 500, False, False), ("cuda", 2000, False, True), ("cuda", 500, True, True),
     ("cpu", 500, False, True)],
)  # fmt: skip
def test_a_short_run_on_a_gpu_is_not_timed_first(device, steps, only, is_timed, monkeypatch):
    monkeypatch.setattr(planning, "seconds_a_step", lambda *_: 0.25)
    monkeypatch.setattr(planning, "seconds_to_start", lambda *_: 0.0)
    short = replace(recipe("finetune"), data="digits", length=Duration(steps=steps))
    request = Request("finetune", "digits", Training(plan=only), short)
    said: list[str] = []
    plan = planning.Plan(
        request, Path("run"), short, {"train": Files().source()}, planning.LazyModel(lambda: None),
        Runtime(device=device), RunOptions(), SplitCache(), said.append, planning.State("create", steps),
    )  # fmt: skip
    plan = planning.timed(plan, new=True)
    assert plan.seconds == (steps * 0.25 if is_timed else None) and len(said) == (not only)
