"""Which calls are one layer and which follow each other: heads, examples and streams however they are laid out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import attnflow
from attnflow import capture, capture_batch
from toys import Attend, Block, assert_weights, heads, joined, numbers, own_weights, seeded

# Heads and examples, wherever they stand.


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(32, 8, bias=False) for _ in range(3))

    def forward(self, x):
        self.p = F.softmax(self.query(x) @ self.key(x).mT * 8**-0.5, -1)
        return self.p @ self.value(x)


class OneModulePerHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(4))

    def forward(self, x):
        y = x + torch.cat([head(x) for head in self.heads], -1)
        self.p = torch.stack([head.p for head in self.heads], 1)
        return y


class Flat(nn.Module):
    """Heads beside the batch on one axis of three; the input is (batch, token, width), or (token, batch, width)."""

    def __init__(self, order, fused):
        super().__init__()
        self.order, self.fused, self.qkv = order, fused, nn.Linear(32, 96)

    def forward(self, x):
        first = x.transpose(0, 1) if self.order.startswith("time") else x
        batch, count, _ = first.shape
        q, k, v = map(heads, self.qkv(first).chunk(3, -1))
        if "heads" in self.order:
            q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        q, k, v = (t.reshape(-1, count, 8) for t in (q, k, v))
        weights = torch.softmax(q.bmm(k.mT) * 8**-0.5, -1)
        o = F.scaled_dot_product_attention(q, k, v) if self.fused else torch.bmm(weights, v)
        outer = (4, batch) if "heads" in self.order else (batch, 4)
        o, self.p = o.unflatten(0, outer), weights.detach().unflatten(0, outer)
        if "heads" in self.order:
            o, self.p = o.transpose(0, 1), self.p.transpose(0, 1)
        y = first + joined(o)
        return y.transpose(0, 1) if self.order.startswith("time") else y


class Parallel(nn.Module):
    """Two attentions that read the same and are added up, as in a parallel block."""

    def __init__(self):
        super().__init__()
        self.attns = nn.ModuleList(Attend() for _ in range(2))

    def forward(self, x):
        return x + sum(attn(x) for attn in self.attns)


class Loop(nn.Module):
    """One head after the other, or one example after the other, in one module."""

    def __init__(self, over):
        super().__init__()
        self.over, self.qkv = over, nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        self.p = torch.softmax(q @ k.mT * 8**-0.5, -1).detach()
        each = [F.scaled_dot_product_attention(q[:, [h]], k[:, [h]], v[:, [h]]) for h in range(4)]
        return x + joined(torch.cat(each, 1))


def test_one_module_per_head_is_a_layer_of_heads():
    model, x = seeded(nn.Sequential(*(OneModulePerHead() for _ in range(3)))), numbers(1, 8, 32)
    trace = capture(model, x)
    model(x)
    assert [layer.shape for layer in trace.layers] == [(4, 8, 8)] * 3
    assert_weights(trace, [layer.p for layer in model])


def test_a_loop_over_heads_is_a_layer_of_heads():
    model, x = seeded(nn.Sequential(Loop("heads"), Loop("heads"))), numbers(2, 6, 32)
    traces = capture_batch(model, x)
    model(x)
    assert_weights(traces, [layer.p for layer in model])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("order", ["batch", "heads", "time", "time, heads"])
@pytest.mark.parametrize(("batch", "count"), [(2, 8), (1, 8), (2, 7), (4, 4), (3, 2)])
def test_heads_and_examples_on_one_axis(order, fused, batch, count):
    model = seeded(nn.Sequential(Flat(order, fused), Flat(order, fused)))
    x = numbers(count, batch, 32) if order.startswith("time") else numbers(batch, count, 32)
    traces = capture_batch(model, x)
    model(x)
    assert len(traces) == batch
    assert_weights(traces, [layer.p for layer in model])


def test_parallel_attention_is_one_layer_with_the_heads_of_both():
    model, x = seeded(nn.Sequential(Parallel(), Parallel())), numbers(2, 6, 32)
    own = own_weights(model, x)
    traces = capture_batch(model, x)
    assert traces[0].layers[0].shape == (8, 6, 6)
    assert_weights(traces, [torch.cat(own[:2], 1), torch.cat(own[2:], 1)])


def test_parallel_blocks_of_timm():
    import timm
    from timm.models.vision_transformer import ParallelThingsBlock

    arguments = {"img_size": 64, "depth": 2, "block_fn": ParallelThingsBlock}
    model = timm.create_model("vit_tiny_patch16_224", **arguments).eval()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    own = [block.attns[i].attn.attn_drop for block in model.blocks for i in range(2)]
    seen = []
    hooks = [module.register_forward_hook(lambda _, args, out: seen.append(out)) for module in own]
    with torch.no_grad():
        model(x := numbers(1, 3, 64, 64))
    for hook in hooks:
        hook.remove()
    trace = capture(model, x)
    assert [layer.shape for layer in trace.layers] == [(6, 17, 17)] * 2
    assert_weights(trace, [torch.cat(seen[:2], 1), torch.cat(seen[2:], 1)])


# Brothers of these: other ways to lay out, to weigh, and to connect.


class By(nn.Module):
    """Attention by hand in some way of a function (q, k, v, note) of heads; `note` keeps the weights for the test."""

    def __init__(self, how):
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(32, 96), nn.Linear(32, 32)
        self.table, self.seen = nn.Linear(8, 6), None

    def note(self, weights):
        if self.seen is not None:
            self.seen.append(weights)
        return weights

    def forward(self, x):
        return self.out(joined(self.how(self, *map(heads, self.qkv(x).chunk(3, -1)))))


def scaled(q, k):
    return (q @ k.mT * 8**-0.5).softmax(-1)


def keys_times_queries(self, q, k, v):
    p = (k @ q.mT * 8**-0.5).softmax(-2)
    self.note(p)
    return (v.mT @ p).mT


def letters_anywhere(self, q, k, v):
    p = self.note(torch.einsum("bhqd,bhkd->qkbh", q, k).softmax(1))
    return torch.einsum("bhkd,qkbh->bhqd", v, p)


def heads_last(self, q, k, v):
    p = self.note(torch.einsum("bhqd,bhkd->bqkh", q, k).softmax(2))
    return torch.einsum("bqkh,bhkd->bhqd", p, v)


def renormalised(self, q, k, v):
    p = scaled(q, k)
    p = p * (p > 0.1)
    return self.note(p / p.sum(-1, keepdim=True)) @ v


def best_three(self, q, k, v):
    scores = q @ k.mT
    least = scores.topk(3, -1).values[..., -1:]
    return self.note(scores.masked_fill(scores < least, float("-inf")).softmax(-1)) @ v


def in_groups(self, q, k, v):
    q, k, v = (t.unflatten(1, (2, 2)) for t in (q, k, v))
    return (self.note(scaled(q, k)) @ v).flatten(1, 2)


def heads_before_examples(self, q, k, v):
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    return (self.note(scaled(q, k)) @ v).transpose(0, 1)


def groups_before_examples(self, q, k, v):
    q, k, v = (t.unflatten(1, (2, 2)).transpose(0, 1) for t in (q, k, v))
    return (self.note(scaled(q, k)) @ v).transpose(0, 1).flatten(1, 2)


# How to attend, and from the noted weights to (batch, head, query, key).
WAYS = {
    "plain": (lambda self, q, k, v: self.note(scaled(q, k)) @ v, lambda p: p),
    "keys_times_queries": (keys_times_queries, lambda p: p.mT),
    "ellipsis": (lambda self, q, k, v: torch.einsum("...ij,...jd->...id", self.note(scaled(q, k)), v), lambda p: p),
    "letters_anywhere": (letters_anywhere, lambda p: p.permute(2, 3, 0, 1)),
    "heads_last": (heads_last, lambda p: p.permute(0, 3, 1, 2)),
    "renormalised": (renormalised, lambda p: p),
    "best_three": (best_three, lambda p: p),
    "of_the_query_alone": (lambda self, q, k, v: self.note(self.table(q).softmax(-1)) @ v, lambda p: p),
    "mean_of_two": (lambda self, q, k, v: self.note((scaled(q, k) + scaled(k, q)) / 2) @ v, lambda p: p),
    "rounded_to_half": (lambda self, q, k, v: self.note(scaled(q, k).half().float()) @ v, lambda p: p),
    "in_groups": (in_groups, lambda p: p.flatten(1, 2)),
    "heads_before_examples": (heads_before_examples, lambda p: p.transpose(0, 1)),
    "groups_before_examples": (groups_before_examples, lambda p: p.transpose(0, 1).flatten(1, 2)),
}


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_weigh_with_their_gradients(way, batch):
    how, arrange = WAYS[way]
    model, x = seeded(Block(By(how), By(how), By(how))), numbers(batch, 6, 32)
    seen = []
    for part in model.parts:
        part.seen = seen
    (model(x)[:, 0] ** 2).sum().backward(inputs=[x.requires_grad_()])  # so that nothing is captured yet
    seen.clear()
    output = model(x.detach())
    gradients = torch.autograd.grad((output[:, 0] ** 2).sum(), seen)
    for part in model.parts:
        part.seen = None
    traces = capture_batch(model, x.detach(), target=lambda output: (output[:, 0] ** 2).sum(-1))
    assert_weights(traces, [arrange(weights.detach()) for weights in seen])
    for example, trace in enumerate(traces):
        for layer, gradient in zip(trace.layers, gradients, strict=True):
            expected = arrange(gradient)[example]
            torch.testing.assert_close(layer.gradient.of(slice(None)), expected, atol=1e-6, rtol=1e-4)


class Heads(Attend):
    """Some heads in one call of the fused kernel, the others in another; of unequal numbers, or some of them causal."""

    def __init__(self, first, causal):
        super().__init__()
        self.first, self.causal = first, causal

    def forward(self, x):
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        scores, n = q @ k.mT * 8**-0.5, self.first
        if self.causal:
            scores[:, :n] = scores[:, :n].masked_fill(~torch.ones_like(scores[0, 0]).bool().tril(), float("-inf"))
        self.seen.append(scores.softmax(-1).detach())
        one = F.scaled_dot_product_attention(q[:, :n], k[:, :n], v[:, :n], is_causal=self.causal)
        return self.out(joined(torch.cat([one, F.scaled_dot_product_attention(q[:, n:], k[:, n:], v[:, n:])], 1)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("first", [1, 2])
def test_heads_in_several_calls(first, causal):
    model, x = seeded(Block(Heads(first, causal), Heads(first, causal))), numbers(2, 6, 32)
    assert_weights(capture_batch(model, x), own_weights(model, x))


class Values(nn.Module):
    """Three layers that keep something from the first: its values, its keys, its scores, or its weights in part."""

    def __init__(self, kept):
        super().__init__()
        self.kept, self.qkv, self.weights = kept, nn.ModuleList(nn.Linear(32, 96) for _ in range(3)), []

    def forward(self, x):
        first, self.weights = None, []
        for layer in self.qkv:
            q, k, v = map(heads, layer(x).chunk(3, -1))
            if self.kept == "values":
                v = v if first is None else (v + first) / 2
            if self.kept == "keys" and first is not None:
                k = first
            scores = q @ k.mT * 8**-0.5
            if self.kept == "scores" and first is not None:
                scores = scores + first
            p = scores.softmax(-1)
            if self.kept == "weights" and first is not None:
                p = (p + first) / 2
            first = first if first is not None else {"values": v, "keys": k, "scores": scores, "weights": p}[self.kept]
            self.weights.append(p.detach())
            x = x + joined(p @ v)
        return x


@pytest.mark.parametrize("kept", ["values", "keys", "scores", "weights"])
def test_something_kept_from_the_first_layer(kept):
    model, x = seeded(Values(kept)), numbers(2, 6, 32)
    traces = capture_batch(model, x)
    model(x)
    assert_weights(traces, model.weights)


class Cross(Attend):
    def forward(self, x, y):
        q, k, v = heads(self.qkv(x)[..., :32]), *map(heads, self.qkv(y)[..., 32:].chunk(2, -1))
        self.seen.append((q @ k.mT * 8**-0.5).softmax(-1).detach())
        return self.out(joined(F.scaled_dot_product_attention(q, k, v)))


class Streams(nn.Module):
    """Two streams: co-attention at once or in turn, one encoder for both, or learned queries that read the first."""

    def __init__(self, how):
        super().__init__()
        self.how, self.own, self.cross = how, *(nn.ModuleList(kind() for _ in range(4)) for kind in (Attend, Cross))
        self.learned = nn.Parameter(torch.randn(1, 5, 32))

    def forward(self, x, y=None):
        own, cross = self.own, self.cross
        if self.how == "learned":
            x, y = x + own[0](x), self.learned.expand(len(x), -1, -1)
            for number in range(2):
                y = y + cross[number](y, x)
                y = y + own[1 + number](y)
            return y
        if self.how == "shared":
            x, y = x + own[0](x), y + own[0](y)
            return x + cross[0](x, y)
        for number in range(2):
            x, y = x + own[2 * number](x), y + own[2 * number + 1](y)
            read = x
            x = x + cross[2 * number](x, y)
            y = y + cross[2 * number + 1](y, read if self.how == "at once" else x)
        return x, y


@pytest.mark.parametrize("count", [6, 7])
@pytest.mark.parametrize("how", ["at once", "in turn", "shared", "learned"])
def test_two_streams_have_their_own_weights_in_their_places(how, count):
    model, x = seeded(Streams(how)), numbers(2, 6, 32)
    inputs = (x,) if how == "learned" else (x, numbers(2, count, 32, seed=2))
    own, traces = own_weights(model, *inputs), capture_batch(model, inputs)
    for example, trace in enumerate(traces):
        parts = [part for layer in trace.layers for part in layer.parts]
        assert len(parts) == len(own)
        for part, weights in zip(parts, own, strict=True):
            torch.testing.assert_close(part.layer.attention(), weights[example], atol=1e-5, rtol=0)
        assert len(trace.tokens) == 6 + (5 if how == "learned" else count)
        assert attnflow.rollout(trace).scores.sum(-1) == pytest.approx(1, abs=1e-5)


class Conditioned(nn.Module):
    """A vector scales every layer (adaLN), or a second input of the same shape is added before each."""

    def __init__(self):
        super().__init__()
        self.layers, self.to_scale = nn.ModuleList([Attend(), Attend()]), nn.Linear(32, 32)

    def forward(self, x, by):
        by = self.to_scale(by)
        for layer in self.layers:
            x = x + layer(x + by) if by.ndim == 3 else x * (1 + by[:, None]) + layer(x)
        return x


@pytest.mark.parametrize("shape", [(2, 32), (2, 6, 32)])
def test_a_second_input_that_is_no_stream(shape):
    model, inputs = seeded(Conditioned()), (numbers(2, 6, 32), numbers(*shape, seed=2))
    assert_weights(capture_batch(model, inputs), own_weights(model, *inputs))


class Looked(nn.Module):
    """Token ids, looked up in some way."""

    def __init__(self, how):
        super().__init__()
        self.how, self.table, self.body = how, nn.Embedding(50, 32), Block(Attend(), Attend())

    def forward(self, ids):
        hows = {
            "module": lambda: self.table(ids),
            "index": lambda: self.table.weight[ids],
            "one hot": lambda: F.one_hot(ids.long(), 50).float() @ self.table.weight,
            "flipped": lambda: self.table(ids.flip(1)),
            "cut": lambda: self.table(ids[:, 1:]),
            "one more": lambda: self.table(F.pad(ids, (1, 0))),
        }
        return self.body(hows[self.how]())


@pytest.mark.parametrize("how", ["module", "index", "one hot", "flipped", "cut", "one more"])
@pytest.mark.parametrize("dtype", [torch.long, torch.int32])
def test_ids_looked_up_in_any_way(how, dtype):
    ids = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    model = seeded(Looked(how))
    traces = capture_batch(model, ids)
    assert_weights(traces, own_weights(model, ids))
    named = {"module": ids, "flipped": ids.flip(1), "cut": ids[:, 1:], "one more": F.pad(ids, (1, 0))}
    if how in named:
        assert [trace.tokens for trace in traces] == [tuple(map(str, row)) for row in named[how].tolist()]


class Tail(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.body = how, Block(Attend(), Attend())

    def forward(self, x):
        x = self.body(x)
        chosen = torch.arange(len(x)), x[..., 0].argmax(1)
        return {"most": lambda: x.amax(1), "flat": lambda: x.flatten(1), "chosen": lambda: x[chosen]}[self.how]()


@pytest.mark.parametrize("how", ["most", "flat", "chosen"])
def test_what_a_pooled_output_is_read_from(how):
    model, x = seeded(Tail(how)), numbers(2, 6, 32)
    traces = capture_batch(model, x)
    with torch.no_grad():
        chosen = model.body(x)[..., 0].argmax(1).tolist()
    expected = [(place,) if how == "chosen" else tuple(range(6)) for place in chosen]
    assert [trace.reads for trace in traces] == expected


# What is not right yet.

NEGATIVE = {
    "less": lambda self, q, k, v: (scaled(q, k) - 0.1) @ v,
    "affine": lambda self, q, k, v: (2 * scaled(q, k) - 1) @ v,
    "from_one": lambda self, q, k, v: (torch.eye(6) - scaled(q, k)) @ v,
    "differential": lambda self, q, k, v: torch.add(scaled(q, k), scaled(k, q), alpha=-0.5) @ v,
    "signed": lambda self, q, k, v: (scaled(q, k) * torch.linspace(-1, 1, 6)) @ v,
}


@pytest.mark.parametrize("how", NEGATIVE)
def test_negative_weights_are_refused(how):
    with pytest.raises(ValueError, match="negative"):
        capture(seeded(Block(By(NEGATIVE[how]), By(NEGATIVE[how]))), numbers(2, 6, 32))


class Unused(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place, self.layers, self.dead = place, nn.ModuleList([Attend(), Attend()]), Attend()

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = x + layer(x)
            if number == self.place:
                self.dead(x)
        return x


@pytest.mark.parametrize("place", [0, 1])
def test_attention_that_the_output_does_not_draw_on_is_no_layer(place):
    model, x = seeded(Unused(place)), numbers(2, 6, 32)
    own = own_weights(model, x)
    del own[place + 1]
    assert_weights(capture_batch(model, x), own)


class Again(nn.Module):
    """Queries of the input over what the first layer returned, or the first layer's weights over what follows."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.cross = how, Attend(), Cross()
        self.qk, self.values = nn.Linear(32, 64), nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        if self.how == "queries":
            read = x + self.first(x)
            return read + self.cross(x, read)
        q, k = self.qk(x).chunk(2, -1)
        p = (q @ k.mT * 32**-0.5).softmax(-1)
        for layer in self.values:
            x = x + p @ layer(x)
        return x


@pytest.mark.parametrize("how", ["queries", "weights"])
def test_the_same_positions_are_no_second_stream(how):
    """Right, or refused; not a graph in which every token stands twice."""
    try:
        traces = capture_batch(seeded(Again(how)), numbers(2, 6, 32))
    except ValueError:
        return
    assert len(traces[0].tokens) == 6
