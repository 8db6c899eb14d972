"""Toy models of 32 numbers a token that keep what they attended to, and parts that mix positions or do not."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import attnflow
from attnflow.graph import attention_graph
from attnflow.propagate.flow import flow as flow_of_arrays

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
WORDS = {**SMALL, "vocab_size": 99, "max_position_embeddings": 64, "pad_token_id": 0}
EIGHT = torch.arange(3, 11)[None]


def as_list(traces):
    return traces if isinstance(traces, list) else [traces]


def heads(x, count=4):
    """(batch, head, token, dim) of (batch, token, width)."""
    return x.unflatten(-1, (count, -1)).transpose(-2, -3)


def joined(x):
    return x.transpose(-2, -3).flatten(-2)


class Attend(nn.Module):
    """Four heads of 8, by the fused kernel or by hand; keeps its weights (batch, head, query, key) for the test."""

    def __init__(self, fused=True):
        super().__init__()
        self.fused, self.qkv, self.out = fused, nn.Linear(32, 96), nn.Linear(32, 32)
        self.seen = []

    def forward(self, x, mask=None):
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        scores = q @ k.mT * 8**-0.5
        weights = (scores if mask is None else scores.masked_fill(~mask, float("-inf"))).softmax(-1)
        self.seen.append(weights.detach())
        return self.out(joined(F.scaled_dot_product_attention(q, k, v, mask) if self.fused else weights @ v))


def own_weights(model, *args, **kwargs):
    """What every `Attend` of a model attended to in one pass, in order."""
    found = []
    attends = [module for module in model.modules() if isinstance(module, Attend)]
    for module in attends:
        module.seen = found
    with torch.no_grad():
        model(*args, **kwargs)
    for module in attends:
        module.seen = []
    return found


def assert_weights(traces, own):
    """The layers of every trace are the model's own weights (batch, head, query, key), layer by layer."""
    for example, trace in enumerate(as_list(traces)):
        assert len(trace.layers) == len(own)
        for layer, weights in zip(trace.layers, own, strict=True):
            torch.testing.assert_close(
                layer.attention(), weights[example].to(layer.attention().dtype), atol=1e-5, rtol=0
            )


def seeded(model):
    """A model with random parameters, of a seed, in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return model.eval()


def numbers(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        for part in self.parts:
            x = x + part(x)
        return x


class Mix(nn.Module):
    """One way of moving information between positions (batch, token, width) that is no softmax attention."""

    def __init__(self, how):
        super().__init__()
        self.how, self.conv, self.qkv = how, nn.Conv1d(32, 32, 3), nn.Linear(32, 96)

    def forward(self, x):
        return getattr(self, self.how)(x)

    def cumsum(self, x):
        return x.cumsum(1) / x.shape[1]

    def roll(self, x):
        return x.roll(1, 1)

    def flip(self, x):
        return x.flip(1)

    def convolution(self, x):
        return self.conv(F.pad(x.mT, (1, 1))).mT

    def causal_convolution(self, x):
        return self.conv(F.pad(x.mT, (2, 0))).mT

    def mean(self, x):
        return x.mean(1, keepdim=True).expand_as(x)

    def most(self, x):
        return x.amax(1, keepdim=True).expand_as(x)

    def fourier(self, x):
        return torch.fft.fft2(x).real / x.shape[1]

    def norm_over_the_batch(self, x):
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1)

    def roll_of_the_batch(self, x):
        return x.roll(1, 0)

    def sigmoid_attention(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.mT / 32**0.5).sigmoid() @ v / x.shape[1]

    def linear_attention(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q @ k.sum(1)[..., None])

    def gate_of_the_mean(self, x):
        return self.qkv(x).chunk(3, -1)[0] * x.mean(1, keepdim=True).sigmoid()

    def in_one_example(self, x):
        return torch.cat([x[:-1], x[-1:].cumsum(1)])

    def at_the_end(self, x):
        """Only the last token draws on another."""
        return torch.cat([x[:, :-1], x[:, -1:] + x[:, :1]], 1)

    def recurrent(self, x):
        state, states = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            state = 0.5 * state + token
            states.append(state)
        return torch.stack(states, 1)


MIXES = [name for name in vars(Mix) if not name.startswith("_") and name != "forward"]


class Lawful(nn.Module):
    """Parts that work on each position alone."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.router = nn.Linear(32, 4)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x):
        return getattr(self, self.how)(x)

    def gated(self, x):
        return self.c(F.silu(self.a(x)) * self.b(x))

    def norm_by_hand(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.c(self.a(x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()).relu_())

    def routed(self, x):
        """The two best of four experts for each token, gathered and scattered."""
        flat = x.flatten(0, -2)
        share, chosen = self.router(flat).softmax(-1).topk(2)
        y = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            y.index_add_(0, token, expert(flat[token]) * share[token, rank, None])
        return y.view_as(x)

    def batch_norm(self, x):
        return self.norm(x.mT).mT

    def pointwise_convolution(self, x):
        return F.conv1d(x.mT, self.c.weight[:, :32, None]).mT

    def tiny(self, x):
        return 1e-3 * self.gated(x)

    def huge(self, x):
        return 1e3 * self.gated(x)

    def rounded(self, x):
        return self.gated(x).mul(8).round().div(8)

    def written_in_place(self, x):
        y = self.gated(x)
        y[:, 0] *= 2
        y[..., 3:5] = 0
        return y


LAWFUL = [name for name in vars(Lawful) if not name.startswith("_") and name != "forward"]


def assert_left_out_positions_have_no_limit(trace, query):
    """Flow through edges of any size is that of the graph in which a position that is left out carries any amount."""
    settings = {"head_fusion": "max", "residual": 0, "query": query}
    graph = attention_graph(trace, **settings)
    below = [layer.matrix().numpy() for layer in graph.below(graph.explained[-1])]
    for rows, layer in zip(below, trace.layers, strict=False):
        rows[layer.left_out, layer.left_out] = 100.0
    top = graph.top(graph.explained[-1]).numpy()
    expected = flow_of_arrays(top, below).values
    assert top.sum() > 1
    np.testing.assert_allclose(attnflow.flow(trace, **settings).scores, expected, rtol=1e-9)
