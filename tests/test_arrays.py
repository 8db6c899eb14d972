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


def test_layers_need_not_be_square():
    lower, upper = attention(4, 6), attention(3, 4)
    relevance = attnflow.rollout([lower, upper])
    np.testing.assert_allclose(relevance.scores, upper @ lower)
    assert relevance.tokens == tuple("012345")
    assert attnflow.flow([lower, upper]).scores.shape == (3, 6)


def test_a_residual_is_the_papers_for_a_trace_and_none_for_arrays():
    weights = attention(1, 2, 4, 4)
    np.testing.assert_allclose(attnflow.rollout(weights).scores, weights[0].mean(0))
    mixed = 0.5 * weights[0].mean(0) + 0.5 * np.eye(4)
    np.testing.assert_allclose(attnflow.rollout(Trace.from_arrays(weights)).scores, mixed)


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
    with pytest.raises(ValueError, match=r"holds a batch of 3 examples; choose one with example \(--example 0\)"):
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
