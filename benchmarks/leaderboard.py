"""Which method to believe: all methods and baselines on the same examples, by tests that remove or mark what counts.

python benchmarks/leaderboard.py DATA [--texts 200] [--photographs 30] [--deletions 8] [--keep FOLDER] [--output PAGE]

DATA: the folder with sst2/ (dev.tsv), adapters/ and weizmann_horses/ (images and masks). Texts: MiniLM with the SST-2
adapter, the class predicted; photographs: DINOv2-small (fine-tuned for saliency), the norm of [CLS]. The read-out
explains the topmost layer. Intervals hold the middle 95 % of bootstrap means over the examples, and differences from
the best are paired. --keep holds the evaluations, so that a run that was killed goes on.
"""

import argparse
import math
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np

import attnflow
from attnflow.capturing import demo, vision
from attnflow.faithfulness import loading
from attnflow.faithfulness.metrics import METRICS
from attnflow.studies.segmentation import cls_norm
from attnflow.studies.sst2 import ADAPTER, classifier

BASELINES = ("gradient-x-input", "libra", "attnlrp", "cp-lrp", "integrated-gradients")
TEXTS = ("blank-out", "signed-blank-out", "deletion-gap")
RESAMPLES = 2000


def texts(data: Path, count: int, output: Path) -> attnflow.Evaluation:
    """Sentences of the development set, every n-th of them."""
    model, tokenizer = classifier(data / "adapters" / ADAPTER)
    examples = loading.texts(data / "sst2" / "dev.tsv")
    step = max(1, len(examples) // count)
    return evaluated(model, examples[::step][:count], TEXTS, output, tokenizer=tokenizer, target="predicted")


def photographs(data: Path, count: int, metric: str, output: Path) -> attnflow.Evaluation:
    """Horses with their masks, every n-th of them."""
    loaded = vision.load(demo.IMAGE)
    masks = sorted((data / "weizmann_horses").glob("*_mask.png"))
    examples = [partial(horse, loaded, mask) for mask in masks]
    step = max(1, len(examples) // count)
    return evaluated(loaded.model, examples[::step][:count], [metric], output, target=cls_norm)


def horse(loaded: vision.VisionModel, mask: Path):
    """The pixels of a photograph, and its mask."""
    pixels = loaded.prepare(vision.open_image(mask.with_name(mask.name.replace("_mask.png", "_rgb.jpg"))))
    return pixels[0], None, np.asarray(vision.open_image(mask).convert("L")) > 127


def evaluated(model, examples, metrics, output: Path, **settings) -> attnflow.Evaluation:
    """All methods and baselines; what was finished before is read."""
    if output.exists():
        return attnflow.Evaluation.load(output)
    print(f"{output.stem}: {len(examples)} examples", file=sys.stderr)
    tell = partial(told, output.stem)
    methods = [*attnflow.METHODS, *BASELINES]
    return attnflow.evaluate(
        model, examples, methods=methods, metrics=metrics, output=output, progress=tell, **settings
    )


def told(name: str, done: int, total: int | None) -> None:
    """Every tenth example on standard error."""
    if done % 10 == 0:
        print(f"{name}: {done} of {total}", file=sys.stderr)


def table(evaluation: attnflow.Evaluation, metrics: tuple[str, ...]) -> str:
    """A row for each method, the best by the first metric first; ties with the best of a metric are in bold."""
    values: dict[str, dict[str, dict[int, float]]] = {metric: {} for metric in metrics}
    for row in evaluation.rows:
        values[row.metric].setdefault(row.method, {})[row.example] = row.value
    rng = np.random.default_rng(0)
    cells: dict[str, dict[str, str]] = {}
    order: dict[str, float] = {}
    for metric in metrics:
        means = {method: np.nanmean(list(found.values())) for method, found in values[metric].items()}
        sign = 1 if METRICS[metric].direction == "up" else -1
        best = max(means, key=lambda method: sign * means[method])
        for method, found in values[metric].items():
            known = np.array([value for value in found.values() if not math.isnan(value)])
            low, high = interval(known, rng)
            pairs = [(value, values[metric][best].get(example, math.nan)) for example, value in found.items()]
            differences = np.array([one - other for one, other in pairs if not math.isnan(one - other)])
            ends = interval(differences, rng)
            tie = method == best or ends[0] <= 0 <= ends[1]
            shown = f"{means[method]:.3f}"
            cells.setdefault(method, {})[metric] = f"{f'**{shown}**' if tie else shown} ({low:.3f} to {high:.3f})"
            if metric == metrics[0]:
                order[method] = sign * float(means[method])
    lines = [f"| method | {' | '.join(metrics)} |", f"| --- |{' --- |' * len(metrics)}"]
    for method in sorted(cells, key=lambda method: -order.get(method, -math.inf)):
        lines.append(f"| {method} | {' | '.join(cells[method].get(metric, 'undefined') for metric in metrics)} |")
    refused = {failure.method: failure.error for failure in evaluation.failures if failure.method}
    for method, error in refused.items():
        if method not in cells:
            lines.append(f"| {method} | refused: {error.split(';')[0][:100]} |{' |' * (len(metrics) - 1)}")
    return "\n".join(lines)


def interval(values: np.ndarray, rng: np.random.Generator) -> tuple[float, float]:
    """The middle 95 % of bootstrap means."""
    if len(values) < 2:
        return math.nan, math.nan
    means = values[rng.integers(0, len(values), (RESAMPLES, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    """Evaluate, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--photographs", type=int, default=30)
    parser.add_argument("--deletions", type=int, default=8, help="photographs of which patches are deleted")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        of_texts = texts(chosen.data, chosen.texts, folder / "texts.parquet")
        found = photographs(chosen.data, chosen.photographs, "pixel-auc", folder / "pixel-auc.parquet")
        deleted = photographs(chosen.data, chosen.deletions, "deletion-gap", folder / "deletion-gap.parquet")
    count = len(attnflow.METHODS) + len(BASELINES) + 2
    page = f"""# Leaderboard

`python benchmarks/leaderboard.py DATA --texts {chosen.texts} --photographs {chosen.photographs} --deletions
{chosen.deletions}` makes this page.
Means with the middle 95 % of bootstrap means; in bold what is not told apart from the best of its column (the paired
interval of the difference holds 0). {count} methods are compared on each column, so that of twenty columns one bold
number more or less is chance. `random` is the floor. Special tokens are neither removed nor correlated.

## Words that change a text classifier's class

MiniLM with an SST-2 adapter, {len({row.example for row in of_texts.rows})} sentences of the development set, the class
predicted, the read-out's top layer. blank-out: rank correlation of sizes; signed-blank-out: of signed relevance with
signed changes; deletion-gap: deleting the least relevant first less deleting the most relevant first.

{table(of_texts, TEXTS)}

## What a ViT sees in a photograph

DINOv2-small fine-tuned for saliency, photographs of horses, the norm of [CLS]. pixel-auc: does the size of relevance
find the horse ({len({row.example for row in found.rows})} photographs).

{table(found, ("pixel-auc",))}

deletion-gap: in the norm of [CLS], as patches are painted over with zeros
({len({row.example for row in deleted.rows})} photographs).

{table(deleted, ("deletion-gap",))}
"""
    if chosen.output:
        chosen.output.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
