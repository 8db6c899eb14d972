"""Rules of the backward pass: relevance adds up to the score on any family, and the model stays what it was."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import attnflow
from attnflow import capture
from attnflow.baselines import BASELINES
from attnflow.capturing.rules import LRP, RULES, Rules, _tried
from attnflow.capturing.target import Direction, similarity_to
from classifiers import small_bert, sst2, sst2_examples, tokenizer
from families import FAMILIES, harder
from toys import seeded

# Patches drawn at random; kernels that take single precision only; a mask that has no batch axis.
LEFT_OUT = {"vilt", "gpt_oss_sinks", "transformer_encoder_causal"}
ADDING_UP = sorted(set(FAMILIES) - LEFT_OUT)


def first_tensor(output):
    values = [output] if isinstance(output, torch.Tensor) else output.values()
    return next(x for x in values if isinstance(x, torch.Tensor))


def score_of(output):
    """A linear function of a model's output."""
    x = first_tensor(output)
    return (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)).sum()


def entrance(model, inputs):
    """What enters, as a leaf, and the model as its function: embeddings of tokens, or pixels."""
    if not isinstance(inputs, dict):
        return inputs[:1].double().requires_grad_(), model
    if "input_ids" not in inputs:
        name = next(name for name, x in inputs.items() if x.is_floating_point())
        rest = {other: x[:1] for other, x in inputs.items() if other != name}
        return inputs[name][:1].double().requires_grad_(), lambda x: model(**{name: x}, **rest)
    inputs = {name: x[:1].double() if x.is_floating_point() else x[:1] for name, x in inputs.items()}
    name = next((name for name, x in inputs.items() if x.is_floating_point() and x.ndim > 3), None)
    if name is not None:
        return inputs[name].requires_grad_(), lambda x: model(**{**inputs, name: x})
    shared = model.get_input_embeddings().weight
    tables = [one for one in model.modules() if isinstance(one, nn.Embedding) and one.weight is shared]
    values = tables[0](inputs["input_ids"]).detach().requires_grad_()

    def run(x):
        hooks = [table.register_forward_hook(lambda *_: x) for table in tables]
        try:
            return model(**inputs)
        finally:
            for hook in hooks:
                hook.remove()

    return values, run


@pytest.mark.parametrize("family", ADDING_UP)
def test_tokens_and_biases_add_up_to_the_score(family):
    model, inputs, _ = FAMILIES[family]()
    model = harder(model)
    values, run = entrance(model, inputs)
    expected = first_tensor(run(values))
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    for name in RULES:
        with Rules(name).of(model) as rules:
            output = run(values)
        torch.testing.assert_close(first_tensor(output), expected, rtol=1e-12, atol=1e-12)
        assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
        assert hooks == sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
        score = score_of(output)
        leaves = [values, *rules.constants]
        gradients = torch.autograd.grad(score, leaves, allow_unused=True)
        parts = [(x * one).sum().item() for x, one in zip(leaves, gradients, strict=True) if one is not None]
        assert np.isfinite(parts).all()
        if RULES[name].adds_up:  # some models compute their norms in single precision
            assert abs(sum(parts) - score.item()) < 1e-6 * max(abs(score.item()), abs(parts[0]))


@pytest.mark.parametrize("rules", RULES)
def test_a_sentence_of_sst2_adds_up(data, rules):
    model, words = sst2(data)
    for text, _ in sst2_examples(data, 3):
        relevance = attnflow.explain(model, text, rules, tokenizer=words)
        checks, score = relevance.recipe["checks"], relevance.recipe["target"]["score"]
        total = relevance.scores.sum() + checks["bias_share"] * score
        assert abs(total - score) <= (checks["completeness_error"] + 1e-6) * max(
            abs(score), abs(relevance.scores).max()
        )
        if rules == "cp-lrp":
            assert checks["completeness_error"] < 1e-4
        else:
            assert checks["completeness_error"] > 1e-6  # they leak by construction


def returned(kept, _module, _args, output):
    kept.append(output[0])


def test_gradients_of_attention_follow_the_rules():
    """What capture keeps of a call is what autograd says under the mode, of what the attention returned."""
    model = small_bert()
    inputs = tokenizer()("it is a good film", return_tensors="pt")
    inputs["input_ids"] %= model.config.vocab_size
    seen = {}
    for rules in (None, *RULES):
        trace = capture(model, dict(inputs), target=1, rules=rules)
        kept = []
        keep = partial(returned, kept)
        hooks = [layer.attention.self.register_forward_hook(keep) for layer in model.bert.encoder.layer]
        if rules is None:
            output = model(**inputs)
        else:
            embeddings = model.bert.embeddings.register_forward_hook(lambda *a: a[-1].detach().requires_grad_())
            with Rules(rules).of(model):
                output = model(**inputs)
            embeddings.remove()
        gradients = torch.autograd.grad(output.logits[0, 1], kept)
        for hook in hooks:
            hook.remove()
        for layer, gradient in zip(trace.layers, gradients, strict=True):
            own = layer.gradient.output.permute(1, 0, 2).flatten(1)
            torch.testing.assert_close(own, gradient[0], rtol=1e-4, atol=1e-6)
        seen[rules] = trace.layers[0].gradient.of(slice(None))
        assert trace.target.get("rules") == rules
    for rules in RULES:
        assert not torch.allclose(seen[None], seen[rules], rtol=1e-2)


