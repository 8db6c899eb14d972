"""How many examples a run explains in a second, beside the model's own batched forward pass.

python benchmarks/run.py [--data TEXTS] [--count 256] [--output run.json]

The packaged MiniLM on the texts of a file (such as SST-2's dev.tsv), without --data on sentences made of one of 9 to 40
words. One figure for each method, batch size and number of workers.

examples_per_second: by the clock over the whole call, as a user waits for it: loading of the model, its digest and the
proofs included. Other work on the machine makes it smaller: the load before the start stands beside the figures.
per_core: examples in a second of one core, by the time that the processor spent on examples, with the proofs of each
worker. plain: the same of the forward pass under torch.no_grad over the same texts, sorted by length, in batches of
the same size. core_hours_for_a_million: by `per_core`, of texts as long as these.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

# (methods, batch size, workers)
CASES = [
    ("raw", 16, 1),
    ("rollout", 1, 1),
    ("rollout", 16, 1),
    ("rollout", 64, 1),
    ("rollout", 16, 2),
    ("flow", 16, 1),
    ("flow", 16, 2),
    ("gradient-rollout", 16, 1),
    ("value-norm", 16, 1),
]
SENTENCE = "the keys to the cabinet that stands beside the old door are on the table in the hall of the house"


def texts(data: Path | None, count: int) -> list[str]:
    """So many texts, of a file as `attnflow run` reads it, or made."""
    if data is None:
        words = 2 * SENTENCE.split()
        return [" ".join(words[: 9 + number % 32]) + f" {number}" for number in range(count)]
    from attnflow.running import sources

    return [example.content for example in list(sources.opened(data).read())[:count]]


def plain(examples: list[str], batch_size: int) -> float:
    """Examples in a second of one core by the forward pass alone, the second of two rounds."""
    import torch

    from attnflow import load_model

    model, tokenizer = load_model()
    ordered = sorted(examples, key=len)
    batches = [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    seconds = 0.0
    for _ in range(2):
        start = time.process_time()
        with torch.no_grad():
            for batch in batches:
                model(**tokenizer(batch, padding=True, return_tensors="pt"))
        seconds = time.process_time() - start
    return len(examples) / seconds


def measured(examples: list[str], method: str, batch_size: int, workers: int) -> dict[str, Any]:
    """The figures of one run."""
    import attnflow

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        found = attnflow.run(
            None, examples, Path(folder) / "run", method=method, batch_size=batch_size, workers=workers, shard_size=64
        )
        wall = time.perf_counter() - start
        summary = found.summary()
        stored = sum(path.stat().st_size for path in found.shards)
    steady = len(examples) / summary["processor_seconds"]
    return {
        "method": method,
        "batch_size": batch_size,
        "workers": workers,
        "examples_per_second": round(len(examples) / wall, 1),
        "per_core": round(steady, 1),
        "core_hours_for_a_million": round(1e6 / steady / 3600, 1),
        "bytes_per_row": round(stored / summary["rows"]),
    }


def machine() -> dict[str, Any]:
    packages = ("attnflow", "torch", "transformers", "numpy", "pyarrow")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "load": load,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "examples": options.count, "rows": []}
    examples = texts(options.data, options.count)
    forward = {size: round(plain(examples, size), 1) for size in sorted({size for _, size, _ in CASES})}
    record["plain"] = forward
    measured(examples[:8], "flow", 4, 1)  # what is compiled once
    print(f"plain forward pass, examples in a second of one core by batch size: {forward}")
    for case in CASES:
        if case[2] > (os.cpu_count() or 1):
            continue
        row = measured(examples, *case)
        record["rows"].append(row)
        share = row["per_core"] / forward[row["batch_size"]]
        print(f"{row['method']:18} batch {row['batch_size']:3}  workers {row['workers']}  ", end="")
        print(f"{row['examples_per_second']:7.1f} a second, per core {row['per_core']:7.1f} ({share:.0%} of plain)")
        if options.output:
            options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
