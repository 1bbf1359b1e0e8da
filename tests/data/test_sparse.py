"""Several labels an image, held sparse: the same as a dense table in all that is asked of them."""

import hashlib
import io

import numpy as np
import pytest
import torch
from refusals import refused

from vitkit.data.loader import evaluation_batches
from vitkit.data.sources.index import INDEX, ROW, Shard, make_columns, open_index, write_index
from vitkit.data.sources.source import Source
from vitkit.data.sources.sparse_labels import DENSE, SparseLabels, blocks, joined
from vitkit.data.splits import by_class, join, same_classes
from vitkit.data.views import View
from vitkit.tasks.classify import ClassificationLoss, one_hot

RNG = np.random.default_rng(4)
TABLE = (RNG.random((40, 7)) < 0.25).astype(np.float32)
TABLE[[0, 11, 39]] = 0  # images without a label, also the first and the last
LABELS = SparseLabels.from_dense(TABLE)


def source(table: np.ndarray, classes: str = "abcdefg") -> Source:
    keys = [str(i) for i in range(len(table))]
    return Source("made", tuple(classes), keys, table, lambda i: np.full((4, 4, 3), i, np.uint8))


@pytest.mark.parametrize("key", [
    slice(None), slice(3, 17), slice(None, None, -1), slice(5, 5), np.array([39, 0, 0, 5]), [1, 2],
    np.arange(0), TABLE[:, 0] > 0,
])  # fmt: skip
def test_parts_are_those_of_the_table(key):
    part = LABELS[key]
    assert part.shape == TABLE[key].shape and np.array_equal(part.dense(), TABLE[key])
    assert part.dense().dtype == TABLE.dtype == part.dtype and part.tolist() == TABLE[key].tolist()


def test_single_images_counts_and_first_labels():
    for i in (0, 5, 39, -1, np.int64(7)):
        assert (
            np.array_equal(LABELS[i], TABLE[i])
            and LABELS.of(int(i)).tolist() == np.flatnonzero(TABLE[i]).tolist()
        )
    with pytest.raises(IndexError):
        LABELS[40]
    assert LABELS.counts().tolist() == TABLE.sum(0).tolist()
    assert LABELS.first().tolist() == TABLE.argmax(1).tolist()
    assert LABELS.most == TABLE.sum(1).max() and LABELS[[0, 11]].most == 1
    assert np.array_equal(np.argwhere(TABLE), np.stack(LABELS.pairs(), axis=1))
    assert np.array_equal(np.asarray(LABELS), TABLE)


def test_they_are_made_of_lists_joined_and_renumbered():
    lists = [[3, 1, 3], [], [0]]
    made = SparseLabels.from_lists(lists, 4)
    assert made.tolist() == [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]]
    assert np.array_equal(joined(made, made).dense(), np.concatenate([made.dense()] * 2))
    turned = made.renumbered(np.array([5, 4, 1, 0]), 6)
    assert turned.tolist() == [[1, 0, 0, 0, 1, 0], [0] * 6, [0, 0, 0, 0, 0, 1]]
    assert turned.first().tolist() == [0, 0, 5]
    assert len(SparseLabels.from_lists([], 4)) == 0


def test_what_tells_labels_apart_is_what_it_was():
    """The plan of shards and kept batches go by a hash of the dense table, which earlier versions held."""
    result = hashlib.sha256()
    for part in blocks(LABELS):
        result.update(part)
    assert result.digest() == hashlib.sha256(TABLE.data).digest()
    kinds, which = LABELS.distinct()
    dense, inverse = np.unique(TABLE, axis=0, return_inverse=True)
    assert kinds == [tuple(np.flatnonzero(row)) for row in dense] and np.array_equal(which, inverse.ravel())


def test_a_dense_table_of_a_large_data_set_is_refused():
    many = SparseLabels(np.arange(1, 10**6 + 1), np.zeros(10**6, np.int32), 21_843)
    with refused("data.too-large", "1000000 images", "21843 classes"):
        many.dense()
    assert DENSE < 10**6 * 21_843 * 4
    assert sum(len(part) for part in blocks(many)) < 2 * 10**7
    assert many[[5, 7]].dense().sum() == 2


