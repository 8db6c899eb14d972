"""What a trace claims of the routes through a model, held to what really happens.

Three things are asked. Order: where a layer reads a position that a layer below it wrote, the values of its call must
depend on that call. Influence: one token, or one patch of pixels, is changed; positions whose values change at a call
must be reached, in the trace, from what was changed. Isolation: with the results of all calls silenced, nothing may
change but the position itself.
"""

import numpy as np

from sweep.spy import watch

CHANGED = 1e-5


def order(calls, found, layers):
    """Faults of order and of reading: sentences, empty if there are none."""
    faults, reads, writes = [], [], []
    for one in found:
        columns = one.columns[one.columns >= 0]
        reads.append(set(columns.tolist()))
        writes.append(set(one.rows[one.rows >= 0].tolist()))
    for late, call in enumerate(calls):
        for early, below in enumerate(calls):
            depends = bool(call.depends & (2 << below.number))
            if depends and found[early].layer >= found[late].layer:
                faults.append(
                    f"layer {found[late].layer} ({call.module}) needs what {below.module} gives, but is not above it"
                )
            if depends or found[early].layer >= found[late].layer:
                continue
            between = layers[found[early].layer : found[late].layer + 1]
            same = all(w[0].shape[1] == w[0].shape[2] == between[0][0].shape[1] for w in between[:-1])
            shared = reads[late] & writes[early]
            if same and shared:
                faults.append(
                    f"layer {found[late].layer} ({call.module}) is said to read at {len(shared)} positions what layer "
                    f"{found[early].layer} ({below.module}) wrote, and does not"
                )
    return faults


def reaching(layers, example, height, silent=False, more=()):
    """Which positions a layer's keys can be reached from: boolean (key of that layer, input position).

    silent: as if layers that keep their positions gave nothing, so that only merging moves anything. more: further
    edges (layer, queries, keys), which a change opened.
    """
    size = layers[0][example].shape[2]
    reach = np.eye(size, dtype=bool)
    for number, weights in enumerate(layers[:height]):
        edges = (weights[example] > 0).any(0)
        for layer, queries, keys in more:
            if layer == number:
                edges[queries, keys] = True
        if edges.shape[0] == edges.shape[1]:
            edges = np.eye(len(edges), dtype=bool) if silent else edges | np.eye(len(edges), dtype=bool)
        reach = (edges.astype(np.float32) @ reach.astype(np.float32)) > 0
    return reach


def moved(before, after, least=CHANGED):
    """Which values changed by more than `least` of their size: boolean (stack, key)."""
    scale = before.abs().amax(-1).clamp(min=float(before.abs().max()) * 1e-3 + 1e-12)
    return ((after - before).abs().amax(-1) > least * scale).numpy()


