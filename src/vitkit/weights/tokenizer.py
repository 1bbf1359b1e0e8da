"""Texts to the token numbers of a text tower, by the tokenizer.json that is published with the weights."""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import Error, WeightsError
from vitkit.io.cache import cache_folder
from vitkit.models.text_tower import TextConfig, TextTower
from vitkit.weights import hub
from vitkit.weights.locate import inside
from vitkit.weights.published import by_source, download
from vitkit.weights.published_modern import HUB

FILE = "tokenizer.json"
LARGEST_FILE = 2**28  # bytes; that of SigLIP 2 has 2**25
SIGLIP = 32_000  # tokens; its texts have no punctuation
SPECIAL: dict[
    int, tuple[tuple[int, ...], int, int]
] = {  # size of a published vocabulary -> start, end, filling
    49_408: ((49_406,), 49_407, 0),  # CLIP
    SIGLIP: ((), 1, 1),
    256_000: ((), 1, 0),  # SigLIP 2
}
SHARED = f"{HUB}/google/siglip2-base-patch16-224/resolve/main/{FILE}"  # all SigLIP 2 models have this one


@dataclass(frozen=True)
class TokenizerPlace:
    """Where the tokenizer of a loaded model is: beside its weights, or where they came from."""

    weights: Path  # the file or folder that was read
    source: str  # hf:owner/name@commit, or the address of a published file

    @property
    def folder(self) -> Path:
        return self.weights if self.weights.is_dir() else self.weights.parent

    def beside(self) -> Path | None:
        """The path of tokenizer.json beside the weights, if it is there."""
        return inside(self.folder, FILE) if (self.folder / FILE).exists() else None

    def find(self) -> Path:
        """The path of tokenizer.json, downloaded if the weights were."""
        if path := self.beside():
            return path
        if hub.is_hub(self.source) and (fetched := hub.fetch_file(self.source, FILE)):
            return fetched
        weight = by_source(self.source)
        if weight and weight.model.startswith(("CLIP", "SigLIP")):
            shared = weight.address.endswith(".npz")
            name = "SigLIP2" if shared else weight.name.replace("/", "_")
            path = cache_folder() / f"{name}.{FILE}"
            download(SHARED if shared else f"{weight.address.rpartition('/')[0]}/{FILE}", path)
            return path
        raise WeightsError(
            f"{self.folder}: no {FILE}, which splits texts into tokens; copy it into this folder from the "
            "repository of the model on the Hugging Face Hub, or give the model as hf:owner/name",
            code="weights.not-found",
        )


def tokenize(tower: TextTower, texts: Sequence[str]) -> Tensor:
    """The token numbers (B, T) of texts for a text tower, on its device; longer texts are cut."""
    if not isinstance(tower.tokenizer, TokenizerPlace):
        raise Error(
            "this text tower was not loaded from a file, so no tokenizer belongs to it; call "
            "model.text(tokens) with token numbers",
            code="model.unsupported",
        )
    numbers = encode(tokenizer_at(tower.tokenizer.find(), tower.config.vocabulary), texts, tower.config)
    return numbers.to(tower.positions.device)


@lru_cache(maxsize=4)
def tokenizer_at(path: Path, vocabulary: int) -> Any:
    """The tokenizer of a file, checked against the size of the tower's vocabulary."""
    try:
        import tokenizers
    except ImportError:
        raise Error(
            'texts need the library tokenizers: pip install "vitkit[text]"', code="request.extra-missing"
        ) from None
    if path.stat().st_size > LARGEST_FILE:
        raise WeightsError(f"{path}: larger than {LARGEST_FILE // 2**20} MiB", code="weights.untrusted")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the library raises nothing more specific
        reason = " ".join(str(error).split())[:200]
        raise WeightsError(f"{path}: not a tokenizer ({reason})", code="weights.format") from None
    if (largest := max(tokenizer.get_vocab().values(), default=0)) >= vocabulary:
        raise WeightsError(
            f"{path}: it has the token number {largest}, but the text tower has {vocabulary} tokens; it is "
            "that of another model",
            code="weights.shape",
        )
    tokenizer.no_truncation()
    return tokenizer


def encode(tokenizer: Any, texts: Sequence[str], config: TextConfig) -> Tensor:
    """Token numbers (B, length), with the start, end and filling that the published models were trained with.

    Of another vocabulary the tokenizer knows them.
    """
    known = SPECIAL.get(config.vocabulary)
    start, end, fill = known or ((), None, (tokenizer.padding or {}).get("pad_id", 0))
    tokenizer.no_padding()
    rows = []
    for text in texts:
        numbers = tokenizer.encode(clean(text, config), add_special_tokens=known is None).ids
        if end is not None:
            numbers = [*start, *numbers[: config.length - len(start) - 1], end]
        elif len(numbers) > config.length:  # the last one is the end token
            numbers = [*numbers[: config.length - 1], numbers[-1]]
        rows.append([*numbers, *[fill] * (config.length - len(numbers))])
    return torch.tensor(rows, dtype=torch.long).reshape(len(rows), config.length)


def clean(text: str, config: TextConfig) -> str:
    """The text as the published models were trained on it: in lower case, for SigLIP without punctuation."""
    text = text.lower()
    if config.vocabulary == SIGLIP:
        text = text.translate(str.maketrans("", "", string.punctuation))
    return " ".join(text.split())
