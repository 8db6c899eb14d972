"""Our rule sets beside lxt, which patches classes of models: whether both agree, and what each costs.

python benchmarks/rules.py [--data FOLDER] [--rounds 15] [--output rules.json]

Needs lxt 2.1 and zennit (pip install --no-deps lxt zennit tabulate) and Captum. FOLDER holds `stories260k`. Everything
runs on the CPU. Linux only.

Agreement: gradient x input of the embeddings (or patches) under each rule set that lxt has for a model; the largest
difference as a share of the largest relevance. lxt patches classes for good, so each rule set is a process of its own.
Where the models of this transformers differ from those that lxt was written for, that is what is printed.

Costs: pairs measured alternately in one process, a plain forward and backward pass to the input and then the method;
the figure is the median of the ratios, with the smallest and the largest. lxt's ratio is that of the patched model to
the same pass of the model before it was patched, measured in a row. Memory is the peak beyond what the process held
with its model, each in a process of its own, as a multiple of what the plain pass takes there.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

warnings.filterwarnings("ignore")
SEED = 0
# Of each model the module that lxt patches, and where it keeps what it patches there.
LXT = {
    "Llama (stories260K)": ("transformers.models.llama.modeling_llama", "lxt.efficient.models.llama"),
    "BERT (MiniLM)": ("transformers.models.bert.modeling_bert", "lxt.efficient.models.bert"),
    "ViT (torchvision, random weights)": ("torchvision.models.vision_transformer", "lxt.efficient.models.vit_torch"),
}
SETS = {"attnlrp": "attnLRP", "cp-lrp": "cp_LRP"}
METHODS = ("plain", "libra", "attnlrp", "cp-lrp", "integrated gradients, 20 steps")


def peak_mb(*, since_now: bool = False) -> float:
    """Peak memory of this process in MB; `since_now` starts a new peak (Linux only)."""
    if since_now:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def loaded(name: str, data: Path) -> tuple[torch.nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A model, what enters it as numbers, and its score as their function."""
    torch.manual_seed(SEED)
    if name.startswith("Llama"):
        from attnflow.studies import stories

        model, _ = stories.load(data / "stories260k")
        ids = torch.randint(5, 500, (1, 128))
        return model, model.get_input_embeddings()(ids).detach(), lambda x: model(inputs_embeds=x).logits[0, -1].max()
    if name.startswith("BERT"):
        from attnflow.capturing import huggingface

        model, _ = huggingface.load()
        ids = torch.randint(1000, 20000, (1, 128))
        direction = torch.randn(384)
        values = model.get_input_embeddings()(ids).detach()
        return model, values, lambda x: model(inputs_embeds=x).last_hidden_state[0, 0] @ direction
    from torchvision.models.vision_transformer import VisionTransformer

    model = VisionTransformer(64, 8, 6, 6, 192, 768).eval()
    torch.nn.init.normal_(model.heads.head.weight)
    return model, torch.randn(1, 3, 64, 64), lambda x: model(x)[0].max()


