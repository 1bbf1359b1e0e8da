"""Parquet files as Hugging Face's datasets write them, and tables of paths."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from refusals import refused

from vitkit.data.decode import BadImage
from vitkit.data.loader import evaluation_batches
from vitkit.data.views import View
from vitkit.datasets.opening import open_data, shard

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def picture(number: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((6, 8, 3), number, np.uint8)).save(out, "PNG")
    return out.getvalue()


def write(path, numbers, labels, names=("cat", "dog", "owl"), rows=4) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [None if n is None else {"bytes": picture(n), "path": f"{n}.png"} for n in numbers]
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table(
        {"image": pyarrow.array(images, kind), "label": pyarrow.array(labels, pyarrow.int64())}
    )
    if names:
        features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, path, row_group_size=rows)


def test_a_folder_of_splits(tmp_path):
    data = tmp_path / "data"
    write(data / "train-00000-of-00002.parquet", range(10), [i % 3 for i in range(10)])
    write(data / "train-00001-of-00002.parquet", range(10, 17), [1] * 7)
    write(data / "validation-00000-of-00001.parquet", range(17, 20), [0, 1, None])
    write(data / "test-00000-of-00001.parquet", range(20, 22), [-1, -1])
    result = open_data(tmp_path)
    assert set(result) == {"train", "val"} and len(result["train"]) == 17
    train = result["train"]
    assert (
        train.classes == ("cat", "dog", "owl")
        and train.labels.tolist() == [i % 3 for i in range(10)] + [1] * 7
    )
    assert [train.fetch(i) for i in range(17)] == [picture(i) for i in range(17)]
    assert (
        train.keys[9] == "train-00000-of-00002.parquet:9"
        and train.keys[15] == "train-00001-of-00002.parquet:5"
    )
    assert len(result["val"]) == 2 and result["val"].skipped == ("validation-00000-of-00001.parquet:2",)
    batches = list(evaluation_batches(train, View(size=(6, 8), crop="squash"), 5, workers=2))
    assert sorted(int(image[0, 0, 0]) for batch in batches for image in batch["image"]) == list(range(17))


def test_one_file_without_names_and_a_row_without_bytes(tmp_path):
    write(tmp_path / "x.parquet", [0, None, 2], [0, 1, 4], names=())
    result = open_data(tmp_path / "x.parquet")["all"]
    assert result.classes == ("0", "1", "2", "3", "4") and result.fetch(2) == picture(2)
    with pytest.raises(BadImage, match=r"x\.parquet:1"):
        result.fetch(1)


def test_shards_of_it(tmp_path):
    write(tmp_path / "in" / "train.parquet", range(9), [i % 3 for i in range(9)])
    shard(str(tmp_path / "in"), tmp_path / "out", images=4)
    result = open_data(tmp_path / "out")["train"]
    assert [result.fetch(i) for i in range(9)] == [picture(i) for i in range(9)] and result.classes[
        2
    ] == "owl"


def test_a_table_of_paths(tmp_path):
    (tmp_path / "a.png").write_bytes(picture(3))
    parquet.write_table(pyarrow.table({"path": ["a.png"], "label": ["cat"]}), tmp_path / "x.parquet")
    result = open_data(tmp_path / "x.parquet")["all"]
    assert result.classes == ("cat",) and result.fetch(0) == picture(3)


@pytest.mark.parametrize(
    ("table", "code", "values"),
    [
        ({"image": [b"x"], "text": ["a"]}, "data.layout", ("label or labels", "image, text")),
        ({"image": [b"x"], "label": ["a"]}, "data.labels", ("row 0", "string", "'a'")),
        ({"image": [b"x"], "label": [None]}, "data.labels", ()),
        ({"a": [1]}, "data.layout", ("path and label", "image and label", "has a")),
    ],
)
def test_tables_of_another_kind_are_refused(tmp_path, table, code, values):
    parquet.write_table(pyarrow.table(table), tmp_path / "x.parquet")
    with refused(code, "x.parquet", *values):
        open_data(tmp_path / "x.parquet")


def test_what_is_not_parquet_or_does_not_agree_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not")
    with refused("data.corrupt", "x.parquet"):
        open_data(tmp_path / "x.parquet")
    write(tmp_path / "y" / "train-0.parquet", [1], [0])
    write(tmp_path / "y" / "train-1.parquet", [1], [0], names=("a", "b", "c"))
    with refused("data.classes", "train-1.parquet", "train-0"):
        open_data(tmp_path / "y")
    write(tmp_path / "z.parquet", [1], [3])
    with refused("data.labels", "z.parquet", "label 3", "3 classes"):
        open_data(tmp_path / "z.parquet")
