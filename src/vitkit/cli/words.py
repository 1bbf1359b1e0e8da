"""Words that several verbs share, and how a program is answered."""

import json as json_module
from typing import Annotated, Any

from tyro.conf import Positional, arg

Data = Annotated[
    Positional[str],
    arg(metavar="DATA", help="Folder, .csv, .parquet, .zip, .tar, .npz, shards (folder or URL) or 'digits'."),
]
Model = Annotated[
    Positional[str],
    arg(metavar="MODEL", help="A model file, a run folder, a Hugging Face folder or a published name."),
]
Device = Annotated[str, arg(metavar="NAME", help="auto, cpu, cuda, ...")]
View = Annotated[
    str,
    arg(
        metavar="NAME",
        help="How an image is brought to the model's size: model (as its card has it), squash, centre "
        "(shorter side to 256/224 of the size, then the central crop) or centre:N (shorter side to N).",
    ),
]
Workers = Annotated[int | None, arg(metavar="N", help="Processes that prepare images.")]
Json = Annotated[
    bool, arg(help="One JSON value on standard output, nothing else; an error as its code and message.")
]


def print_json(content: Any) -> None:
    print(json_module.dumps(content, indent=2))
