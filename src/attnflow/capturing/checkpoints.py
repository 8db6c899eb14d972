"""Checkpoints: models from a folder or the hub, with every weight that they need as it was stored, or not at all."""

from __future__ import annotations

import inspect
import json
import pickle
import re
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

# What attention does not depend on, so that a model without a head may lack it: modules and parameters by their names.
_SPARE = {"pooler", "mask_token"}
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_WAIT = 5.0  # seconds for the hub to answer

_notes: WeakKeyDictionary[torch.nn.Module, tuple[str, ...]] = WeakKeyDictionary()


def notes(model: torch.nn.Module) -> tuple[str, ...]:
    """What was not stored with a model, and is done without: for the recipe and the command line."""
    return _notes.get(model, ())


def add_note(model: torch.nn.Module, note: str) -> None:
    """Remember, for as long as the model lives, what was not stored with it."""
    _notes[model] = (*notes(model), note)


@contextmanager
def opening(name: str, what: str, advice: str) -> Generator[dict[str, Any]]:
    """The options with which `from_pretrained` finds a model by its name; any failure inside is a ValueError of a line.

    No code of a checkpoint's own runs. Where the hub gives no answer, what was fetched before is taken at once.
    what, advice: for the message, what was to be loaded and what to give instead.
    """
    local = Path(name).is_dir() or not _HUB_NAME.fullmatch(name) or not _hub_answers()
    try:
        if not name or Path(name).is_file():
            raise ValueError("it is a file" if name else "the name is empty")
        if not Path(name).is_dir() and not _HUB_NAME.fullmatch(name):
            raise ValueError("there is no such folder")
        yield {"local_files_only": local, "trust_remote_code": False}
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # libraries of any make read foreign files here: what they raise is not known
        absent = local and isinstance(error, OSError) and not Path(name).exists()
        why = "there is no such folder, and the hub gives no answer" if absent else _reason(error)
        raise ValueError(f"cannot load {what} from {name!r}: {why}; {advice}") from error


def _hub_answers() -> bool:
    """Whether the hub can be reached: asked once, where its own client would try again for most of a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_WAIT)
    except Exception:  # of the HTTP library, or that the client was told to stay offline
        return False
    return True


def _reason(error: Exception) -> str:
    """Why a checkpoint cannot be read, in a line."""
    if "trust_remote_code" in str(error):
        return "it needs code of its own, which is never run (load it yourself, and give it to attnflow.capture)"
    if isinstance(error, pickle.UnpicklingError):
        return "its weights are cut short, or hold Python objects, which are never loaded (save them as safetensors)"
    if type(error).__name__ == "SafetensorError":
        return f"its weights cannot be read, the file may be cut short ({first_line(error)})"
    if isinstance(error, json.JSONDecodeError):
        return f"one of its files is no JSON ({first_line(error)})"
    if isinstance(error, ValueError | OSError):
        return first_line(error)
    if named := re.findall(r'(?:"|size mismatch for )([\w.]+)[":]', str(error)):  # of torch's load_state_dict
        return f"{len(named)} of its weights are missing, left over or of another size: {_few(named)}"
    return f"it is no such model ({type(error).__name__}: {first_line(error)})"


def first_line(error: BaseException) -> str:
    """The first line of a message, without the full stop."""
    return str(error).strip().split("\n")[0].rstrip(".")


def pretrained(kind: str, name: str, options: Mapping[str, Any], *, head: str | None = None) -> Any:
    """A model of transformers in evaluation mode, made by one of its classes (AutoModel), with its stored weights.

    head: what it must have been trained to do, for models with a head. Without one a pooler may be missing: it is taken
    away where the model can do without, and `notes` tells of it.

    Raises ValueError where weights are missing, have other sizes than the configuration says, or were stored for
    layers that the model does not have: such a model would be another than the one that was stored.
    """
    import transformers

    model, facts = getattr(transformers, kind).from_pretrained(
        name, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    check_weights(model, facts["missing_keys"], facts["unexpected_keys"], facts["mismatched_keys"], head=head)
    _leave_out(model, facts["missing_keys"])
    return model.eval()


def check_weights(
    model: torch.nn.Module,
    missing: Iterable[str],
    unexpected: Iterable[str],
    mismatched: Iterable[tuple[str, Any, Any]] = (),
    *,
    head: str | None = None,
) -> None:
    """Raise ValueError for a model that is not the one that was stored; the arguments are as `pretrained` finds them.

    Weights without a place in the model are those of another head, unless they belong to a block of it, or to one like
    them.
    """
    sizes = sorted(mismatched)
    if sizes:
        key, stored, wanted = sizes[0]
        raise ValueError(
            f"{len(sizes)} of its weights have another size than config.json says: {key} is {tuple(stored)}, and "
            f"{tuple(wanted)} is expected"
        )
    own = [key for key, _ in model.named_parameters()]
    base = f"{getattr(model, 'base_model_prefix', '')}."
    lacking = _natural(key for key in missing if head or not _SPARE & set(key.split(".")))
    if head and lacking and any(key.startswith(base) for key in own):
        untrained = [key for key in lacking if not key.startswith(base)]
        if len(untrained) == len(lacking):
            raise ValueError(f"it was not trained to {head}: it has no weights for {untrained[0]}")
    if lacking:
        raise ValueError(
            f"it lacks {len(lacking)} of its {len(own)} weights, which would be drawn at random: {_few(lacking)}; "
            "config.json and the stored weights do not belong together"
        )
    kinds = {_kind(key.removeprefix(base)) for key in own} - {""}
    blocks = {prefix for key in own for prefix in _blocks(key.removeprefix(base))}
    plain = [key.removeprefix(base) for key in unexpected]
    ignored = _natural(key for key in plain if _kind(key) in kinds or blocks & set(_blocks(key)))
    if ignored:
        raise ValueError(
            f"{len(ignored)} of its stored weights belong to layers that config.json does not have, and would be left "
            f"out: {_few(ignored)}"
        )


def _blocks(key: str) -> list[str]:
    """The blocks (items of a list of modules) that a weight lies in: "encoder.layer.0"."""
    parts = key.split(".")
    return [".".join(parts[: place + 1]) for place, part in enumerate(parts) if part.isdecimal()]


def _kind(key: str) -> str:
    """A weight's name but for the numbers of blocks; "" outside of all blocks."""
    return re.sub(r"\d+", "#", key) if _blocks(key) else ""


def _natural(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: [(part.isdecimal(), part.zfill(9)) for part in key.split(".")])


def _few(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _leave_out(model: torch.nn.Module, missing: Iterable[str]) -> None:
    """Take poolers without weights away, where the model can do without, and note what was not stored."""
    for path in sorted({key[: key.index("pooler") + len("pooler")] for key in missing if "pooler" in key.split(".")}):
        parent = model.get_submodule(path.rpartition(".")[0])
        optional = "add_pooling_layer" in inspect.signature(type(parent).__init__).parameters
        if optional:
            parent.register_module("pooler", None)
        became = "it is left out" if optional else "its numbers are random, and its output means nothing"
        add_note(model, f"no weights are stored for the {path}: {became}; attention does not depend on it")
