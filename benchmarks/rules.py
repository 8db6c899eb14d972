"""Our rule sets beside lxt, which patches classes of models: whether both agree, and what each costs.

python benchmarks/rules.py [--data FOLDER] [--rounds 15] [--output rules.json]

Needs lxt 2.1 and zennit (pip install --no-deps lxt zennit tabulate), transformers 4, beside which lxt 2.1 loads, and
Captum. FOLDER holds `stories260k`. Everything runs on the CPU, in one thread, in single precision.

Agreement: gradient x input of the embeddings (or patches) under each rule set that lxt has for a model; the largest
difference as a share of the largest relevance. lxt patches classes for good, so each rule set is a process of its own.
Where the models of this transformers differ from those that lxt was written for, that is what is printed.

Costs: a plain forward and backward pass to the input, then the method, in turn; the figure is the median of the ratios
of processor time, with the smallest and the largest. Ours take the gradients of biases too. lxt's ratio is that of the
patched model to the median of the model before. Memory is the most that torch has allocated at a time beyond the model
and its input, as a multiple of what the plain pass takes.
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
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate
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
MODELS = (*LXT, "DINOv2-small")
METHODS = ("libra", "attnlrp", "cp-lrp", "integrated gradients, 20 steps")


def loaded(name: str, data: Path) -> tuple[torch.nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """A model without gradients of parameters, what enters it as numbers, and its score as their function."""
    torch.manual_seed(SEED)
    model, values, score = _loaded(name, data)
    return model.requires_grad_(False), values, score


def _loaded(name: str, data: Path) -> tuple[torch.nn.Module, torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
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
    if name.startswith("DINOv2"):
        from attnflow.capturing import demo

        model = demo.dinov2().eval()
        direction = torch.randn(384)
        return model, torch.randn(1, 3, 224, 224), lambda x: model(x).last_hidden_state[0, 0] @ direction
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
    """The same under our rules, with the gradients of biases."""
    from attnflow.capturing.rules import Rules

    x = values.clone().requires_grad_()
    with Rules(rules).of(model) as mode:
        result = score(x)
    gradient, *_ = torch.autograd.grad(result, [x, *mode.constants], allow_unused=True)
    return gradient * values


def run(method: str, model: torch.nn.Module, values: torch.Tensor, score: Any) -> torch.Tensor:
    """One pass of a method."""
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


def agree(name: str, rules: str, data: Path) -> dict[str, float]:
    """Largest difference of ours and lxt's as a share of the largest relevance, and largest difference of the outputs.

    Of cp-lrp with gates also the difference from ours with the gate's gradient stopped, as lxt stops it.
    """
    model, values, score = loaded(name, data)
    own = {"difference": ours(rules, model, values, score)}
    gates = [module for path, module in model.named_modules() if path.endswith("gate_proj")]
    if rules == "cp-lrp" and gates:
        hooks = [gate.register_forward_hook(lambda *args: args[-1].detach()) for gate in gates]
        own["difference with a constant gate"] = ours(rules, model, values, score)
        for hook in hooks:
            hook.remove()
    before = score(values)
    patched(name, rules)
    model, values, score = loaded(name, data)
    peer = relevance(values, score)
    return {
        **{what: float((one - peer).abs().max() / one.abs().max()) for what, one in own.items()},
        "outputs differ by": float((before - score(values)).abs()),
    }


def seconds(call: Callable[[], Any]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def megabytes(call: Callable[[], Any]) -> float:
    """The most that torch has allocated at a time in one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    assert seen.profiler is not None
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))) / 2**20


def costs(name: str, data: Path, rounds: int) -> dict[str, Any]:
    """What the plain pass takes, and of each method the ratios to it: time (median, smallest, largest) and memory."""
    model, values, score = loaded(name, data)
    plain = partial(relevance, values, score)
    times = [seconds(plain) for _ in range(rounds + 1)][1:]  # the first call sets up
    result: dict[str, Any] = {"plain": {"seconds": statistics.median(times), "MB": megabytes(plain)}}

    def ratios(call: Callable[[], Any], rounds: int) -> dict[str, Any]:
        call()
        found = [1 / seconds(plain) * seconds(call) for _ in range(rounds)]
        memory = megabytes(call) / result["plain"]["MB"]
        return {"time": [statistics.median(found), min(found), max(found)], "memory": memory}

    for method in METHODS:
        count = 3 if method.startswith("integrated") else rounds
        result[method] = ratios(partial(run, method, model, values, score), count)
    return result


def lxt_costs(name: str, rules: str, data: Path, rounds: int) -> dict[str, Any]:
    """The same ratios of the patched model to the model before, which cannot run in turn."""
    found = []
    for patch in (False, True):
        if patch:
            patched(name, rules)
        _, values, score = loaded(name, data)
        call = partial(relevance, values, score)
        call()
        found.append(([seconds(call) for _ in range(rounds)], megabytes(call)))
    (before, plain), (after, peer) = found
    middle = statistics.median(before)
    return {"time": [x / middle for x in (statistics.median(after), min(after), max(after))], "memory": peer / plain}


def child(*arguments: str) -> Any:
    """What this script prints in a process of its own, or the last line of its error."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True)
    return json.loads(done.stdout) if not done.returncode else f"not to be had: {done.stderr.strip().splitlines()[-1]}"


def installed(package: str) -> str | None:
    """The version of a package, if it is there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def rounded(value: Any) -> Any:
    """Numbers to three digits."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def main() -> None:
    """Print everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("ATTNFLOW_DATA", "data")))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--part", nargs=3, metavar=("agree|costs|lxt", "MODEL", "SET"), help="one part alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part:
        what, name, rules = options.part
        parts: dict[str, Callable[[], Any]] = {
            "agree": lambda: agree(name, rules, options.data),
            "costs": lambda: costs(name, options.data, options.rounds),
            "lxt": lambda: lxt_costs(name, rules, options.data, options.rounds),
        }
        print(json.dumps(parts[what]()))
        return
    result: dict[str, Any] = {
        "machine": {"processor": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()},
        "versions": {name: installed(name) for name in ("torch", "transformers", "torchvision", "lxt", "captum")},
        "models": {},
    }

    def part(what: str, name: str, rules: str = "all") -> Any:
        return child("--data", str(options.data), "--rounds", str(options.rounds), "--part", what, name, rules)

    for name in MODELS:
        result["models"][name] = {"costs": part("costs", name)}
        for rules in SETS if name in LXT else ():
            result["models"][name][rules] = {
                "agreement with lxt": part("agree", name, rules),
                "lxt": part("lxt", name, rules),
            }
    text = json.dumps(rounded(result), indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
