"""The similarity of two inputs as a target: which words of the one make a model find it like the other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from attnflow.capturing.inputs import arguments, module_of
from attnflow.capturing.target import Pooling, Similarity, pooled, similarity_to

# What sentence-transformers calls the ways to pool, where it saves a model.
_SAVED: dict[str, Pooling] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
}


def similar_to(model: Any, inputs: Any, *, tokenizer: Any = None, pooling: Pooling = "output") -> Similarity:
    """The target of a bi-encoder: how similar an input is to this other one, by the cosine of their embeddings.

    model, inputs, tokenizer: as `attnflow.capture` takes them. pooling: how the model's embedding (width,) is made of
    what it returns; see `attnflow.pooled`.

    Raises ValueError for what the model does not return, and for inputs that are several examples.

    >>> import attnflow
    >>> model, tokenizer = attnflow.load_model()
    >>> target = similar_to(model, "Where are my keys?", tokenizer=tokenizer, pooling="mean")
    >>> text = "The keys to the cabinet are on the table."
    >>> attnflow.explain(model, text, "cp-lrp", tokenizer=tokenizer, target=target).top(1)[0][1]
    'keys'
    """
    module, bound = module_of(model)
    args, named = arguments(module, inputs, tokenizer)
    with torch.no_grad():
        found = pooled(module(*args, **{**bound, **named}), pooling, named.get("attention_mask"))
    if len(found) != 1:
        raise ValueError(f"the other input is one example; {len(found)} were given")
    target = similarity_to(found, pooling)
    return replace(target, other=f"that of {inputs!r}") if isinstance(inputs, str) else target


def saved_pooling(name: str) -> Pooling:
    """How a model that sentence-transformers saved pools the vectors of its tokens.

    name: a local folder. Raises ValueError where nothing is saved there, another way to pool, or a layer behind it.
    """
    behind = sorted(path.name for path in Path(name).glob("[2-9]_*") if not path.name.endswith("Normalize"))
    if behind:
        raise ValueError(f"{name} changes its embedding behind the pooling, by {behind[0]}, which is not run here")
    file = Path(name) / "1_Pooling" / "config.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"no folder {name} here says how its embedding is made of the vectors of its tokens (in "
            "1_Pooling/config.json): give pooling (--pooling): mean, first, last, or output where the model returns it"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON ({error})") from error
    ways = (
        [way for way, used in saved.items() if way.startswith("pooling_mode") and used] if type(saved) is dict else []
    )
    if len(ways) != 1 or ways[0] not in _SAVED:
        raise ValueError(f"{file} pools by {', '.join(ways) or 'nothing'}; what is known here are {', '.join(_SAVED)}")
    return _SAVED[ways[0]]
