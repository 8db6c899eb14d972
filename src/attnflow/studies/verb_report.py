"""What the verb-number study found, in words and as tables in Markdown, beside the paper's numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attnflow.methods import METHODS
from attnflow.studies.record import Record
from attnflow.studies.verb_measure import BLANK_OUT, COLUMN_SUM, GRADIENTS, SIDES

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
    models = list(tables["accuracy"])
    main, seeds = models[0], [name for name in models if name.startswith("no mask, seed")]
    of_main = tables["correlations"][main]
    inside, outside = (of_main[side][BLANK_OUT] for side in SIDES)
    natural = {name: tables["accuracy"][name]["natural"] for name in models}
    sentences = [
        f"The model without a mask is right about {_percent(natural[main])} of {tables['test sentences']['natural']} "
        f"held-out natural sentences (paper: {_percent(ACCURACY)}, with about a hundred times the data); "
        + "; ".join(f"{name}: {_percent(natural[name])}" for name in models[1:])
        + ".",
        f"At layer 1 and with CLS inside the correlation, raw attention reaches {_two(inside['raw']['mean'][0])} and "
        f"rollout {_two(inside['rollout']['mean'][0])} against blank-out [paper {_two(PAPER[BLANK_OUT]['raw'][0][0])} "
        f"and {_two(PAPER[BLANK_OUT]['rollout'][0][0])}]; with CLS outside both reach "
        f"{_two(outside['raw']['mean'][0])} and {_two(outside['rollout']['mean'][0])}, since they then rank the words "
        "alike.",
    ]
    first = tables["CLS first"]
    sentences.append(
        f"CLS is the token whose blank-out changes the decision most in {_percent(first[BLANK_OUT])} of the sentences, "
        f"and has the largest gradient in {_percent(first[NORM])}; at layer 1 raw attention gives it the highest score "
        f"in {_percent(first['raw, layer 1'])}, rollout in {_percent(first['rollout, layer 1'])}."
    )
    for reference in (BLANK_OUT, NORM):
        for side in SIDES:
            found = of_main[side][reference]
            gains = [f"{name} {_gain(tables['depth'][side][reference][name])}" for name in METHODS]
            tops = [
                f"{name} {_two(found[name]['mean'][-1])} [paper {_two(cells[0][-1])}]"
                for name, cells in PAPER[reference].items()
            ]
            sentences.append(
                f"Against {_named(reference)}, {side}, the top layer reaches: {', '.join(tops)}. The column sum of the "
                f"first layer alone reaches {_two(found[COLUMN_SUM]['mean'][0])}; depth adds: {', '.join(gains)}."
            )
    alike = [f"{name} {_two(value)}" for name, value in tables["likeness to the column sum"].items()]
    sentences.append(
        f"The top layer ranks the words as the first layer's column sum does with a correlation of: {', '.join(alike)}."
    )
    if len(seeds) > 1:
        tops = [
            f"{name} {_span(tables['correlations'][one][OUTSIDE][BLANK_OUT][name]['mean'][-1] for one in seeds)}"
            for name in METHODS
        ]
        sentences.append(f"Over {len(seeds)} seeds the top layer, {OUTSIDE}, against blank-out: {', '.join(tops)}.")
    tops = [f"{_two(of_main[OUTSIDE][one]['rollout']['mean'][-1])} ({one})" for one in GRADIENTS]
    share = tables["gradient sum over norm"]
    sentences.append(
        f"The sum of a gradient over the embedding is {share:.0e} of its norm: GPT-2's blocks see an embedding without "
        "its mean, so that by algebra the sum is 0, and what correlates with it correlates with rounding."
    )
    sentences.append(f"Rollout's top layer, {OUTSIDE}, against the four gradients: {', '.join(tops)}.")
    return sentences


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
    for number, reference in enumerate((BLANK_OUT, NORM), start=1):
        lines += ["", f"## Table {number}: Spearman correlation with {_named(reference)}", ""]
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
    shown = [*METHODS, COLUMN_SUM]
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
                [f"{side}: {method}", *([*cells, ""] if method in METHODS else ["", "", "", "", "", "", *cells])]
            )
    return _table(["", "L1", "L2", "L3", "L4", "L5", "L6", "no layer"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (head, ["---"] * len(head), *rows)
    ]


def _named(reference: str) -> str:
    return reference if reference == BLANK_OUT else "the gradient"


def _gain(found: Mapping[str, Any]) -> str:
    return f"{found['mean'][0]:+.2f} ({found['low'][0]:+.2f} to {found['high'][0]:+.2f})"


def _span(values: Iterable[float]) -> str:
    several = list(values)
    return f"{_two(min(several))} to {_two(max(several))}"


def _two(value: float | None) -> str:
    return "undefined" if value is None or math.isnan(value) else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
