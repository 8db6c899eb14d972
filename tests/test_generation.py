"""What a model wrote itself: one square causal graph of prompt and answer, a row for each token written."""

import json
import sys

import numpy as np
import pytest
import torch
import transformers as hf

import attnflow
from attnflow import capture, capture_batch
from attnflow.cli import main
from attnflow.show.wording import rows
from families import IDS, SMALL, TEXT, images
from test_encoder_decoder import bart, t5, whisper

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LEFT_PADDED = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])


def gpt2():
    config = hf.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, **ENDS)
    return hf.GPT2LMHeadModel, config, {"input_ids": IDS, "attention_mask": LEFT_PADDED}


def llama():
    inputs = {"input_ids": IDS, "attention_mask": LEFT_PADDED}
    return hf.LlamaForCausalLM, hf.LlamaConfig(**TEXT, num_key_value_heads=2), inputs


def mistral_sliding_window():
    config = hf.MistralConfig(**TEXT, num_key_value_heads=2, sliding_window=3)
    return hf.MistralForCausalLM, config, {"input_ids": IDS}


FAMILIES = [gpt2, llama, mistral_sliding_window, bart, t5]


def built(family, kernel):
    torch.manual_seed(0)
    model_class, config, inputs = family()
    config._attn_implementation = kernel
    return model_class(config).eval(), inputs


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_what_the_model_attended_to_when_it_wrote_the_token(family, cache):
    """Against the eager model's own generation, step by step, with a cache of keys and without."""
    model, inputs = built(family, "sdpa")
    traces = capture_batch(model, inputs, generate=5)
    eager, _ = built(family, "eager")
    settings = {"output_attentions": True, "return_dict_in_generate": True}
    own = eager.generate(**inputs, max_new_tokens=5, do_sample=False, use_cache=cache, **settings)
    joint = model.config.is_encoder_decoder
    assert len(traces) == 2
    for example, trace in enumerate(traces):
        start, shift = trace.generated_from, trace.decoder_start or 0
        written = own.sequences[example, start - shift if joint else IDS.shape[1] :].tolist()
        assert list(trace.tokens[start:]) == [str(token) for token in written]
        layers = [layer.parts[0].layer if joint else layer for layer in trace.layers]
        if joint:
            layers = [layer for layer in layers if "decoder" in layer.name and layer.shape[1] == layer.shape[2]]
        steps = own.decoder_attentions if joint else own.attentions
        assert len(steps) == len(written) == 5
        for step, of_layers in enumerate(steps):
            for layer, weights in zip(layers, of_layers, strict=True):
                row = start - shift - 1 + step
                seen = layer.attention([row])[:, 0, : row + 1]
                expected = weights[example, :, -1]
                # The model's own keys have padding in front, and a sliding window may have dropped the oldest.
                common = min(seen.shape[1], expected.shape[1])
                torch.testing.assert_close(seen[:, -common:], expected[:, -common:], atol=1e-5, rtol=0)
                assert seen[:, :-common].abs().sum() < 1e-6


def test_rows_are_called_by_what_they_wrote():
    model, inputs = built(mistral_sliding_window, "sdpa")
    trace = capture_batch(model, inputs, generate=4)[0]
    assert (trace.generated_from, trace.readout) == (7, "generated")
    rollout = attnflow.rollout(trace, query=trace.readout)
    np.testing.assert_array_equal(rollout.scores, attnflow.rollout(trace, query=[6, 7, 8, 9]).scores)
    assert rollout.queries == (7, 8, 9, 10)
    assert rollout.query_tokens == trace.tokens[7:]
    assert rollout.recipe["settings"]["query"] == "generated"
    assert (rollout.scores[range(4), rollout.queries] == 0).all()  # no token draws on itself while it is written
    flow = attnflow.flow(trace, query="generated", layer="all")
    assert flow.scores.shape == (3, 4, 11)


