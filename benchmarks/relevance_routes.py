"""Two ways to take conserved relevance apart into routes, on real sentences, and how large the routes are.

python benchmarks/relevance_routes.py DATA [--sentences 100]

DATA: the folder of the studies' data, of which the development set of SST-2 and the adapter of its classifier (MiniLM)
are used; the target is the logit of the predicted class, under "cp-lrp". Sizes are amounts whatever their sign. Those
of `attnflow.paths` are compared with those of every route from the score down whose amount is the product of the share
that each edge has in its node. Printed are medians over sentences, and the smallest and the largest.
"""

import argparse
from pathlib import Path

import numpy as np

from attnflow import capture, paths
from attnflow.relevance_flow import carried_relevance, relevance_graph
from attnflow.studies.sst2 import ADAPTER, classifier
from attnflow.trace import Trace

EDGES = "conserved-relevance"


def of_shares(trace: Trace) -> float:
    """The size of all routes together, from the top down, if each edge had its share of what came to its node."""
    layers, at_keys, at_queries = carried_relevance(relevance_graph(trace, EDGES, {}))
    arriving, ended = np.abs(leaving(trace, len(layers) - 1)), 0.0
    for number in reversed(range(len(layers))):
        edges, came = layers[number], layers[number].sum(0)
        own = np.abs(leaving(trace, number))
        ended += float((arriving * shares(at_queries[number], own)).sum())
        arriving = arriving @ shares(edges, own[:, None])
        ended += float((arriving * shares(at_keys[number], came)).sum())
        arriving = arriving * shares(came - at_keys[number], came)
    return ended + float(arriving.sum())


def shares(parts: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.abs(np.divide(parts, whole, out=np.zeros_like(parts), where=whole != 0))


def leaving(trace: Trace, number: int) -> np.ndarray:
    return trace.layers[number].carried.leaving.double().numpy()


def of_paths(trace: Trace) -> dict[str, float]:
    found = paths(trace, edges=EDGES, top=None)
    amounts = np.array([one.amount for one in found])
    sizes, highest = np.abs(amounts), len(trace.layers) - 1
    whole = sizes.sum()
    below = np.array([one.steps[0].layer < highest for one in found])
    ends = np.array([one.end for one in found])
    return {
        "all routes less what leaves the last layer": abs(amounts.sum() - leaving(trace, highest).sum()),
        "routes": len(found),
        "size of all routes": whole,
        "of it the 10 largest": sizes[:10].sum() / whole,
        "of it from below the last layer": sizes[below].sum() / whole,
        "of it to tokens": sizes[ends == "token"].sum() / whole,
        "of it to biases": sizes[ends == "biases"].sum() / whole,
        "of it cancelled": sizes[ends == "cancelled"].sum() / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sentences", type=int, default=100)
    given = parser.parse_args()
    model, tokenizer = classifier(given.data / "adapters" / ADAPTER)
    lines = (given.data / "sst2" / "dev.tsv").read_text().splitlines()[: given.sentences]
    rows = list[dict[str, float]]()
    for line in lines:
        text = line.rsplit("\t", 1)[0]
        trace = capture(
            model, text, tokenizer=tokenizer, target="predicted", rules="cp-lrp", keep="relevance", prove=False
        )
        assert trace.target is not None
        own, by_shares = of_paths(trace), of_shares(trace)
        rows.append(
            {
                "tokens": len(trace.tokens),
                "size of the score": abs(trace.target["score"]),
                **own,
                "size of products of shares": by_shares,
                "that over the size of all routes": by_shares / own["size of all routes"],
            }
        )
    print(f"{len(rows)} sentences: median (smallest to largest)")
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        print(f"{name:>45}: {np.median(values):.3g} ({values.min():.3g} to {values.max():.3g})")


if __name__ == "__main__":
    main()
