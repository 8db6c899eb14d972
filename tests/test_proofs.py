"""What capture proves of a pass: that nothing but recorded attention moves information, and where tokens stand.

Models in which something other than attention mixes positions must be refused, each naming the module that does it;
those with odd but lawful parts must pass, with their own weights.
"""

import dataclasses
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

import attnflow
from attnflow import capture, capture_batch
from families import IDS, images
from toys import (
    EIGHT,
    LAWFUL,
    MIXES,
    SMALL,
    WORDS,
    Attend,
    Block,
    Lawful,
    Mix,
    assert_weights,
    heads,
    joined,
    numbers,
    own_weights,
    seeded,
)

# What is one graph, and what is none.


def diff_llama():
    return hf.DiffLlamaModel(hf.DiffLlamaConfig(**WORDS, num_key_value_heads=2)), {"input_ids": EIGHT}


def lilt():
    config = hf.LiltConfig(**{**WORDS, "hidden_size": 48}, max_2d_position_embeddings=64)
    return hf.LiltModel(config), {"input_ids": EIGHT, "bbox": torch.zeros(1, 8, 4, dtype=torch.long)}


class BiEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = hf.BertModel(hf.BertConfig(**WORDS))

    def forward(self, a, b):
        return torch.cosine_similarity(self.bert(a).last_hidden_state[:, 0], self.bert(b).last_hidden_state[:, 0])


class Channels(nn.Module):
    """Attention among 8 channels of 4 groups, where there are 8 tokens (XCA)."""

    def forward(self, x):
        c = x.unflatten(-1, (4, 8)).permute(0, 2, 3, 1)
        return x + ((c @ c.mT).softmax(-1) @ c).permute(0, 3, 1, 2).flatten(2)


REFUSED = {
    "diff_llama": (diff_llama, "differential"),
    "lilt": (lilt, "share scores"),
    "bi_encoder": (lambda: (BiEncoder(), (EIGHT, EIGHT + 1)), "2 passes through bert"),
    "bi_encoder_other_length": (lambda: (BiEncoder(), (EIGHT, EIGHT[:, 1:])), "2 passes through bert"),
    "channels": (
        lambda: (nn.Sequential(Block(Attend()), Channels(), Block(Attend())), numbers(1, 8, 32)),
        "^1 moves information between positions",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_graph_is_refused_with_its_reason(case):
    make, reason = REFUSED[case]
    model, inputs = make()
    with pytest.raises(ValueError, match=reason):
        capture(model.eval(), inputs)


class Memory(nn.Module):
    """A feed-forward layer over learned slots, as many as there are tokens."""

    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Linear(32, 8), nn.Parameter(torch.randn(8, 32))

    def forward(self, x):
        return self.keys(x).softmax(-1) @ self.values


class Tagger(nn.Module):
    """A head of probabilities over 8 classes, used as they are, as an expected value, or to mix codes."""

    def __init__(self, how):
        super().__init__()
        self.how, self.body, self.head = how, nn.Sequential(Block(Attend()), Block(Attend())), nn.Linear(32, 8)
        self.codes = nn.Parameter(torch.randn(8, 4))

    def forward(self, x):
        p = self.head(self.body(x)).softmax(-1)
        return {"plain": lambda: p, "expected": lambda: p @ torch.linspace(0, 1, 8), "codes": lambda: p @ self.codes}[
            self.how
        ]()


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("how", ["memory", "plain", "expected", "codes"])
def test_a_softmax_over_something_else_is_no_layer(how, count):
    model = nn.Sequential(Block(Attend()), Block(Memory()), Block(Attend())) if how == "memory" else Tagger(how)
    x = numbers(2, count, 32)
    assert_weights(capture_batch(seeded(model), x), own_weights(model, x))


CROSS = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**WORDS, is_decoder=True, add_cross_attention=True)),
    "gpt2": lambda: hf.GPT2Model(
        hf.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=99, add_cross_attention=True, bos_token_id=1, eos_token_id=1
        )
    ),
}


