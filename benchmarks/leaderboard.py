"""Which method to believe: all methods and baselines on the same examples, by tests whose answer is known or asked.

python benchmarks/leaderboard.py DATA [--tasks sst2,subject] [--share 0.1] [--keep FOLDER] [--output PAGE]

DATA: the folder with sst2/, verb_number/, blimp/, adapters/ and weizmann_horses/. tasks.py holds the jobs. Each method
explains the topmost layer from the read-out, as `attnflow.evaluate` does. --share takes less of each job, for a try.
--keep holds the evaluations: a run that was killed goes on, and a method that is new is measured alone.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tasks import TASKS, Job, Task

import attnflow
from attnflow.faithfulness.example import model_inputs
from attnflow.faithfulness.metrics import METRICS, blank_out, correlation
from attnflow.faithfulness.results import FEW, Difference, Summary
from attnflow.faithfulness.score import text_score

# lrp is one of the sets of rules; occlusion is asked of some tasks; the sum of the gradient is 0 by algebra in BERT;
# hidden token attribution explains a position, by a backward pass for each number of it.
LEFT_OUT = ("lrp", "occlusion", "gradient-sum", "hidden-token-attribution")
BASELINES = tuple(name for name in attnflow.BASELINES if name not in LEFT_OUT)


def measured(name: str, task: Task, data: Path, kept: Path, share: float) -> tuple[attnflow.Evaluation, str]:
    """All methods on a task, those that were measured before from their files; and what the examples say themselves."""
    loaded = task.load(data, kept)
    model, examples, settings = loaded
    count = max(2, math.ceil(share * task.count))
    examples = examples[:: max(1, len(examples) // count)][:count]
    found = [attnflow.Evaluation.load(path) for path in sorted(kept.glob(f"{name}.*.parquet"))]
    done = {row.method for one in found for row in one.rows} | {
        failure.method for one in found for failure in one.failures
    }
    wanted = [*attnflow.METHODS, *BASELINES, *task.more]
    missing = [method for method in wanted if method not in done]
    if missing:
        print(f"{name}: {len(missing)} methods, {len(examples)} examples", file=sys.stderr)
        output = kept / f"{name}.{len(found)}.parquet"
        found.append(
            attnflow.evaluate(
                model,
                examples,
                methods=missing,
                metrics=task.metrics,
                output=output,
                progress=partial(told, name),
                **settings,
            )
        )
    same = {(one.recipe["model"]["sha256"], one.recipe["data"]["sha256"]) for one in found}
    if len(same) > 1:
        raise SystemExit(f"{kept} holds evaluations of {name} on other data or weights: give an empty folder")
    rows = dict.fromkeys(row for one in found for row in one.rows)
    failures = dict.fromkeys(failure for one in found for failure in one.failures)
    whole = attnflow.Evaluation(tuple(rows), tuple(failures), found[0].recipe)
    return whole, ceiling((model, examples, settings)) if "blank-out" in task.metrics else ""


def ceiling(job: Job) -> str:
    """How far blank-out by UNK agrees with blank-out by MASK."""
    model, examples, settings = job
    agreed: list[float] = []
    for text, *_ in examples:
        inputs: Any = model_inputs(text, model, settings["tokenizer"])
        trace = attnflow.capture(model, inputs, tokenizer=settings["tokenizer"], target=settings["target"])
        assert trace.target
        scores = [
            text_score(model, inputs, trace.roles, trace.target["target"], tokenizer=settings["tokenizer"], blank=blank)
            for blank in ("unk", "mask")
        ]
        one, other = (np.abs(blank_out(score, len(score.positions))) for score in scores)
        agreed.append(correlation(one, other))
    return f"Blank-out by UNK and blank-out by MASK agree at {np.nanmean(agreed):.3f}. "


def told(name: str, done: int, total: int | None) -> None:
    """Every tenth example on standard error."""
    if done % 10 == 0:
        print(f"{name}: {done} of {total}", file=sys.stderr)


def table(evaluation: attnflow.Evaluation, metrics: Sequence[str]) -> str:
    """A row for each method, the best by the first metric first; what is not told apart from the best is in bold."""
    summary, apart = evaluation.summary(), evaluation.differences()
    cells = {(one.method, one.metric): cell(one, apart) for one in summary}
    first = [one for one in summary if one.metric == metrics[0]]
    lines = [f"| method | {' | '.join(metrics)} |", f"| --- |{' --- |' * len(metrics)}"]
    for one in sorted(first, key=goodness, reverse=True):
        row = [cells.get((one.method, metric), "") for metric in metrics]
        lines.append(f"| {one.method} | {' | '.join(row)} |")
    known = {one.method for one in first}
    refused = {failure.method: failure.error for failure in evaluation.failures if failure.method not in known}
    for method, error in refused.items():
        if method is not None:
            lines.append(f"| {method} | refused: {error.split(';')[0][:100]} |{' |' * (len(metrics) - 1)}")
    return "\n".join(lines)


def cell(one: Summary, apart: Sequence[Difference]) -> str:
    """A mean and its interval."""
    shown = f"{one.mean:.3f}" if tied(one, apart) is False else f"**{one.mean:.3f}**"
    return f"{shown} ({one.low:.3f} to {one.high:.3f})"


def tied(one: Summary, apart: Sequence[Difference]) -> bool:
    """Whether a method is the best of its metric, or not told apart from it."""
    own = [other for other in apart if (other.method, other.metric) == (one.method, one.metric)]
    return not own or own[0].low <= 0 <= own[0].high


def goodness(one: Summary) -> float:
    """The mean, turned so that more is better."""
    sign = 1 if METRICS[one.metric].direction == "up" else -1
    return -math.inf if math.isnan(one.mean) else sign * one.mean


def overview(found: dict[str, attnflow.Evaluation]) -> str:
    """Means alone, one column a task and metric, by the mean rank over the columns."""
    columns = [(name, metric) for name in found for metric in TASKS[name].metrics]
    summaries = {
        (name, one.metric, one.method): one for name, evaluation in found.items() for one in evaluation.summary()
    }
    apart = {name: evaluation.differences() for name, evaluation in found.items()}
    methods = list(dict.fromkeys(method for _, _, method in summaries))
    ranks: dict[str, list[float]] = {method: [] for method in methods}
    for column in columns:
        scores = [goodness(summaries[*column, m]) if (*column, m) in summaries else -math.inf for m in methods]
        order = np.argsort(np.argsort([-score for score in scores]))
        for method, place in zip(methods, order, strict=True):
            ranks[method].append(float(place) + 1)
    lines = [
        f"| method | mean rank | {' | '.join(f'{name}: {metric}' for name, metric in columns)} |",
        f"| --- | --- |{' --- |' * len(columns)}",
    ]
    for method in sorted(methods, key=lambda method: float(np.mean(ranks[method]))):
        row = []
        for name, metric in columns:
            one = summaries.get((name, metric, method))
            shown = "" if one is None else f"{one.mean:.3f}"
            row.append(f"**{shown}**" if one is not None and tied(one, apart[name]) else shown)
        lines.append(f"| {method} | {np.mean(ranks[method]):.1f} | {' | '.join(row)} |")
    return "\n".join(lines)


def section(name: str, evaluation: attnflow.Evaluation, says: str) -> str:
    """One task of the page."""
    task, count = TASKS[name], len({row.example for row in evaluation.rows})
    return f"""## {task.title}

