"""Attention that somebody else computed: every layout, and every way for it to be wrong."""

import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import attnflow
from attnflow import Trace


def attention(*shape, seed=0):
    """Random attention weights whose rows sum to 1."""
    weights = np.random.default_rng(seed).random(shape)
    return weights / weights.sum(-1, keepdims=True)


LAYOUTS = {
    "(layer, head, query, key)": lambda a: a,
    "(layer, batch, head, query, key)": lambda a: a[:, None],
    "list of (head, query, key)": list,
    "list of (batch, head, query, key)": lambda a: [layer[None] for layer in a],
    "tuple of torch tensors": lambda a: tuple(torch.tensor(layer[None]) for layer in a),
    "float32": lambda a: a.astype("f4"),
    "long double": lambda a: a.astype(np.longdouble),
    "big-endian": lambda a: a.astype(">f8"),
    "nested lists": lambda a: a.tolist(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_same_rollout(layout):
    weights = attention(3, 2, 5, 5)
    expected = attnflow.rollout(Trace.from_arrays(weights)).scores
    scores = attnflow.rollout(Trace.from_arrays(LAYOUTS[layout](weights))).scores
    np.testing.assert_allclose(scores, expected, atol=1e-6 if layout == "float32" else 1e-15)


def test_layouts_without_heads():
    weights = attention(3, 4, 4)
    expected = attnflow.rollout(weights).scores
    np.testing.assert_array_equal(attnflow.rollout(list(weights)).scores, expected)
    np.testing.assert_array_equal(attnflow.rollout(weights[:, None]).scores, expected)


def test_a_batch_of_one_before_the_layers_is_no_batch_of_layers(tmp_path):
    weights = attention(3, 2, 5, 5)
    np.testing.assert_array_equal(attnflow.rollout(weights[None]).scores, attnflow.rollout(weights).scores)
    np.save(tmp_path / "one.npy", weights[None])
    for example in (None, 0, -1, np.int64(0)):
        assert len(attnflow.load(tmp_path / "one.npy", example=example).layers) == 3
    with pytest.raises(ValueError, match="example 1 is out of range: the batch holds 1"):
        attnflow.load(tmp_path / "one.npy", example=1)


def test_layers_need_not_be_square():
    lower, upper = attention(4, 6), attention(3, 4)
    relevance = attnflow.rollout([lower, upper], residual=0)
    np.testing.assert_allclose(relevance.scores, upper @ lower)
    assert relevance.tokens == tuple("012345")
    assert attnflow.flow([lower, upper], residual=0).scores.shape == (3, 6)


def test_the_residual_is_the_papers_wherever_attention_comes_from(tmp_path):
    weights = attention(1, 2, 4, 4)
    mixed = 0.5 * weights[0].mean(0) + 0.5 * np.eye(4)
    np.save(tmp_path / "attention.npy", weights)
    for given in (weights, Trace.from_arrays(weights), attnflow.load(tmp_path / "attention.npy")):
        relevance = attnflow.rollout(given)
        np.testing.assert_allclose(relevance.scores, mixed)
        assert relevance.recipe["settings"]["residual"] == 0.5
        np.testing.assert_allclose(attnflow.rollout(given, residual=0).scores, weights[0].mean(0))


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".safetensors"])
def test_files_round_trip(tmp_path, suffix):
    weights = attention(11, 2, 5, 5)
    path = tmp_path / f"attention{suffix}"
    match suffix:
        case ".npz":
            np.savez(path, attention=weights, tokens=np.array(list("abcde")))
        case ".npy":
            np.save(path, weights)
        case _:
            save_file({"attention": weights}, path)
    trace = attnflow.load(path)
    assert len(trace.layers) == 11
    np.testing.assert_array_equal(trace.layers[10].attention(), weights[10])
    assert trace.tokens == (tuple("abcde") if suffix == ".npz" else tuple("01234"))


@pytest.mark.parametrize("save", [np.savez, lambda path, **arrays: save_file(arrays, path)])
def test_one_array_per_layer_comes_in_natural_order(tmp_path, save):
    layers = {f"layer_{number}": attention(2, 4, 4, seed=number) for number in range(12)}
    path = tmp_path / ("layers.npz" if save is np.savez else "layers.safetensors")
    save(path, **layers)
    trace = attnflow.load(path)
    assert [layer.name for layer in trace.layers] == [f"layer_{number}" for number in range(12)]
    np.testing.assert_array_equal(trace.layers[2].attention(), layers["layer_2"])


