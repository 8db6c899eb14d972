"""Judges many cases, each in a process of its own with limits of time and memory."""

import dataclasses
import json
import os
import resource
import select
import signal
import time
import warnings

SECONDS, MEMORY = 120, 6 << 30


def prepared():
    """Loads what every process needs, once, before they are forked."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import scipy.spatial  # noqa: F401
    import timm  # noqa: F401
    import torch
    import transformers

    import attnflow  # noqa: F401
    import sweep.judge  # noqa: F401

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")


def one(case):
    """The row of one case, from a forked process; a process that dies is a row as well."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _work(case, writing)
    os.close(writing)
    started, answer = time.monotonic(), b""
    while True:
        left = SECONDS - (time.monotonic() - started)
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            os.kill(child, signal.SIGKILL)
            break
        piece = os.read(reading, 65536)
        if not piece:
            break
        answer += piece
    os.close(reading)
    _, status = os.waitpid(child, 0)
    lines = answer.decode(errors="replace").splitlines()
    if lines and lines[-1].endswith("}"):
        return json.loads(lines[-1])
    seconds = round(time.monotonic() - started, 1)
    how = f"took more than {SECONDS} s" if seconds >= SECONDS else f"the process ended with {status}"
    return {"name": case.name, "library": case.library, "family": case.family, "verdict": "not judged"} | {
        "reason": how, "seconds": seconds
    }  # fmt: skip


def _work(case, writing):
    """What the forked process does."""
    from sweep.judge import judge

    used = _size()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        row = dataclasses.asdict(judge(case))
    except BaseException as error:
        row = {"name": case.name, "library": case.library, "family": case.family, "verdict": "not judged"} | {
            "reason": f"{type(error).__name__}: {error}"[:200], "seconds": 0.0
        }  # fmt: skip
    os.write(writing, json.dumps(row).encode())
    os._exit(0)


def _size():
    """How large this process is, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def sweep(cases, path=None, say=print):
    """Rows of all cases; those that stand in the file of an earlier run are not judged again."""
    rows = []
    if path and os.path.exists(path):
        with open(path) as file:
            rows = [json.loads(line) for line in file]
    done = {(row["library"], row["name"]) for row in rows}
    prepared()
    for number, case in enumerate(cases):
        if (case.library, case.name) in done:
            continue
        row = one(case)
        rows.append(row)
        if path:
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")
        if row["verdict"] != "no model":
            say(f"{number + 1}/{len(cases)} {row['name']}: {row['verdict']} {row['reason'][:160]} ({row['seconds']} s)")
    return rows