def test_a_source_of_a_table_holds_it_sparse_and_parts_agree():
    made = source(TABLE)
    assert made.multilabel and isinstance(made.labels, SparseLabels)
    assert np.array_equal(made.take(np.array([9, 2])).labels.dense(), TABLE[[9, 2]])
    both = join(made, source(TABLE[:, ::-1], "gfedcba"))
    assert np.array_equal(both.labels.dense(), np.concatenate([TABLE, TABLE]))
    wider = same_classes(made, ("x", *"gfedcba"))
    assert np.array_equal(wider.labels.dense()[:, :0:-1], TABLE) and not wider.labels.dense()[:, 0].any()
    members = [part.tolist() for part in by_class(made)]
    assert members == [np.flatnonzero(TABLE.argmax(1) == c).tolist() for c in range(7)]


def test_batches_hold_numbers_and_the_loss_makes_rows_of_them():
    made = source(TABLE)
    result = list(evaluation_batches(made, View(size=(4, 4), crop="squash"), 16))
    assert {tuple(batch["label"].shape[1:]) for batch in result} == {(LABELS.most,)}  # alike, for CUDA graphs
    rows = torch.cat([one_hot(batch["label"], 7) for batch in result])
    assert np.array_equal(rows.numpy(), TABLE)
    objective = ClassificationLoss(classes=7, loss="sigmoid", label_smoothing=0.1)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 7))
    for batch in result:
        dense = batch | {"label": torch.from_numpy(TABLE[batch["index"]])}
        for name, value in objective(model, dense).items():
            assert torch.equal(value, objective(model, batch)[name])


def index_of(columns: dict[str, np.ndarray], facts: dict | None = None) -> bytes:
    file = io.BytesIO()
    shards = [Shard("train-000000.tar", 10**6, "0" * 64, len(columns["shard"]))]
    write_index(file, "abcdefg", {"train": (shards, columns)}, facts or {})
    return file.getvalue()


def test_an_index_keeps_them_sparse_and_older_dense_ones_are_read(tmp_path):
    columns = make_columns(np.zeros(40, ROW), map(str, range(40)), LABELS)
    (tmp_path / INDEX).write_bytes(index_of(columns))
    assert (
        (tmp_path / INDEX).read_bytes().startswith(b"vitkit-shards 2 ")
    )  # older versions say so, not "damaged"
    result = open_index(tmp_path / INDEX)[1]["train"].labels(7)
    assert np.array_equal(result.dense(), TABLE) and not result.numbers.flags.owndata  # mapped, not in memory
    del columns["label_end"]
    (tmp_path / "old").write_bytes(index_of(columns | {"label": TABLE}, {"several": True}))
    assert (tmp_path / "old").read_bytes().startswith(b"vitkit-shards 1 ")
    assert np.array_equal(open_index(tmp_path / "old")[1]["train"].labels(7).dense(), TABLE)
    single = make_columns(np.zeros(40, ROW), map(str, range(40)), np.arange(40) % 7)
    assert index_of(single).startswith(b"vitkit-shards 1 ")


@pytest.mark.parametrize(("name", "value", "code", "named"), [
    ("label_end", -1, "data.corrupt", ""), ("label_end", 10**6, "data.corrupt", ""),
    ("label", 7, "data.labels", "label 7"), ("label", -1, "data.labels", "label -1"),
])  # fmt: skip
def test_a_damaged_index_of_several_labels_is_refused(tmp_path, name, value, code, named):
    columns = make_columns(np.zeros(40, ROW), map(str, range(40)), LABELS)
    columns[name] = columns[name].copy()
    columns[name][20] = value
    (tmp_path / INDEX).write_bytes(index_of(columns))
    with refused(code, INDEX, named):
        open_index(tmp_path / INDEX)
    columns = make_columns(np.zeros(40, ROW), map(str, range(40)), LABELS)
    columns["label_end"] = columns["label_end"] + 1
    (tmp_path / INDEX).write_bytes(index_of(columns))
    with refused("data.corrupt", INDEX, len(columns["label"])):
        open_index(tmp_path / INDEX)
