"""The page of a sweep: counts first, then what is wrong, what is refused and why, what is equal, what was not built."""

import collections
import re

VERDICTS = ("equal", "refused", "WRONG", "crash", "not judged", "not built")
HEAD = """# What capture was tried on

Written by `make sweep`; the families that the tests hold to 1e-5 are in [families.md](families.md). Every model class
of transformers and every class of timm is built small, with seeded random weights, and captured; the trace is held to
what the model really does, seen by other means (tests/sweep): the weights of every attention call below autograd, which
calls the values of a call depend on, and what changes at every call when one token or patch is changed, with attention
and without. "equal" says how large the largest difference was.

"""


def counts(rows):
    """How many there are of each verdict, in one line."""
    number = collections.Counter(row["verdict"] for row in rows)
    built = sum(number[v] for v in VERDICTS[:-1])
    return f"built {built}: " + ", ".join(f"{v} {number[v]}" for v in VERDICTS)


def kind(reason):
    """A reason without the names and numbers of one model, so that reasons of one kind fall together."""
    reason = re.sub(r"'[^']*'(, '[^']*')*", "'...'", reason)
    reason = re.sub(r"\b[A-Z][A-Za-z0-9]*[a-z0-9][A-Z]\w*\b(?!Error)", "...", reason)
    reason = re.sub(r"\d+( x \d+)*(, \d+( x \d+)*)*", "n", reason)
    return re.sub(r"\s+", " ", reason).replace("|", "/")[:220]


def table(rows, cells):
    """Rows of a table in the order of library and name."""
    ordered = sorted(rows, key=lambda row: (row["library"], row["name"]))
    return "".join("| " + " | ".join(str(one).replace("|", "/") for one in cells(row)) + " |\n" for row in ordered)


def page(rows):
    """The whole page."""
    by = collections.defaultdict(list)
    for row in rows:
        by[row["verdict"]].append(row)
    number = {v: len(by[v]) for v in VERDICTS}
    text = HEAD + "| | transformers | timm |\n| --- | --- | --- |\n"
    for verdict in ("built", *VERDICTS):
        own = [r for v in (VERDICTS[:-1] if verdict == "built" else [verdict]) for r in by[v]]
        timm = sum(row["library"] == "timm" for row in own)
        label = {"not built": "could not be built", "not judged": "could not be judged"}.get(verdict, verdict)
        text += f"| {label} | {len(own) - timm} | {timm} |\n"
    for verdict in ("WRONG", "crash"):
        if number[verdict]:
            text += f"\n## {verdict}\n\n| class | library | what |\n| --- | --- | --- |\n"
            text += table(by[verdict], lambda row: (row["name"], row["library"], row["reason"]))
    for verdict, title in (("refused", "Refused"), ("not judged", "Not judged"), ("not built", "Not built")):
        if number[verdict]:
            text += f"\n## {title}\n\n" + grouped(by[verdict])
    if number["equal"]:
        text += "\n## Equal\n\n| class | library | calls | largest difference | eager twin | |\n"
        text += "| --- | --- | --- | --- | --- | --- |\n" + table(
            by["equal"],
            lambda row: (
                row["name"],
                row["library"],
                row["calls"],
                f"{row['error'] or 0:.0e}",
                row["eager"],
                row["notes"],
            ),
        )
    return text


def grouped(rows):
    """Reasons of one kind, each with the classes that it holds for; the most frequent first."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[kind(row["reason"])].append(row)
    text = ""
    for reason, own in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])):
        names = ", ".join(sorted(row["name"] for row in own))
        text += f"- **{len(own)}**: {own[0]['reason'] if len(own) == 1 else reason}\n  {names}\n"
    return text
