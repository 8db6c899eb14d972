"""What the verb-number study found, in words and as tables in Markdown, beside the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnflow.studies.comparison import number
from attnflow.studies.record import Record
from attnflow.studies.verb_measure import BLANK_OUT, COLUMN_SUM, GRADIENTS, SIDES, STUDIED

INSIDE, OUTSIDE = SIDES
NORM, SUM = GRADIENTS[0], GRADIENTS[-1]
ACCURACY = 0.96
# Abnar & Zuidema 2020, tables 1 and 2: means and deviations at layers 1 to 6. They do not say which gradient it is.
PAPER = {
    BLANK_OUT: {
        "raw": ((0.69, 0.10, -0.11, -0.09, 0.20, 0.29), (0.27, 0.43, 0.49, 0.52, 0.45, 0.39)),
        "rollout": ((0.32, 0.38, 0.51, 0.62, 0.70, 0.71), (0.26, 0.27, 0.26, 0.26, 0.25, 0.24)),
        "flow": ((0.32, 0.44, 0.70, 0.70, 0.71, 0.70), (0.26, 0.29, 0.25, 0.22, 0.22, 0.22)),
    },
    NORM: {
        "raw": ((0.53, 0.16, -0.06, 0.00, 0.24, 0.46), (0.33, 0.38, 0.42, 0.47, 0.40, 0.35)),
        "rollout": ((0.22, 0.27, 0.39, 0.47, 0.53, 0.54), (0.31, 0.32, 0.32, 0.32, 0.32, 0.31)),
        "flow": ((0.22, 0.31, 0.54, 0.61, 0.60, 0.61), (0.31, 0.34, 0.32, 0.28, 0.28, 0.28)),
    },
}


def words(tables: Mapping[str, Any]) -> list[str]:
    """What the numbers say, a sentence each."""
    main = next(iter(tables["accuracy"]))
    return [
        _on_accuracy(tables),
        *_on_layer_1(tables, tables["correlations"][main]),
        *(_on_depth(tables, main, reference, side) for reference in (BLANK_OUT, NORM) for side in SIDES),
        "The top layer ranks the words as the first layer's column sum does with a correlation of: "
        + ", ".join(f"{name} {_two(value)}" for name, value in tables["likeness to the column sum"].items())
        + ".",
        _on_models(tables),
        f"The sum of a gradient over the embedding is {tables['gradient sum over norm']:.0e} of its norm: LayerNorm "
        "takes off the mean of what it sees, so that by algebra the sum is 0, and what correlates with it is rounding.",
    ]


def _on_accuracy(tables: Mapping[str, Any]) -> str:
    count = tables["test sentences"]["natural"]
    natural = {name: row["natural"] for name, row in tables["accuracy"].items()}
    share = next(iter(natural.values()))
    return (
        f"Right about the number in {count} held-out natural sentences: "
        + ", ".join(f"{_percent(value)} ({name})" for name, value in natural.items())
        + f"; the standard error is {_percent(math.sqrt(share * (1 - share) / count))}, and the paper's model, with "
        f"about a hundred times the data, reached {_percent(ACCURACY)}."
    )


def _on_layer_1(tables: Mapping[str, Any], correlations: Mapping[str, Any]) -> list[str]:
    reached = {(side, name): _two(correlations[side][BLANK_OUT][name]["mean"][0]) for side in SIDES for name in STUDIED}
    papers = {name: _two(means[0]) for name, (means, _) in PAPER[BLANK_OUT].items()}
    first = tables["CLS first"]
    return [
        f"At layer 1, {INSIDE}, raw reaches {reached[INSIDE, 'raw']} and rollout {reached[INSIDE, 'rollout']} "
        f"against blank-out [paper {papers['raw']} and {papers['rollout']}]; {OUTSIDE}, {reached[OUTSIDE, 'raw']} and "
        f"{reached[OUTSIDE, 'rollout']}, since they then rank the words alike.",
        f"CLS is the token whose blank-out changes the decision most in {_percent(first[BLANK_OUT])} of the sentences, "
        f"and has the largest gradient in {_percent(first[NORM])}; at layer 1 raw attention gives it the highest score "
        f"in {_percent(first['raw, layer 1'])}, rollout in {_percent(first['rollout, layer 1'])}.",
    ]


def _on_depth(tables: Mapping[str, Any], model: str, reference: str, side: str) -> str:
    found = tables["correlations"][model][side][reference]
    tops = [
        f"{name} {_two(found[name]['mean'][-1])} [paper {_two(means[-1])}]"
        for name, (means, _) in PAPER[reference].items()
    ]
    gains = [f"{name} {_gain(tables['depth'][side][reference][name])}" for name in STUDIED]
    return (
        f"Against {_named(reference)}, {side}, the top layer reaches: {', '.join(tops)}. The column sum of the first "
        f"layer alone reaches {_two(found[COLUMN_SUM]['mean'][0])}; depth adds: {', '.join(gains)}."
    )


def _on_models(tables: Mapping[str, Any]) -> str:
    """How the top layer differs from model to model."""
    rows = {
        name: ", ".join(f"{method} {_two(found[OUTSIDE][BLANK_OUT][method]['mean'][-1])}" for method in STUDIED)
        for name, found in tables["correlations"].items()
    }
    return (
        f"The top layer against blank-out, {OUTSIDE}, by model: "
        + "; ".join(f"{name}: {row}" for name, row in rows.items())
        + "."
    )


def markdown(record: Record) -> str:
    """The record's words and tables in Markdown."""
    tables = record.tables
    main = next(iter(tables["accuracy"]))
    lines = [
        "# Verb number",
        "",
        "Written by `attnflow study verb-number`; the numbers stand in `verb-number.json`.",
        "",
    ]
    lines += [f"- {sentence}" for sentence in record.words]
    lines += ["", "## Accuracy by the number of attractors", ""]
    kinds = list(tables["test sentences"])
    lines += _table(
        ["model", *(f"{kind} ({tables['test sentences'][kind]})" for kind in kinds)],
        [[name, *(_percent(row[kind]) for kind in kinds)] for name, row in tables["accuracy"].items()],
    )
    for place, reference in enumerate((BLANK_OUT, NORM), start=1):
        lines += ["", f"## Table {place}: Spearman correlation with {_named(reference)}", ""]
        lines += [f"Mean ± deviation over sentences ({main}); layers count from 1, as in the paper.", ""]
        lines += _paper_table(reference, tables["correlations"][main])
    lines += ["", "## Which gradient, at the last layer", ""]
    lines += _table(
        ["method", *(f"{one}, {side}" for one in GRADIENTS for side in SIDES)],
        [
            [
                method,
                *(
                    _two(tables["correlations"][main][side][one][method]["mean"][-1])
                    for one in GRADIENTS
                    for side in SIDES
                ),
            ]
            for method in tables["correlations"][main][OUTSIDE][NORM]
        ],
    )
    lines += ["", "## What depth adds over the first layer's column sum", ""]
    lines += ["The last layer's correlation less that of the column sum, with its 95 % interval.", ""]
    lines += _table(
        ["method", *(f"{_named(one)}, {side}" for one in (BLANK_OUT, NORM) for side in SIDES)],
        [
            [method, *(_gain(tables["depth"][side][one][method]) for one in (BLANK_OUT, NORM) for side in SIDES)]
            for method in tables["depth"][OUTSIDE][NORM]
        ],
    )
    shown = [*STUDIED, COLUMN_SUM]
    lines += ["", "## Seeds, mask and training: the last layer, CLS outside", ""]
    lines += _table(
        ["model", "accuracy", *(f"{_named(one)}: {name}" for one in (BLANK_OUT, NORM) for name in shown)],
        [
            [
                model,
                _percent(tables["accuracy"][model]["natural"]),
                *(_two(found[OUTSIDE][one][name]["mean"][-1]) for one in (BLANK_OUT, NORM) for name in shown),
            ]
            for model, found in tables["correlations"].items()
        ],
    )
    lines += ["", "## Length of the sentence, and right or wrong decisions: the last layer, CLS outside", ""]
    rows = {f"{length} words": row for length, row in tables["lengths"].items()} | tables["decisions"]
    lines += _table(
        ["sentences", "n", *(f"{_named(one)}: {name}" for one in (BLANK_OUT, NORM) for name in shown)],
        [
            [name, str(row["n"]), *(_two(row[one][method]) for one in (BLANK_OUT, NORM) for method in shown)]
            for name, row in rows.items()
            if row["n"]
        ],
    )
    return "\n".join(lines) + "\n"


def _paper_table(reference: str, correlations: Mapping[str, Any]) -> list[str]:
    rows = [
        [f"paper: {name}", *(f"{_two(mean)} ± {_two(deviation)}" for mean, deviation in zip(*cells, strict=True)), ""]
        for name, cells in PAPER[reference].items()
    ]
    for side in SIDES:
        for method, found in correlations[side][reference].items():
            cells = [f"{_two(mean)} ± {_two(one)}" for mean, one in zip(found["mean"], found["deviation"], strict=True)]
            rows.append(
                [f"{side}: {method}", *([*cells, ""] if method in STUDIED else ["", "", "", "", "", "", *cells])]
            )
    return _table(["", "L1", "L2", "L3", "L4", "L5", "L6", "no layer"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, ["---"] * len(head), *rows)
    ]


def _named(reference: str) -> str:
    return reference if reference == BLANK_OUT else "the gradient"


def _gain(found: Mapping[str, Any]) -> str:
    mean, low, high = (number(found[name][0], "+.2f") for name in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"


def _two(value: float | None) -> str:
    return number(value, ".2f")


def _percent(share: float | None) -> str:
    return number(None if share is None else 100 * share, ".1f") + " %"
