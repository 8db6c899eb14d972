"""knockout(): edges of attention taken out of a running model, against masks and weights changed by other means."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.overrides import TorchFunctionMode

from attnflow import Contrast, capture, knockout
from classifiers import sharpened, small_bert, small_vit, tokenizer
from families import FAMILIES, images

TEXT = "The keys to the cabinet are on the table."
SETS = [[(0, 0, 3)], [(1, 4, 2), (1, 4, 3), (0, 1, 0)], [(0, 5, 5), (1, 5, 1)], []]


class Masked(TorchFunctionMode):
    """Gives every fused call an explicit mask without some edges, or weighs its values by hand without them."""

    def __init__(self, edges, how="hide"):
        super().__init__()
        self.edges, self.how, self.calls = edges, how, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value, mask, *_ = (*args, kwargs.get("attn_mask"))
        shape = query.shape[-2], key.shape[-2]
        added = torch.zeros(shape)
        if mask is not None:
            added = added.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else added + mask
        if kwargs.get("is_causal"):
            added = added.masked_fill(~torch.ones(shape, dtype=torch.bool).tril(), -torch.inf)
        gone = torch.zeros(shape, dtype=torch.bool)
        for layer, *place in self.edges:
            if layer == self.calls:
                gone[tuple(place)] = True
        self.calls += 1
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scale = kwargs.get("scale") or query.shape[-1] ** -0.5
        if self.how == "hide":
            return func(
                query,
                key,
                value,
                attn_mask=added.masked_fill(gone, -torch.inf).expand(len(query), 1, *shape),
                scale=scale,
            )
        return ((query @ key.mT * scale + added).softmax(-1) * ~gone) @ value


class WithoutWeights(TorchFunctionMode):
    """Changes what a softmax by hand is given, or returns, in each layer: an eager model with edges taken out."""

    def __init__(self, edges, how):
        super().__init__()
        self.edges, self.how, self.calls = edges, how, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.softmax:
            return func(*args, **kwargs)
        gone = torch.zeros(args[0].shape[-2:], dtype=torch.bool)
        for layer, *place in self.edges:
            if layer == self.calls:
                gone[tuple(place)] = True
        self.calls += 1
        if self.how == "hide":
            return func(args[0].masked_fill(gone, -torch.inf), *args[1:], **kwargs)
        return func(*args, **kwargs).masked_fill(gone, 0)


def tiny_causal(name, **more):
    torch.manual_seed(0)
    common = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=16)
    else:
        config = transformers.LlamaConfig(**common, num_key_value_heads=2, intermediate_size=32)
    return sharpened(transformers.AutoModelForCausalLM.from_config(config, **more))


def scored(model, inputs, mode, index):
    with torch.no_grad(), mode:
        logits = (model(**inputs) if isinstance(inputs, dict) else model(inputs)).logits
    return float((logits[:, -1] if logits.ndim == 3 else logits)[0, index])


def below_the_diagonal(sets):
    return [[(layer, max(query, key), min(query, key)) for layer, query, key in own if key or query] for own in sets]


@pytest.mark.parametrize("how", ["hide", "zero"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_fused_kernels_with_a_mask_of_their_own(name, how):
    sets = SETS if name in ("bert", "vit") else below_the_diagonal(SETS)
    if name == "bert":
        model, inputs = small_bert(), dict(tokenizer()(TEXT, return_tensors="pt"))
    elif name == "vit":
        model, inputs = small_vit(), images()[:1]
    else:
        model, inputs = tiny_causal(name), {"input_ids": torch.arange(3, 12)[None]}
    found = knockout(model, inputs, sets, target=1, how=how, batch_size=3)
    base = scored(model, inputs, Masked([]), 1)
    expected = [base - scored(model, inputs, Masked(own, how), 1) for own in sets]
    assert found.base == pytest.approx(base, rel=1e-5)
    np.testing.assert_allclose(found.changes, expected, rtol=1e-3, atol=1e-4 * abs(base))
    assert np.abs(found.changes[:3]).max() > 1e-2 * abs(base)
    assert found.changes[3] == 0  # a set without edges is the model itself


@pytest.mark.parametrize("how", ["hide", "zero"])
def test_weights_by_hand(how):
    model = small_bert()
    model.set_attn_implementation("eager")
    inputs = dict(tokenizer()(TEXT, return_tensors="pt"))
    found = knockout(model, inputs, SETS, target=1, how=how)
    base = scored(model, inputs, WithoutWeights([], how), 1)
    expected = [base - scored(model, inputs, WithoutWeights(own, how), 1) for own in SETS]
    np.testing.assert_allclose(found.changes, expected, rtol=1e-3, atol=1e-4 * abs(base))
    fused = knockout(small_bert(), inputs, SETS, target=1, how=how)
    np.testing.assert_allclose(found.changes, fused.changes, rtol=1e-3, atol=1e-4 * abs(base))


@pytest.mark.parametrize("batch_first", [True, False])
def test_multi_head_attention_with_the_mask_of_each_layer(batch_first):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(1, 9, 16) if batch_first else torch.randn(9, 1, 16)

    def second(output):
        return (output if batch_first else output.transpose(0, 1))[:, 0, 2]

    def masked(edges):
        y = x
        with torch.no_grad():
            for number, one in enumerate(model.layers):
                mask = torch.zeros(9, 9, dtype=torch.bool)
                for layer, *place in edges:
                    if layer == number:
                        mask[tuple(place)] = True
                y = one(y, src_mask=mask)
        return float(second(y))

    found = knockout(model, x, [*SETS, [(1, 0, 3), (0, 0, 3)]], target=second)
    expected = [masked([]) - masked(own) for own in [*SETS, [(1, 0, 3), (0, 0, 3)]]]
    np.testing.assert_allclose(found.changes, expected, rtol=1e-4, atol=1e-6)
    assert abs(found.changes[-1]) > 1e-4


def test_a_batch_is_as_one_set_after_the_other_and_padding_is_left_out():
    model, words = small_bert(), tokenizer()
    plain = dict(words(TEXT, return_tensors="pt"))
    alone = knockout(model, plain, SETS, target="predicted", batch_size=1)
    for size in (2, 32):
        together = knockout(model, plain, SETS, target="predicted", batch_size=size)
        np.testing.assert_allclose(together.changes, alone.changes, rtol=1e-4, atol=1e-4)
    assert alone.target == capture(model, plain, target="predicted").target["target"]
    padded = dict(words(TEXT, return_tensors="pt", padding="max_length", max_length=16))
    np.testing.assert_allclose(
        knockout(model, padded, SETS, target="predicted").changes, alone.changes, rtol=1e-3, atol=1e-4
    )


def weighed(output):
    """A number that every position of the output has a part in."""
    values = output if isinstance(output, torch.Tensor) else next(x for x in output.values() if x.is_floating_point())
    numbers = values.flatten(1)
    return numbers @ torch.linspace(-1, 1, numbers.shape[1]) ** 3


@pytest.mark.parametrize(
    "name",
    [
        "t5_encoder", "gpt_oss_sinks", "gemma2_soft_capping", "bloom_alibi", "deberta_v2", "falcon_multi_query", "vit",
        "siglip_vision_tower", "timm_vit", "timm_eva02", "transformer_encoder", "hand_written_softmax",
    ],
)  # fmt: skip
def test_families_in_a_batch_and_one_by_one(name):
    model, inputs, _ = FAMILIES[name]()
    one = {key: value[:1] if key != "mask" else value for key, value in inputs.items()}
    sets = [[], [(0, 2, 1)], [(0, 3, 2)]]
    for how in ("hide", "zero"):
        alone = knockout(model, one, sets, target=weighed, how=how, batch_size=1).changes
        together = knockout(model, one, sets, target=weighed, how=how, batch_size=3).changes
        np.testing.assert_allclose(together, alone, rtol=1e-2, atol=5e-6)
        assert alone[0] == 0
        assert (alone[1:] != 0).all()


def test_padding_on_the_left_is_left_out():
    model, ids, sets = tiny_causal("llama"), torch.arange(3, 12)[None], below_the_diagonal(SETS)
    alone = knockout(model, {"input_ids": ids}, sets, target=1)
    padded = {"input_ids": F.pad(ids, (4, 0)), "attention_mask": F.pad(torch.ones_like(ids), (4, 0))}
    padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    found = knockout(model, padded, sets, target=1)
    np.testing.assert_allclose(found.changes, alone.changes, rtol=1e-3, atol=1e-4 * abs(alone.base))
    assert np.abs(alone.changes).max() > 1e-2 * abs(alone.base)


def test_the_predicted_class_stays_the_target_and_contrasts_count():
    model, words = small_bert(), tokenizer()
    trace = capture(model, TEXT, tokenizer=words, target="predicted")
    every = [[(layer, query, 3) for layer in range(2) for query in range(len(trace.tokens))]]
    one, other = (knockout(model, TEXT, every, target=index, tokenizer=words) for index in (0, 2))
    pair = knockout(model, TEXT, every, target=(0, 2), tokenizer=words)
    assert pair.base == pytest.approx(one.base - other.base, rel=1e-4)
    np.testing.assert_allclose(pair.changes, one.changes - other.changes, rtol=1e-4, atol=1e-4)
    assert pair.target == "0 rather than 2"
    assert knockout(model, TEXT, [], target=Contrast(0, 2), tokenizer=words).changes.shape == (0,)


def test_hidden_keys_of_which_one_had_all_the_weight():
    """The kernel's weights are made anew, so that what is left is right even where it was less than rounding."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 1, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    with torch.no_grad():
        model.layers[0].self_attn.in_proj_weight.mul_(30)
    x = torch.randn(1, 6, 16)
    trace = capture(model, x)
    weights = trace.layers[0].attention()[0]
    query = int(weights.max(1).values.argmax())
    key = int(weights[query].argmax())
    assert weights[query, key] > 1 - 1e-6

    def read(output):
        return output[:, query, 0]

    mask = torch.zeros(6, 6, dtype=torch.bool)
    mask[query, key] = True
    with torch.no_grad():
        expected = float(read(model(x)) - read(model(x, mask=mask)))
    assert knockout(model, x, [[(0, query, key)]], target=read).changes[0] == pytest.approx(expected, abs=1e-4)


