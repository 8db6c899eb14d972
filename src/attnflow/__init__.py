"""attnflow: attention rollout, attention flow and their kin, for any Transformer.

    trace = attnflow.capture(model, inputs, tokenizer=tokenizer)
    attnflow.rollout(trace).show()
    attnflow.flow(trace, query="[CLS]").top(5)

Names load on first use: importing attnflow loads neither torch nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnflow.answer import Relevance
    from attnflow.baselines import BASELINES
    from attnflow.capturing import capture, capture_batch
    from attnflow.capturing.arrays import load
    from attnflow.capturing.embeddings import similar_to
    from attnflow.capturing.models import load_model
    from attnflow.capturing.rules import RULES
    from attnflow.capturing.target import Answer, Contrast, Direction, Token, pooled, similarity_to
    from attnflow.edges import EDGES
    from attnflow.explaining import explain
    from attnflow.faithfulness.metrics import METRICS
    from attnflow.faithfulness.results import Evaluation
    from attnflow.faithfulness.routes import route_test
    from attnflow.faithfulness.run import evaluate
    from attnflow.intervening import knockout
    from attnflow.methods import METHODS, flow, flow_bounds, raw, relevance, rollout
    from attnflow.propagate.carriers import CARRIERS
    from attnflow.reporting import report
    from attnflow.routes import group_flow, min_cut, paths
    from attnflow.running.comparison import compare
    from attnflow.running.engine import run
    from attnflow.running.results import Run, read
    from attnflow.trace import Trace

__all__ = [
    "BASELINES",
    "CARRIERS",
    "EDGES",
    "METHODS",
    "METRICS",
    "RULES",
    "Answer",
    "Contrast",
    "Direction",
    "Evaluation",
    "Relevance",
    "Run",
    "Token",
    "Trace",
    "capture",
    "capture_batch",
    "compare",
    "evaluate",
    "explain",
    "flow",
    "flow_bounds",
    "group_flow",
    "knockout",
    "load",
    "load_model",
    "min_cut",
    "paths",
    "pooled",
    "raw",
    "read",
    "relevance",
    "report",
    "rollout",
    "route_test",
    "run",
    "similar_to",
    "similarity_to",
]

_HOME = {
    "route_test": "attnflow.faithfulness.routes",
    "knockout": "attnflow.intervening",
    "similar_to": "attnflow.capturing.embeddings",
    "similarity_to": "attnflow.capturing.target",
    "pooled": "attnflow.capturing.target",
    "Token": "attnflow.capturing.target",
    "Direction": "attnflow.capturing.target",
    "Contrast": "attnflow.capturing.target",
    "Answer": "attnflow.capturing.target",
    "BASELINES": "attnflow.baselines",
    "CARRIERS": "attnflow.propagate.carriers",
    "EDGES": "attnflow.edges",
    "Evaluation": "attnflow.faithfulness.results",
    "METRICS": "attnflow.faithfulness.metrics",
    "evaluate": "attnflow.faithfulness.run",
    "explain": "attnflow.explaining",
    "METHODS": "attnflow.methods",
    "Relevance": "attnflow.answer",
    "Trace": "attnflow.trace",
    "capture": "attnflow.capturing",
    "capture_batch": "attnflow.capturing",
    "compare": "attnflow.running.comparison",
    "flow": "attnflow.methods",
    "flow_bounds": "attnflow.methods",
    "group_flow": "attnflow.routes",
    "load": "attnflow.capturing.arrays",
    "load_model": "attnflow.capturing.models",
    "min_cut": "attnflow.routes",
    "paths": "attnflow.routes",
    "raw": "attnflow.methods",
    "read": "attnflow.running.results",
    "relevance": "attnflow.methods",
    "report": "attnflow.reporting",
    "RULES": "attnflow.capturing.rules",
    "Run": "attnflow.running.results",
    "rollout": "attnflow.methods",
    "run": "attnflow.running.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'attnflow' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
