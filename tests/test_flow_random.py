"""10,000 random problems against scipy (integers) and igraph (floats), with their cuts, bounds and routes."""

import numpy as np
import pytest

import fuzz_flow

LATER = [pytest.param(start, marks=pytest.mark.long) for start in range(2000, 10_000, 1000)]


@pytest.mark.parametrize("start", [0, 1000, *LATER])
def test_random_problems(start):
    for seed in range(start, start + 1000):
        rng = np.random.default_rng(seed)
        kind, layers = fuzz_flow.problem(rng)
        try:
            fuzz_flow.check(rng, kind, layers)
        except AssertionError as error:
            raise AssertionError(f"problem {seed} ({kind}): python tests/fuzz_flow.py --seed {seed}") from error
