"""One runner for whole data sets: `run` explains every example, and goes on where it stopped."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, Unpack, get_args

import torch

from attnflow.capturing import huggingface, vision
from attnflow.capturing.models import load_model
from attnflow.capturing.target import Contrast, as_target, resolved
from attnflow.explaining import check_methods, check_settings, is_targeted, usual_method
from attnflow.faithfulness.run import versions_of, weights_digest, whole_number
from attnflow.files import named
from attnflow.graph import Settings
from attnflow.memory import free_memory
from attnflow.running import processes, shards, sources
from attnflow.running.plan import Plan, RunTarget, Subject
from attnflow.running.results import Run, read
from attnflow.running.shards import Table
from attnflow.running.sources import Example
from attnflow.running.worker import Worker

Engine: TypeAlias = Literal["local", "ray"]

# Examples that are explained before the run to see what a row takes.
_TRIED = 4


def run(
    model: Any,
    data: Any,
    output: str | Path,
    *,
    method: str | Sequence[str] | None = None,
    target: RunTarget | None = None,
    tokenizer: Any = None,
    task: str | None = None,
    device: str = "cpu",
    text: str | None = None,
    label: str | None = None,
    top: int | None = None,
    full: bool = False,
    limit: int | None = None,
    shuffle: int | None = None,
    workers: int = 1,
    engine: Engine = "local",
    part: tuple[int, int] | None = None,
    batch_size: int = 16,
    shard_size: int = 128,
    memory: int | None = None,
    fail_fast: bool = False,
    receptive_field: bool = False,
    progress: Callable[[int, int | None], object] | None = None,
    note: Callable[[str], object] | None = None,
    **settings: Unpack[Settings],
) -> Run:
    """Explain every example of a data set, and keep the answers in a folder; the same call goes on after any end.

    model: the name of a model for `load_model` (None is the packaged demo), what that returns, a model (with its
    tokenizer), or a function without arguments that returns any of these; several workers need a name or a function.
    data: a folder of photographs, a file of texts (.tsv, .csv, .jsonl, .parquet, or one on each line), or any sequence
    or iterator of examples: texts, paths of photographs, or what the model takes, alone or as (content, label). text,
    label: names of the columns. An iterator is read in turn, and must yield the same when a run goes on.
    output: a new folder, or the one of the same run. In it are manifest.json and shards of rows, which `read` reads.
    task, device: as `load_model` takes them; unless told otherwise the task is the one that the model was trained for.

    method, settings: as `explain` takes them, for one layer. Unless told otherwise the query is the read-out, and its
    row is what is kept; of several queries the mean of their rows. full: keep every row. top: keep so many tokens of
    each row, those with the highest scores by their size.
    target: a class by its index or name, "predicted", "label" for the class that the label of each example names, a
    pair for the first class rather than the second, or a function of the model's output, for which examples share no
    pass.

    limit: take the first examples only. shuffle: take them in an order that this seed draws. workers: processes, each
    with its own model and its share of the cores. engine: "ray" takes as many actors of a Ray cluster, of a core and,
    with device="cuda", a GPU each; the cluster is that of RAY_ADDRESS, or one that is started here. part: (number,
    count), explain this part of the data alone, while other processes, on this machine or others, explain theirs into
    the same folder; numbers count from 0, and parts take the shards in turn. batch_size: examples in one pass at most;
    memory: bytes that a pass may take, unless told otherwise half of what is free, shared among workers. shard_size:
    examples in a file, of which a kill loses those that are not whole.
    fail_fast: end at the first example that fails, where otherwise its error is a row and the run goes on.
    progress: called with the examples done, and in all if known. note: called with what should be said, in a line each:
    the estimated size before the run, and after Ctrl-C how to go on.

    Raises ValueError for unknown names, settings or columns, for a folder of another run (other settings, methods,
    weights, versions, or examples), while another process writes to it, and if a method explains none of the first
    examples; OSError for a folder that cannot be written and for a full disk, behind which all shards are whole.
    """
    method = usual_method(target) if method is None else method
    methods = tuple(dict.fromkeys([method] if isinstance(method, str) else method))
    check_methods(methods, target)  # pyright: ignore[reportArgumentType]
    check_settings(methods, {**settings, "receptive_field": receptive_field})
    plan = Plan(
        methods=methods,
        target=_target(target),
        settings=_settings(settings) | {"receptive_field": receptive_field},
        top=None if top is None else whole_number("top", top, 1),
        full=full,
        batch_size=whole_number("batch_size", batch_size, 1),
        memory=None if memory is None else whole_number("memory", memory, 1),
        fail_fast=fail_fast,
    )
    if engine not in get_args(Engine):
        raise ValueError(f"engine={engine!r} is unknown; give one of {', '.join(get_args(Engine))}")
    workers, shard_size = _workers(workers, engine), whole_number("shard_size", shard_size, 1)
    turn = _Turn(*_part(part), shard_size)
    limit = None if limit is None else whole_number("limit", limit, 1)
    shuffle = None if shuffle is None else whole_number("shuffle", shuffle, 0)
    folder = Path(output)
    shards.check_folder(folder)
    source = sources.opened(data, text=text, label=label)
    first, examples = sources.until_readable(source.read())
    if not first:
        raise ValueError("there are no data; give at least one example, such as a text")
    load = _loader(model, tokenizer, task, device, source.kind or sources.kind_of(first[-1].content), plan)
    elsewhere = workers > 1 or engine == "ray"
    if elsewhere and not isinstance(load, partial) and load is not model:
        raise ValueError(
            f"{workers} workers need a model that each can load: give its name, or a function that loads it, which a "
            "worker can import"
        )
    if engine == "ray" and source.count is None:
        raise ValueError("Ray is handed many examples at once, and an iterator may wait; give a sequence or a file")
    subject = Subject.of(load(), tokenizer)
    plan = replace(plan, target=_of_model(plan.target, subject.model))
    if plan.memory is None:
        plan = replace(plan, memory=_share(subject.model, workers))
    total = source.count if limit is None or source.count is None else min(limit, source.count)
    total = None if total is None else sum(map(turn.has, range(total)))
    manifest = {"recipe": _recipe(subject, plan), "data": source.facts}
    with shards.opened(folder, manifest, part=None if part is None else turn.number) as kept:
        finished, explained = kept.finished()
        if source.count is not None and finished and max(finished) >= source.count:
            raise ValueError(_fewer(folder))
        left = _Left(sources.in_order(examples, shuffle, limit), finished, folder, turn, whole=limit is None)
        beginning, pending = sources.peeked(iter(left), _TRIED)
        if not beginning:
            return read(folder)
        worker = Worker(subject, plan)
        rows = worker.table(beginning)
        if total is not None and rows["error"].null_count:
            _say_size(rows, len(beginning), total - left.before, shard_size, folder, note)
        done = [0]

        def finish(count: int) -> None:
            done[0] += count
            if progress:
                progress(left.before + done[0], total)

        chunks = iter(lambda: list(islice(pending, shard_size)), list[Example]())
        if engine == "ray":
            from attnflow.running import on_ray

            tables = on_ray.tables(chunks, load, plan, workers, cuda=device.startswith("cuda"))
        else:
            tables = processes.tables(chunks, load, plan, workers) if elsewhere else _here(worker, chunks, finish)
        del worker, subject  # of which each process has its own
        try:
            with closing(tables):
                for table in tables:
                    explained |= shards.explained_by(table)
                    _check_explained(table, [name for name in methods if name not in explained])
                    kept.write(table)
                    if elsewhere:
                        finish(len(table["example"].unique()))
        except KeyboardInterrupt:
            if note:
                note(f"stopped: the examples whose shards are whole are in {named(folder)}, and the same call goes on")
            raise
    return read(folder)


@dataclass(frozen=True)
class _Turn:
    """Which examples a part of a run takes: shard by shard in the order of the run, one part after the other."""

    number: int
    count: int
    shard_size: int

    def has(self, place: int) -> bool:
        """Whether the example at a place in the order of the run is this part's."""
        return place // self.shard_size % self.count == self.number


