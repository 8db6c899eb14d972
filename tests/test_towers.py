"""One tower of several, keys from the past, and inputs in the forms in which people have them."""

import functools

import numpy as np
import pytest
import torch
import transformers as hf

import attnflow
from attnflow import capture, capture_batch
from families import FAMILIES, IDS, SMALL, TEXT, VISION, images
from test_capture import clip, eager_twin, llava, siglip

GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}


def gpt2():
    torch.manual_seed(0)
    return hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2)).eval()


@pytest.mark.parametrize("case", [clip, siglip])
@pytest.mark.parametrize("tower", ["vision_model", "text_model"])
def test_a_tower_is_what_it_is_alone(case, tower):
    model, inputs = case()
    part = "pixel_values" if tower == "vision_model" else "input_ids"
    alone = capture_batch(model.get_submodule(tower), {part: inputs[part]})
    for trace, own in zip(capture_batch(model, inputs, tower=tower), alone, strict=True):
        assert (trace.tokens, trace.roles, trace.grid) == (own.tokens, own.roles, own.grid)
        assert len(trace.layers) == len(own.layers)
        for layer, other in zip(trace.layers, own.layers, strict=True):
            torch.testing.assert_close(layer.attention(), other.attention(), atol=1e-6, rtol=0)
        assert trace.readout == own.readout


def test_image_tokens_of_a_language_model_stand_at_their_patches():
    model, inputs = llava()
    trace = capture(model, inputs, tower="language_model")
    assert trace.tokens == ("1", *(f"{row},{column}" for row in range(4) for column in range(4)), "5", "6")
    assert (trace.grid, trace.groups["image"], trace.groups["text"]) == ((4, 4), tuple(range(1, 17)), (0, 17, 18))
    with torch.no_grad():
        own = eager_twin(model)(**inputs, output_attentions=True).attentions
    for layer, weights in zip(trace.layers, own, strict=True):
        torch.testing.assert_close(layer.attention(), weights[0], atol=1e-5, rtol=0)
    seen = []
    layer = model.get_submodule("language_model.layers.0")
    hook = layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(args[0].clone()), with_kwargs=True)
    changed = inputs["pixel_values"].clone()
    changed[..., 8:16, 24:] += 3  # the patch in row 1, column 3; attention below carries it to others, less
    with torch.no_grad():
        model(**inputs)
        model(**{**inputs, "pixel_values": changed})
    hook.remove()
    assert int((seen[1] - seen[0]).norm(dim=-1)[0].argmax()) == trace.tokens.index("1,3")
    rollout = attnflow.rollout(trace, query=-1)
    assert (rollout.grid, rollout.roles.count("patch")) == ((4, 4), 16)


def test_a_tower_gives_its_layers_and_gradients_alone():
    model, inputs = llava()
    how = {"tower": "language_model", "target": lambda output: output.last_hidden_state[:, -1, :3].sum(-1)}
    every, last = capture(model, inputs, **how), capture(model, inputs, layers=-1, **how)
    assert (len(every.layers), len(last.layers)) == (3, 1)
    torch.testing.assert_close(last.layers[0].attention(), every.layers[-1].attention())
    torch.testing.assert_close(last.layers[0].gradient.of([18]), every.layers[-1].gradient.of([18]))
    assert every.layers[0].gradient.of([18]).abs().max() > 0


def test_a_tower_that_is_not_there():
    model, inputs = clip()
    with pytest.raises(ValueError, match="no attention was seen in tower='audio_model' of CLIPModel; it was in "):
        capture(model, inputs, tower="audio_model")
    with pytest.raises(ValueError, match="several towers, .*explain one of them with tower='text_model'"):
        capture(model, inputs)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_keys_of_a_cache_are_positions_of_the_past(kind):
    model, ids = gpt2(), IDS[:, :5]
    cache = hf.StaticCache(config=model.config, max_cache_len=5) if kind == "static" else hf.DynamicCache()
    with torch.no_grad():
        model(ids[:, :2], past_key_values=cache)
    length = int(cache.get_seq_length())
    whole = capture_batch(model, {"input_ids": ids})
    for trace, other in zip(
        capture_batch(model, {"input_ids": ids[:, 2:], "past_key_values": cache}), whole, strict=True
    ):
        assert trace.tokens == ("[PAST1]", "[PAST2]", *other.tokens[2:])
        assert (trace.readout, trace.roles[:3]) == (4, ("prefix", "prefix", "text"))
        for layer, own in zip(trace.layers, other.layers, strict=True):
            torch.testing.assert_close(layer.attention()[:, 2:], own.attention()[:, 2:], atol=1e-6, rtol=0)
            assert layer.attention()[:, :2, :2].eq(torch.eye(2)).all()
        # The two tokens of the past end at their keys, so that what reaches them is theirs in sum.
        ours, theirs = (attnflow.rollout(one, query=-1).scores[0] for one in (trace, other))
        np.testing.assert_allclose([ours[:2].sum(), *ours[2:]], [theirs[:2].sum(), *theirs[2:]], atol=1e-6)
    assert int(cache.get_seq_length()) == length  # the caller's cache is as it was


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_prefix_tuning_has_its_prefix_as_positions():
    import peft

    settings = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    trace = capture(peft.get_peft_model(gpt2(), settings).eval(), {"input_ids": IDS[:1]})
    assert trace.tokens[:4] == ("[PAST1]", "[PAST2]", "[PAST3]", "5")
    assert {layer.shape for layer in trace.layers} == {(4, 10, 10)}


