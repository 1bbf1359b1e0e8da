"""The text towers of CLIP and SigLIP: tokens of a text to an embedding beside those of images."""

# B texts, T tokens, D width, E width of the embedding

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitkit.errors import ConfigError, Error
from vitkit.models.attention import Attention
from vitkit.models.encoder import Block, Encoder
from vitkit.models.mlp import Mlp
from vitkit.models.rope import Turn

LARGEST = -1  # end_token: the largest number of a text, which is its end token in CLIP's vocabulary
CHOICES = {"pool": ("end", "last"), "gelu": ("tanh", "erf", "quick")}


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The configuration of a text tower; the defaults are those of CLIP's ViT-B models."""

    vocabulary: int = 49_408  # number of tokens
    length: int = 77  # positions; longer texts are cut
    width: int = 512
    depth: int = 12
    heads: int = 8
    hidden: int = 2048  # MLP size
    output: int = 512  # width of the embedding, which is that of the image embedding
    gelu: str = "quick"
    norm_eps: float = 1e-5
    causal: bool = True  # a token attends to those before it only
    pool: str = "end"  # the token that becomes the embedding: the end token (CLIP) or the last one (SigLIP)
    end_token: int = LARGEST  # its number; -1: the largest number of a text
    output_bias: bool = False  # whether the projection to the embedding has a bias (SigLIP)
    sigmoid: bool = False  # a logit bias and a sigmoid for each label (SigLIP), instead of a softmax (CLIP)

    def __post_init__(self) -> None:
        for field, known in CHOICES.items():
            if getattr(self, field) not in known:
                raise ConfigError(f"{field} must be one of {', '.join(known)}, not {getattr(self, field)!r}")
        for field in ("vocabulary", "length", "width", "heads", "hidden", "output"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field} must be at least 1, not {getattr(self, field)}")
        if self.width % self.heads:
            raise ConfigError(f"text width {self.width} is not divisible by {self.heads} heads")


class CausalAttention(Attention):
    """Self-attention in which a token attends to itself and to those before it."""

    def forward(self, z: Tensor, first: int | None = None, turn: Turn | None = None) -> Tensor:
        q, k, v = self.project(z)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TextTower(nn.Module):
    """Token numbers (B, T) to embeddings (B, E), and the scale and bias of the logits."""

    tokenizer: object = None  # where tokenizer.json is; set by weights/load.py

    def __init__(self, config: TextConfig):
        super().__init__()
        c = self.config = config
        self.tokens = nn.Embedding(c.vocabulary, c.width)
        self.positions = nn.Parameter(torch.empty(1, c.length, c.width))
        attention = CausalAttention if c.causal else Attention
        blocks = [
            Block(
                attention(c.width, c.heads),
                Mlp(c.width, c.hidden, gelu=c.gelu),
                width=c.width,
                eps=c.norm_eps,
            )
            for _ in range(c.depth)
        ]
        self.encoder = Encoder(blocks, nn.LayerNorm(c.width, eps=c.norm_eps))
        self.project = nn.Linear(c.width, c.output, bias=c.output_bias)
        self.logit_scale = nn.Parameter(torch.empty(1))  # the logarithm of the factor
        self.logit_bias = nn.Parameter(torch.empty(1)) if c.sigmoid else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Token numbers (B, T), each text with its end token -> embeddings (B, E), not normalised."""
        c = self.config
        if tokens.ndim != 2 or not 0 < tokens.shape[1] <= c.length or tokens.is_floating_point():
            raise Error(
                f"tokens must be whole numbers of shape (B, 1 to {c.length}), not {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}",
                code="model.input",
            )
        z = self.tokens(tokens) + self.positions[:, : tokens.shape[1]]
        z = self.encoder(z, (tokens.shape[1], 1), lambda z, layer: z)
        return self.project(z[torch.arange(len(z), device=z.device), self.places(tokens)])

    def places(self, tokens: Tensor) -> Tensor:
        """The position in each text whose token becomes the embedding."""
        if self.config.pool == "last":
            return tokens.new_full((len(tokens),), tokens.shape[1] - 1)
        if self.config.end_token == LARGEST:
            return tokens.argmax(-1)  # the first one, if the text is filled up with end tokens
        return (tokens == self.config.end_token).int().argmax(-1)
