"""One verdict for one class: equal, refused, WRONG, crash, or why it could not be built."""

import dataclasses
import os
import time
import traceback

import torch

from sweep import changes, claims, matching, spy
from sweep.build import CannotBuildError, NoModelError, build, first_line

CHANGES = 2


@dataclasses.dataclass
class Verdict:
    """One row of the sweep. verdict: equal, refused, WRONG, crash, not built, not judged, or no model."""

    name: str
    library: str
    family: str
    verdict: str = "not built"
    reason: str = ""
    error: float | None = None
    calls: int = 0
    layers: int = 0
    eager: str = ""
    notes: str = ""
    inputs: str = ""
    seconds: float = 0.0


def judge(case) -> Verdict:
    """The verdict on one case; never raises."""
    row, started = Verdict(case.name, case.library, case.family), time.monotonic()
    try:
        built = build(case)
        row.inputs = ", ".join(f"{name} {tuple(value.shape)}" for name, value in built.inputs.items())
        row.verdict = "not judged"
        of_built(built, row)
    except NoModelError as error:
        row.verdict, row.reason = "no model", str(error)
    except CannotBuildError as error:
        row.reason = str(error)
    except Exception as error:
        row.reason = first_line(error) + at(error)
    row.seconds = round(time.monotonic() - started, 1)
    return row


def at(error):
    """Where an error came from: file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""


def of_built(built, row):
    """Fills in the verdict on a model that was built."""
    import attnflow

    try:
        calls, output = spy.watch(built.model, built.inputs)
    except spy.TooMuchError as error:
        calls, output, row.notes = None, None, f"not spied: {error}"
    row.calls = len(calls or ())
    torch.manual_seed(0)
    try:
        traces = attnflow.capture_batch(built.model, dict(built.inputs))
    except Exception as error:
        refusal(error, row, os.path.dirname(attnflow.__file__))
        return
    if calls is None:
        row.reason, row.notes = row.notes, ""
        return
    row.layers = len(traces[0].layers)
    faults = hold(built, calls, output, traces, row)
    row.verdict, row.reason = ("WRONG", "; ".join(dict.fromkeys(faults))[:600]) if faults else ("equal", "")


def refusal(error, row, home):
    """A clear error of attnflow's own is a refusal; anything else is a crash."""
    frames = traceback.extract_tb(error.__traceback__)
    own = bool(frames) and frames[-1].filename.startswith(home)
    clear = isinstance(error, ValueError | MemoryError) and "\n" not in str(error).strip()
    if isinstance(error, NotImplementedError) or (clear and own):
        row.verdict, row.reason = "refused", str(error)
        return
    inside = [f for f in frames if f.filename.startswith(home)]
    place = f"{os.path.basename(inside[-1].filename)}:{inside[-1].lineno}" if inside else ""
    row.verdict, row.reason = "crash", f"{first_line(error)} ({place}{at(error)})"


def hold(built, calls, output, traces, row):
    """All faults of a trace: sentences."""
    if not calls:
        return [f"a trace of {len(traces[0].layers)} layers, but no attention was seen"]
    if len({len(t.layers) for t in traces}) > 1:
        return ["examples have different numbers of layers"]
    ids = built.inputs.get("input_ids")
    if ids is not None and ids.ndim == 2 and len(traces[0].tokens) < ids.shape[1]:
        return [f"only {len(traces[0].tokens)} of {ids.shape[1]} tokens, none of which is padding, are in the trace"]
    facts = traces[0].model.get("proofs", {})
    left_out = facts.get("constant", "").partition(": ")[2].split(", ")
    found, unknown, layers = matching.match(calls, traces)
    found = [None if call.module in left_out else one for call, one in zip(calls, found, strict=True)]
    missing = [
        c for c, one in zip(calls, found, strict=True) if one is None and not silent(c) and c.module not in left_out
    ]
    faults = []
    if missing and not any("unused" in t.model.get("proofs", {}) for t in traces):
        shape = " x ".join(map(str, missing[0].weights.shape))
        faults.append(f"{len(missing)} of {len(calls)} calls are in no layer, first {missing[0].module} ({shape})")
    faults += [f"layer {n} ({traces[0].layers[n].name}) has the weights of no call" for n in unknown[:2]]
    kept = [(c, one) for c, one in zip(calls, found, strict=True) if one is not None]
    if not kept:
        return faults
    row.error = max(one.error for _, one in kept)
    held, places = [c for c, _ in kept], [one for _, one in kept]
    faults += claims.order(held, places, layers)[:2]
    row.eager = agreement(built, calls)
    found = [matching.nowhere(c) if one is None and silent(c) else one for c, one in zip(calls, found, strict=True)]
    if None not in found:
        faults += of_changes(built, calls, output, found, layers, traces, row)
    return faults


def silent(call):
    """Whether a call need not be found: no data in its values, or all weight of each row on one key."""
    return not call.depends or bool((call.weights.amax(-1) > 1 - 1e-4).all())


def of_changes(built, calls, output, found, layers, traces, row):
    """Faults that show when single tokens and patches are changed."""
    said = "mixers" in traces[0].model.get("proofs", {})
    reality, faults = claims.Reality(built, calls, output, found, layers, traces[0].decoder_start), {}
    made = changes.changes(built, calls, traces, CHANGES)
    for change in made:
        for kind, sentence in reality.hold(change):
            decided = "masks" in traces[0].model.get("proofs", {})  # a change may open what a mask had closed
            if not (said and kind in ("mixer", "influence")) and not (decided and kind == "influence"):
                faults.setdefault(kind, sentence)
    if not made:
        row.notes = "influence not tested"
    elif said:
        row.notes = "mixers are told of"
    return [f"{kind}: {sentence}" for kind, sentence in faults.items()]


def agreement(built, calls):
    """How many of the weights that an eager twin returns are among the spied ones."""
    try:
        weights = spy.returned(built)
    except Exception as error:
        return f"no twin: {first_line(error)[:60]}"
    if not weights:
        return ""
    hits = 0
    for one in weights:
        same = [c.weights for c in calls if c.weights.numel() == one.numel() and c.weights.shape[-1] == one.shape[-1]]
        hits += any(float((one.reshape(w.shape) - w).abs().max()) < 1e-4 for w in same)
    return f"{hits}/{len(weights)}"
