"""Random problems for the flow engine, and every check that a problem allows.

python tests/fuzz_flow.py --seconds 600 [--seed 1]
"""

import argparse
import time
from itertools import pairwise

import numpy as np

import reference
from attnflow.propagate.cuts import min_cut, paths
from attnflow.propagate.flow import flow, flow_bounds

KINDS = ["uniform", "integers", "sparse", "repeated", "sharp", "causal", "scales", "tiny", "huge", "one wide"]
KINDS += ["identity"]


def capacities(rng, kind, shape):
    """One layer (query, key)."""
    layer = rng.random(shape)
    if kind == "integers":
        layer = rng.integers(0, rng.choice([2, 50, 10**6]), shape).astype(float)
    elif kind == "sparse":
        layer *= rng.random(shape) < rng.choice([0.1, 0.3])
    elif kind == "repeated":
        layer = rng.integers(0, 4, shape) / 4
    elif kind == "sharp":
        layer = np.exp(20 * layer)
        layer = 0.5 * layer / layer.sum(1, keepdims=True) + 0.5 * np.eye(*shape)
    elif kind == "causal":
        layer = np.tril(layer)
        layer /= np.maximum(layer.sum(1, keepdims=True), 1e-300)
    elif kind == "scales":
        layer = 10.0 ** (-12 * layer)
    elif kind == "tiny":
        layer *= 1e-250
    elif kind == "huge":
        layer *= 1e250
    elif kind == "one wide":
        layer[rng.integers(shape[0])] *= 1e6
    elif kind == "identity":
        layer = np.eye(*shape) + layer * (rng.random(shape) < 0.5) * rng.choice([0.01, 0.1, 1.0]) / shape[1]
    if rng.random() < 0.2:
        layer[rng.integers(shape[0])] = 0
    return layer


def problem(rng):
    """(kind, layers): 1 to 12 layers of 1 to 40 tokens, the one nearest the input first; small ones are the rule."""
    kind, depth = rng.choice(KINDS), rng.integers(1, 13)
    widest = int(np.exp(rng.uniform(0, np.log(41))))
    square = kind in ("causal", "identity") or rng.random() < 0.5
    widths = [widest] * (depth + 1) if square else rng.integers(1, widest + 1, depth + 1)
    return kind, [capacities(rng, kind, (queries, keys)) for keys, queries in pairwise(widths)]


def check(rng, kind, layers):
    """One pair: its cut carries the value, its bounds enclose it, its routes add up, and a peer agrees."""
    top, below = layers[-1], layers[:-1]
    query, token = rng.integers(len(top)), rng.integers(layers[0].shape[1])
    result = flow(top[[query]], below, sinks=[token])
    value = result.values[0, 0]
    close = {"rtol": 1e-9, "atol": 0}
    cut = min_cut(top, below, query, token)
    np.testing.assert_allclose(sum(edge.capacity for edge in cut), value, **close)
    assert not reference.carries(top, below, query, token, {edge[:3] for edge in cut})
    bounds = flow_bounds(top[[query]], below, sinks=[token])
    assert bounds.lower[0, 0] <= value * (1 + 1e-9)
    assert value <= bounds.upper[0, 0] * (1 + 1e-9)
    if kind == "integers":
        np.testing.assert_allclose(value, reference.flow_by_scipy(top, below, query, token), rtol=1e-12)
    elif kind in ("tiny", "huge"):  # beyond what igraph's tolerances are made for
        scale = max(layer.max() for layer in layers) or 1.0
        scaled = [layer / scale for layer in layers]
        expected = reference.flow_by_igraph(scaled[-1], scaled[:-1], query, token) * scale
        np.testing.assert_allclose(value, expected, **close)
    else:
        np.testing.assert_allclose(value, reference.flow_by_igraph(top, below, query, token), rtol=1e-9, atol=1e-14)
    if rng.random() < 0.2:
        check_paths(layers, query, token, value)


def check_paths(layers, query, token, value):
    """The routes of a pair add up to its flow, come strongest first, and overload no edge."""
    routes = paths(layers[-1], layers[:-1], query, token)
    amounts = [path.amount for path in routes.paths]
    np.testing.assert_allclose(sum(amounts), value, rtol=1e-9, atol=0)
    np.testing.assert_allclose(routes.flow, value, rtol=1e-9, atol=0)
    assert amounts == sorted(amounts, reverse=True)
    carried = [np.zeros_like(layer) for layer in layers]
    for path in routes.paths:
        assert (path.nodes[0], path.nodes[-1]) == (query, token)
        for number, (above, under) in zip(reversed(range(len(layers))), pairwise(path.nodes), strict=True):
            carried[number][above, under] += path.amount
    for layer, edges in zip(layers, carried, strict=True):
        assert (edges <= layer + 1e-9 * min(value, layer.max())).all()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None, help="begin with this problem; random if absent")
    arguments = parser.parse_args()
    start = arguments.seed if arguments.seed is not None else time.time_ns() % 10**12
    end, seed = time.monotonic() + arguments.seconds, start
    while time.monotonic() < end:
        rng = np.random.default_rng(seed)
        try:
            check(rng, *problem(rng))
        except AssertionError:
            print(f"problem {seed} failed: run again with --seed {seed}")
            raise
        seed += 1
    print(f"{seed - start} problems, {start} to {seed - 1}: all hold")


if __name__ == "__main__":
    main()