{task.words} {says}n = {count}{" (Student's intervals)" if count < FEW else ""}.

{table(evaluation, task.metrics)}
"""


def main() -> None:
    """Evaluate, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"names with commas between them: {', '.join(TASKS)}")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--output", type=Path)
    chosen = parser.parse_args()
    names = chosen.tasks.split(",")
    if unknown := [name for name in names if name not in TASKS]:
        parser.error(f"there is no task {unknown[0]!r}; choose from {', '.join(TASKS)}")
    found: dict[str, attnflow.Evaluation] = {}
    says: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        kept = chosen.keep or Path(temporary)
        kept.mkdir(parents=True, exist_ok=True)
        for name in names:
            found[name], says[name] = measured(name, TASKS[name], chosen.data, kept, chosen.share)
    methods = len({row.method for one in found.values() for row in one.rows})
    sections = "\n".join(section(name, evaluation, says[name]) for name, evaluation in found.items())
    page = f"""# Leaderboard

`python benchmarks/leaderboard.py DATA` makes this page. Higher is better in every column. In bold is what is not told
apart from the best of its column: the interval of the paired difference, example by example, holds 0. {methods} methods
and baselines are compared in each column, so that one in twenty is told apart, or not, by chance. `random` is the
floor. Special tokens are neither removed nor compared. Signed relevance is compared by its size with sizes and with
marks, and as it is where a test removes what speaks for the answer. `occlusion` is the reference of blank-out itself.

{overview(found)}

{sections}"""
    if chosen.output:
        chosen.output.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