@pytest.mark.parametrize("count", [8, 5])
@pytest.mark.parametrize("family", CROSS)
def test_states_of_another_model_are_an_encoder_whatever_their_length(family, count):
    model, inputs = CROSS[family]().eval(), {"input_ids": EIGHT, "encoder_hidden_states": numbers(1, count, 32)}
    trace = capture(model, inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    assert trace.decoder_start == count
    assert [layer.shape for layer in trace.layers] == [(4, count + 8, count + 8)] * 4
    for number, layer in enumerate(trace.layers):
        own = (output.cross_attentions if number % 2 else output.attentions)[number // 2][0]
        keys = slice(0, count) if number % 2 else slice(count, None)
        torch.testing.assert_close(layer.attention()[:, count:, keys], own, atol=1e-5, rtol=0)
        torch.testing.assert_close(layer.attention()[:, :count, :count], torch.eye(count).expand(4, -1, -1))


def test_convit_has_all_its_layers_with_its_own_weights():
    import timm

    model, x = timm.create_model("convit_tiny", img_size=64).eval(), numbers(1, 3, 64, 64)
    own = []
    with torch.no_grad():
        for block in model.blocks[:10]:
            block.attn.gating_param.copy_(numbers(4))
        hooks = [
            block.attn.attn_drop.register_forward_hook(lambda _, args, out: own.append(out)) for block in model.blocks
        ]
        model(x)
    for hook in hooks:
        hook.remove()
    trace = capture(model, x)
    assert len(own) == 12
    assert [layer.shape[1:] for layer in trace.layers] == [(16, 16)] * 10 + [(17, 17)] * 2 or len(trace.layers) == 12
    for layer, weights in zip(trace.layers, own, strict=True):
        count = weights.shape[-1]  # [CLS] comes in before the last two blocks
        torch.testing.assert_close(layer.attention()[:, -count:, -count:], weights[0], atol=1e-5, rtol=0)


# What mixes positions beside attention.


def qwen():
    types = ["linear_attention", "full_attention", "linear_attention"]
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    config = hf.Qwen3_5TextConfig(
        **{**WORDS, "num_hidden_layers": 3}, num_key_value_heads=2, head_dim=8, layer_types=types, **linear,
        linear_value_head_dim=8,
    )  # fmt: skip
    return hf.Qwen3_5TextModel(config), "layers.0.linear_attn", 1


def lfm2(types=("conv", "full_attention", "conv"), name="layers.0.conv"):
    config = hf.Lfm2Config(**{**WORDS, "num_hidden_layers": len(types)}, num_key_value_heads=2, layer_types=[*types])
    return hf.Lfm2Model(config), name, 1


def jamba():
    config = hf.JambaConfig(
        **{**WORDS, "num_hidden_layers": 4}, num_key_value_heads=2, attn_layer_period=4, attn_layer_offset=2,
        num_experts=1, num_experts_per_tok=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
    )  # fmt: skip
    return hf.JambaModel(config), "layers.0.mamba", 1


@pytest.mark.parametrize("family", [qwen, lfm2, jamba])
def test_hybrids_are_refused_unless_their_mixers_are_allowed(family):
    torch.manual_seed(0)
    model, name, layers = family()
    with pytest.raises(ValueError, match=f"^{name} moves information between positions"):
        capture(model.eval(), {"input_ids": EIGHT})
    with pytest.warns(UserWarning, match=f"{name} moves information"):
        trace = capture(model, {"input_ids": EIGHT}, mixers="allow")
    assert len(trace.layers) == layers
    assert name in trace.model["proofs"]["mixers"]
    assert attnflow.rollout(trace).recipe["model"]["proofs"] == trace.model["proofs"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=EIGHT, output_attentions=True).attentions
    assert_weights(trace, [weights for weights in own if weights is not None])


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("how", MIXES)
def test_whatever_mixes_positions_is_refused_by_its_name(how, place):
    """Before the first attention, between two, and between the last two."""
    parts = [Attend(), Attend(), Attend()]
    parts.insert(place, Mix(how))
    model, x = seeded(Block(*parts)), numbers(2, 6, 32)
    with pytest.raises(ValueError, match=rf"^parts.{place}(\.conv)? moves information between"):
        capture(model, x)
    with pytest.warns(UserWarning, match=rf"^parts.{place}(\.conv)? moves information"):
        traces = capture_batch(model, x, mixers="allow")
    assert_weights(traces, own_weights(model, x))
    assert traces[0].model["proofs"]["mixers"].startswith(f"parts.{place}")


class Gated(nn.Module):
    """Attention whose output is multiplied with a gate of the mean of all tokens."""

    def __init__(self):
        super().__init__()
        self.attend, self.gate = Attend(), nn.Linear(32, 32)

    def forward(self, x):
        return self.attend(x) * self.gate(x.mean(1, keepdim=True)).sigmoid()


def test_a_gate_of_all_tokens_on_what_attention_returns_is_refused():
    model, x = seeded(Block(Gated(), Attend())), numbers(2, 6, 32)
    with pytest.raises(ValueError, match=r"^parts.0\b.* moves information between positions"):
        capture(model, x)


def test_mixers_unseen_are_not_looked_for_unless_asked():
    model, x = seeded(Block(Attend(), Mix("mean"), Attend())), numbers(2, 6, 32)
    traces = capture_batch(model, x, prove=False)
    assert traces[0].model["proofs"]["isolation"] == "assumed (prove=False)"
    assert_weights(traces, own_weights(model, x))


# What mixes nothing, however odd.


@pytest.mark.parametrize("how", LAWFUL)
def test_what_works_on_each_position_alone_passes(how):
    model, x = seeded(Block(Attend(), Lawful(how), Attend(fused=False), Lawful(how), Attend())), numbers(2, 6, 32)
    traces = capture_batch(model, x)
    assert_weights(traces, own_weights(model, x))
    assert traces[0].model["proofs"]["isolation"] == "proved"


class Universal(nn.Module):
    """One block over and over."""

    def __init__(self):
        super().__init__()
        self.block = Block(Attend(), Lawful("gated"))

    def forward(self, x):
        for _ in range(3):
            x = self.block(x)
        return x


class Keyed(nn.Module):
    """Positions are added to queries and keys only, by torch's own module."""

    def __init__(self):
        super().__init__()
        self.mha, self.positions = nn.MultiheadAttention(32, 4, batch_first=True), nn.Parameter(torch.randn(1, 6, 32))

    def forward(self, x):
        asks = x + self.positions[:, : x.shape[1]]
        return x + self.mha(asks, asks, x)[0]


def test_one_block_over_and_over():
    model, x = seeded(Universal()), numbers(2, 6, 32)
    assert_weights(capture_batch(model, x), own_weights(model, x))


@pytest.mark.parametrize("scale", [0, 1e-3, 1e3])
def test_any_residual_will_do(scale):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Attend() for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = scale * x + layer(x)
            return x

    model, x = seeded(Scaled()), numbers(2, 6, 32)
    assert_weights(capture_batch(model, x), own_weights(model, x))


def test_positions_added_to_queries_and_keys_only():
    model, x = seeded(nn.Sequential(Keyed(), Keyed())), numbers(2, 6, 32)
    traces, own = capture_batch(model, x), []
    with torch.no_grad():
        for layer in model:
            asks = x + layer.positions
            own.append(layer.mha(asks, asks, x, average_attn_weights=False)[1])
            x = layer(x)
    assert_weights(traces, own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_any_precision_will_do(dtype):
    model, x = seeded(Block(Attend(), Lawful("gated"), Attend())).to(dtype), numbers(2, 6, 32).to(dtype)
    traces = capture_batch(model, x)
    for index, trace in enumerate(traces):
        assert trace.model["proofs"]["isolation"] == "proved"
        for layer, own in zip(trace.layers, own_weights(model, x), strict=True):
            torch.testing.assert_close(layer.attention().double(), own[index].double(), atol=2e-2, rtol=0)


@pytest.mark.parametrize(("batch", "count"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4), (4, 4), (6, 6), (32, 32)])
@pytest.mark.parametrize("fused", [True, False])
def test_small_and_square_inputs(batch, count, fused):
    model, x = seeded(Block(Attend(fused), Lawful("gated"), Attend(fused))), numbers(batch, count, 32)
    traces = capture_batch(model, x)
    assert len(traces) == batch
    assert_weights(traces, own_weights(model, x))


def test_padding_in_a_batch_of_three():
    model = hf.BertModel(hf.BertConfig(**WORDS)).eval()
    ids = torch.randint(3, 90, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [0] * 3 + [1] * 3])
    traces = capture_batch(model, {"input_ids": ids, "attention_mask": mask})
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(input_ids=ids, attention_mask=mask, output_attentions=True).attentions
    for example, (trace, kept) in enumerate(zip(traces, mask.bool(), strict=True)):
        for layer, weights in zip(trace.layers, own, strict=True):
            torch.testing.assert_close(layer.attention(), weights[example][:, kept][:, :, kept], atol=1e-5, rtol=0)


def test_albert_shares_its_weights():
    model = hf.AlbertModel(hf.AlbertConfig(**WORDS, embedding_size=16)).eval()
    trace = capture(model, {"input_ids": EIGHT})
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert_weights(trace, model(input_ids=EIGHT, output_attentions=True).attentions)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("cache", ["none", "use", "dynamic", "static"])
def test_a_cache_changes_nothing(cache):
    config = hf.LlamaConfig(**WORDS, num_key_value_heads=2)
    model = hf.LlamaForCausalLM(config).eval()
    objects = {"dynamic": hf.DynamicCache, "static": lambda: hf.StaticCache(config, max_cache_len=8)}
    given = {"past_key_values": objects[cache]()} if cache in objects else {"use_cache": cache == "use"}
    trace = capture(model, {"input_ids": EIGHT, **given})
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert_weights(trace, model(input_ids=EIGHT, output_attentions=True).attentions)


@dataclasses.dataclass
class Output:
    states: torch.Tensor
    pooled: torch.Tensor


@pytest.mark.parametrize("kind", ["tuple", "dataclass", "list", "nested"])
def test_whatever_a_model_returns(kind):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Block(Attend(), Attend())

        def forward(self, x):
            y = self.body(x)
            values = (y, y.mean(1))
            kinds = {"tuple": values, "dataclass": Output(*values), "list": [*values], "nested": {"a": {"b": values}}}
            return kinds[kind]

    model, x = seeded(Model()), numbers(2, 6, 32)
    assert_weights(capture_batch(model, x), own_weights(model, x))


# Where tokens stand in an image.


def positions_by_perturbing(model, first, inputs, size, patch):
    """For every patch in reading order, which position of the first layer's input it changes."""
    seen, places = [], []
    hook = first.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    pixels = inputs["pixel_values"]
    with torch.no_grad():
        model(**inputs)
        for row in range(0, size, patch):
            for column in range(0, size, patch):
                other = pixels.clone()
                other[..., row : row + patch, column : column + patch] += 3
                model(**{**inputs, "pixel_values": other})
                places.append(int((seen[-1] - seen[0]).abs().sum(-1)[0].argmax()))
    hook.remove()
    return places


def yolos():
    config = hf.YolosConfig(**SMALL, image_size=(32, 32), patch_size=8, num_detection_tokens=5)
    model = hf.YolosModel(config).eval()
    return model, model.encoder.layer[0], {"pixel_values": numbers(1, 3, 32, 32)}


def vit_mae():
    config = hf.ViTMAEConfig(**SMALL, image_size=32, patch_size=8, mask_ratio=0.0)
    model = hf.ViTMAEModel(config).eval()
    noise = torch.rand(1, 16, generator=torch.Generator().manual_seed(0))
    return model, model.layers[0], {"pixel_values": numbers(1, 3, 32, 32), "noise": noise}


@pytest.mark.parametrize("family", [yolos, vit_mae])
def test_patches_stand_where_changing_their_pixels_shows(family):
    model, first, inputs = family()
    places = positions_by_perturbing(model, first, inputs, 32, 8)
    trace = capture(model, inputs)
    names = [f"{row},{column}" for row in range(4) for column in range(4)]
    assert [trace.tokens.index(name) for name in names] == places
    assert trace.roles.count("patch") == 16


REORDERED = {
    "flipped": (lambda x: torch.cat([x[:, :1], x[:, 1:].flip(1)], 1), ("[CLS]", "3,3", "3,2"), ("0,1", "0,0")),
    "without_cls": (lambda x: x[:, 1:], ("0,0", "0,1", "0,2"), ("3,2", "3,3")),
    "cls_last": (lambda x: x.roll(-1, 1), ("0,0", "0,1", "0,2"), ("3,3", "[CLS]")),
    "half": (lambda x: x[:, :9], ("[CLS]", "0,0", "0,1"), ("1,2", "1,3")),
}


@pytest.mark.parametrize("case", REORDERED)
def test_patches_have_their_own_names_in_any_order(case):
    change, first, last = REORDERED[case]
    model = hf.ViTModel(hf.ViTConfig(**SMALL, image_size=32, patch_size=8)).eval()
    model.embeddings.register_forward_hook(lambda module, args, output: change(output))
    tokens = capture(model, numbers(1, 3, 32, 32)).tokens
    assert (tokens[:3], tokens[-2:]) == (first, last)


# Gradients, and what stands in their way.


class Overwritten(nn.Module):
    """Attention whose result is written into afterwards."""

    def __init__(self, how):
        super().__init__()
        self.how, self.qkv = how, nn.Linear(32, 96)
        self.mha = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x, keep=None):
        if self.how == "mha":
            o = self.mha(x, x, x)[0]
        else:
            q, k, v = self.qkv(x).chunk(3, -1)
            w = (q @ k.mT / 32**0.5).softmax(-1)
            if keep is not None:
                keep.append(w)
            o = w @ v
        return x + (F.relu(o, inplace=True) if self.how == "relu" else o.mul_(0.1))


