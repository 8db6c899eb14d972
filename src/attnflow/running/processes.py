"""Several processes, each with a model of its own and its share of the cores.

Only this file is loaded in a process before it knows how many threads it may start.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnflow.running.plan import Plan
    from attnflow.running.shards import Table
    from attnflow.running.sources import Example
    from attnflow.running.worker import Worker

# Chunks that a worker has at hand, so that none waits.
_AHEAD = 2
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")

_worker: Worker | None = None


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def tables(chunks: Iterable[list[Example]], load: Callable[[], Any], plan: Plan, workers: int) -> Generator[Table]:
    """The rows of each chunk, as soon as one of so many processes has made them.

    load: makes the model, once in each process. Whatever ends the caller, and if it is killed, ends the processes.

    Raises what a worker raises; ValueError for a function that no other process can import, and if a process ends by
    itself.
    """
    try:
        pickle.dumps((load, plan))
    except Exception as error:  # of any class that takes part
        raise ValueError(
            f"the model's function or the target cannot be handed to a worker ({error}): define it at the top of a "
            "module, or take one worker"
        ) from error
    context = get_context("spawn")
    # A pipe of which only this process holds the end that is written to: where it is closed, the workers end.
    watched, held = context.Pipe(duplex=False)
    threads = max(1, cores() // workers)
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(watched, threads, load, plan))
    waiting = set[Future[Any]]()
    try:
        for chunk in chunks:
            waiting.add(pool.submit(_explain, chunk))
            if len(waiting) >= _AHEAD * workers:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in done)
    except BrokenProcessPool as error:
        raise ValueError(
            "a worker process ended before its work did: memory may not hold so many (take fewer workers), or a script "
            'starts them outside of if __name__ == "__main__":; the same run goes on where it stopped'
        ) from error
    finally:
        if waiting:
            held.close()
        pool.shutdown(cancel_futures=True)
        held.close()
        watched.close()


def _begin(watched: Connection, threads: int, load: Callable[[], Any], plan: Plan) -> None:
    """Make this process a worker."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    for name in _THREADS:
        given = os.environ.get(name, "")
        os.environ[name] = str(min(threads, int(given)) if given.isdecimal() and int(given) else threads)
    import torch

    from attnflow.running.plan import Subject
    from attnflow.running.worker import Worker

    torch.set_num_threads(min(threads, torch.get_num_threads()))
    with suppress(ModuleNotFoundError):
        from transformers.utils import logging

        logging.disable_progress_bar()
    _worker = Worker(Subject.of(load()), plan)


def _end_with(watched: Connection) -> None:
    """End this process when the one that started it closes the pipe, or ends."""
    with suppress(OSError):
        watched.poll(None)
    os._exit(1)


def _explain(chunk: list[Example]) -> Table:
    assert _worker is not None
    return _worker.table(chunk)
