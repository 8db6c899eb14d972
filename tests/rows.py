"""Rows of runs, compared."""

import numpy as np

# Numbers that other batches, with other padding, move by their rounding.
_ROUNDED = ("scores", "sum", "special", "score", "probability")


def same_rows(first, second):
    """The same rows in two tables, but for rounding."""
    assert first.schema.names == second.schema.names
    for name in first.schema.names:
        cells = [table[name].to_pylist() for table in (first, second)]
        if name in _ROUNDED:
            numbers = [np.concatenate([np.ravel(one) for one in column if one is not None] or [[]]) for column in cells]
            np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-6)
        else:
            assert cells[0] == cells[1], name