class _Left:
    """The examples of a part that are in no shard yet. before: how many of those that came so far are in one.

    Raises ValueError for an example that is another than the one in its shard, and where data without a known number
    end before the shards do (`whole`: all of them are asked for).
    """

    def __init__(
        self, examples: Iterator[Example], finished: Mapping[int, str], folder: Path, turn: _Turn, *, whole: bool
    ) -> None:
        self._examples, self._finished, self._folder, self._turn, self._whole = examples, finished, folder, turn, whole
        self.before = 0

    def __iter__(self) -> Iterator[Example]:
        seen = 0
        for place, example in enumerate(self._examples):
            known = self._finished.get(example.number)
            if known is None:
                if self._turn.has(place):
                    yield example
                continue
            if known != example.identity:
                raise ValueError(
                    f"example {example.number} ({example.name}) is not the one that {named(self._folder)} holds: it "
                    "has changed, or others came before it; give the same data, or write to another folder"
                )
            seen += 1
            self.before += self._turn.has(place)
        if self._whole and seen < len(self._finished):
            raise ValueError(_fewer(self._folder))


def _fewer(folder: Path) -> str:
    return f"{named(folder)} holds more examples than the data; give all of them to go on, or write to another folder"


def _check_explained(table: Table, lacking: Sequence[str]) -> None:
    """Raise ValueError for methods without a single answer so far, with the first error of one of them."""
    if lacking:
        methods, errors = (table[name].to_pylist() for name in ("method", "error"))
        why = next(error for name, error in zip(methods, errors, strict=True) if name in (None, lacking[0]))
        count = len(table["example"].unique())
        raise ValueError(
            f"{lacking[0]} explains none of the first {count} examples: {why}; leave it out, or change what it needs"
        )