def test_inputs_in_the_forms_in_which_people_have_them(minilm):
    torch.manual_seed(0)
    model = hf.BertModel(hf.BertConfig(**TEXT)).eval()
    forms = [
        (model, {"input_ids": IDS.numpy()}),
        (model, {"input_ids": IDS.tolist()}),
        (functools.partial(model, output_hidden_states=True), {"input_ids": IDS}),
        (functools.partial(model, input_ids=IDS), {}),
        (torch.nn.DataParallel(model), {"input_ids": IDS}),
        (model, IDS.numpy()),
    ]
    expected = capture_batch(model, {"input_ids": IDS})
    for given, inputs in forms:
        for trace, own in zip(capture_batch(given, inputs), expected, strict=True):
            assert trace.tokens == own.tokens
            torch.testing.assert_close(trace.layers[-1].attention(), own.layers[-1].attention())
    assert capture(model, {"input_ids": IDS[0].tolist()}).tokens == expected[0].tokens
    pair = capture(minilm[0], ("Who wrote it?", "Mary did."), tokenizer=minilm[1])
    assert pair.tokens == ("[CLS]", "who", "wrote", "it", "?", "[SEP]", "mary", "did", ".", "[SEP]")


class Features(torch.nn.Module):
    """Takes a mapping as its one argument, as SentenceTransformer does."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, features):
        q, k, v = self.qkv(features["x"]).chunk(3, -1)
        return features["x"] + torch.nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_mapping_that_a_model_wants_as_one_argument():
    assert len(capture_batch(Features().eval(), {"x": torch.randn(2, 8, 32)})) == 2


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (("one", "two", "three"), "a tuple of texts is a pair; 3 were given"),
        ({"input_ids": np.array(["a"])}, "input_ids holds <U1; expected numbers"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, r"an input is empty: its shape is \(1, 0\)"),
    ],
)
def test_inputs_that_are_none(minilm, inputs, message):
    with pytest.raises(ValueError, match=message):
        capture(minilm[0], inputs, tokenizer=minilm[1])


def test_the_last_logits_alone_are_read_at_the_last_token():
    model, mask = gpt2(), torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    inputs = {"input_ids": IDS, "attention_mask": mask}
    every = capture_batch(model, inputs, target=5)
    for trace, own in zip(capture_batch(model, {**inputs, "logits_to_keep": 1}, target=5), every, strict=True):
        assert trace.target["score"] == pytest.approx(own.target["score"], abs=1e-5)
    right = {"input_ids": IDS, "attention_mask": mask.flip(1), "logits_to_keep": 1}
    with pytest.raises(ValueError, match="logits of 1 tokens, and the last token of an example is not among them"):
        capture(model, right, target=5)


@pytest.mark.parametrize("lengths", [(7, 4), (3, 7), (5, 6)])
def test_what_is_read_is_not_recalled_from_inputs_of_the_same_shape(lengths):
    """The last token of a padded example depends on its padding, not on the shape of the batch."""
    torch.manual_seed(0)
    model = hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, pad_token_id=0)).eval()
    for own in (lengths, lengths[::-1], lengths):
        mask = (torch.arange(7) < torch.tensor(own)[:, None]).long()
        inputs = {"input_ids": IDS * mask, "attention_mask": mask}
        assert [trace.readout for trace in capture_batch(model, inputs)] == [length - 1 for length in own]
        assert [trace.reads for trace in capture_batch(model, inputs, target=1)] == [(length - 1,) for length in own]


def test_a_model_is_captured_under_inference_mode():
    torch.manual_seed(0)
    model = hf.BertForSequenceClassification(hf.BertConfig(**TEXT)).eval()
    with torch.inference_mode():
        assert capture_batch(model, {"input_ids": IDS})[0].reads == (0,)
        assert capture_batch(model, {"input_ids": IDS.clone()}, target=0)[0].layers[0].gradient.of([0]).abs().max() > 0


def test_generation_that_cannot_go_on_says_so():
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT2, n_positions=12)).eval()
    with pytest.raises(ValueError, match="cannot write so far: it ran past its table of positions"):
        capture(model, {"input_ids": IDS[:1]}, generate={"max_new_tokens": 20, "do_sample": False, "eos_token_id": 98})
    assert len(capture_batch(model, {"input_ids": IDS}, generate=2)) == 2


def test_a_mixer_between_eager_layers_is_named():
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            config = hf.BertConfig(**TEXT, attn_implementation="eager")
            self.one, self.two = hf.BertModel(config), hf.BertModel(config)
            self.convolution = torch.nn.Conv1d(32, 32, 3, padding=1)

        def forward(self, input_ids):
            hidden = self.convolution(self.one(input_ids).last_hidden_state.mT).mT
            return self.two(inputs_embeds=hidden).last_hidden_state

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="^convolution moves information between positions"):
        capture(Mixed().eval(), {"input_ids": IDS})


def test_pooled_outputs_say_which_positions_they_are_read_from():
    torch.manual_seed(0)
    pooled = hf.BertForSequenceClassification(hf.BertConfig(**TEXT, num_labels=3)).eval()
    assert capture_batch(pooled, {"input_ids": IDS})[0].reads == (0,)
    causal = hf.GPT2ForSequenceClassification(hf.GPT2Config(**GPT2, pad_token_id=0)).eval()
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
    traces = capture_batch(causal, {"input_ids": IDS * mask, "attention_mask": mask})
    assert [trace.reads for trace in traces] == [(6,), (3,)]
    whole = hf.Dinov2ForImageClassification(hf.Dinov2Config(**SMALL, image_size=32, patch_size=8)).eval()
    trace = capture_batch(whole, {"pixel_values": images()})[0]  # its head takes [CLS] beside the mean of the patches
    assert trace.reads == trace.readout == tuple(range(17))
    average = hf.ViTModel(hf.ViTConfig(**VISION), add_pooling_layer=False).eval()
    assert capture_batch(average, images())[0].reads is None


def test_without_a_proof_windows_are_refused_and_stacks_assumed():
    swin, inputs, _ = FAMILIES["swin"]()
    with pytest.raises(ValueError, match="can only be asked of the model: leave prove=False and weights= out"):
        capture(swin, inputs, prove=False)
    model, inputs, _ = FAMILIES["bert"]()
    assumed, proved = capture_batch(model, inputs, prove=False)[0], capture_batch(model, inputs)[0]
    assert assumed.model["proofs"]["isolation"] == "assumed (prove=False)"
    torch.testing.assert_close(assumed.layers[-1].attention(), proved.layers[-1].attention())


def test_padding_is_hidden_example_by_example_where_heads_come_first():
    """A mask that hides other keys in each example, of a call whose outer axes are (head, example)."""

    class HeadsFirst(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96)

        def forward(self, x, visible):
            q, k, v = (part.unflatten(-1, (4, 8)).permute(2, 0, 1, 3) for part in self.qkv(x).chunk(3, -1))
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible[None, :, None])
            return x + mixed.permute(1, 2, 0, 3).flatten(2)

    visible = torch.arange(6) < torch.tensor([6, 4, 2])[:, None]
    torch.manual_seed(0)
    traces = capture_batch(HeadsFirst().eval(), {"x": torch.randn(3, 6, 32), "visible": visible})
    assert [trace.layers[0].shape for trace in traces] == [(4, 6, 6), (4, 4, 4), (4, 2, 2)]


def test_a_mixer_that_was_allowed_stands_in_every_caption():
    from attnflow.show import wording

    class Rolled(torch.nn.Module):
        def forward(self, x):
            return x + x.roll(1, 1)

    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = hf.BertModel(hf.BertConfig(**TEXT))
            self.rolled = Rolled()

        def forward(self, input_ids):
            return self.rolled(self.bert(input_ids).last_hidden_state)

    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="^rolled moves information between positions"):
        trace = capture_batch(Mixed().eval(), {"input_ids": IDS}, mixers="allow")[0]
    relevance = attnflow.rollout(trace, query=0)
    assert relevance.recipe["model"]["proofs"]["mixers"] == "rolled"
    for said in (wording.caption(relevance), wording.method_and_query(relevance)):
        assert "rolled mixes positions unseen" in said


@pytest.mark.parametrize("place", ["layers.0.mlp", "layers.2.mlp"])
@pytest.mark.parametrize("mixes", ["text alone", "all"])
def test_mixing_beside_image_tokens_is_seen(place, mixes):
    """In a language model with image tokens too, among its words alone, and behind its last attention."""
    model, inputs = llava()
    module = model.get_submodule(f"language_model.{place}")

    def mix(_module, _args, output):
        rolled = output.roll(1, 1)
        if mixes == "text alone":  # the last of the words takes from the one before it
            rolled = torch.cat([torch.zeros_like(output[:, :-1]), rolled[:, -1:]], 1)
        return output + rolled

    hook = module.register_forward_hook(mix)
    with pytest.raises(ValueError, match="moves information between positions|no graph that can be explained"):
        capture(model, inputs, tower="language_model")
    hook.remove()
    assert capture(model, inputs, tower="language_model").model["proofs"]["isolation"] == "proved"
