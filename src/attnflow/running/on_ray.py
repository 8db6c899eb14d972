"""The workers of a run as actors of a Ray cluster: Ray Data hands them the chunks, and this process alone writes."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import Any

import pyarrow as pa

from attnflow.running.plan import Plan, Subject
from attnflow.running.shards import Table
from attnflow.running.sources import Example
from attnflow.running.worker import Worker

# Chunks that are handed to Ray at once, for each actor, so that its object store never holds a whole data set.
_WINDOW = 64


def tables(
    chunks: Iterable[list[Example]], load: Callable[[], Any], plan: Plan, workers: int, *, cuda: bool
) -> Generator[Table]:
    """The rows of each chunk, as soon as one of so many actors has made them, as `processes.tables` gives them.

    Joins the cluster at RAY_ADDRESS, or starts one on this machine. cuda: give each actor a GPU of its own. A chunk
    whose actor or machine dies is given to another.

    Raises ValueError with what an actor raised, and for more actors than the cluster has cores or GPUs.
    """
    import ray  # pyright: ignore[reportMissingImports]

    if not ray.is_initialized():
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    has = ray.cluster_resources()
    for what, name, needed in (("cores", "CPU", workers), ("GPUs", "GPU", workers * cuda)):
        if needed > has.get(name, 0):
            raise ValueError(f"{workers} workers need as many {what}, and the cluster has {has.get(name, 0):g}")
    rest = iter(chunks)
    while window := [{"chunk": pickle.dumps(chunk)} for chunk in islice(rest, _WINDOW * workers)]:
        found = ray.data.from_items(window, override_num_blocks=len(window)).map_batches(
            _Actor,
            fn_constructor_args=(load, plan),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=min(workers, len(window))),
            num_cpus=1,
            num_gpus=int(cuda),
        )
        for row in found.iter_rows():
            if row["error"]:
                raise ValueError(row["error"])
            yield pa.ipc.open_stream(row["table"]).read_all()


class _Actor:
    """A worker with a model of its own, whose rows travel as bytes of Arrow."""

    def __init__(self, load: Callable[[], Any], plan: Plan) -> None:
        import torch

        torch.set_num_threads(1)
        self._worker = Worker(Subject.of(load()), plan)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The rows of one chunk, or the error that ends the run."""
        (chunk,) = batch["chunk"]
        try:
            table = self._worker.table(pickle.loads(chunk))
        except (ValueError, ImportError) as error:
            return {"table": [b""], "error": [str(error)]}
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return {"table": [sink.getvalue().to_pybytes()], "error": [""]}
