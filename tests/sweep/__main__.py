"""Runs the sweep: `PYTHONPATH=src:tests python -m sweep`. Run with --help for the choices."""

import argparse
import fnmatch
import random

from sweep import catalogue, report, run


def main():
    """Judges the chosen cases and writes the page."""
    parser = argparse.ArgumentParser(
        prog="sweep", description="Judges capture on every class of transformers and timm."
    )
    parser.add_argument("--only", metavar="PATTERN", action="append", help="names that match, such as 'Bert*'")
    parser.add_argument("--library", choices=["transformers", "timm"], help="one library only")
    parser.add_argument("--bases", action="store_true", help="base models only, no task heads")
    parser.add_argument("--all-timm", action="store_true", help="every architecture of timm, not one for each class")
    parser.add_argument("--sample", metavar="N", type=int, help="so many, chosen by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", metavar="FILE", help="JSON lines: written row by row, and gone on with")
    parser.add_argument("--output", metavar="PAGE", help="the page to write, such as docs/coverage.md")
    chosen = parser.parse_args()
    run.prepared()
    cases = catalogue.timm_cases(chosen.all_timm) + catalogue.transformers_cases()
    cases = [case for case in cases if chosen.library in (None, case.library)]
    if chosen.bases:
        cases = [case for case in cases if case.order == 0]
    if chosen.only:
        cases = [case for case in cases if any(fnmatch.fnmatchcase(case.name, one) for one in chosen.only)]
    cases.sort()
    if chosen.sample is not None:
        cases = sorted(random.Random(chosen.seed).sample(cases, min(chosen.sample, len(cases))))
    rows = run.sweep(cases, chosen.resume)
    wanted = {(case.library, case.name) for case in cases}
    rows = [row for row in rows if (row["library"], row["name"]) in wanted]
    print(report.counts(rows))
    if chosen.output:
        with open(chosen.output, "w") as file:
            file.write(report.page(rows))


if __name__ == "__main__":
    main()