def test_an_example_is_chosen_from_a_batch(tmp_path):
    weights = attention(2, 3, 4, 5, 5)
    np.save(tmp_path / "batch.npy", weights)
    trace = attnflow.load(tmp_path / "batch.npy", example=1)
    np.testing.assert_array_equal(trace.layers[1].attention(), weights[1, 1])
    with pytest.raises(ValueError, match=r"batch of 3 examples \(attention \(2, 3, 4, 5, 5\)\); choose one with"):
        attnflow.load(tmp_path / "batch.npy")
    with pytest.raises(ValueError, match="example 7 is out of range: the batch holds 3"):
        attnflow.load(tmp_path / "batch.npy", example=7)


def test_pickles_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return pytest.fail, ("the file was unpickled",)

    np.save(tmp_path / "objects.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    (tmp_path / "raw.npz").write_bytes(pickle.dumps(Bomb()))
    (tmp_path / "raw.npy").write_bytes(pickle.dumps(Bomb()))
    np.savez(tmp_path / "tokens.npz", a=attention(1, 2, 2), tokens=np.array([Bomb()], dtype=object))
    for name in ("objects.npy", "raw.npz", "raw.npy", "tokens.npz"):
        with pytest.raises(ValueError, match=r"cannot be read as attention arrays: .*never loaded"):
            attnflow.load(tmp_path / name)


def test_bad_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        attnflow.load(tmp_path / "absent.npz")
    with pytest.raises(ValueError, match="suffix must be one of .npz, .npy, .safetensors"):
        attnflow.load(tmp_path / "attention.pt")
    for name in ("short.npy", "short.npz", "short.safetensors"):
        (tmp_path / name).write_bytes(b"\x93NUMPY")
        with pytest.raises(ValueError, match="cannot be read as attention arrays"):
            attnflow.load(tmp_path / name)
    np.savez(tmp_path / "empty.npz")
    with pytest.raises(ValueError, match="holds no arrays"):
        attnflow.load(tmp_path / "empty.npz")
    np.save(tmp_path / "words.npy", np.array([[["a"]]]))
    with pytest.raises(ValueError, match="must be an array of numbers"):
        attnflow.load(tmp_path / "words.npy")


BAD = {
    "nan": (lambda a: a * np.where(np.arange(4) == 2, np.nan, 1), "layer 0, head 0, query 0, key 2 is nan"),
    "infinite": (lambda a: a + np.inf, "layer 0, head 0, query 0, key 0 is inf"),
    "negative": (lambda a: a - 0.9, "finite and not negative; layer 0, head 0"),
    "one matrix": (lambda a: a[0, 0], r"shape \(4, 4\) has 2 axes; expected \(layer, head, query, key\)"),
    "scalar": (lambda a: np.float64(1), "has 0 axes"),
    "rank of a layer": (lambda a: [a[0], a[0, 0, 0]], r"layer 1 has shape \(4,\); expected"),
    "mismatch": (lambda a: [a[0], a[1][:, :, :3]], "layer 1 attends to 3 keys, but layer 0 below it has 4 queries"),
    "no layers": (lambda a: [], "needs at least one layer"),
    "no tokens": (lambda a: a[..., :0, :0], r"layer 0 is empty: \(head, query, key\) is \(2, 0, 0\)"),
    "batch": (lambda a: [a, a], "layer 0 has shape .*: a batch of 3 examples"),
    "mapping": (lambda a: {"attention": a}, "a dict was given"),
    "number": (lambda a: 5, "an array or a list of layers; a int was given"),
    "nothing": (lambda a: None, "a NoneType was given"),
    "boolean": (lambda a: a > 0, "must be an array of numbers; one of type bool"),
    "boolean tensor": (lambda a: torch.tensor(a > 0), "must be an array of numbers; one of type bool"),
    "complex tensor": (lambda a: torch.tensor(a + 1j), "must be an array of numbers; one of type complex128"),
    "logits": (lambda a: np.log(a), "finite and not negative; layer 0, head .*: are these logits"),
    "transposed": (lambda a: a.swapaxes(-1, -2), "layer 0 has rows that do not sum to 1 and columns .* transposed"),
    "complex": (lambda a: a + 1j, "must be an array of numbers; one of type complex128"),
}


@pytest.mark.parametrize("method", ["raw", "rollout", "flow"])
@pytest.mark.parametrize("case", BAD)
def test_bad_attention(case, method):
    spoil, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        getattr(attnflow, method)(spoil(attention(3, 2, 4, 4)), layer=0)


def test_rows_that_do_not_sum_to_one_need_no_residual():
    weights = attention(2, 2, 4, 4)
    weights[1, 1, 3] *= 0.9
    trace = Trace.from_arrays(weights)
    for method in (attnflow.rollout, attnflow.flow):
        with pytest.raises(ValueError, match="layer 1, head 1, query 3 sums to 0.9; pass residual=0"):
            method(trace)
        method(trace, residual=0)
    with pytest.raises(ValueError, match="layer 0 has 3 queries and 5 keys: a residual joins"):
        attnflow.rollout([attention(3, 5)], residual=0.5)


@pytest.mark.parametrize("factor", [0.5, 10])
@pytest.mark.parametrize("make", [Trace.from_arrays, attnflow.raw, lambda a: attnflow.raw(a, layer="all")])
def test_rows_far_from_one_are_warned_of(make, factor):
    with pytest.warns(UserWarning, match=f"the rows of layer 0 sum to {factor} on average"):
        make(factor * attention(1, 2, 4, 4))


def test_edges_of_a_graph_may_sum_to_anything():
    weights = 10 * attention(2, 4, 4)
    trace = Trace.from_arrays(weights.swapaxes(-1, -2), edges=True)
    scores = attnflow.flow(weights.swapaxes(-1, -2), residual=0).scores
    np.testing.assert_array_equal(attnflow.flow(trace, residual=0).scores, scores)


def test_real_attention_is_not_warned_of(minilm_trace):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        stack = torch.stack([layer.attention() for layer in minilm_trace.layers]).to(dtype)
        assert attnflow.raw(stack, query=0).scores.shape == (1, 12)
        with pytest.raises(ValueError, match="is it transposed"):
            attnflow.raw(stack.mT.softmax(-2), query=0)


LABELS = {
    "strings": list("abc"),
    "an array of strings": np.array(list("abc")),
    "bytes": np.array(list("abc"), dtype="S"),
    "objects": np.array(list("abc"), dtype=object),
}


@pytest.mark.parametrize("kind", LABELS)
def test_tokens_are_labels(kind):
    assert Trace.from_arrays(np.eye(3)[None], tokens=LABELS[kind]).tokens == tuple("abc")


@pytest.mark.parametrize("numbers", [[7, 8, 9], range(7, 10), np.arange(7, 10), torch.arange(7, 10)])
def test_tokens_may_be_numbers(numbers):
    assert Trace.from_arrays(np.eye(3)[None], tokens=numbers).tokens == ("7", "8", "9")


@pytest.mark.parametrize("tokens", ["abc", b"abc", 5, {"a": 1}, [["a"], ["b"], ["c"]], ["a", None, "c"]])
def test_what_is_no_label_is_refused(tokens, minilm):
    with pytest.raises(ValueError, match="tokens must be a sequence of labels|token . is a .*; expected a string"):
        Trace.from_arrays(np.eye(3)[None], tokens=tokens)
    model, _ = minilm
    with pytest.raises(ValueError, match="tokens must be a sequence of labels|token . is a .*; expected a string"):
        attnflow.capture(model, {"input_ids": torch.tensor([[101, 7592, 102]])}, tokens=tokens)


def test_tokens_of_a_file_may_be_bytes_and_of_each_example(tmp_path):
    weights = attention(2, 3, 4, 5, 5)
    rows = np.array([list("abcde"), list("fghij"), list("klmno")], dtype="S")
    np.savez(tmp_path / "batch.npz", attention=weights, tokens=rows)
    assert attnflow.load(tmp_path / "batch.npz", example=1).tokens == tuple("fghij")
    np.savez(tmp_path / "one.npz", attention=weights[:, :1], tokens=rows[0])
    assert attnflow.load(tmp_path / "one.npz").tokens == tuple("abcde")


BESIDE = {"labels": np.arange(5), "embeddings": np.ones((5, 64)), "loss": np.array(0.5), "names": np.array(["a"])}


@pytest.mark.parametrize("named", ["attention", "attentions", "Attention", "attention_0"])
def test_what_is_named_attention_is_the_attention(tmp_path, named):
    weights = attention(1, 2, 5, 5)
    np.savez(tmp_path / "file.npz", **BESIDE, **{named: weights}, tokens=np.array(list("abcde")))
    trace = attnflow.load(tmp_path / "file.npz")
    np.testing.assert_array_equal(trace.layers[0].attention(), weights[0])
    assert trace.tokens == tuple("abcde")


HELD = {
    "labels": ({"weights": attention(2, 2, 5, 5), "labels": np.arange(5)}, r"weights \(2, 2, 5, 5\), labels \(5,\)"),
    "embeddings": ({"a": attention(2, 2, 5, 5), "e": np.ones((5, 64))}, r"not clear: a \(2, 2, 5, 5\), e \(5, 64\)"),
    "two stacks": ({"encoder": attention(2, 2, 5, 5), "decoder": attention(2, 2, 5, 5)}, "which of them .* not clear"),
    "two series": ({f"{a}_{i}": attention(2, 5, 5) for a in "ab" for i in (0, 1)}, "which of them .* not clear"),
    "layers and more": ({"layer_0": attention(2, 5, 5), "layer_last": attention(2, 5, 5)}, "not clear"),
    "no attention": ({"hidden_0": np.ones((1, 5, 8)), "hidden_1": np.ones((1, 5, 8))}, r"holds hidden_0 \(1, 5, 8\)"),
    "vectors": ({"layer_0": np.ones(5), "layer_1": np.ones(5)}, r"'layer_0' .* is no attention: .*layer_1 \(5,\)"),
    "a vector": ({"mean": np.ones(5)}, r"'mean' .* is no attention: .*holds mean \(5,\)"),
    "tokens alone": ({"tokens": np.array(["a"])}, r"holds no arrays of attention \(tokens \(1,\)\)"),
}


@pytest.mark.parametrize("case", HELD)
def test_what_else_a_file_holds_is_named(tmp_path, case):
    arrays, message = HELD[case]
    np.savez(tmp_path / "file.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        attnflow.load(tmp_path / "file.npz")


def test_labels_must_fit():
    weights = attention(2, 4, 4)
    with pytest.raises(ValueError, match="3 tokens were given for 4 input positions"):
        Trace.from_arrays(weights, tokens=["a", "b", "c"])
    with pytest.raises(ValueError, match="unknown roles"):
        Trace.from_arrays(weights, roles=["word"] * 4)
    with pytest.raises(ValueError, match="grid of .* does not hold 3 patches"):
        Trace.from_arrays(weights, roles=["prefix", "patch", "patch", "patch"], grid=(2, 2))


def test_groups_hold_every_position_once():
    roles = ["special", "text", "prefix", "patch", "patch"]
    weights = attention(2, 5, 5)
    assert Trace.from_arrays(weights, roles=roles).groups == {"text": (0, 1), "image": (2, 3, 4)}
    assert Trace.from_arrays(weights, roles=roles, grid=(2, 1, 1)).groups == {"text": (0, 1), "video": (2, 3, 4)}
    assert Trace.from_arrays(weights).groups == {"text": (0, 1, 2, 3, 4)}
    image = Trace.from_arrays(weights, roles=["prefix", *["patch"] * 4], grid=(2, 2))
    assert image.groups == {"prefix": (0,), "patch": (1, 2, 3, 4)}
    assert attnflow.group_flow(image).tokens == ("prefix", "patch")


def test_given_arrays_are_not_changed():
    weights = attention(2, 2, 4, 4)
    before = weights.copy()
    for method in (attnflow.raw, attnflow.rollout, attnflow.flow):
        scores = method(weights).scores
        scores[:] = 0
    np.testing.assert_array_equal(weights, before)