def test_a_story_is_written_and_explained(stories):
    """A real model: the same continuation, and rows that sum to 1."""
    model, tokenizer = stories
    prompt = tokenizer.encode("Once upon a time")
    trace = capture(model, {"input_ids": torch.tensor([prompt])}, generate=12)
    ids = [int(token) for token in trace.tokens]
    told = tokenizer.decode(ids, skip_special_tokens=True)
    assert told.startswith("Once upon a time, there was a little girl")
    assert (trace.generated_from, len(ids)) == (len(prompt), len(prompt) + 12)
    np.testing.assert_allclose(attnflow.rollout(trace, query="generated").scores.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("of_the_model", [True, False])
def test_an_answer_ends_with_its_end_of_sequence(of_the_model):
    model, inputs = built(llama, "sdpa")
    free = capture_batch(model, inputs, generate=6)
    second = int(free[0].tokens[8])
    if of_the_model:
        model.generation_config.eos_token_id = [2, second]
        settings = 6
    else:
        settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": second}
    traces = capture_batch(model, inputs, generate=settings)
    assert traces[0].tokens == free[0].tokens[:9]
    assert len(traces[1].tokens) == 4 + 6


@pytest.mark.parametrize("whole", [int, np.int64, torch.tensor])
def test_numbers_of_numpy_and_torch_are_numbers(whole):
    model, inputs = built(llama, "sdpa")
    free = capture_batch(model, inputs, generate=6)
    assert [trace.tokens for trace in capture_batch(model, inputs, generate=whole(6))] == [
        trace.tokens for trace in free
    ]
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": whole(int(free[0].tokens[8]))}
    assert capture_batch(model, inputs, generate=settings)[0].tokens == free[0].tokens[:9]
    ids = [whole(int(token)) for token in free[0].tokens[:4]]
    assert capture(model, {"input_ids": ids}).tokens == free[0].tokens[:4]


def test_what_cannot_be_generated_is_refused():
    model, inputs = built(llama, "sdpa")
    with pytest.raises(ValueError, match="LlamaModel cannot generate; load it with its head.*AutoModelForCausalLM"):
        capture(model.model, inputs, generate=3)
    with pytest.raises(ValueError, match="gave 4 answers to 2 prompts"):
        capture(model, inputs, generate={"max_new_tokens": 2, "num_beams": 2, "num_return_sequences": 2})
    with pytest.raises(ValueError, match="generation needs input_ids"):
        capture(model, {"inputs_embeds": torch.randn(1, 4, 32)}, generate=2)
    trace = capture_batch(model, inputs)[0]
    with pytest.raises(ValueError, match="no token is 'generated'"):
        attnflow.rollout(trace, query="generated")


def main_of(arguments):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["attnflow", *arguments])
        main()


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A folder with a tiny random GPT-2 and a byte-level tokenizer."""
    import tokenizers

    folder = tmp_path_factory.mktemp("writer")
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(["Once upon a time there was a girl. <b>"] * 3, vocab_size=300, show_progress=False)
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="!")
    torch.manual_seed(3)
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300, bos_token_id=0, eos_token_id=299)
    hf.GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_command_line_explains_what_was_written(writer, capsys, tmp_path):
    run = ["text", "Once upon a time", "--model", str(writer), "--generate", "3"]
    main_of([*run, "--json", "-o", str(tmp_path / "rows.png")])
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"]["settings"]["query"] == "generated"
    assert len(found["query_tokens"]) == len(found["scores"]) == 3
    assert found["query_tokens"] == found["tokens"][-3:]
    assert (tmp_path / "rows.png").stat().st_size > 5000
    main_of(run)
    table = capsys.readouterr().out
    assert "written" in table
    assert "raw, 3 tokens written" in table


def test_the_table_has_a_column_for_each_token_written(writer):
    model = hf.AutoModelForCausalLM.from_pretrained(writer).eval()
    tokenizer = hf.AutoTokenizer.from_pretrained(writer)
    trace = capture(model, "Once upon a time", tokenizer=tokenizer, generate=3)
    scores, labels, name = rows(attnflow.raw(trace, query="generated"))
    assert (name, len(labels)) == ("written", 3)
    np.testing.assert_array_equal(
        scores, attnflow.raw(trace, query=range(len(trace.tokens) - 4, len(trace.tokens) - 1)).scores
    )
    assert rows(attnflow.raw(trace, query="generated", layer="all"))[2] == "layer"


def test_a_model_without_a_trained_head_does_not_write(capsys):
    with pytest.raises(SystemExit, match="2"):
        main_of(["text", "Once", "--generate", "3"])
    assert "it was not trained to write: it has no weights for" in capsys.readouterr().err


def whisper_model():
    model, inputs = built(whisper, "sdpa")
    with torch.no_grad():  # so that it does not repeat the token it began with
        model.model.decoder.embed_positions.weight.mul_(100)
    return model, inputs


def without_mask():
    model, _ = built(gpt2, "sdpa")
    return model, {"input_ids": IDS.where(LEFT_PADDED == 1, 0)}


def padded_on_the_right():
    model, _ = built(gpt2, "sdpa")
    return model, {"input_ids": IDS, "attention_mask": LEFT_PADDED.flip(1)}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (whisper_model, "generate of WhisperForConditionalGeneration leaves out what its answers began with"),
        (without_mask, "hold padding and no attention_mask: give the mask"),
        (padded_on_the_right, "padded on the left.*padding_side"),
    ],
)
def test_a_pass_that_would_not_be_what_generation_did_is_refused(case, message):
    model, inputs = case()
    with pytest.raises(ValueError, match=message):
        capture(model, inputs, generate=3)


@pytest.mark.parametrize("number", [0, -1, 2.5, "5", True])
def test_a_number_of_tokens_that_is_none(number):
    model, inputs = built(llama, "sdpa")
    with pytest.raises(ValueError, match="generate= takes a number of tokens from 1 on, or a mapping"):
        capture(model, inputs, generate=number)


def test_pixels_alone_may_be_written_about():
    torch.manual_seed(0)
    encoder = hf.ViTConfig(**SMALL, image_size=32, patch_size=8)
    decoder = hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, add_cross_attention=True, **ENDS)
    config = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = hf.VisionEncoderDecoderModel(config=config).eval()
    model.generation_config.decoder_start_token_id = 1
    first, second = (capture_batch(model, inputs, generate=4)[1] for inputs in (images(), {"pixel_values": images()}))
    assert first.tokens == second.tokens
    assert first.generated_from == first.decoder_start + 1
