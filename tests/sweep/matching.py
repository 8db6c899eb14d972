"""Which layer of a trace holds which spied call, row by row.

A row of a layer and a row of a call are the same if their sorted weights agree: where a layer stands over more
positions than its call (windows, joint graphs), the weights of the call appear among zeros. Where the sorted values lie
apart, the match also tells which position of the trace each key of the call stands for. Rows with all their weight on
one key say nothing, and are left out; so are those few that a trace holds as the mean of several copies (a [CLS] that
stands in every window): a call counts as found if at least nine in ten of its rows are, and all rows of copies share
one place.
"""

import dataclasses

import numpy as np
from scipy.spatial import cKDTree

TOLERANCE, APART, PREVIEW = 2e-4, 3e-6, 6


@dataclasses.dataclass
class Found:
    """Where a call stands in a trace. Arrays hold -1 where nothing is known.

    layer: its number; error: the largest difference; example: (stack,); rows: (stack, query); columns: (stack, key).
    """

    layer: int
    error: float
    example: np.ndarray
    rows: np.ndarray
    columns: np.ndarray


def nowhere(call):
    """The place of a call that says nothing of what the model was given, and that a trace may leave out."""
    stack, queries, keys = call.weights.shape
    return Found(0, 0.0, *(np.full(shape, -1) for shape in (stack, (stack, queries), (stack, keys))))


class Rows:
    """The rows of one layer in all traces of a batch, sorted, with a tree to find them by."""

    def __init__(self, weights):
        self.shapes = [w.shape for w in weights]
        widest = max(shape[2] for shape in self.shapes)
        stacks, self.example, self.place = [], [], []
        for example, w in enumerate(weights):
            heads, queries, keys = w.shape
            flat = np.pad(w.reshape(-1, keys), ((0, 0), (0, widest - keys)))
            stacks.append(flat)
            self.example += [example] * len(flat)
            self.place += [*range(queries)] * heads
        values = np.concatenate(stacks)
        self.order = np.argsort(-values, axis=1, kind="stable")
        self.sorted = np.take_along_axis(values, self.order, 1)
        self.example, self.place = np.array(self.example), np.array(self.place)
        self.tree = cKDTree(preview(self.sorted))
        self.telling = self.sorted[:, 0] < 1 - 1e-4
        self.seen = ~self.telling


def preview(rows):
    """The first few sorted values, by which rows are looked up."""
    return np.pad(rows, ((0, 0), (0, max(0, PREVIEW - rows.shape[1]))))[:, :PREVIEW]