class Reality:
    """The calls of one model, loud and silenced, and what a change does to their values."""

    def __init__(self, built, calls, output, found, layers, start=None):
        self.built, self.calls, self.found, self.layers, self.start = built, calls, found, layers, start
        self.silent, silent_output = watch(built.model, built.inputs, silence=True)
        self.outputs = output, silent_output

    def hold(self, change):
        """Faults that one change shows: (kind, sentence); a kind is "place", "influence", "mixer" or "example"."""
        loud, _ = watch(self.built.model, change.inputs, before=change.before())
        quiet, silent = watch(self.built.model, change.inputs, silence=True, before=change.before())
        if len(loud) != len(self.calls) or len(quiet) != len(self.silent):
            return [("place", f"{change.what}: the model makes another number of calls")]
        if change.module is not None:
            # Which position of the trace a state stands for, the first call's own keys tell.
            own = (self.found[0].example == change.example).nonzero()[0]
            change.position = int(self.found[0].columns[own[0], change.at]) if len(own) else -1
            if change.position < 0:
                return []
        entered, touched = self.entered(loud, change, CHANGED), self.entered(loud, change, 0)
        if entered is None:
            return []
        faults = []
        if change.what.startswith("input_ids") and change.position not in entered and self.start is not None:
            change.position += self.start  # of a decoder, behind what it reads
        if change.sure and change.position not in entered and entered:
            faults.append(("place", f"{change.what} stands at {sorted(entered)[:4]}, not at {change.position}"))
        if change.strict and entered - {change.position}:
            others = sorted(entered - {change.position})
            faults.append(("mixer", f"{change.what} is at positions {others[:4]} before any attention"))
        start = np.array(sorted({*([change.position] if change.sure else []), *(() if change.strict else touched)}))
        if not len(start):
            return faults
        faults += self.follow(self.calls, loud, start, change, silent=False)
        faults += self.follow(self.silent, quiet, start, change, silent=True)
        if change.strict:
            faults += self.at_the_end(self.outputs[1], silent, change)
        return faults

    def at_the_end(self, before, after, change):
        """A fault if the last hidden state, with all attention silenced, changes anywhere else.

        Asked only where it holds the positions of the trace, of which none is a patch that could stand elsewhere.
        """
        old, new = getattr(before, "last_hidden_state", None), getattr(after, "last_hidden_state", None)
        size = {w[0].shape[n] for w in self.layers for n in (1, 2)}
        if old is None or old.ndim != 3 or size != {old.shape[1]} or new.shape != old.shape or change.patches:
            return []
        others = sorted(set(moved(old, new)[change.example].nonzero()[0].tolist()) - {change.position})
        sentence = f"with all attention silenced, {change.what} changes position {others[:1]} of the last hidden state"
        return [("mixer", sentence)] if others else []

    def entered(self, loud, change, least):
        """The positions of the trace that a change enters by: what it changes before any call; None if unknown."""
        places, known = set(), False
        size = self.layers[0][change.example].shape[2]
        for call, after, one in zip(self.calls, loud, self.found, strict=True):
            before_any = call.depends <= 1 and self.layers[one.layer][change.example].shape[2] == size
            if not before_any or call.values.shape != after.values.shape:
                continue
            own = (one.example == change.example)[:, None] & (one.columns >= 0)
            if own.any():
                known = True
                places |= set(one.columns[own & moved(call.values, after.values, least)].tolist())
        return places if known else None

    def opened(self, after, change):
        """Edges of the changed example after the change: what is now attended to may not have been before (top-k)."""
        edges = []
        for new, one in zip(after, self.found, strict=True):
            if new.weights.shape[:2] == one.rows.shape and new.weights.shape[2] == one.columns.shape[1]:
                stack, query, key = (new.weights > 0).numpy().nonzero()
                rows, columns = one.rows[stack, query], one.columns[stack, key]
                known = (one.example[stack] == change.example) & (rows >= 0) & (columns >= 0)
                edges.append((one.layer, rows[known], columns[known]))
        return edges

    def follow(self, before, after, start, change, silent):
        """Faults at every call: values that changed where the trace has no route to, or in another example."""
        faults, opened = [], [] if silent else self.opened(after, change)
        for old, new, one in zip(before, after, self.found, strict=False):
            if old.values.shape != new.values.shape or old.values.shape[1] != one.columns.shape[1]:
                continue
            differs = moved(old.values, new.values)
            known = one.columns >= 0
            strangers = ((one.example >= 0) & (one.example != change.example))[:, None] & differs
            if strangers.any() and not silent:
                faults.append(("example", f"{change.what} of example {change.example} changes another example"))
            reach = reaching(self.layers, change.example, one.layer, silent, opened)[:, start].any(1)
            own = (one.example == change.example)[:, None] & known & differs
            beyond = sorted({int(c) for c in one.columns[own] if not reach[c]})
            if beyond:
                kind = "mixer" if silent else "influence"
                how = "with all attention silenced, " if silent else ""
                faults.append(
                    (kind, f"{how}{change.what} changes position {beyond[0]} ({len(beyond)} in all) at {old.module}")
                )
                break
        return faults
