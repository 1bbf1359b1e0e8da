"""Zero-shot classification: the text tower of CLIP or SigLIP turns names of classes into a classifier."""

# K labels, E width of the embeddings

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitkit.errors import Error
from vitkit.models.adapt import rebuilt, without_text
from vitkit.models.text_tower import TextTower
from vitkit.models.variants import Model
from vitkit.models.vit import ViT
from vitkit.weights.tokenizer import tokenize

TEMPLATE = "a photo of a {}."
BATCH = 256  # texts


def text_tower(model: Any, purpose: str) -> TextTower:
    """The text tower of a model; an error names what it is needed for."""
    tower = getattr(model, "text", None)
    if isinstance(tower, TextTower):
        return tower
    raise Error(
        f"{purpose} needs the text tower of a CLIP or SigLIP model, and this model has none; use the "
        "original file with both towers, such as hf:openai/clip-vit-base-patch32, and in Python "
        "vitkit.load(..., text=True)",
        code="model.unsupported",
    )


def texts_of(given: str | os.PathLike[str] | Iterable[str], name: str) -> tuple[str, ...]:
    """Texts that the user gives: one, several, or the lines of a .txt file."""
    texts = (os.fspath(given),) if isinstance(given, str | os.PathLike) else tuple(given)
    if len(texts) == 1 and str(texts[0]).endswith(".txt"):
        path = Path(texts[0])
        try:
            lines = path.read_text("utf-8-sig").splitlines()
        except UnicodeDecodeError:
            raise Error(f"{path}: not a UTF-8 text file", code="file.unreadable") from None
        texts = tuple(line.strip() for line in lines if line.strip())
    for text in texts:
        if not isinstance(text, str) or not text.strip():
            raise Error(f"{name} {text!r}: expected a text that is not empty", code="request.value")
    if not texts:
        raise Error(f"{name}: expected one or more texts", code="request.value")
    return texts


@torch.no_grad()
def embed_texts(tower: TextTower, texts: Sequence[str]) -> Tensor:
    """The embeddings of texts, (B, E) in float32 on the CPU, not normalised."""
    parts = [texts[first : first + BATCH] for first in range(0, len(texts), BATCH)]
    rows = [tower(tokenize(tower, part)).float().cpu() for part in parts]
    return torch.cat(rows) if rows else torch.zeros(0, tower.config.output)


def check_templates(templates: str | Iterable[str]) -> tuple[str, ...]:
    """The templates, each with {} where the label goes."""
    templates = ((templates,) if isinstance(templates, str) else tuple(templates)) or (TEMPLATE,)
    for template in templates:
        if "{}" not in template:
            raise Error(
                f"template {template!r}: write {{}} where the label goes, as in {TEMPLATE!r}",
                code="request.value",
            )
    return templates


def check_labels(labels: str | Iterable[str]) -> tuple[str, ...]:
    labels = texts_of(labels, "labels")
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise Error(f"labels: {twice!r} is there twice; omit one", code="request.value")
    return labels


def prompts(label: str, templates: Sequence[str]) -> list[str]:
    """A label in each template; as the name of a folder may have underscores, they become spaces."""
    return [template.replace("{}", label.replace("_", " ")) for template in templates]


def label_embeddings(tower: TextTower, labels: Sequence[str], templates: Sequence[str]) -> Tensor:
    """The embedding of each label, (K, E) of length 1: the mean of the normalised ones of its templates."""
    texts = [text for label in labels for text in prompts(label, templates)]
    embedded = F.normalize(embed_texts(tower, texts), dim=-1)
    return F.normalize(embedded.unflatten(0, (len(labels), -1)).mean(1), dim=-1)


def zero_shot(model: Model, labels: str | Iterable[str], template: str | Iterable[str] = ()) -> Model:
    """A classifier for these labels, made of a model with a text tower (vitkit.load(..., text=True)).

    The result is a model like any other, which can be saved, exported and served. CLIP's answers are the
    softmax over the labels, those of SigLIP a probability for each label by itself.

    template   one or more texts with {} where the label goes; the default is "a photo of a {}."
    """
    tower = text_tower(model, "zero-shot classification")
    names, texts = check_labels(labels), check_templates(template)
    assert isinstance(model, ViT)
    embedded = label_embeddings(tower, names, texts)
    device = model.project.weight.device
    state = dict(without_text(model).state_dict())
    scale = float(tower.logit_scale.detach().exp())
    bias = 0.0 if tower.logit_bias is None else float(tower.logit_bias.detach())
    state |= {"head.weight": (scale * embedded).to(device)}
    state |= {"head.bias": torch.full((len(names),), bias, device=device)}
    config = replace(model.config, text=None, classes=len(names), normalize=True)
    new = rebuilt(model, config, state)
    new.labels, new.task = names, "multilabel" if tower.config.sigmoid else "classify"
    return new.eval()
