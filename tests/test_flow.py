"""The flow engine against slow references, on examples, random graphs, real attention, and wrong input."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import reduce
from itertools import pairwise
from typing import get_args

import numba
import numpy as np
import pytest
import torch

import reference
from attnflow import flow as explained_flow
from attnflow import memory
from attnflow.propagate import _engine as engine
from attnflow.propagate._maxflow import kernel
from attnflow.propagate.cuts import min_cut, paths
from attnflow.propagate.flow import flow, flow_bounds, flow_of_layers

CLOSE = {"rtol": 1e-9, "atol": 1e-300}


def random_layers(rng, kind, depth, width, square=True):
    """A stack of `depth` layers, the one nearest the input first."""
    widths = [width] * (depth + 1) if square else rng.integers(1, width + 1, depth + 1)
    layers = []
    for keys, queries in pairwise(widths):
        layer = rng.random((queries, keys))
        if kind == "integers":
            layer = rng.integers(0, 50, layer.shape).astype(float)
        elif kind == "sparse":
            layer *= rng.random(layer.shape) < 0.3
        elif kind == "repeated":
            layer = rng.integers(0, 4, layer.shape) / 4
        elif kind == "sharp":
            layer = np.exp(20 * layer)
            layer = 0.5 * layer / layer.sum(1, keepdims=True) + 0.5 * np.eye(queries, keys)
        elif kind == "causal":
            layer = np.tril(layer) / np.tril(layer).sum(1, keepdims=True)
        elif kind == "scales":
            layer = 10.0 ** (-30 * layer)
        elif kind == "identity":
            layer = np.eye(queries, keys) + layer * (rng.random(layer.shape) < 0.5) / (8 * keys)
        if rng.random() < 0.3 and kind != "identity":
            layer[rng.integers(queries)] = 0
        layers.append(layer)
    return layers


KINDS = ["uniform", "integers", "sparse", "repeated", "sharp", "causal", "scales", "identity"]


def check_cut(top, below, query, token, value):
    """The edges of the cut carry the value, and nothing passes without them."""
    cut = min_cut(top, below, query, token)
    layers = [*below, top]
    assert all(edge.capacity == layers[edge.layer][edge.query, edge.key] for edge in cut)
    np.testing.assert_allclose(sum(edge.capacity for edge in cut), value, **CLOSE)
    assert not reference.carries(top, below, query, token, {edge[:3] for edge in cut})


def test_the_examples_of_the_paper():
    narrow = np.zeros((3, 2))
    narrow[:, 0] = 0.1, 0.1, 0.0
    result = flow([[0.1, 0.1, 0.8]], [narrow])
    np.testing.assert_allclose(result.values, [[0.2, 0.0]])
    pipe = flow([[0.5]], [[[0.4, 0.3]], np.eye(2), [[1.0], [1.0]]][::-1])
    np.testing.assert_allclose(pipe.values, [[0.5]])


@pytest.mark.parametrize("kind", KINDS)
def test_equals_networkx(kind):
    rng = np.random.default_rng(KINDS.index(kind))
    for case in range(40):
        layers = random_layers(rng, kind, depth=rng.integers(1, 6), width=rng.integers(1, 8), square=case % 2)
        values = flow(layers[-1], layers[:-1]).values
        query, token = rng.integers(values.shape[0]), rng.integers(values.shape[1])
        expected = reference.flow_by_networkx(layers[-1], layers[:-1], query, token)
        np.testing.assert_allclose(values[query, token], expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_has_a_cut(kind):
    rng = np.random.default_rng(100 + KINDS.index(kind))
    for case in range(60):
        layers = random_layers(rng, kind, depth=rng.integers(1, 9), width=rng.integers(1, 25), square=case % 2)
        result = flow(layers[-1], layers[:-1])
        query, token = (rng.integers(size) for size in result.values.shape)
        check_cut(layers[-1], layers[:-1], query, token, result.values[query, token])
        assert set(np.unique(result.certificates)) <= {1, 2}


def test_equals_scipy_on_integers():
    rng = np.random.default_rng(1)
    for case in range(150):
        layers = random_layers(rng, "integers", depth=rng.integers(1, 8), width=rng.integers(1, 41), square=case % 2)
        values = flow(layers[-1], layers[:-1]).values
        for _ in range(3):
            query, token = rng.integers(values.shape[0]), rng.integers(values.shape[1])
            expected = reference.flow_by_scipy(layers[-1], layers[:-1], query, token)
            np.testing.assert_allclose(values[query, token], expected, rtol=1e-12)


def test_equals_the_least_of_all_cuts():
    rng = np.random.default_rng(2)
    for _ in range(40):
        layers = random_layers(rng, KINDS[rng.integers(len(KINDS))], depth=4, width=3, square=False)
        query, token = rng.integers(layers[-1].shape[0]), rng.integers(layers[0].shape[1])
        expected = reference.flow_by_cuts(layers[-1], layers[:-1], query, token)
        value = flow(layers[-1][[query]], layers[:-1], sinks=[token]).values[0, 0]
        np.testing.assert_allclose(value, expected, rtol=1e-12)


def real_layers(model, tokenizer, tokens):
    """The transitions of real attention over part of a real text: mean over heads, residual 0.5."""
    text = " ".join(module.__doc__ for module in (subprocess, threading, time))
    inputs = tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt")
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    return [0.5 * layer[0].double().mean(0) + 0.5 * torch.eye(tokens, dtype=torch.float64) for layer in attentions]


@pytest.mark.parametrize("tokens", [20, 100])
def test_real_attention(minilm, minilm_eager, tokens):
    layers = real_layers(minilm_eager, minilm[1], tokens)
    for depth in (1, 2, 3, 4, 6):
        top, below = layers[depth - 1], layers[: depth - 1]
        result = flow(top, below)
        arrays = [layer.numpy() for layer in (*below, top)]
        rollout = reduce(np.matmul, arrays[::-1])
        assert (result.values >= rollout * (1 - 1e-9)).all()
        for query, token in ((0, 1), (tokens - 1, 0), (tokens // 2, tokens // 3), (5, 5)):
            check_cut(arrays[-1], arrays[:-1], query, token, result.values[query, token])
    checks = result.checks()
    assert checks["known_by_bound"] + checks["known_by_cut"] == 1
    # Finding of docs/flow.md: at the top of a deep stack the query hardly matters, the more so the longer the text.
    assert checks["saturated"] > (0.9 if tokens == 100 else 0.8)


def test_does_not_depend_on_the_number_of_threads():
    layers = random_layers(np.random.default_rng(3), "sharp", depth=5, width=30)
    several = flow(layers[-1], layers[:-1]).values
    threads = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        one = flow(layers[-1], layers[:-1]).values
        assert numba.get_num_threads() == 1
    finally:
        numba.set_num_threads(threads)
    np.testing.assert_array_equal(several, one)


def test_half_ways_that_meet_give_the_same(monkeypatch):
    rng = np.random.default_rng(11)
    layers = [0.5 * rng.dirichlet(np.ones(40), 40) + 0.5 * np.eye(40) for _ in range(12)]
    monkeypatch.setattr(engine, "_WORTH_A_SAMPLE", np.inf)
    plain = flow(layers[-1], layers[:-1])
    found = []
    meeting = engine._meeting
    monkeypatch.setattr(engine, "_WORTH_A_SAMPLE", 0)
    monkeypatch.setattr(engine, "_meeting", lambda *given: found.append(meeting(*given)) or found[-1])
    met = flow(layers[-1], layers[:-1])
    assert found[0][0] >= 0, "no pair of the sample met"
    np.testing.assert_array_equal(met.values, plain.values)
    np.testing.assert_array_equal(met.certificates, plain.certificates)
    check_cut(layers[-1], layers[:-1], 3, 17, met.values[3, 17])


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_left_out_change_nothing(kind, monkeypatch):
    rng = np.random.default_rng(12)
    for depth in (2, 3, 6):
        layers = random_layers(rng, kind, depth, 12, square=False)
        found = []
        for left_out in (False, True):
            monkeypatch.setattr(engine, "_ends_bind", lambda *given, answer=left_out: answer)
            found.append(flow(layers[-1], layers[:-1]).values)
        np.testing.assert_allclose(*found, **CLOSE)


def test_bounds_are_left_out_where_only_the_ends_bind(monkeypatch):
    rng = np.random.default_rng(13)
    even = [0.5 * rng.dirichlet(np.ones(40), 40) + 0.5 * np.eye(40) for _ in range(6)]
    sharp = [np.exp(8 * rng.normal(size=(40, 40))) for _ in range(6)]
    sharp = [0.5 * layer / layer.sum(1, keepdims=True) + 0.5 * np.eye(40) for layer in sharp]
    asked, ask = [], engine._ends_bind
    monkeypatch.setattr(engine, "_WORTH_LEAVING_OUT", 0)
    monkeypatch.setattr(engine, "_ends_bind", lambda *given: asked.append(ask(*given)) or asked[-1])
    for layers in (even, sharp):
        left_out = flow(layers[-1][:2], layers[:-1])
        np.testing.assert_allclose(left_out.values, flow(layers[-1], layers[:-1]).values[:2], **CLOSE)
    assert asked == [True, False, False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_half_ways_prove_nothing_false(kind, monkeypatch):
    monkeypatch.setattr(engine, "_WORTH_A_SAMPLE", 0)
    rng = np.random.default_rng(200 + KINDS.index(kind))
    for case in range(15):
        layers = random_layers(rng, kind, depth=rng.integers(5, 10), width=rng.integers(2, 20), square=case % 2)
        result = flow(layers[-1], layers[:-1])
        for _ in range(5):
            query, token = (rng.integers(size) for size in result.values.shape)
            check_cut(layers[-1], layers[:-1], query, token, result.values[query, token])


def test_a_pair_alone_is_the_pair_among_others():
    layers = random_layers(np.random.default_rng(4), "sharp", depth=4, width=20)
    every = flow(layers[-1], layers[:-1]).values
    np.testing.assert_array_equal(flow(layers[-1][[7]], layers[:-1], sinks=[3, -1]).values[0], every[7, [3, -1]])


def test_degenerate_graphs():
    one = np.array([[0.25]])
    assert flow(one, []).values == 0.25
    assert flow(one, [one * 2, one * 3]).values == 0.25
    np.testing.assert_array_equal(flow(np.eye(5), [np.eye(5)] * 4).values, np.eye(5))
    np.testing.assert_array_equal(flow(np.zeros((3, 4)), [np.ones((4, 2))] * 1).values, np.zeros((3, 2)))
    zeros = flow(np.ones((3, 3)), [np.ones((3, 3)), np.zeros((3, 3)), np.ones((3, 3))])
    np.testing.assert_array_equal(zeros.values, np.zeros((3, 3)))
    assert flow(np.ones((2, 3)), [np.ones((3, 2))], sinks=[]).values.shape == (2, 0)


@pytest.mark.parametrize("scale", [1e-30, 1e30, 2.0**-900])
def test_scaling_the_capacities_scales_the_flow(scale):
    layers = random_layers(np.random.default_rng(5), "sharp", depth=5, width=12)
    values = flow(layers[-1], layers[:-1]).values
    scaled = flow(layers[-1] * scale, [layer * scale for layer in layers[:-1]]).values
    np.testing.assert_allclose(scaled / scale, values, rtol=1e-9)


def test_small_flows_through_wide_edges_keep_their_digits():
    rng = np.random.default_rng(6)
    for _ in range(20):
        layers = random_layers(rng, "uniform", depth=5, width=10)
        layers[0][:, 0] *= 1e-200
        layers[0][:, 1] *= 1e-12
        for token in (0, 1):
            value = flow(layers[-1], layers[:-1]).values[3, token]
            check_cut(layers[-1], layers[:-1], 3, token, value)


@pytest.mark.parametrize("depth", [2, 6, 12])
@pytest.mark.parametrize("narrow", [1e-3, 1e-14])
def test_flows_far_below_their_bound_keep_their_digits(depth, narrow):
    """Two separate routes, one narrow at its top and one at its bottom: the bound counts each many times over."""
    rng, n = np.random.default_rng(depth), 16
    below = [np.zeros((2 * n, 1))]
    below[0][:n], below[0][n] = 1, 0.7 * narrow
    for _ in range(depth):
        layer = 0.5 + rng.random((2 * n, 2 * n))
        layer[:n, n:] = layer[n:, :n] = 0
        below.append(layer)
    top = np.zeros((1, 2 * n))
    top[0, n:], top[0, 0] = 1, narrow
    value = flow(top, below).values[0, 0]
    if depth == 12:
        assert flow_bounds(top, below).upper > 1e3 * value
    np.testing.assert_allclose(value, 1.7 * narrow, rtol=1e-12)
    check_cut(top, below, 0, 0, value)
    routes = paths(top, below, 0, 0)
    np.testing.assert_allclose([routes.flow, sum(path.amount for path in routes.paths)], 1.7 * narrow, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_at_once_is_each_layer_alone(kind):
    layers = random_layers(np.random.default_rng(300 + KINDS.index(kind)), kind, depth=6, width=14)
    for first in (0, 2):
        together = flow_of_layers(layers[first:], layers[:-1], sinks=[0, 5])
        for number, result in enumerate(together, first):
            alone = flow(layers[number], layers[:number], sinks=[0, 5])
            np.testing.assert_array_equal(result.values, alone.values)
            np.testing.assert_array_equal(result.certificates, alone.certificates)
            np.testing.assert_array_equal(result.saturated, alone.saturated)


def test_every_layer_must_fit():
    with pytest.raises(ValueError, match=r"layer 1 of shape \(3, 3\) attends to 3 keys, but layer 0"):
        flow_of_layers([np.ones((3, 3)), np.ones((3, 4))], [np.ones((4, 4)), np.ones((4, 4))])


@pytest.mark.parametrize("kind", KINDS)
def test_bounds_enclose_the_flow(kind):
    rng = np.random.default_rng(400 + KINDS.index(kind))
    for case in range(20):
        layers = random_layers(rng, kind, depth=rng.integers(1, 9), width=rng.integers(1, 25), square=case % 2)
        values = flow(layers[-1], layers[:-1]).values
        lower, upper = flow_bounds(layers[-1], layers[:-1])
        assert (lower >= 0).all()
        assert (lower <= values * (1 + 1e-9)).all()
        assert (values <= upper * (1 + 1e-9)).all()
        plain = flow_bounds(layers[-1], layers[:-1], found=False)
        np.testing.assert_array_equal(plain.upper, upper)
        assert len(layers) == 1 or not plain.lower.any()


def test_bounds_of_real_attention_meet(minilm_eager, minilm):
    layers = real_layers(minilm_eager, minilm[1], 100)
    lower, upper = flow_bounds(layers[-1], layers[:-1])
    assert (lower >= upper * (1 - 1e-9)).mean() > 0.7
    assert (1 - lower / upper).mean() < 0.02


def test_saturation_by_query():
    result = flow([[0.1, 0.0], [0.6, 0.0]], [[[0.5, 0.5], [0.5, 0.5]], np.eye(2)])
    np.testing.assert_array_equal(result.saturated, [[True, True], [False, False]])
    assert result.checks()["saturated_by_query"] == [1.0, 0.0]
    assert result.checks()["saturated"] == 0.5


def test_what_a_query_keeps_to_itself_fixes_its_flow():
    """A query that keeps nearly all to itself has what its own row in layer 0 lets through, and what it gives away."""
    below = [np.full((3, 3), 1 / 3), np.eye(3) * 0.9 + 0.1 / 3]
    result = flow([[0.98, 0.01, 0.01], [0.0, 0.5, 0.5]], below, queries=[0, 1])
    np.testing.assert_allclose(result.values[0], 1 / 3 + 0.02 + 0.2 / 3)
    assert result.fixed[0].all()
    assert not result.saturated.any()
    assert not result.fixed[1].any()
    checks = result.checks()
    assert (checks["fixed_by_layer_0"], checks["fixed_by_layer_0_by_query"]) == (0.5, [1.0, 0.0])
    assert not flow([[0.98, 0.01, 0.01]], below).fixed.any()  # without its position


def test_real_attention_from_cls_is_fixed_by_layer_0(minilm_trace):
    by_layer = explained_flow(minilm_trace, query="[CLS]", layer="all").recipe["checks"]["layers"]
    fixed = [checks["fixed_by_layer_0"] for checks in by_layer]
    assert fixed[0] == 0
    assert min(fixed[1:]) > 0.9
    assert max(checks["saturated"] for checks in by_layer) < 0.5


def test_more_than_fits_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**6)
    before = time.perf_counter()
    with pytest.raises(MemoryError, match=r"6 layers of up to 300 nodes.* 0\.0 GB are free; explain fewer"):
        flow(np.ones((300, 300)), [np.ones((300, 300))] * 5)
    assert time.perf_counter() - before < 1


def test_free_memory_is_known_and_plausible():
    free = memory.free_memory()
    assert free is None or 10**6 < free < 10**14


LOADED = """
import logging
from attnflow.propagate import _engine
logging.basicConfig(format="%(message)s")
_engine.load_kernels()
"""


def test_says_when_it_compiles_and_not_when_it_only_loads(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", LOADED]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)
    )
    assert first.stderr.count("compiling its kernels for flow") == 1
    assert second.stderr == ""


def test_nothing_compiles_later(monkeypatch):
    monkeypatch.setattr(engine, "_WORTH_LEAVING_OUT", 0)
    monkeypatch.setattr(engine, "_WORTH_A_SAMPLE", 0)
    for part in get_args(engine.Part):
        engine.load_kernels(part)
    kernels = {name: one for name, one in vars(engine.load_kernels()).items() if hasattr(one, "signatures")}
    before = {name: len(one.signatures) for name, one in kernels.items()}
    layers = random_layers(np.random.default_rng(14), "sharp", depth=6, width=10)
    flow(layers[-1], layers[:-1])
    flow(layers[-1][:2], layers[:-1])
    flow_of_layers(layers, layers[:-1], sinks=[1])
    flow_bounds(layers[-1], layers[:-1])
    min_cut(layers[-1], layers[:-1], [2, 3], 4)
    paths(layers[-1], layers[:-1], 2, [4, 5])
    assert {name: len(one.signatures) for name, one in kernels.items()} == before


def test_compiles_where_nothing_can_be_written():
    names = {}
    exec("def double(x):\n    return 2 * x", names)  # in no file, so that numba has no place for its code
    assert kernel(names["double"])(21) == 42


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tensors_of_any_float_type(dtype):
    layers = [torch.from_numpy(layer).to(dtype) for layer in random_layers(np.random.default_rng(7), "", 4, 6)]
    arrays = [layer.double().numpy() for layer in layers]
    values = flow(layers[-1].requires_grad_(), layers[:-1]).values
    np.testing.assert_array_equal(values, flow(arrays[-1], arrays[:-1]).values)


def test_inputs_are_not_changed():
    layers = random_layers(np.random.default_rng(8), "sharp", depth=4, width=8)
    copies = [layer.copy() for layer in layers]
    flow(layers[-1], layers[:-1])
    for layer, copy in zip(layers, copies, strict=True):
        np.testing.assert_array_equal(layer, copy)


def test_progress_ends_at_all_pairs():
    seen = []
    layers = random_layers(np.random.default_rng(9), "sharp", depth=4, width=16)
    flow(layers[-1], layers[:-1], progress=lambda done, pairs: seen.append((done, pairs)))
    assert seen[-1] == (256, 256)
    assert seen == sorted(seen)


def test_an_error_in_the_callback_ends_the_call():
    layers = random_layers(np.random.default_rng(10), "sharp", depth=6, width=60)

    def stop(done, pairs):
        raise KeyboardInterrupt

    before = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        flow(layers[-1], layers[:-1], progress=stop)
    assert time.perf_counter() - before < 1


LONG = """
import signal
import numpy as np
from attnflow.propagate.flow import flow

signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background of a shell ignore it
weights = np.exp(8 * np.random.default_rng(0).normal(size=(8, 256, 256)))
layers = list(weights / weights.sum(-1, keepdims=True) + np.eye(256))
flow(layers[-1], layers[:-1], progress=lambda done, pairs: print("under way", flush=True))
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no SIGINT to another process")
def test_ctrl_c_ends_a_long_flow():
    with subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"under way\n"
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=5)
        finally:
            process.kill()
    assert process.returncode != 0
    assert b"KeyboardInterrupt" in errors


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-9, 1e308])
def test_capacities_that_are_not(value):
    layers = [np.ones((4, 4)) for _ in range(3)]
    layers[1][2, 3] = value
    with pytest.raises(ValueError, match=r"layer 1 query 2, key 3 is"):
        flow(layers[2], layers[:2])


@pytest.mark.parametrize(
    ("top", "below", "message"),
    [
        (np.ones(3), [np.ones((3, 3))], r"layer 1, the explained one, has shape \(3,\); expected a matrix"),
        (np.ones((3, 3)), [np.ones((2, 3, 3))], r"layer 0 has shape \(2, 3, 3\)"),
        (np.ones((1, 0)), [np.ones((0, 3))], "at least one of each"),
        (np.ones((1, 3)), [np.ones((3, 3)), np.ones((4, 3))], "layer 2 of shape .* 3 keys, but layer 1 .* 4 queries"),
    ],
)
def test_layers_that_do_not_fit(top, below, message):
    with pytest.raises(ValueError, match=message):
        flow(top, below)


def test_positions_out_of_range():
    with pytest.raises(ValueError, match="input token 3 is out of range: there are 3"):
        flow(np.eye(3), [np.eye(3)], sinks=[3])
    with pytest.raises(ValueError, match="query -4 is out of range"):
        min_cut(np.eye(3), [np.eye(3)], -4, 0)


def test_importing_is_light():
    code = "import sys, attnflow.propagate.flow; print(sorted({'numba', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_torch_keeps_its_threads():
    """Numba starts threads at the first flow of a process, which resets torch's count where both use OpenMP."""
    code = (
        "import torch, numpy as np; torch.set_num_threads(1); from attnflow.propagate.flow import flow; "
        "flow(np.eye(3), [np.eye(3)] * 2); print(torch.get_num_threads())"
    )
    environment = os.environ | {"NUMBA_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "1"
