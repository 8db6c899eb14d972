"""What capture costs: time and peak memory beside the plain forward pass and eager attention with its outputs.

python benchmarks/capture.py [--output capture.json]

BERT-base's shape (12 layers, 12 heads, width 768, random weights), and one rollout row of a causal model whose
length grows. Every figure comes from a process of its own. Memory is the peak beyond what the process held before, in a
run where freed blocks go back to the system; otherwise it is the allocator's habits that are measured. Linux only.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path


def peak_mb(*, since_now: bool = False) -> float:
    """Peak memory of this process in MB; `since_now` starts a new peak (Linux only)."""
    if since_now:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def bert(tokens: int, kernel: str):
    import torch
    import transformers

    config = transformers.BertConfig(max_position_embeddings=max(512, tokens), attn_implementation=kernel)
    torch.manual_seed(0)
    return transformers.BertModel(config).eval(), {"input_ids": torch.randint(1000, 20000, (1, tokens))}


def forward(tokens: int, mode: str, runs: int) -> dict[str, float]:
    """Median seconds of a forward pass, and MB beyond the loaded model."""
    import torch

    from attnflow import capture

    model, inputs = bert(tokens, "eager" if mode == "eager with outputs" else "sdpa")
    calls = {
        "plain": lambda: model(**inputs),
        "capture": lambda: capture(model, inputs),
        "eager with outputs": lambda: model(**inputs, output_attentions=True),
    }
    with torch.no_grad():
        model(**{name: value[:, :16] for name, value in inputs.items()})
        before, seconds = peak_mb(since_now=True), []
        for _ in range(runs):
            start = time.perf_counter()
            kept = calls[mode]()
            seconds.append(time.perf_counter() - start)
            del kept
    return {"seconds": statistics.median(seconds), "peak_mb": peak_mb() - before}


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
    trace = attnflow.capture(model, {"input_ids": torch.randint(10, 900, (1, tokens))})
    attnflow.rollout(attnflow.capture(model, {"input_ids": torch.arange(10, 26)[None]}), query=-1)
    before, start = peak_mb(since_now=True), time.perf_counter()
    attnflow.rollout(trace, query=-1)
    return {"seconds": time.perf_counter() - start, "peak_mb": peak_mb() - before}


def apart(job: str, *arguments: object) -> dict[str, float]:
    """Seconds of one job of this file in a process of its own, and its peak memory in another."""
    command = [sys.executable, __file__, "--job", json.dumps([job, *arguments])]
    timed, weighed = (
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | more).stdout)
        for more in ({}, {"MALLOC_MMAP_THRESHOLD_": "1000000"})
    )
    return {"seconds": timed["seconds"], "peak_mb": weighed["peak_mb"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job, *arguments = json.loads(options.job)
        print(json.dumps({"forward": forward, "rollout_row": rollout_row}[job](*arguments)))
        return
    rows = []
    for tokens, runs in ((128, 15), (512, 7), (2048, 3)):
        plain = None
        for mode in ("plain", "capture", "eager with outputs"):
            result = apart("forward", tokens, mode, runs)
            plain = plain or result
            rows.append({"job": f"BERT-base shape, {mode}", "tokens": tokens, **result})
            ratio, extra = result["seconds"] / plain["seconds"], result["peak_mb"] - plain["peak_mb"]
            print(f"n={tokens:5} {mode:20} {result['seconds']:7.3f} s  x{ratio:4.2f}  {extra:+7.0f} MB", flush=True)
    for tokens in (4096, 8192, 16384):
        result = apart("rollout_row", tokens)
        rows.append({"job": "one rollout row, causal", "tokens": tokens, **result})
        print(
            f"n={tokens:5} one rollout row     {result['seconds']:7.2f} s         {result['peak_mb']:+7.0f} MB",
            flush=True,
        )
    versions = {name: version(name) for name in ("attnflow", "torch", "transformers", "numpy")}
    machine = {"platform": platform.platform(), "python": platform.python_version()}
    if options.output:
        options.output.write_text(json.dumps({"machine": machine, "versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