def relevance(values: torch.Tensor, score: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Gradient x input, element by element."""
    x = values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(score(x), x)
    return gradient * values


def ours(rules: str, model: torch.nn.Module, values: torch.Tensor, score: Any) -> torch.Tensor:
    """The same under our rules."""
    from attnflow.capturing.rules import Rules

    x = values.clone().requires_grad_()
    with Rules(rules).of(model):
        result = score(x)
    (gradient,) = torch.autograd.grad(result, x)
    return gradient * values


def run(method: str, model: torch.nn.Module, values: torch.Tensor, score: Any) -> torch.Tensor:
    """One pass of a method."""
    if method in ("plain", "lxt"):
        return relevance(values, score)
    if method.startswith("integrated"):
        from captum.attr import IntegratedGradients

        # One step at a time: the score is a function of one example.
        return IntegratedGradients(lambda x: torch.stack([score(one[None]) for one in x])).attribute(
            values, n_steps=20, internal_batch_size=1
        )
    return ours(method, model, values, score)


def patched(name: str, rules: str) -> None:
    """Patch the classes of a model as lxt does for a rule set."""
    target, own = LXT[name]
    from lxt.efficient import monkey_patch

    monkey_patch(import_module(target), getattr(import_module(own), SETS[rules]))


def agree(name: str, rules: str, data: Path) -> dict[str, Any]:
    """Largest difference of ours and lxt's, as a share of the largest relevance, and of the two outputs."""
    model, values, score = loaded(name, data)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    own = ours(rules, model, values, score)
    before = score(values)
    times = [timed(lambda: relevance(values, score)) for _ in range(10)]
    patched(name, rules)
    model, values, score = loaded(name, data)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    peer = relevance(values, score)
    slower = [timed(lambda: relevance(values, score)) for _ in range(10)]
    token = own.sum(-1) if own.ndim == 3 else own.sum(1)
    peers = peer.sum(-1) if own.ndim == 3 else peer.sum(1)
    return {
        "difference": float((own - peer).abs().max() / own.abs().max()),
        "difference of tokens": float((token - peers).abs().max() / token.abs().max()),
        "correlation": float(torch.corrcoef(torch.stack([own.flatten(), peer.flatten()]))[0, 1]),
        "outputs differ by": float((before - score(values)).abs()),
        "lxt, time": statistics.median(slower) / statistics.median(times),
    }


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def costs(name: str, data: Path, rounds: int) -> dict[str, Any]:
    """Ratios of each method's time to that of the plain pass just before it: median, smallest, largest."""
    model, values, score = loaded(name, data)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    result: dict[str, Any] = {}
    for method in METHODS[1:]:
        count = 3 if method.startswith("integrated") else rounds
        run(method, model, values, score)
        ratios = [
            1 / timed(lambda: run("plain", model, values, score)) * timed(lambda: run(method, model, values, score))  # noqa: B023
            for _ in range(count)
        ]
        result[method] = [round(x, 2) for x in (statistics.median(ratios), min(ratios), max(ratios))]
    return result


def memory(name: str, method: str, data: Path) -> float:
    """MB that one pass takes at its peak."""
    if method == "lxt":
        patched(name, "attnlrp" if hasattr(import_module(LXT[name][1]), "attnLRP") else "cp-lrp")
    model, values, score = loaded(name, data)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    run(method, model, values, score)
    peak_mb(since_now=True)
    held = peak_mb()
    run(method, model, values, score)
    return peak_mb() - held


def child(*arguments: str) -> Any:
    """What this script prints in a process of its own, or the last line of its error."""
    # Freed blocks go back to the system at once, so that the peak is that of what lives.
    env = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=env)
    return json.loads(done.stdout) if not done.returncode else f"not to be had: {done.stderr.strip().splitlines()[-1]}"


def installed(package: str) -> str | None:
    """The version of a package, if it is there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> None:
    """Print everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ATTNFLOW_DATA", "data")))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part:
        what, name, detail = options.part
        parts: dict[str, Callable[[], Any]] = {
            "agree": lambda: agree(name, detail, options.data),
            "costs": lambda: costs(name, options.data, int(detail)),
            "memory": lambda: memory(name, detail, options.data),
        }
        print(json.dumps(parts[what]()))
        return
    result: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: installed(name) for name in ("torch", "transformers", "torchvision", "lxt", "captum")},
        "models": {},
    }
    shared = ("--data", str(options.data))
    for name in LXT:
        taken = {method: child(*shared, "--part", "memory", name, method) for method in (*METHODS, "lxt")}
        plain = taken["plain"]
        result["models"][name] = {
            "agreement with lxt": {rules: child(*shared, "--part", "agree", name, rules) for rules in SETS},
            "time, times plain": child(*shared, "--part", "costs", name, str(options.rounds)),
            "memory, times plain": {
                method: round(mb / plain, 2) if isinstance(mb, float) else mb for method, mb in taken.items()
            },
            "memory of plain, MB": plain,
        }
    text = json.dumps(result, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