@pytest.mark.parametrize("how", ["mul", "relu"])
def test_gradients_of_what_is_written_into_afterwards(how):
    model, x, kept = seeded(Overwritten(how)), numbers(1, 8, 32), []
    (expected,) = torch.autograd.grad(model(x, kept)[:, 0].sum(), kept)
    trace = capture(model, x, target=lambda output: output[:, 0].sum(-1))
    torch.testing.assert_close(trace.layers[0].gradient.of(slice(None)), expected, atol=1e-6, rtol=1e-5)


def test_gradients_of_torchs_module_written_into_afterwards():
    model, x = seeded(Overwritten("mha")), numbers(1, 8, 32)
    trace = capture(model, x, target=lambda output: output[:, 0].sum(-1))
    mha = model.mha
    q, k, v = (heads(t) for t in F.linear(x, mha.in_proj_weight, mha.in_proj_bias).chunk(3, -1))
    w = (q @ k.mT * 8**-0.5).softmax(-1).detach().requires_grad_()
    (expected,) = torch.autograd.grad((mha.out_proj(joined(w @ v)) * 0.1)[:, 0].sum(), w)
    torch.testing.assert_close(trace.layers[0].gradient.of(slice(None)), expected[0], atol=1e-6, rtol=1e-5)


def test_a_mask_that_is_filled_anew_for_each_layer():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Attend(), Attend(), Attend()])
            self.register_buffer("mask", torch.zeros(8, 8, dtype=torch.bool))

        def forward(self, x):
            steps = (torch.arange(8)[:, None] - torch.arange(8)).abs()
            for layer, window in zip(self.layers, (1, 3, 7), strict=True):
                self.mask.copy_(steps <= window)
                x = x + layer(x, self.mask)
            return x

    model, x = seeded(Windows()), numbers(2, 8, 32)
    traces = capture_batch(model, x)
    assert not traces[0].layers[0].attention()[:, 0, 2:].any()
    assert_weights(traces, own_weights(model, x))