def plain(call, layer, weights):
    """The match of a call whose layer holds just its own positions, or None."""
    batch, shape = len(weights), weights[0].shape
    if any(w.shape != shape for w in weights) or call.shape[-1] != shape[2] or call.size != batch * weights[0].size:
        return None
    error = float(np.abs(call.reshape(batch, *shape) - np.stack(weights)).max())
    if not error <= TOLERANCE or call.shape[1] != shape[1]:
        return None
    example = np.repeat(np.arange(batch), call.shape[0] // batch)
    rows = np.broadcast_to(np.arange(shape[1]), call.shape[:2]).copy()
    columns = np.broadcast_to(np.arange(shape[2]), (call.shape[0], call.shape[2])).copy()
    return Found(layer, error, example, rows, columns)


def placed(call, layer, rows):
    """The match of a call somewhere within a layer, or None."""
    stack, queries, keys = call.shape
    values = call.reshape(-1, keys)
    order = np.argsort(-values, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, 1)
    telling = (ordered[:, 0] < 1 - 1e-4) & (ordered[:, 0] > 0)
    if not telling.any():
        return None
    _, near = rows.tree.query(preview(ordered), k=min(8, len(rows.sorted)), distance_upper_bound=TOLERANCE)
    near = near.reshape(len(ordered), -1)
    # Where examples do not differ, each is the one that the order of the stack says.
    own = np.arange(len(ordered)) * len(rows.shapes) // len(ordered)
    others = np.append(rows.example, -1)
    width = max(keys, rows.sorted.shape[1])
    mine = np.pad(ordered, ((0, 0), (0, width - keys)))
    theirs = np.pad(rows.sorted, ((0, 1), (0, width - rows.sorted.shape[1])), constant_values=9)
    best, at = np.full(len(ordered), np.inf), np.full(len(ordered), -1)
    for choice in near.T:
        far = np.abs(mine - theirs[choice]).max(1) + 1e-7 * (others[choice] != own)
        closer = far < best
        best[closer], at[closer] = far[closer], choice[closer]
    hit = (best <= TOLERANCE) & telling
    missed = telling & ~hit
    odd = set(np.nonzero(missed.reshape(stack, queries))[1])
    if missed.any() and (hit.sum() < 0.9 * telling.sum() and len(odd) > max(1, queries // 10)):
        return None
    if not hit.any():
        return None
    distance, _ = cKDTree(preview(ordered)).query(preview(rows.sorted), distance_upper_bound=TOLERANCE)
    rows.seen |= distance < TOLERANCE
    found = Found(layer, float(best[hit].max()), *(np.full(s, -1) for s in (stack, (stack, queries), (stack, keys))))
    found.rows.reshape(-1)[hit] = rows.place[at[hit]]
    gaps = np.abs(np.diff(mine, axis=1, append=-1))
    clear = (gaps > APART) & (np.roll(gaps, 1, 1) > APART) & (mine > 1e-6)
    clear[:, 0] = (gaps[:, 0] > APART) & (mine[:, 0] > 1e-6)
    told = np.where(hit, clear.sum(1), -1).reshape(stack, queries)
    for one in range(stack):
        best_row = one * queries + int(told[one].argmax())
        if hit[best_row]:
            found.example[one] = rows.example[at[best_row]]
            use = clear[best_row][:keys][: rows.order.shape[1]]
            mine_at, its_at = order[best_row][: len(use)][use], rows.order[at[best_row]][: len(use)][use]
            found.columns[one, mine_at] = its_at
            shift = its_at - mine_at
            run = len(shift) > max(4, keys // 2) and (shift == shift[0]).all()
            if run and shift[0] >= 0 and keys + shift[0] <= rows.order.shape[1]:
                found.columns[one] = np.arange(keys) + shift[0]  # one run of positions
    return found


def match(calls, traces):
    """(for each call where it was found or None, the numbers of layers with rows that stand for no call).

    The layers looked at first are those of the call's own module, in order.
    """
    layers = [[t.layers[n].attention().float().numpy() for t in traces] for n in range(len(traces[0].layers))]
    names = [layer.name for layer in traces[0].layers]
    arrays = [call.weights.float().numpy() for call in calls]
    found, taken, rows = [None] * len(calls), set(), {}
    for number, array in enumerate(arrays):
        for layer in sorted(range(len(layers)), key=lambda n: (n in taken, n)):
            one = plain(array, layer, layers[layer])
            if one is not None:
                found[number] = one
                taken.add(layer)
                break
    for number, (call, array) in enumerate(zip(calls, arrays, strict=True)):
        if found[number] is not None:
            continue
        order = sorted(range(len(layers)), key=lambda n: (n in taken, not near(names[n], call.module), n))
        for layer in order:
            if layer not in rows:
                rows[layer] = Rows(layers[layer])
            one = placed(array, layer, rows[layer])
            if one is not None:
                found[number] = one
                break
    unknown = []
    for layer, weights in enumerate(layers):
        if layer in taken or is_merging(weights[0]):
            continue
        if layer not in rows or (rows[layer].telling & ~rows[layer].seen).mean() > 0.1:
            unknown.append(layer)
    return found, unknown, layers


def near(name, module):
    """Whether a layer's name and a module's name are of one place."""
    return name == module or name.startswith(module + ".") or module.startswith(name + ".")


def is_merging(weights):
    """Whether a layer has no weights of its own: one head, fewer queries than keys, even shares."""
    shares = weights[weights > 0]
    return weights.shape[0] == 1 and weights.shape[1] < weights.shape[2] and len(np.unique(shares.round(6))) <= 4
