"""What every method costs beside the plain forward pass: time, and peak memory.

python benchmarks/methods.py [--output methods.json]

The packaged MiniLM on a text of 128 and of 512 tokens, and on eight of 128 tokens at once; the packaged DINOv2-small
on a photograph of 16 x 16 patches. Each method explains the first token, from a trace that was captured with the
gradient of that token's size; the row "capture" is that capture. Linux only; some minutes on two cores.

Times are pairs measured alternately in one process: plain pass, method, plain pass, and so on. A figure is the median
of the ratios of a method to the plain pass just before it, with the smallest and the largest; of several examples, both
are of all of them. Memory is the peak beyond what the process held with its model and traces, in a process of its own
in which freed blocks go back to the system, and as a multiple of what the plain pass takes there.
"""

import argparse
import decimal
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROUNDS = 3
# work: (model, tokens or patches along a side, examples)
WORKS = {
    "MiniLM, n = 128": ("text", 128, 1),
    "MiniLM, n = 512": ("text", 512, 1),
    "DINOv2-small, n = 257": ("image", 16, 1),
    "MiniLM, n = 128, eight examples": ("text", 128, 8),
}


def peak_mb(*, since_now: bool = False) -> float:
    """Peak memory of this process in MB; `since_now` starts a new peak (Linux only)."""
    if since_now:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def loaded(kind: str, size: int, count: int) -> tuple[Any, dict[str, Any]]:
    """A packaged model and its inputs."""
    if kind == "image":
        import matplotlib

        from attnflow.capturing import vision

        model = vision.load()
        photograph = vision.open_image(Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg")
        return model.model, {"pixel_values": model.prepare(photograph, (14 * size, 14 * size))}
    from attnflow.capturing import huggingface

    model, tokenizer = huggingface.load()
    names = sorted(vars(decimal))
    text = " ".join(str(getattr(decimal, name).__doc__) for name in names)
    texts = [text[1000 * number :] for number in range(count)]
    inputs = tokenizer(texts, truncation=True, max_length=size, return_tensors="pt")
    assert inputs.input_ids.shape == (count, size), "the text is too short"
    return model, dict(inputs)


def first_token(output: Any) -> Any:
    """The Euclidean norm of what the model makes of the first token."""
    return output.last_hidden_state[:, 0].norm(dim=-1)


def jobs_of(work: str) -> tuple[Callable[[], object], dict[str, Callable[[], object]]]:
    """The plain pass, and what is measured beside it: the capture, and each method. All have run once."""
    import torch

    from attnflow import METHODS, capture_batch
    from attnflow.methods import relevance

    model, inputs = loaded(*WORKS[work])

    def plain() -> None:
        with torch.no_grad():
            model(**inputs)

    def captured() -> list[Any]:
        return capture_batch(model, inputs, target=first_token)

    traces = captured()
    jobs: dict[str, Callable[[], object]] = {"capture": captured}
    for name in METHODS:
        jobs[name] = lambda name=name: [relevance(trace, name, query=0) for trace in traces]
    for job in (plain, *jobs.values()):
        job()
    return plain, jobs


def timed(work: str) -> dict[str, list[tuple[float, float]]]:
    """For each job the seconds of the plain pass and of the job, pair by pair."""
    plain, jobs = jobs_of(work)
    return {name: [(clock(plain), clock(job)) for _ in range(ROUNDS)] for name, job in jobs.items()}


def weighed(work: str) -> dict[str, float]:
    """For each job, and the plain pass, the MB that it takes at its peak beyond what was held before it."""
    plain, jobs = jobs_of(work)
    return {name: grown(job) for name, job in {"plain": plain, **jobs}.items()}


def clock(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def grown(job: Callable[[], object]) -> float:
    """MB that a job takes at its peak beyond what was held before it."""
    before = peak_mb(since_now=True)
    job()
    return peak_mb() - before


def apart(job: str, work: str) -> dict[str, Any]:
    """What a job of this file returns, in a process of its own."""
    command = [sys.executable, __file__, "--job", job, work]
    more = {"MALLOC_MMAP_THRESHOLD_": "20000", "MALLOC_TRIM_THRESHOLD_": "0"} if job == "weighed" else {}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | more)
    return json.loads(done.stdout)


def row(work: str, name: str, pairs: list[tuple[float, float]], weight: float, plain: float) -> dict[str, Any]:
    """The figures of one job, printed."""
    ratios = sorted(taken / beside for beside, taken in pairs)
    found = {
        "work": work,
        "method": name,
        "seconds": statistics.median(taken for _, taken in pairs),
        "plain_seconds": statistics.median(beside for beside, _ in pairs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "peak_mb": weight,
        "plain_peak_mb": plain,
        "memory_ratio": weight / plain,
    }
    print(
        f"{work:32} {name:34} {found['seconds']:8.4f} s  x{found['ratio']:6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) "
        f"{weight:+7.1f} MB  x{found['memory_ratio']:5.2f}",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job, work = options.job
        print(json.dumps({"timed": timed, "weighed": weighed}[job](work)))
        return
    load, rows = os.getloadavg()[0], list[dict[str, Any]]()
    for work in WORKS:
        times, weights = apart("timed", work), apart("weighed", work)
        rows += [row(work, name, pairs, weights[name], weights["plain"]) for name, pairs in times.items()]
    if options.output:
        names = ("attnflow", "torch", "transformers", "numpy", "scipy", "numba")
        machine = {
            "platform": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count(),
            "threads": os.environ.get("OMP_NUM_THREADS", "torch's own"),
            "load_before_and_after": [load, os.getloadavg()[0]],
        }  # fmt: skip
        record = {"machine": machine, "versions": {name: version(name) for name in names}, "rows": rows}
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
