"""attnflow as a user's own code, which a type checker knows all about (`make check` and tools/dist.py run pyright)."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import attnflow


def most_relevant(model: torch.nn.Module, pixels: torch.Tensor, count: int = 3) -> list[tuple[str, float]]:
    """The labels and scores of the tokens that the output draws on most."""
    trace: attnflow.Trace = attnflow.capture(model, pixels)
    relevance: attnflow.Relevance = attnflow.rollout(trace, query=trace.readout)
    return [(one.token, one.score) for one in relevance.top(count)]


def flows(attention: NDArray[np.float64], folder: Path) -> NDArray[np.float64]:
    """The flow from each query to each token, kept in a file."""
    relevance = attnflow.flow(attention, residual=0.5, head_fusion="mean")
    relevance.save(folder / "flow.json")
    return relevance.scores


def both(model: torch.nn.Module, pixels: torch.Tensor) -> dict[str, attnflow.Relevance]:
    """Two methods on one example."""
    return attnflow.explain(model, pixels, ["rollout", "gradient-flow"], target=attnflow.Contrast(1, 0))
