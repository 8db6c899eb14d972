"""From labels to structure: which calls are one layer, which follow each other, and whose positions they join.

A stream is a set of positions with the calls that change them one after the other: an encoder, a decoder, a tower. The
queries of a call say which stream it changes, its keys and values say which it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from attnflow.capturing.recorder import Recording, Source


@dataclass(eq=False)
class Stream:
    """Positions, and the groups of calls that change them, in order.

    sources: where its tokens begin; none if they are learned. made_of: streams whose results are among its tokens.
    """

    sources: tuple[Source, ...]
    made_of: set[int]
    groups: list[int] = field(default_factory=list[int])

    @property
    def tip(self) -> int | None:
        """The group of calls that changed it last."""
        return self.groups[-1] if self.groups else None


@dataclass(frozen=True)
class Group:
    """Calls that read the same, side by side: heads of one layer. of, on: the streams of queries and of keys."""

    calls: tuple[int, ...]
    of: int
    on: int


@dataclass(frozen=True, eq=False)
class Dataflow:
    """The structure of a forward pass.

    steps: the layers in order, each of one group, or of several that change different streams at once (co-attention).
    pools: whether the last group gathers its stream by queries that are no positions of it.
    """

    streams: tuple[Stream, ...]
    steps: tuple[tuple[Group, ...], ...]
    pools: bool

    @property
    def read(self) -> int:
        """The stream that the last layer changes, or the one that it pools."""
        last = self.steps[-1][-1]
        return last.on if self.pools else last.of

    @property
    def mutual(self) -> bool:
        """Whether streams read each other, so that none is the encoder of the other."""
        readers = {(group.of, group.on) for step in self.steps for group in step if group.of != group.on}
        return any((on, of) in readers for of, on in readers)

    @property
    def joint(self) -> tuple[int, ...]:
        """The streams whose positions make up the graph: those that are only read before those that read them."""
        last = self.steps[-1][0]
        left_out = {last.of} if self.pools and last.of != last.on else set[int]()
        readers = {(group.of, group.on) for step in self.steps for group in step if group.of != group.on}
        only_read = {on for of, on in readers if (on, of) not in readers} - {of for of, _ in readers}
        own = [number for number in range(len(self.streams)) if number not in left_out]
        return tuple(sorted(own, key=lambda number: (number not in only_read, number)))

    def group_of(self, call: int) -> tuple[Group, bool]:
        """The group of a call, and whether it is the one that pools."""
        last = self.steps[-1][-1]
        group = next(group for step in self.steps for group in step if call in group.calls)
        return group, self.pools and group is last


class Misfit(ValueError):
    """Why the calls of a pass are no graph that capture knows; said beside their sizes."""


def dataflow(recording: Recording) -> Dataflow:
    """The structure of a recorded pass, from the labels of its calls.

    Raises Misfit where calls are no layers of one graph: twin passes, branches, differential attention, keys of several
    states at once.
    """
    groups = _siblings(recording)
    _refuse_differences(recording, groups)
    group_of = {call: number for number, calls in enumerate(groups) for call in calls}
    streams: list[Stream] = []
    stream_of: list[int] = []
    steps: list[list[Group]] = []
    before: dict[int, int | None] = {}

    def latest(label: int) -> int | None:
        return max((group_of[call] for call in recording.callers(label)), default=None)

    def begun(label: int) -> int:
        """The stream that begins with the sources of a label and has no calls yet."""
        sources = tuple(recording.sources(label))
        for number, stream in enumerate(streams):
            if sources and stream.sources == sources and not stream.groups:
                return number
        streams.append(Stream(sources, {stream_of[group_of[call]] for call in recording.callers(label)}))
        return len(streams) - 1

    for number, calls in enumerate(groups):
        fed, name = recording.fed[calls[0]], _name(recording, calls[0])
        read = fed.values  # keys may hold places of their own beside what the values hold
        if set(recording.callers(fed.keys)) - set(recording.callers(fed.values)):
            raise Misfit(f"{name} takes its keys from other calls than its values: two streams share scores")
        asks, reads = latest(fed.queries), latest(read)
        if asks is not None and _begins_anew(recording, fed.queries, calls[0], streams[stream_of[asks]]):
            asks, reads = None, None if fed.queries == read else reads
        of = begun(fed.queries) if asks is None else stream_of[asks]
        if fed.queries == read or (asks is None and reads is None and _share_sources(recording, fed.queries, read)):
            on = of
        elif reads is None:
            on = begun(read)
            streams[on].sources = _with_those_of_keys(recording, streams[on].sources, fed.keys)
        else:
            on = stream_of[reads]
        asked = None if reads is None else streams[stream_of[reads]]
        if (
            asks is None
            and asked is not None
            and asked.sources
            and asked.sources == tuple(recording.sources(fed.queries))
        ):
            raise Misfit(_stale(recording, groups, name, None, asked.tip))
        others = {stream_of[group_of[call]] for call in recording.callers(fed.queries)} - {of, *streams[of].made_of}
        if others and asks is not None:
            raise Misfit(f"{name} reads what several streams returned, added up: parallel branches")
        for stream, state in ((of, asks), (on, reads)):
            if state != streams[stream].tip and not (steps and before.get(stream, streams[stream].tip) == state):
                raise Misfit(_stale(recording, groups, name, state, streams[stream].tip))
        group = Group(tuple(calls), of, on)
        fresh = asks == streams[of].tip and reads == streams[on].tip
        if fresh:
            before = {index: stream.tip for index, stream in enumerate(streams)}
            steps.append([group])
        elif any(other.of == of for other in steps[-1]):
            raise Misfit(_stale(recording, groups, name, asks if asks != streams[of].tip else reads, streams[of].tip))
        else:
            steps[-1].append(group)
        streams[of].groups.append(number)
        stream_of.append(of)
    last = steps[-1][0]
    extent = recording.calls[last.calls[0]].extent
    probes = len(streams[last.of].groups) == 1 and not streams[last.of].sources
    fewer = last.of == last.on and len(groups) > 1 and extent[2:] != recording.calls[groups[0][0]].extent[2:]
    alone = len(streams) == 1 + (last.of != last.on)
    pools = len(steps[-1]) == 1 and extent[2] != extent[3] and (probes or fewer) and alone
    return Dataflow(tuple(streams), tuple(tuple(step) for step in steps), pools)


def _begins_anew(recording: Recording, label: int, call: int, stream: Stream) -> bool:
    """Whether queries that hold what a stream returned are tokens of a stream of their own: text with an image."""
    count = recording.calls[call].extent[2]
    more = [source for source in recording.sources(label) if source not in stream.sources]
    first = recording.fed[call].queries
    fits = any(source.kind == "embedding" and source.plane[-1:] == (count,) for source in more)
    return fits and not any(
        recording.calls[other].extent[2] == count and recording.fed[other].bit & first for other in range(call)
    )


def _share_sources(recording: Recording, one: int, other: int) -> bool:
    """Whether all sources of one label are among those of the other, one way or the other."""
    sources, others = set(recording.sources(one)), set(recording.sources(other))
    return bool(sources) and bool(others) and (sources <= others or others <= sources)


def _with_those_of_keys(recording: Recording, sources: tuple[Source, ...], keys: int) -> tuple[Source, ...]:
    """The sources of values, with those of keys that are given for the same tokens."""
    planes = {(source.kind, source.plane) for source in sources}
    more = [source for source in recording.sources(keys) if (source.kind, source.plane) in planes]
    return tuple(dict.fromkeys([*sources, *more]))


def _siblings(recording: Recording) -> list[list[int]]:
    """The calls in groups that read the same and are read together ever after: one module per head, heads in groups."""
    fed, calls = recording.fed, recording.calls
    labels = [label for number in recording.explained for label in fed[number][:3]] + recording.returned
    groups: list[list[int]] = []
    for number in recording.explained:
        one = fed[number]
        for group in groups:
            first = fed[group[0]]
            same = one[:3] == first[:3] and calls[number].extent[2:] == calls[group[0]].extent[2:]
            together = all(bool(label & one.bit) == bool(label & first.bit) for label in labels)
            twins = calls[number].module == calls[group[0]].module and one.visit != first.visit
            if same and together and not twins:
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def _refuse_differences(recording: Recording, groups: Sequence[Sequence[int]]) -> None:
    """Raise Misfit where what the calls of one layer return is subtracted from each other."""
    for calls in groups:
        own = sum(recording.fed[call].bit for call in calls)
        if any(one and other and not (one | other) & ~own for one, other in recording.differences):
            raise Misfit(
                f"{_name(recording, calls[0])} subtracts what some of its heads return from what others do "
                "(differential attention): the weights of what is left may be negative, for which the attention graph "
                "has no edges"
            )


def _name(recording: Recording, call: int) -> str:
    return recording.calls[call].module or "the model"


def _stale(recording: Recording, groups: Sequence[Sequence[int]], name: str, state: int | None, tip: int | None) -> str:
    """What to say of a call that reads a state which other calls have changed since."""
    assert tip is not None
    changed = _name(recording, groups[tip][0])
    if state is None:
        return f"{name} reads, as it was before, what {changed} has changed: parallel branches, or a second pass"
    earlier = _name(recording, groups[state][0])
    return f"{name} reads what {earlier} returned, which {changed} has changed since: branches, or keys kept from below"


def towers(recording: Recording, flow: Dataflow) -> list[list[str]]:
    """The modules of the calls of each set of streams that nothing joins; several sets are no single graph."""
    modules: list[list[str]] = []
    for one in joined_streams(flow):
        calls = [call for step in flow.steps for group in step if group.of in one for call in group.calls]
        modules.append([recording.calls[call].module for call in sorted(calls)])
    return modules


def joined_streams(flow: Dataflow) -> list[set[int]]:
    """The sets of streams that calls join to one another and to no others, but for streams without calls."""
    sets = [{number} for number in range(len(flow.streams))]
    for step in flow.steps:
        for group in step:
            joined = [one for one in sets if one & {group.of, group.on}]
            sets = [one for one in sets if one not in joined] + [set().union(*joined)]
    changed = {group.of for step in flow.steps for group in step}
    return [one for one in sorted(sets, key=min) if one & changed]


def common_path(names: Sequence[str]) -> str:
    """The module that holds all of some modules, as a path; numbers at its end are left out."""
    levels = zip(*(name.split(".") for name in names), strict=False)
    shared = itertools.takewhile(lambda level: len(set(level)) == 1, levels)
    return ".".join(level[0] for level in shared)