class Odd(nn.Module):
    """A classifier with a function that no rule covers."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 3)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids):
        return self.head(torch.sinh(1 + self.layer(self.words(input_ids)))[:, 0])


def test_a_function_without_a_rule_is_named():
    model = seeded(Odd())
    ids = {"input_ids": torch.arange(5)[None]}
    with pytest.warns(UserWarning, match=r"relevance misses .* of the score; functions without a rule: torch.sinh"):
        relevance = attnflow.explain(model, ids, "cp-lrp")
    assert relevance.recipe["checks"]["without_rule"] == ["torch.sinh"]
    assert relevance.recipe["checks"]["completeness_error"] > 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.forward = lambda input_ids: model.head(model.layer(model.words(input_ids))[:, 0])
        assert attnflow.explain(model, ids, "cp-lrp").recipe["checks"]["completeness_error"] < 1e-4


def test_a_function_without_a_rule_is_named_of_edges_too():
    model = seeded(Odd())
    with pytest.warns(UserWarning, match=r"rules='cp-lrp' have none for torch.sinh: gradients went through"):
        trace = capture(model, {"input_ids": torch.arange(5)[None]}, target=1, rules="cp-lrp")
    assert trace.target["without_rule"] == ["torch.sinh"]


def test_lrp_is_one_of_the_sets():
    model, ids = small_bert(), {"input_ids": torch.arange(5)[None]}
    found = attnflow.explain(model, ids, "lrp", target=1)
    np.testing.assert_array_equal(found.scores, attnflow.explain(model, ids, LRP, target=1).scores)
    assert found.recipe["method"] == LRP
    assert attnflow.explain(model, ids, "lrp", target=1, layer=0).recipe["target"]["rules"] == LRP


@pytest.mark.parametrize("method", ["cp-lrp", "gradient-norm", "integrated-gradients"])
def test_inference_mode_is_refused(method):
    model, ids = small_bert(), {"input_ids": torch.arange(5)[None]}
    trace = capture(model, ids)
    with torch.inference_mode(), pytest.raises(ValueError, match=r"not to be had inside torch.inference_mode\(\)"):
        BASELINES[method].function(trace, model, ids, target=1)


def test_half_precision_sums_in_single(data):
    """Relevance in bfloat16 differs from that in single precision by rounding alone."""
    model, words = sst2(data)
    text = sst2_examples(data, 1)[0][0]
    single = attnflow.explain(model, text, "cp-lrp", tokenizer=words, target=1, layer="all")
    half = attnflow.explain(model.bfloat16(), text, "cp-lrp", tokenizer=words, target=1, layer="all")
    assert half.scores.dtype == np.float64
    assert np.corrcoef(single.scores.ravel(), half.scores.ravel())[0, 1] > 0.98
    assert half.recipe["checks"]["conservation"] < 0.1


class Checkpointed(nn.Module):
    """Runs each layer of an encoder under gradient checkpointing."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 3)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids):
        x = self.words(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x[:, 0])


def test_checkpointed_blocks_are_refused_in_a_line():
    ids = {"input_ids": torch.arange(5)[None]}
    for call in (attnflow.explain, lambda *args, **how: capture(*args[:2], rules="cp-lrp", **how)):
        with pytest.raises(ValueError, match="gradient checkpointing runs blocks again without the rules"):
            call(seeded(Checkpointed()), ids, "cp-lrp", target=1)


def cosine(output):
    """Of the mean embedding to that of the first token's, each divided by its own length by hand."""
    one, two = output.last_hidden_state.mean(1), torch.ones(1, 384)
    return (one / one.norm(dim=-1, keepdim=True) * F.normalize(two)).sum(-1)


