"""Do the edges that a method finds matter to the model more than others: they are knocked out of it.

python benchmarks/routes.py DATA [--sentences 100] [--k 10] [--draws 5] [--how hide] [--output routes.json]

DATA: the folder of the studies' data, of which the development set of SST-2 and the adapter of its classifier (MiniLM)
are used. The target is the logit of the predicted class minus that of the other; a change is what taking the k
strongest edges of a method out took from it. Printed are means over sentences with their 95 % bootstrap intervals, and
those of paired differences.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from attnflow import Contrast
from attnflow.faithfulness.routes import route_test
from attnflow.studies.sst2 import ADAPTER, classifier

METHODS = (
    "raw",
    "rollout",
    "measured-rollout",
    "flow",
    "gradient-flow",
    "chefer",
    "size-of-gradient-sum-over-layers",
    "alti",
)


def interval(values: np.ndarray) -> str:
    """The mean of values (sentence,), and the middle 95 % of the means of 10,000 bootstrap samples."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (10_000, len(values)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{values.mean():.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--how", choices=("hide", "zero"), default="hide")
    parser.add_argument("--output", type=Path, help="write every value as JSON")
    given = parser.parse_args()
    start = time.perf_counter()
    model, tokenizer = classifier(given.data / "adapters" / ADAPTER)
    lines = (given.data / "sst2" / "dev.tsv").read_text().splitlines()[: given.sentences]
    texts = [line.rsplit("\t", 1)[0] for line in lines]
    rows = []
    for seed, text in enumerate(texts):
        with torch.no_grad():
            best = int(model(**tokenizer(text, return_tensors="pt")).logits.argmax())
        found = route_test(
            model, text, tokenizer, Contrast(best, 1 - best), METHODS, given.k, seed, draws=given.draws, how=given.how
        )
        rows.append({"text": text, "base": found.base} | {name: taken._asdict() for name, taken in found.taken.items()})
        print(f"{seed + 1} of {len(texts)}, {time.perf_counter() - start:.0f} s", end="\r", flush=True)
    base = np.array([row["base"] for row in rows])
    print(f"\nbase {interval(base)} over {len(rows)} sentences, k = {given.k}, {given.how}\n")
    print("| edges of | taken out | change | random edges | same queries | - same queries | - strongest raw |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    raw = np.array([row["raw"]["change"] for row in rows])
    for name in (*METHODS, "minimum cut"):
        edges, change, random, same = (
            np.array([row[name][of] for row in rows]) for of in ("edges", "change", "random", "same_queries")
        )
        cells = [interval(change), interval(random), interval(same), interval(change - same), interval(change - raw)]
        print(f"| {name} | {edges.mean():.1f} | {' | '.join(cells)} |")
    if given.output:
        given.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