def test_nothing_is_left_on_the_model():
    model, words = small_bert(), tokenizer()
    inputs = dict(words(TEXT, return_tensors="pt"))
    with torch.no_grad():
        before = model(**inputs).logits
    knockout(model, inputs, SETS, target=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, before)


@pytest.mark.parametrize(
    ("edges", "more", "message"),
    [
        ([(0, 1, 2)], {}, r"edges are sets of \(layer, query, key\), .* a set holds 0"),
        ([[(0, 1)]], {}, r"a set holds \(0, 1\)"),
        ([[(2, 0, 0)]], {}, r"edge \(2, 0, 0\) .* is out of range: the layer is one among 2"),
        ([[(0, 12, 0)]], {}, r"edge \(0, 12, 0\) .* of 9 queries and 9 keys"),
        ([[(0, 1, 2)]], {}, r"there is no edge \(0, 1, 2\): the query sees nothing of this key"),
        ([[(0, 1, 0), (0, 1, 1)]], {}, "query 1 would have no key left to attend to"),
        ([[(0, 2, 1)]], {"how": "drop"}, "how='drop' is unknown; choose one of hide, zero"),
        ([[(0, 2, 1)]], {"batch_size": 0}, "batch_size must be 1 or more"),
        ([[(0, 2, 1)]], {"target": 70}, "target 70 does not fit logits"),
    ],
)
def test_errors(edges, more, message):
    model, inputs = tiny_causal("gpt2"), {"input_ids": torch.arange(3, 12)[None]}
    with pytest.raises(ValueError, match=message):
        knockout(model, inputs, edges, **{"target": 1, **more})


def test_what_cannot_lose_edges_is_refused():
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(config).eval()
    inputs = {"input_ids": torch.arange(3, 9)[None], "decoder_input_ids": torch.arange(3)[None]}
    with pytest.raises(ValueError, match="several streams, such as encoder and decoder"):
        knockout(model, inputs, [[(0, 0, 1)]], target=1)
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    with pytest.raises(ValueError, match="windows, frames or merged patches"):
        knockout(transformers.SwinForImageClassification(config).eval(), images()[:1], [[(0, 0, 1)]], target=1)
    with pytest.raises(ValueError, match="2 examples, and knockout takes one"):
        knockout(tiny_causal("gpt2"), {"input_ids": torch.arange(18).view(2, 9)}, [[(0, 2, 1)]], target=1)
