"""Time and peak memory of the main job: `attnflow text` and `image` on the demo models, import, and help.

python benchmarks/commands.py [--runs 5] [--output commands.json]

Prints a table; each figure is the median of several runs in processes of their own, after one that is left out.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

SENTENCE = "The keys to the cabinet are on the table."


def jobs(folder: Path) -> dict[str, list[str]]:
    """The commands to measure."""
    from matplotlib.cbook import get_sample_data

    attnflow = [sys.executable, "-c", "from attnflow.cli import main; main()"]
    photo = str(get_sample_data("grace_hopper.jpg", asfileobj=False))
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import attnflow": [sys.executable, "-c", "import attnflow"],
        "import torch": [sys.executable, "-c", "import torch"],
        "attnflow --help": [*attnflow, "--help"],
        "attnflow text, rollout": [*attnflow, "text", SENTENCE],
        "attnflow text, flow, PNG": [*attnflow, "text", SENTENCE, "--method", "flow", "-o", str(folder / "keys.png")],
        "attnflow image, rollout, PNG": [*attnflow, "image", photo, "-o", str(folder / "photo.png")],
        "attnflow image, flow, PNG": [*attnflow, "image", photo, "--method", "flow", "-o", str(folder / "photo.png")],
    }


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds and peak memory in MB of one run: the child's own, read in a process that has no other child."""
    probe = (
        "import resource, subprocess, sys, time\n"
        "start = time.perf_counter()\n"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)\n"
        "print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024)"
    )
    run = subprocess.run([sys.executable, "-c", probe, *command], capture_output=True, text=True, check=True)
    seconds, megabytes = run.stdout.split()
    return float(seconds), float(megabytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, command in jobs(Path(folder)).items():
            first, _ = measure(command)
            runs = [measure(command) for _ in range(arguments.runs)]
            seconds, memory = (statistics.median(values) for values in zip(*runs, strict=True))
            rows.append({"job": name, "seconds": seconds, "peak_mb": memory, "first_seconds": first})
            print(f"{name:32} {seconds:7.2f} s {memory:8.0f} MB   (first run {first:.2f} s)", flush=True)
    result = {
        "machine": {"platform": platform.platform(), "processor": platform.processor() or platform.machine()},
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in ("attnflow", "torch", "transformers", "numba", "numpy")},
        "rows": rows,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