def _here(worker: Worker, chunks: Iterable[list[Example]], progress: Callable[[int], object]) -> Generator[Table]:
    """The rows of each chunk, made in this process."""
    for chunk in chunks:
        yield worker.table(chunk, progress)


def _say_size(
    rows: Table, tried: int, left: int, shard_size: int, folder: Path, note: Callable[[str], object] | None
) -> None:
    """Say what the run will take on the disk, by the rows of a few examples, and refuse what has no room."""
    frame = shards.stored_size(rows.slice(0, 0))
    each = (shards.stored_size(rows) - frame) / tried
    needed = round(left * each + -(-left // shard_size) * frame)
    shards.check_room(folder, needed)
    if note:
        note(f"{left:,} examples to explain, about {shards.size(needed)} in {named(folder)}")


def _target(target: Any) -> RunTarget | None:
    pair = isinstance(target, tuple) and len(target) == 2 and all(isinstance(one, int | str) for one in target)  # pyright: ignore
    if target is None or callable(target) or isinstance(target, str | Contrast) or pair:
        return target
    return whole_number('target, where it is no name, "predicted", "label", pair or function,', target, 0)


def _of_model(target: RunTarget | None, model: torch.nn.Module) -> RunTarget | None:
    """The target with names of classes as their indices."""
    return target if target is None or target == "label" else resolved(target, model)  # pyright: ignore[reportReturnType]


def _settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    for name in settings:
        if name not in Settings.__annotations__:
            raise ValueError(f"there is no setting {name!r}; the settings are {', '.join(Settings.__annotations__)}")
    if isinstance(settings.get("layer"), str):
        raise ValueError("a run explains one layer; give its number, such as -1")
    return dict(settings)


def _workers(workers: Any, engine: Engine) -> int:
    count, cores = whole_number("workers", workers, 1), processes.cores()
    if count > cores and engine == "local":
        raise ValueError(f"{count} workers would share {cores} cores and be slower than {cores}; give {cores} at most")
    return count


def _part(part: Any) -> tuple[int, int]:
    if part is None:
        return 0, 1
    numbers: list[Any] = list(part) if isinstance(part, tuple | list) else []
    if len(numbers) != 2 or not all(type(one) is int for one in numbers) or not 0 <= numbers[0] < numbers[1]:
        raise ValueError(f"part is (number, count), such as (0, 4) for the first of four; {part!r} was given")
    return numbers[0], numbers[1]


def _share(model: torch.nn.Module, workers: int) -> int | None:
    """The bytes that each of some workers may use for a pass: half of what is free."""
    parameter = next(model.parameters(), None)
    free = free_memory(None if parameter is None else parameter.device)
    return None if free is None else free // (2 * workers)


def _loader(
    model: Any, tokenizer: Any, task: str | None, device: str, kind: sources.Kind, plan: Plan
) -> Callable[[], Any]:
    """The function that makes the model; a partial of `load_model` for a name."""
    if model is not None and not isinstance(model, str | Path):
        if task is not None or device != "cpu":
            raise ValueError("task and device go with the name of a model; this one is loaded already")
        if isinstance(model, torch.nn.Module) or not callable(model):
            return lambda: model
        if tokenizer is not None:
            raise ValueError("a function that loads the model returns its tokenizer too, as (model, tokenizer)")
        return model
    if tokenizer is not None:
        raise ValueError("the name of a model stands for its tokenizer too; leave tokenizer out, or give a model")
    if task == "image-text":
        raise ValueError("a run explains texts or photographs; a model of both takes one pair at a time (explain)")
    name = None if model is None else str(model)
    if task is None:
        task = _task(name, kind, targeted=any(map(is_targeted, plan.methods)))
    return partial(load_model, name, task=task, device=device)  # pyright: ignore[reportCallIssue, reportArgumentType]


def _task(name: str | None, kind: sources.Kind, *, targeted: bool) -> str:
    """The task for data of a kind: with the head that the model was trained with, where that tells anything."""
    if kind == "inputs":
        raise ValueError(
            "examples that are inputs of a model do not tell which task it has; give task=, such as 'image', or a model"
        )
    if kind == "image":
        return "image-classification" if name is not None and vision.is_classifier(name) else "image"
    trained = huggingface.trained_task(name)
    # The logits of a whole vocabulary are worth their time where something is explained that they hold.
    return trained if targeted or trained == "text-classification" else "text"


def _recipe(subject: Subject, plan: Plan) -> dict[str, Any]:
    """What decides the rows: for the manifest, and to tell whether a run is the same."""
    return {
        "methods": plan.methods,
        "target": None if plan.target is None else as_target(plan.target).words,
        "settings": plan.settings,
        "top": plan.top,
        "full": plan.full,
        "tokenizer": None if subject.tokenizer is None else type(subject.tokenizer).__name__,
        "model": {"class": type(subject.model).__name__, "sha256": weights_digest(subject.model)},
        "versions": versions_of(subject.model, subject.tokenizer),
    }
