"""`vitkit embed --text`: the embeddings of texts, beside those of images, in one file."""

from pathlib import Path

import torch.nn.functional as F

from vitkit.commands.shared import loaded
from vitkit.errors import Error
from vitkit.inference.columns import EMBED, format_of
from vitkit.inference.zero_shot import embed_texts, text_tower, texts_of
from vitkit.io.files import replace_file
from vitkit.models.variants import Model
from vitkit.weights.locate import is_exported


def embed_text(
    model: Model | str, given: tuple[str, ...], out: Path, *, normalize: bool, dtype: str, device: str
) -> tuple[int, int]:
    """Write the columns text and embedding; returns the number of texts and of numbers for each."""
    kind, texts = format_of(out, EMBED), texts_of(given, "--text")
    kind.check(out)
    if not out.parent.is_dir():
        raise Error(f"--out {out}: no folder {out.parent}", code="file.not-found")
    if is_exported(model):
        raise Error(f"{model}: an exported file has no text tower", code="model.unsupported")
    values = embed_texts(text_tower(loaded(model, device, text=True), "--text"), texts)
    values = F.normalize(values, dim=-1) if normalize else values
    columns = {"text": list(texts), "embedding": values.numpy().astype(dtype), "error": [None] * len(texts)}
    replace_file(out, lambda temporary: kind.write(temporary, columns))
    return values.shape[0], values.shape[1]
