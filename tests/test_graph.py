"""Which queries and layers the settings name."""

import numpy as np
import pytest

import attnflow
from attnflow import memory
from attnflow.graph import attention_graph
from attnflow.trace import query_positions

LABELS = ("[CLS]", "the", "cat", "the", "[SEP]")


def test_queries_are_positions_or_tokens():
    assert query_positions(None, LABELS) == (0, 1, 2, 3, 4)
    assert query_positions("all", LABELS) == (0, 1, 2, 3, 4)
    assert query_positions("cat", LABELS) == (2,)
    assert query_positions(-1, LABELS) == (4,)
    assert query_positions(np.int64(1), LABELS) == (1,)
    assert query_positions([0, -2], LABELS) == (0, 3)
    assert query_positions(np.array([0, 3]), LABELS) == (0, 3)
    assert query_positions("all", ("for", "all")) == (1,)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("the", r"the token 'the' occurs at \[1, 3\]: give one of these positions"),
        ("dog", r"no token is 'dog'; the tokens are: \[CLS\] the cat the \[SEP\]"),
        (5, "query 5 is out of range: there are 5 queries, 0 to 4"),
        (-6, "query -6 is out of range"),
        ([], "the list of queries is empty"),
        (1.5, "a query is a position, several positions or a token; 1.5 was given"),
        (["1"], r"a query is .*; \['1'\] was given"),
        (slice(0, 2), "a query is a position"),
        (True, "a query is a position, several positions or a token; True was given"),
        (np.False_, "a query is a position, .* was given"),
        ([4, True], r"a query is a position, .*; \[4, True\] was given"),
        (np.array([True, False]), "a query is a position, .* was given"),
    ],
)
def test_bad_queries(query, message):
    with pytest.raises(ValueError, match=message):
        query_positions(query, LABELS)


def test_transitions_are_made_for_what_is_asked():
    graph = attention_graph(np.full((4, 3, 3), 1 / 3), layer=2, start_layer=1, query=[2, 0])
    assert (graph.explained, graph.queries, graph.query_tokens) == ((2,), (2, 0), ("2", "0"))
    assert graph.top(2).shape == (2, 3)
    assert [transition.number for transition in graph.below(2)] == [1]
    assert graph.settings["residual"] == 0.5


@pytest.mark.parametrize(
    ("method", "settings", "edges"),
    [
        (attnflow.rollout, {}, 50 * 50 * 3),
        (attnflow.rollout, {"query": 0}, 50 * 3),
        (attnflow.raw, {"layer": "all"}, 50 * 50 * 6),
        (attnflow.flow, {"query": 0}, 50 * 3 + 3 * 50 * 50),
        (attnflow.flow_bounds, {"query": 0, "start_layer": 2}, 50 * 3 + 50 * 50),
    ],
)
def test_what_cannot_fit_is_refused_before_any_work(monkeypatch, method, settings, edges):
    layers = [np.full((50, 50), 0.02)] * 4
    monkeypatch.setattr(memory, "free_memory", lambda device: 8 * edges - 1)
    with pytest.raises(MemoryError, match=r"layers of up to 50 positions.* GB are free; explain fewer queries"):
        method(layers, **settings)
    monkeypatch.setattr(memory, "free_memory", lambda device: 10**9)
    method(layers, **settings)
