"""What capture costs beside the plain forward pass: time, and peak memory.

python benchmarks/capture.py [--output capture.json]

BERT-base's shape (12 layers, 12 heads, width 768, random weights), with the fused kernel and with eager attention; and
one rollout row of a causal model whose length grows. Linux only; about four minutes on two cores.

Times are pairs measured alternately in one process: plain, captured, plain, captured, and so on. A figure is the median
of the ratios of a capture to the plain pass just before it, with the smallest and the largest.

recording: captured with prove=False. later: captured when the proofs are remembered. first: captured with the proofs,
each time a new model object (over the same parameters).

Memory is the peak beyond what the process held with its model loaded, each figure from a process of its own in which
freed blocks go back to the system; otherwise it is the allocator's habits that are measured.

What a figure must be is printed beside it, as "within" or "over", and is not asserted.
"""

import argparse
import copy
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

# (kernel, tokens, rounds)
TIMED = [
    ("sdpa", 128, 7),
    ("sdpa", 512, 3),
    ("sdpa", 2048, 2),
    ("eager", 128, 7),
    ("eager", 512, 3),
    ("eager", 1024, 1),
]
# (kernel, tokens, ways)
WEIGHED = [
    ("sdpa", 2048, ("plain", "recording", "first")),
    ("eager", 1024, ("with outputs", "recording", "first")),
]
ROWS = (4096, 8192)
# At most so many times the plain pass.
MUST = {"recording": 1.15, "later": 1.2, "first": 4.0}
# Captured eager attention: at most so many times the memory of the plain pass with output_attentions=True.
MUST_WEIGH = 1.05


def peak_mb(*, since_now: bool = False) -> float:
    """Peak memory of this process in MB; `since_now` starts a new peak (Linux only)."""
    if since_now:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def bert(tokens: int, kernel: str) -> tuple[Any, dict[str, Any]]:
    """A model of BERT-base's shape and one input; everything that loads late is loaded."""
    import torch
    import transformers

    from attnflow import capture

    config = transformers.BertConfig(max_position_embeddings=max(512, tokens), attn_implementation=kernel)  # pyright: ignore
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    capture(model, {"input_ids": torch.arange(1000, 1016)[None]})
    return model, {"input_ids": torch.randint(1000, 20000, (1, tokens))}


