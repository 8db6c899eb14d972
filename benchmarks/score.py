"""Throughput of the score function beside the same model on as many ready inputs in the same batches.

python benchmarks/score.py [--runs 7] [--cases 128] [--batch-size 64] [--output score.json]

Every token (patch) is blanked out in turn, and again until there are as many cases as asked for. The plain forward
pass gets the whole input that often, made before the clock starts. The two take turns, and a run's ratio is of its own
pair; printed are medians. Texts: MiniLM with an untrained head; images: an untrained ViT-S/16.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import transformers

from attnflow.capturing import demo
from attnflow.faithfulness.score import Score, image_score, text_score

SENTENCE = "the film is one of those that try to be everything at once , and for a while it almost gets away with it"


def clock(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@torch.no_grad()
def plain(model: torch.nn.Module, batch: dict[str, torch.Tensor], cases: int) -> None:
    """The model on the same batch until all cases are through."""
    size = len(next(iter(batch.values())))
    for start in range(0, cases, size):
        count = min(size, cases - start)
        model(**{name: value[:count] for name, value in batch.items()}).logits.softmax(-1).cpu()


def row(
    name: str, model: torch.nn.Module, inputs: dict[str, torch.Tensor], score: Score, cases: int, runs: int
) -> dict:
    count = len(score.positions)
    keep = np.resize(~np.eye(count, dtype=bool), (cases, count))
    batch = {key: value.repeat(score.batch_size, *[1] * (value.ndim - 1)) for key, value in inputs.items()}
    plain(model, batch, cases)
    score(keep)
    pairs = [(clock(lambda: plain(model, batch, cases)), clock(lambda: score(keep))) for _ in range(runs)]
    ready, blanked = (cases / statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    print(f"{name:28} {ready:8.1f} cases/s plain {blanked:8.1f} blanked out   ratio {ratio:.2f}", flush=True)
    return {"job": name, "tokens": count, "plain_per_s": ready, "blanked_per_s": blanked, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--cases", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    size = {"batch_size": arguments.batch_size}
    counts = arguments.cases, arguments.runs
    rows = []

    words = transformers.AutoTokenizer.from_pretrained(demo.text_folder())
    model = transformers.AutoModelForSequenceClassification.from_pretrained(demo.text_folder()).eval()
    for text in (SENTENCE, " ".join([SENTENCE] * 5)):
        inputs = dict(words(text, return_tensors="pt"))
        roles = ["special", *["text"] * (inputs["input_ids"].shape[1] - 2), "special"]
        for blank in ("unk", "delete"):
            score = text_score(model, inputs, roles, 1, tokenizer=words, blank=blank, **size)
            rows.append(row(f"text, {len(roles)} tokens, {blank}", model, inputs, score, *counts))

    vit = transformers.ViTForImageClassification(
        transformers.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536)
    ).eval()
    pixels = torch.randn(1, 3, 224, 224)
    for blank in ("zero", "blur"):
        score = image_score(vit, pixels, ["prefix", *["patch"] * 196], (14, 14), 1, blank=blank, **size)
        rows.append(row(f"image, 196 patches, {blank}", vit, {"pixel_values": pixels}, score, *counts))

    result = {
        "machine": {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("attnflow", "torch", "transformers", "numpy")},
        "settings": {"cases": arguments.cases, "batch_size": arguments.batch_size, "runs": arguments.runs},
        "rows": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
