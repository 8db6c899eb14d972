"""Encoder, cross-attention and decoder as one joint graph."""

import numpy as np
import pytest
import torch
import transformers as hf

import attnflow
from attnflow import capture, capture_batch
from families import IDS, SMALL, images
from toys import assert_left_out_positions_have_no_limit

DECODER_IDS = torch.tensor([[1, 20, 21, 22, 23], [1, 24, 25, 26, 27]])
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
DEPTH = {"encoder_layers": 3, "decoder_layers": 2, "d_model": 32, "vocab_size": 99}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def t5():
    config = hf.T5Config(
        d_model=32,
        d_kv=8,
        num_layers=3,
        num_decoder_layers=2,
        num_heads=4,
        d_ff=64,
        vocab_size=99,
        **ENDS,
    )
    return hf.T5ForConditionalGeneration, config, {"input_ids": IDS}


def bart():
    return (
        hf.BartForConditionalGeneration,
        hf.BartConfig(**DEPTH, **HEADS, **ENDS),
        {"input_ids": IDS},
    )


def marian():
    return (
        hf.MarianMTModel,
        hf.MarianConfig(**DEPTH, **HEADS, **ENDS, max_position_embeddings=32),
        {"input_ids": IDS},
    )


def whisper():
    config = hf.WhisperConfig(
        **DEPTH,
        **HEADS,
        **ENDS,
        num_mel_bins=8,
        max_source_positions=12,
        suppress_tokens=None,
    )
    sound = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0))
    return hf.WhisperForConditionalGeneration, config, {"input_features": sound}


FAMILIES = [t5, bart, marian, whisper]


def build(family):
    torch.manual_seed(0)
    model_class, config, inputs = family()
    model = model_class(config).eval()
    return model, {**inputs, "decoder_input_ids": DECODER_IDS}


def own_attention(model, inputs):
    """encoder, decoder and cross-attention of the same weights with eager attention."""
    config = type(model.config)(**model.config.to_dict())
    config._attn_implementation = "eager"
    twin = type(model)(config).eval()
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        output = twin(**inputs, output_attentions=True)
    return output.encoder_attentions, output.decoder_attentions, output.cross_attentions


def separately(encoder, decoder, cross, residual=0.5):
    """Rollout of the decoder's positions onto both inputs, stream by stream: no joint matrix."""

    def mixed(weights):
        mean = weights.double().mean(0).numpy()
        return (1 - residual) * mean + residual * np.eye(len(mean))

    to_encoder = np.eye(encoder[0].shape[-1])
    for weights in encoder:
        to_encoder = mixed(weights) @ to_encoder
    own, other = np.eye(decoder[0].shape[-1]), np.zeros((decoder[0].shape[-1], len(to_encoder)))
    for self_weights, cross_weights in zip(decoder, cross, strict=True):
        own, other = mixed(self_weights) @ own, mixed(self_weights) @ other
        moved = (1 - residual) * cross_weights.double().mean(0).numpy()
        own, other = residual * own, moved @ to_encoder + residual * other
    return np.hstack([other, own])


@pytest.mark.parametrize("family", FAMILIES)
def test_three_streams_equal_the_models_own(family):
    model, inputs = build(family)
    encoder, decoder, cross = own_attention(model, inputs)
    expected = [*encoder, *(weights for pair in zip(decoder, cross, strict=True) for weights in pair)]
    for example, trace in enumerate(capture_batch(model, inputs)):
        keys = encoder[0].shape[-1]
        assert (trace.decoder_start, len(trace.tokens)) == (keys, keys + 5)
        assert len(trace.layers) == len(expected) == 7
        for layer, own in zip(trace.layers, expected, strict=True):
            torch.testing.assert_close(layer.parts[0].layer.attention(), own[example], atol=1e-5, rtol=0)
        assert trace.readout == len(trace.tokens) - 1


@pytest.mark.parametrize("family", FAMILIES)
def test_joint_rollout_is_the_rollout_stream_by_stream(family):
    model, inputs = build(family)
    streams = own_attention(model, inputs)
    for example, trace in enumerate(capture_batch(model, inputs)):
        expected = separately(*([weights[example] for weights in stream] for stream in streams))
        scores = attnflow.rollout(trace).scores
        np.testing.assert_allclose(scores[trace.decoder_start :], expected, atol=1e-6)
        np.testing.assert_allclose(scores.sum(-1), 1, atol=1e-6)
        flow = attnflow.flow(trace, query=trace.readout)
        assert (flow.scores >= expected[-1:] - 1e-6).all()
        encoder_only = attnflow.rollout(trace, layer=2).scores
        assert not encoder_only[: trace.decoder_start, trace.decoder_start :].any()


def test_positions_that_a_layer_leaves_out_do_not_limit_a_flow():
    model, inputs = build(bart)
    assert_left_out_positions_have_no_limit(capture_batch(model, inputs)[0], query=-1)


@pytest.mark.parametrize("family", [t5, bart])
def test_the_encoder_alone_is_a_plain_stack(family):
    model, inputs = build(family)
    encoder, _, _ = own_attention(model, inputs)
    trace = capture_batch(model.get_encoder(), {"input_ids": IDS})[0]
    assert trace.decoder_start is None
    for layer, own in zip(trace.layers, encoder, strict=True):
        torch.testing.assert_close(layer.attention(), own[0], atol=1e-5, rtol=0)


def test_padding_in_both_streams_is_removed():
    model, inputs = build(bart)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    decoder_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    padded = capture_batch(model, {**inputs, "attention_mask": mask, "decoder_attention_mask": decoder_mask})[1]
    alone = capture(model, {"input_ids": IDS[1:, :4], "decoder_input_ids": DECODER_IDS[1:, :3]})
    assert padded.tokens == alone.tokens
    np.testing.assert_allclose(attnflow.rollout(padded).scores, attnflow.rollout(alone).scores, atol=1e-6)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # torch's word on batch_first=False
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_plain_torch_transformers(batch_first, whole):
    torch.manual_seed(0)
    source, target = torch.randn(2, 6, 32), torch.randn(2, 6, 32)  # as long as each other: only identity tells them
    settings = {"dim_feedforward": 64, "batch_first": batch_first}
    if whole:
        model = torch.nn.Transformer(32, 4, 2, 2, **settings)
    else:
        model = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(32, 4, **settings), 2)
    inputs = (source, target) if whole else (target, source)
    traces = capture_batch(model.eval(), tuple(x if batch_first else x.transpose(0, 1) for x in inputs))
    places = [(part.queries[0], part.keys[0]) for layer in traces[0].layers for part in layer.parts]
    assert places == [(0, 0)] * 2 * whole + [(6, 6), (6, 0)] * 2
    assert attnflow.rollout(traces[0], query=-1).scores[0, :6].sum() > 0.4


def test_vision_encoder_with_a_text_decoder_keeps_its_grid():
    torch.manual_seed(0)
    decoder = hf.BertConfig(
        **SMALL,
        vocab_size=99,
        is_decoder=True,
        add_cross_attention=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    vision = hf.ViTConfig(**SMALL, image_size=32, patch_size=8)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, decoder)
    model = hf.VisionEncoderDecoderModel(config).eval()
    trace = capture_batch(model, {"pixel_values": images(), "decoder_input_ids": DECODER_IDS})[0]
    assert trace.grid == (4, 4)
    assert (trace.decoder_start, len(trace.tokens)) == (17, 22)
    assert attnflow.rollout(trace, query=-1).scores[0, :17].sum() > 0.1