def afresh(model: Any) -> Any:
    """Another model object over the same parameters, of which nothing is remembered."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def timed(kernel: str, tokens: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """For each way to capture the seconds of every capture, and of the plain pass just before each."""
    import torch

    from attnflow import capture

    model, inputs = bert(tokens, kernel)
    seconds = {way: {"plain": list[float](), "captured": list[float]()} for way in MUST}
    with torch.no_grad():
        model(**inputs)
        capture(model, inputs)
        for _ in range(rounds):
            for way, own in seconds.items():
                subject = afresh(model) if way == "first" else model
                gc.collect()  # what the pair before left, a model object among it, is no cost of this one
                start = time.perf_counter()
                model(**inputs)
                between = time.perf_counter()
                capture(subject, inputs, prove=way != "recording")
                own["plain"].append(between - start)
                own["captured"].append(time.perf_counter() - between)
    return seconds


def weighed(kernel: str, tokens: int, way: str) -> float:
    """MB beyond the loaded model that one pass takes at its peak."""
    import torch

    from attnflow import capture

    model, inputs = bert(tokens, kernel)
    with torch.no_grad():
        model(**{name: value[:, :16] for name, value in inputs.items()})
        before = peak_mb(since_now=True)
        if way in ("plain", "with outputs"):
            kept = model(**inputs, output_attentions=way == "with outputs")
        else:
            kept = capture(model, inputs, prove=way == "first")
        peak = peak_mb() - before
        del kept
    return peak


def rollout_row(tokens: int) -> dict[str, float]:
    """Seconds and MB of one rollout row of a causal Llama of 4 layers, 8 heads, width 256, beyond its capture."""
    import torch
    import transformers

    import attnflow

    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=tokens,
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    trace = attnflow.capture(model, {"input_ids": torch.randint(10, 900, (1, tokens))}, prove=False)
    attnflow.rollout(attnflow.capture(model, {"input_ids": torch.arange(10, 26)[None]}), query=-1)
    before, start = peak_mb(since_now=True), time.perf_counter()
    attnflow.rollout(trace, query=-1)
    return {"seconds": time.perf_counter() - start, "peak_mb": peak_mb() - before}


JOBS = {"weighed": weighed, "rollout_row": rollout_row}


def apart(job: str, *arguments: object, weighs: bool = False) -> Any:
    """What a job of this file returns, in a process of its own, in which memory can be weighed."""
    command = [sys.executable, __file__, "--job", json.dumps([job, *arguments])]
    more = {"MALLOC_MMAP_THRESHOLD_": "1000000"} if weighs else {}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | more)
    return json.loads(done.stdout)


def held(ratio: float, most: float) -> str:
    """Whether a ratio is what it must be."""
    return f"{'within' if ratio <= most else 'over'} x{most:g}"


def rows_of_times(kernel: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """The figures of `timed`, printed."""
    rows: list[dict[str, Any]] = []
    for way, seconds in timed(kernel, tokens, rounds).items():
        ratios = sorted(b / a for a, b in zip(seconds["plain"], seconds["captured"], strict=True))
        ratio, plain = statistics.median(ratios), statistics.median(seconds["plain"])
        captured = statistics.median(seconds["captured"])
        row = {"job": f"BERT-base shape, {way}", "kernel": kernel, "tokens": tokens, "seconds": captured}
        rows.append(row | {"plain_seconds": plain, "ratio": ratio, "ratios": ratios, "must": MUST[way]})
        print(
            f"{kernel:5} n={tokens:5} {way:12} {captured:7.3f} s, plain {plain:7.3f} s  x{ratio:4.2f} "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}, {rounds} pairs)  {held(ratio, MUST[way])}",
            flush=True,
        )
    return rows


def rows_of_memory(kernel: str, tokens: int, ways: tuple[str, ...]) -> list[dict[str, Any]]:
    """The figures of `weighed`, printed."""
    rows: list[dict[str, Any]] = []
    outputs = None
    for way in ways:
        peak, beside = apart("weighed", kernel, tokens, way, weighs=True), ""
        rows.append({"job": f"BERT-base shape, {way}", "kernel": kernel, "tokens": tokens, "peak_mb": peak})
        if outputs is not None:
            rows[-1] |= {"ratio": peak / outputs, "must": MUST_WEIGH}
            beside = f"  x{peak / outputs:4.2f} of that with outputs, {held(peak / outputs, MUST_WEIGH)}"
        outputs = peak if way == "with outputs" else outputs
        print(f"{kernel:5} n={tokens:5} {way:12} {peak:+7.0f} MB{beside}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job, *arguments = json.loads(options.job)
        print(json.dumps(JOBS[job](*arguments)))
        return
    began, rows = time.perf_counter(), list[dict[str, Any]]()
    for kernel, tokens, rounds in TIMED:
        rows += rows_of_times(kernel, tokens, rounds)
    for kernel, tokens, ways in WEIGHED:
        rows += rows_of_memory(kernel, tokens, ways)
    for tokens in ROWS:
        seconds = apart("rollout_row", tokens)["seconds"]
        peak = apart("rollout_row", tokens, weighs=True)["peak_mb"]
        rows.append({"job": "one rollout row, causal", "tokens": tokens, "seconds": seconds, "peak_mb": peak})
        print(f"sdpa  n={tokens:5} one rollout row, causal {seconds:6.2f} s  {peak:+7.0f} MB", flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all")
    if options.output:
        names = ("attnflow", "torch", "transformers", "numpy")
        machine = {
            "platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "torch's own"),
        }  # fmt: skip
        record = {"machine": machine, "versions": {name: version(name) for name in names}, "rows": rows}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