class Cut(nn.Module):
    """A head on a body that no gradient reaches."""

    def __init__(self, how):
        super().__init__()
        self.how, self.body, self.head = how, Block(Attend(), Attend()), nn.Linear(32, 3)

    def forward(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                x = self.body(x)
        elif self.how == "inference":
            with torch.inference_mode():
                x = self.body(x)
            x = x.clone()
        elif self.how == "checkpoint":
            from torch.utils.checkpoint import checkpoint

            x = checkpoint(self.body, x, use_reentrant=True)
        else:
            x = self.body(x).detach()
        return self.head(x[:, 0])


@pytest.mark.parametrize("how", ["no_grad", "detach", "inference", "checkpoint"])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_gradient_that_reaches_nothing_is_an_error(how):
    model, x = seeded(Cut(how)), numbers(1, 6, 32)
    with pytest.raises(ValueError, match="no gradient of the target reaches the attention of body.parts"):
        capture(model, x, target=0)
    assert_weights(capture(model, x), own_weights(model, x))


@pytest.mark.filterwarnings("ignore")
def test_int8_lets_no_gradient_through():
    from torch.ao.quantization import quantize_dynamic

    model, x = seeded(Cut("whole")), numbers(1, 6, 32)
    model = quantize_dynamic(nn.Sequential(model.body, model.head), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(ValueError, match="no gradient of the target reaches .* int8"):
        capture(model, x, target=lambda output: output.sum((1, 2)))


# Models that are more than a module.


def test_scripted_and_mapped_models_are_refused_in_words():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return x + F.scaled_dot_product_attention(q, k, v)

    class Mapped(Plain):
        def forward(self, x):
            return torch.func.vmap(super().forward)(x)

    x = numbers(2, 8, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(Plain().eval())
    with pytest.raises(ValueError, match="scripted module"):
        capture(scripted, x)
    with pytest.raises(ValueError, match=r"torch\.func"):
        capture(Mapped().eval(), x)


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_activation_is_no_obstacle():
    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(x)

    model, x = seeded(Block(Attend(), torch.jit.script(Swish()), Attend())), numbers(2, 6, 32)
    assert_weights(capture_batch(model, x), own_weights(model, x))


def digits_dinov2():
    config = hf.Dinov2Config(**SMALL, image_size=32, patch_size=8)
    return hf.Dinov2ForImageClassification(config), {"pixel_values": images()[:1, :, :32, :32]}, 17


def digits_wav2vec2():
    config = hf.Wav2Vec2Config(
        **SMALL, conv_dim=(16,), conv_stride=(5,), conv_kernel=(10,), num_feat_extract_layers=1,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    return hf.Wav2Vec2ForCTC(config), {"input_values": numbers(1, 400)}, 79


def digits_own():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1, self.layer2 = (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2))

        def forward(self, x):
            return self.layer2(self.layer1(x))

    return Net(), numbers(1, 5, 32), 5


@pytest.mark.parametrize("family", [digits_dinov2, digits_wav2vec2, digits_own])
def test_digits_in_names(family):
    model, inputs, count = family()
    trace = capture(model.eval(), inputs)
    assert [layer.shape for layer in trace.layers] == [(4, count, count)] * 2


def test_a_model_compiled_in_place_is_not_compiled_again():
    from torch._dynamo.utils import counters

    model = hf.BertModel(hf.BertConfig(**WORDS)).eval()
    expected = [layer.attention() for layer in capture(model, {"input_ids": EIGHT}).layers]
    model.compile(backend=lambda graph, _: graph.forward)
    counters.clear()
    trace = capture(model, {"input_ids": EIGHT})
    assert not counters["stats"]
    assert not counters["frames"]
    for layer, weights in zip(trace.layers, expected, strict=True):
        torch.testing.assert_close(layer.attention(), weights)


@pytest.mark.parametrize("kind", ["DataParallel", "compiled", "partial"])
def test_wrapped_models(kind):
    model, x = seeded(Block(Attend(), Attend())), numbers(2, 6, 32)
    wrap = {
        "DataParallel": nn.DataParallel,
        "compiled": lambda model: torch.compile(model, backend="eager"),
        "partial": functools.partial,
    }
    assert_weights(capture_batch(wrap[kind](model), x), own_weights(model, x))


@pytest.mark.parametrize("registers", [0, 4])
def test_a_pooled_vit_is_read_from_its_patches(registers):
    import timm

    arguments = {"img_size": 64, "depth": 2, "global_pool": "avg", "reg_tokens": registers}
    model = timm.create_model("vit_tiny_patch16_224", **arguments, class_token=not registers).eval()
    trace = capture(model, numbers(1, 3, 64, 64))
    before = registers or 1
    assert trace.reads == tuple(range(before, before + 16))
    assert trace.readout == trace.reads


def test_reads_of_pooled_outputs():
    class Pooled(nn.Module):
        def __init__(self, places):
            super().__init__()
            self.body, self.places = Block(Attend(), Attend()), places

        def forward(self, x):
            return self.body(x)[:, self.places].mean(1)

    for places in ([0], [5], [1, 3], [0, 1, 2, 3, 4, 5]):
        traces = capture_batch(seeded(Pooled(places)), numbers(2, 6, 32))
        assert [trace.reads for trace in traces] == [tuple(places)] * 2
        assert traces[0].readout == (places[0] if len(places) == 1 else tuple(places))


def test_capture_inside_a_captured_pass_is_refused():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Block(Attend())

        def forward(self, x):
            capture(self.body, x)
            return self.body(x)

    with pytest.raises(ValueError, match="inside a forward pass that is itself being captured"):
        capture(seeded(Nested()), numbers(1, 6, 32))
    model, x = seeded(Block(Attend())), numbers(1, 6, 32)
    assert_weights(capture(model, x), own_weights(model, x))  # nothing is left behind


# Chance.


class Chance(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.norm = how, nn.BatchNorm1d(32)

    def forward(self, x):
        if self.how == "monte_carlo":
            return F.dropout(x, 0.1, training=True)
        if self.how == "batch_norm":
            return self.norm(x.mT).mT
        return x * torch.empty(len(x), 1, 1).bernoulli_(0.5) if self.training else x  # stochastic depth


@pytest.mark.parametrize(
    ("how", "training"),
    [("monte_carlo", False), ("batch_norm", True), ("stochastic_depth", True)],
)
def test_chance_and_training_mode_are_refused(how, training):
    model = seeded(Block(Attend(), Chance(how), Attend()))
    model.parts[1].train(training)
    with pytest.raises(ValueError, match=r"parts.1(\.norm)? drops or normalises as in training mode"):
        capture(model, numbers(2, 6, 32))
    if training:
        x = numbers(2, 6, 32)
        assert_weights(capture_batch(model.eval(), x), own_weights(model, x))


@pytest.mark.parametrize("refused", [False, True])
def test_nothing_is_left_on_a_model(refused):
    """No hook, attribute, buffer or random number, also after an error, and nothing of the passes that ran again."""

    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend, self.last, self.passes = Attend(), None, 0
            self.register_buffer("running", torch.zeros(32))

        def forward(self, x):
            self.passes += 1
            self.last = x
            self.running = x.mean((0, 1))
            return self.attend(x)

    model, x = seeded(Block(Keeps(), Mix("mean") if refused else Lawful("gated"), Keeps())), numbers(2, 6, 32)
    with torch.no_grad():
        model(x)
    expected = [(module.last.clone(), module.running.clone()) for module in (model.parts[0], model.parts[2])]
    names = [set(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    if refused:
        with pytest.raises(ValueError, match="moves information"):
            capture(model, x)
    else:
        capture_batch(model, x)
    assert torch.equal(state, torch.get_rng_state())
    assert names == [set(vars(module)) for module in model.modules()]
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert [module.passes for module in (model.parts[0], model.parts[2])] == [2, 2]
    for module, (last, running) in zip((model.parts[0], model.parts[2]), expected, strict=True):
        assert torch.equal(module.last, last)
        assert torch.equal(module.running, running)


def test_ids_in_one_stream_with_types_and_positions():
    trace = capture(hf.BertModel(hf.BertConfig(**WORDS)).eval(), {"input_ids": IDS[:1], "token_type_ids": IDS[:1] % 2})
    assert len(trace.tokens) == IDS.shape[1]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_classifier_of_padded_texts_is_read_from_its_last_word(side):
    ids = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(0))
    ids[1, slice(3) if side == "left" else slice(5, None)] = 0
    model = hf.LlamaForSequenceClassification(hf.LlamaConfig(**WORDS)).eval()
    traces = capture_batch(model, {"input_ids": ids, "attention_mask": (ids != 0).long()})
    assert [trace.reads for trace in traces] == [(7,), (4,)]
    assert [trace.readout for trace in traces] == [7, 4]


# What is not right yet.


@pytest.mark.parametrize("how", MIXES)
def test_what_mixes_after_the_last_attention_is_refused(how):
    model, x = seeded(Block(Attend(), Attend(), Mix(how))), numbers(2, 6, 32)
    with pytest.raises(ValueError, match="moves information"):
        capture(model, x)


@pytest.mark.parametrize("how", MIXES)
def test_mixing_is_seen_without_residuals(how):
    model, x = seeded(nn.Sequential(Attend(), Mix(how), Attend())), numbers(2, 6, 32)
    with pytest.raises(ValueError, match="moves information"):
        capture(model, x)


class Prefixed(nn.Module):
    """Learned tokens before those of the input, which are given to all of them, or mixed with each other."""

    def __init__(self, how):
        super().__init__()
        self.how, self.learned = how, nn.Parameter(torch.randn(1, 2, 32))
        self.first, self.second = Attend(), Attend()

    def forward(self, x):
        x = torch.cat([self.learned.expand(len(x), -1, -1), x], 1)
        x = x + self.first(x)
        learned, own = x[:, :2], x[:, 2:]
        if self.how == "given":
            own = own + learned[:, :1]
        elif self.how == "mixed":
            learned = learned.cumsum(1)
        else:
            learned = learned.roll(1, 0)
        x = torch.cat([learned, own], 1)
        return x + self.second(x)


@pytest.mark.parametrize("how", ["given", "mixed", "rolled"])
def test_mixing_out_of_learned_tokens_is_seen(how):
    with pytest.raises(ValueError, match="moves information"):
        capture(seeded(Prefixed(how)), numbers(2, 6, 32))


class Pair(nn.Module):
    """One token draws on one other."""

    def __init__(self, to, of):
        super().__init__()
        self.to, self.of = to, of

    def forward(self, x):
        return torch.cat([x[:, : self.to], x[:, self.of, None], x[:, self.to + 1 :]], 1)


@pytest.mark.parametrize(("batch", "count"), [(1, 4), (1, 8), (2, 12)])
def test_mixing_of_any_pair_is_seen(batch, count):
    for to in range(count):
        for of in {0, (to + 1) % count, count - 1} - {to}:
            with pytest.raises(ValueError, match="moves information"):
                capture(seeded(Block(Attend(), Pair(to, of), Attend())), numbers(batch, count, 32))


def test_mixers_that_were_allowed_once_are_refused_all_the_same():
    model, x = seeded(Block(Attend(), Mix("mean"), Attend())), numbers(2, 6, 32)
    for _ in range(2):
        with pytest.warns(UserWarning, match="parts.1 moves information"):
            capture_batch(model, x, mixers="allow")
    with pytest.raises(ValueError, match="parts.1 moves information"):
        capture(model, x)


class Opening(nn.Module):
    """A gate that is closed at first."""

    def __init__(self):
        super().__init__()
        self.gate, self.on = nn.Parameter(torch.zeros(1)), False

    def forward(self, x):
        return (self.gate + self.on) * x.mean(1, keepdim=True)


@pytest.mark.parametrize("by", ["parameter", "flag"])
def test_a_mixer_that_begins_to_mix_later_is_seen(by):
    model, x = seeded(Block(Attend(), Opening(), Attend())), numbers(2, 6, 32)
    capture_batch(model, x)
    with torch.no_grad():
        model.parts[1].gate.fill_(by == "parameter")
    model.parts[1].on = by == "flag"
    with pytest.raises(ValueError, match="moves information"):
        capture(model, x)


class Cached(nn.Module):
    """Attention whose keys and values lie in buffers of its own, as in models that write word by word."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.register_buffer("keys", torch.zeros(2, 4, 16, 8))
        self.register_buffer("values", torch.zeros(2, 4, 16, 8))

    def forward(self, x):
        q, k, v = map(heads, self.qkv(x).chunk(3, -1))
        count = x.shape[1]
        self.keys[:, :, :count], self.values[:, :, :count] = k, v
        k, v = self.keys[:, :, :count], self.values[:, :, :count]
        self.p = (q @ k.mT * 8**-0.5).softmax(-1)
        return joined(F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("prove", [True, False])
def test_keys_in_buffers_of_the_model(prove):
    """They are kept as the pass had them, whatever runs afterwards, and the buffers are left as the pass left them."""
    model, x = seeded(Block(Cached(), Cached())), numbers(2, 6, 32)
    with torch.no_grad():
        model(x)
    own, buffers = [part.p for part in model.parts], [buffer.clone() for buffer in model.buffers()]
    traces = capture_batch(model, x, prove=prove)
    for before, after in zip(buffers, model.buffers(), strict=True):
        torch.testing.assert_close(before, after)
    with torch.no_grad():
        model(numbers(2, 6, 32, seed=3))
    assert_weights(traces, own)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30])
def test_inputs_that_are_all_alike(value):
    model, x = seeded(Block(Attend(), Attend())), torch.full((2, 6, 32), value)
    assert_weights(capture_batch(model, x), own_weights(model, x))


def test_parameters_made_in_inference_mode():
    with torch.inference_mode():
        model = Block(Attend(), Attend()).eval()
    x = numbers(2, 6, 32)
    assert_weights(capture_batch(model, x), own_weights(model, x))


@pytest.mark.parametrize("shape", [(2, 0, 32), (0, 6, 32)])
def test_nothing_to_attend_to_is_refused(shape):
    with pytest.raises(ValueError, match="no (tokens|examples)|empty"):
        capture(seeded(nn.Sequential(Keyed())), torch.zeros(shape))


def test_patches_given_to_cls_are_seen():
    model = hf.ViTModel(hf.ViTConfig(**SMALL, image_size=32, patch_size=8)).eval()

    def gather(module, args, output):
        return torch.cat([output[:, :1] + output[:, 1:].mean(1, keepdim=True), output[:, 1:]], 1)

    next(
        module for name, module in model.named_modules() if name.endswith(("layer.0", "layers.0"))
    ).register_forward_hook(gather)
    with pytest.raises(ValueError, match="moves information"):
        capture(model, numbers(1, 3, 32, 32))
