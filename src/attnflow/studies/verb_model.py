"""The model of the verb-number study: GPT-2 blocks over a sentence and a CLS token, with or without a causal mask."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

POSITIONS = 64


class Attention(nn.Module):
    """Multi-head attention through torch's fused kernel."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, token, width) to the same."""
        q, k, v = self.project_in(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.project_out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A block of GPT-2: attention, then two linear layers, each normalised before and added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, token, width) to the same."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))


class VerbNumberModel(nn.Module):
    """Logits (batch, 2) of singular and plural for ids (batch, token), read from the last token, which is CLS.

    The paper's size. CLS stands last so that a causal mask leaves it all words, and a mask is the only difference
    between the two kinds of model.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        layers: int = 6,
        heads: int = 8,
        width: int = 128,
        dropout: float = 0.1,
        causal: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position_embeddings = nn.Embedding(POSITIONS, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, causal) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, 2)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # As in GPT-2: what is added to the residual stream is smaller, the more often it is added.
                deep = name.endswith(("project_out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if deep else 0.02)
        # With so few sentences, learning which tokens are neighbours from random positions takes half of the time.
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.position_embeddings.weight.data = 0.1 * 2**0.5 * _waves(POSITIONS, width)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids (batch, token) to logits (batch, 2)."""
        return self.of_embeddings(self.embedding(input_ids))

    def of_embeddings(self, words: torch.Tensor) -> torch.Tensor:
        """Embeddings of words (batch, token, width) to logits (batch, 2)."""
        places = self.position_embeddings(torch.arange(words.shape[1], device=words.device))
        return self.classifier(self.norm(self.blocks(self.dropout(words + places))[:, -1]))


def _waves(count: int, width: int) -> torch.Tensor:
    """Sines and cosines of the position (position, width), of wavelengths from 6 to 1300 (Vaswani et al. 2017)."""
    frequencies = torch.exp(-math.log(200.0) * torch.arange(width // 2) / (width // 2))
    angles = torch.arange(count)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)