TARGETS = {
    "similarity": similarity_to(torch.ones(384), "mean"),
    "cosine by hand": cosine,
    "a normalised direction": lambda output: F.normalize(output.last_hidden_state[:, 0], dim=-1)[:, 3],
    "cosine of two tokens": lambda output: F.cosine_similarity(*output.last_hidden_state[:, 1:3].unbind(1)),
    "length": lambda output: output.last_hidden_state[:, 2].norm(dim=-1),
    "direction": Direction(torch.ones(384), "mean"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_divides_by_a_length_is_added_up_to(minilm, name):
    model, tokenizer = minilm
    text = "The keys to the cabinet are on the table."
    plain = attnflow.explain(model, text, "gradient-x-input", tokenizer=tokenizer, target=TARGETS[name])
    ruled = attnflow.explain(model, text, "cp-lrp", tokenizer=tokenizer, target=TARGETS[name])
    checks = ruled.recipe["checks"]
    assert checks["completeness_error"] < 1e-5
    assert "without_rule" not in checks
    assert ruled.recipe["target"]["score"] == pytest.approx(plain.recipe["target"]["score"], rel=1e-6)
    trace = attnflow.capture(model, text, tokenizer=tokenizer, target=TARGETS[name], rules="cp-lrp")
    assert trace.target["score"] == pytest.approx(plain.recipe["target"]["score"], rel=1e-6)


def test_a_softmax_of_the_target_keeps_its_gradient(data):
    model, tokenizer = sst2(data)
    with pytest.warns(UserWarning, match="softmax of the target"):
        ruled = attnflow.explain(
            model, "a gripping film", "cp-lrp", tokenizer=tokenizer, target=lambda one: one.logits.softmax(-1)[:, 1]
        )
    assert np.abs(ruled.row).max() > 1e-3


def test_names_that_are_not():
    model = small_bert()
    ids = {"input_ids": torch.arange(5)[None]}
    with pytest.raises(ValueError, match="rules 'lrp' are unknown; choose one of libra, attnlrp, cp-lrp"):
        capture(model, ids, target=0, rules="lrp")
    with pytest.raises(ValueError, match="rules='libra' say how gradients of a target are taken, and there is none"):
        capture(model, ids, rules="libra")
    assert set(RULES) <= set(BASELINES)


class Branch(nn.Module):
    """A classifier that applies a function to its hidden states, as a statement or as an expression."""

    def __init__(self, function):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.norm = nn.GroupNorm(2, 16)
        self.head = nn.Linear(16, 3)
        self.function = function

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids):
        return self.head(self.function(self, self.layer(self.words(input_ids))).mean(1))


def relu_statement(_, x):
    nn.functional.relu(x, inplace=True)
    return x


def sigmoid_statement(_, x):
    x.sigmoid_()
    return x


def gate_statement(_, x):
    x.mul_(x + 1)
    return x


IN_PLACE = nn.SiLU(inplace=True)
FUNCTIONS = {
    "relu as a statement": relu_statement,
    "sigmoid as a statement": sigmoid_statement,
    "gate as a statement": gate_statement,
    "a module in place": lambda _, x: IN_PLACE(x),
    "group norm": lambda model, x: model.norm(x.flatten(0, 1)).view_as(x),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions_in_place_and_group_norms(kind):
    model = seeded(Branch(FUNCTIONS[kind]))
    ids = {"input_ids": torch.arange(5)[None]}
    plain = model(**ids).detach()
    for rules in RULES:
        trace = capture(model, ids, target=1, rules=rules)
        torch.testing.assert_close(trace.output.detach(), plain)
        relevance = attnflow.explain(model, ids, rules, target=1)
        assert relevance.recipe["target"]["score"] == pytest.approx(float(plain[0, 1]), abs=1e-6)
    checks = relevance.recipe["checks"]  # of cp-lrp, the last
    assert checks["completeness_error"] < 1e-4


class Shifted(nn.Module):
    """Adds to each position what stands there in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("places", torch.arange(40.0).view(5, 8))

    def forward(self, x):
        return x + self.places[: x.shape[1], : x.shape[2]]


def test_a_module_is_an_activation_where_it_maps_each_number_by_itself_and_all_alike():
    x = torch.randn(2, 5, 8)
    for module, expected in (
        (nn.GELU(), (True, False)),
        (nn.Dropout().eval(), (True, False)),
        (nn.ReLU(inplace=True), (True, True)),
        (nn.Softmax(dim=1), (False, False)),
        (nn.Softmax(dim=-1), (False, False)),
        (nn.Flatten(), (False, False)),
        (Shifted(), (False, False)),
    ):
        before = x.clone()
        assert _tried(module, x) == expected, module
        torch.testing.assert_close(x, before, rtol=0, atol=0)


@pytest.mark.parametrize("module", [nn.Tanh(), nn.Dropout().eval()])
def test_a_parameter_that_passes_through_a_module_is_no_input(module):
    """As DeBERTa's relative positions do, which attnlrp would give half of a product's relevance to."""
    with Rules("attnlrp").of(module) as rules:
        assert not module(nn.Parameter(torch.ones(3))).requires_grad
    assert not rules.constants


def test_two_threads_get_their_own_answers():
    model = small_bert()
    inputs = [{"input_ids": torch.randint(5, 500, (1, 9), generator=torch.Generator().manual_seed(n))} for n in (0, 1)]
    alone = [attnflow.explain(model, one, "cp-lrp", target=1).scores for one in inputs]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(6):
            both = list(pool.map(lambda one: attnflow.explain(model, one, "cp-lrp", target=1).scores, inputs))
            for found, expected in zip(both, alone, strict=True):
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)
