"""What a plan measures before it tells a time."""

from dataclasses import replace
from multiprocessing import active_children

from vitkit.recipes import recipe
from vitkit.runs.build import open_splits
from vitkit.runs.estimates import seconds_to_start


def test_the_start_of_data_workers_is_timed_and_leaves_none_behind():
    digits = replace(recipe("scratch"), data="digits", image_size=(16, 16), batch=32)
    train = open_splits(digits)["train"]
    before = set(active_children())
    assert seconds_to_start(digits, train, workers=0) == 0
    assert 0 < seconds_to_start(digits, train, workers=2) < 120
    assert set(active_children()) <= before
