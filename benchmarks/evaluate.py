"""What an example of an evaluation costs: passes forward and backward, and time beside the plain passes.

python benchmarks/evaluate.py DATA [--examples 12] [--rounds 3]

DATA: the folder with sst2/ and adapters/. MiniLM with the SST-2 adapter; the methods gradient-flow, gradient-norm and
gradient-x-input by one metric, the correlation with a gradient baseline. So nothing is removed from a text, and what is
counted is the capture and the gradients. JSON: passes of an example, and the median over rounds of its milliseconds,
and of these over the milliseconds of one plain forward pass, measured alternately.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import attnflow
from attnflow.faithfulness import loading
from attnflow.studies.sst2 import ADAPTER, classifier

METHODS = ("gradient-flow", "gradient-norm", "gradient-x-input")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--examples", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model, tokenizer = classifier(options.data / "adapters" / ADAPTER)
    examples = loading.texts(options.data / "sst2" / "dev.tsv")[: options.examples]
    texts = [dict(tokenizer(text, return_tensors="pt")) for text, *_ in examples]

    def evaluated() -> None:
        attnflow.evaluate(
            model, examples, methods=METHODS, metrics=["gradient"], target="predicted", tokenizer=tokenizer
        )

    def plain() -> None:
        with torch.no_grad():
            for inputs in texts:
                model(**inputs)

    evaluated()  # what is compiled, and the proofs of each shape
    found: dict[str, Any] = {"examples": len(examples), "methods": METHODS, **passes(model, evaluated, len(examples))}
    pairs = [(clock(plain), clock(evaluated)) for _ in range(options.rounds)]
    found["ms_an_example"] = 1000 * statistics.median(taken for _, taken in pairs) / len(examples)
    found["times_a_plain_pass"] = statistics.median(taken / beside for beside, taken in pairs)
    print(json.dumps(found))


def passes(model: torch.nn.Module, job: Any, count: int) -> dict[str, float]:
    """How many passes forward and backward a job makes for each of so many examples."""
    forward, backward, grad = list[int](), list[int](), torch.autograd.grad
    hook = model.register_forward_hook(lambda *_: forward.append(1))

    def counted(*args: Any, **kwargs: Any) -> Any:
        backward.append(1)
        return grad(*args, **kwargs)

    torch.autograd.grad = counted
    try:
        job()
    finally:
        torch.autograd.grad = grad
        hook.remove()
    return {"forward": len(forward) / count, "backward": len(backward) / count}


def clock(job: Any) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
