"""Cells of keys and values: which are taken, and what the next token sees of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ggmlb import AllocationError
from ggmlb.models import TextModel
from ggmlb.models.text.kv_cache import FREE

WINDOWS = 0, 5


@pytest.mark.parametrize("seed", range(4))
def test_masks_that_are_kept_are_those_made_anew(models: Callable[..., Path], seed: int) -> None:
    rng = np.random.default_rng(seed)
    with TextModel(models(), ["CPU"], n_ctx=48) as model:
        memory = model._loaded.memory.cells
        assert memory is not None
        lengths = dict.fromkeys(range(3), 0)
        for _ in range(300):
            sequence, n = int(rng.integers(3)), int(rng.integers(1, 4))
            held = memory.sequence != FREE
            assert memory.n_used == (np.flatnonzero(held)[-1] + 1 if held.any() else 0)
            if rng.random() < 0.1 or held.sum() + n > memory.n_cells:
                lengths[sequence] = memory.remove(sequence, int(rng.integers(lengths[sequence] + 1)))
                continue
            first = np.flatnonzero(~held)[:n]
            if n > 1:
                cells = memory.find_cells(n)
                places = lengths[sequence] + np.arange(n, dtype=np.int32)
                memory.occupy(cells, np.full(n, sequence, np.int32), places)
                assert cells.tolist() == first.tolist()
            else:
                assert memory.take(sequence, lengths[sequence]) == first[0]
            lengths[sequence] += n
            at = np.array([sequence], np.int32), np.array([lengths[sequence] - 1], np.int32)
            for window in WINDOWS:
                expected = memory.mask(*at, memory.n_cells, window)
                assert bytes(memory.row(sequence, int(at[1][0]), window)) == expected.tobytes()


def test_a_full_memory_has_no_cell(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=8) as model:
        memory = model._loaded.memory.cells
        assert memory is not None
        cells = [memory.take(1, i) for i in range(8)]
        assert cells == list(range(8))
        with pytest.raises(AllocationError, match="larger n_ctx"):
            memory.take(1, 8)
        memory.release(np.array([3]))
        assert memory.take(2, 0) == 3
        assert memory.n_used == 8


def test_no_more_tokens_are_copied_than_there_are(models: Callable[..., Path]) -> None:
    """As after a failed batch, whose cells were released."""
    with TextModel(models(), ["CPU"], n_ctx=16) as model:
        memory = model._loaded.memory
        assert memory.cells is not None
        for i in range(3):
            memory.cells.take(1, i)
        assert (memory.copy(1, 2, 5), memory.length(2)) == (3, 3)
