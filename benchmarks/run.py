"""How many examples a run explains in a second, beside the model's own batched forward pass and Captum's batches.

python benchmarks/run.py [--data TEXTS] [--count 256] [--photograph FILE] [--images 48]
    [--methods raw,rollout] [--output run.json]

The packaged MiniLM on the texts of a file (such as SST-2's dev.tsv), without --data on sentences made of one of 9 to 40
words; with --photograph the packaged DINOv2-small too, on one image so many times, which is opened each time.
One figure for each method, batch size and number of workers.

examples_per_second: by the clock over the whole call, as a user waits for it: loading of the model, its digest and the
proofs included. Other work on the machine makes it smaller: the load before the start stands beside the figures.
per_core: examples in a second of one core, by the time that the processor spent on examples, with the proofs of each
worker. plain: the same of the forward pass under torch.no_grad over the same examples, made ready and sorted by length,
in batches of the same size, measured before and after each run, so that other work slows both. share: per_core by the
mean of the two. core_hours_for_a_million: by `per_core`, of examples like these.
captum: gradient x input of the embeddings by Captum, for the same target as ours (the norm at [CLS]), in batches of 16.
"""

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

# (methods, batch size, workers)
TEXTS = [
    ("raw", 16, 1),
    ("rollout", 1, 1),
    ("rollout", 16, 1),
    ("rollout", 64, 1),
    ("rollout", 16, 2),
    ("flow", 16, 1),
    ("gradient-rollout", 16, 1),
    ("gradient-x-input", 16, 1),
    ("value-norm", 16, 1),
]
PHOTOGRAPHS = [("raw", 8, 1), ("rollout", 8, 1)]
SENTENCE = "the keys to the cabinet that stands beside the old door are on the table in the hall of the house"


def texts(data: Path | None, count: int) -> list[str]:
    """So many texts, of a file as `attnflow run` reads it, or made."""
    if data is None:
        words = 2 * SENTENCE.split()
        return [" ".join(words[: 9 + number % 32]) + f" {number}" for number in range(count)]
    from attnflow.running import sources

    return [example.content for example in islice(sources.opened(data).read(), count)]


def batches(examples: list[Any], size: int) -> list[list[Any]]:
    ordered = sorted(examples, key=len) if isinstance(examples[0], str) else examples
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def forward(image: bool) -> Callable[[list[Any]], Any]:
    """The plain forward pass of a batch, with what makes it ready."""
    import torch

    from attnflow import load_model
    from attnflow.capturing.vision import open_image

    if image:
        loaded = load_model(task="image")
        return lambda batch: loaded.model(torch.cat([loaded.prepare(open_image(path)) for path in batch]))
    model, tokenizer = load_model()
    return lambda batch: model(**tokenizer(batch, padding=True, return_tensors="pt"))


def by_captum() -> Callable[[list[str]], Any]:
    """Gradient x input of the embeddings of a batch."""
    from captum.attr import LayerGradientXActivation

    from attnflow import load_model

    model, tokenizer = load_model()
    captum = LayerGradientXActivation(
        lambda ids, mask: model(ids, attention_mask=mask).last_hidden_state[:, 0].norm(dim=-1),
        model.get_input_embeddings(),
    )

    def attribute(batch: list[str]) -> Any:
        inputs = tokenizer(batch, padding=True, return_tensors="pt")
        return captum.attribute(inputs["input_ids"], additional_forward_args=(inputs["attention_mask"],))

    return attribute


def rate(explain: Callable[[list[Any]], Any], examples: list[Any], size: int, grad: bool = False) -> float:
    """Examples in a second of one core."""
    import torch

    start = time.process_time()
    with torch.set_grad_enabled(grad):
        for batch in batches(examples, size):
            explain(batch)
    return len(examples) / (time.process_time() - start)


def measured(examples: list[Any], method: str, batch_size: int, workers: int) -> dict[str, Any]:
    """The figures of one run."""
    import attnflow

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        found = attnflow.run(
            None, examples, Path(folder) / "run", method=method, batch_size=batch_size, workers=workers
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
    packages = ("attnflow", "torch", "transformers", "numpy", "pyarrow", "captum")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "load": load,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }


def rows(examples: list[Any], cases: list[tuple[str, int, int]]) -> Any:
    plain = forward(isinstance(examples[0], Path))
    rate(plain, examples[:64], 16)  # what is done once
    for method, size, workers in cases:
        if workers > (os.cpu_count() or 1):
            continue
        before = rate(plain, examples, size)
        row = measured(examples, method, size, workers)
        row["plain"] = round((before + rate(plain, examples, size)) / 2, 1)
        row["share"] = round(row["per_core"] / row["plain"], 3)
        row["model"] = "DINOv2-small" if isinstance(examples[0], Path) else "MiniLM"
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--count", type=int, default=256)
    parser.add_argument("--photograph", type=Path)
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--methods", help="of the cases those by these methods alone, with commas between them")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {"machine": machine(), "texts": options.count, "rows": []}
    print(json.dumps(record["machine"]))
    examples = texts(options.data, options.count)
    measured(examples[:8], "flow", 4, 1)  # what is compiled once
    jobs = [(examples, TEXTS)]
    wanted = None if options.methods is None else options.methods.split(",")
    if options.photograph is not None:
        record["images"] = options.images
        jobs.insert(0, ([options.photograph] * options.images, PHOTOGRAPHS))
    for given, cases in jobs:
        for row in rows(given, [case for case in cases if wanted is None or case[0] in wanted]):
            record["rows"].append(row)
            name = f"{row['model']}, {row['method']}"
            print(f"{name:28} batch {row['batch_size']:3}  workers {row['workers']}  ", end="")
            print(f"{row['examples_per_second']:6.1f} a second, per core {row['per_core']:6.1f}", end="")
            print(f" ({row['share']:.0%} of plain, {row['plain']:.1f})", flush=True)
    record["peak_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory of this process, which holds its models twice: {record['peak_bytes'] / 1e6:,.0f} MB")
    record["captum"] = round(rate(by_captum(), examples, 16, grad=True), 1)
    print(f"Captum, gradient x input     batch  16  workers 1  per core {record['captum']:.1f}")
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
