"""Texts to token numbers, and to batches that waste little on padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Tokens = npt.NDArray[np.int32]

BATCH_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of texts per batch that are used: few, so that the graphs of earlier batches serve again."""

LENGTH_STEP = 4
"""Padded lengths are multiples of this, for the same reason."""

COLUMNS_STEP = 8
"""Numbers of tokens in a batch are multiples of this: products of such widths are the fastest."""

BATCH_OVERHEAD = 64
"""What one more batch costs, in tokens' worth of computation."""


class Tokenizer:
    """Splits texts into a model's tokens.

    Args:
        path: A `tokenizer.json`.
        n_max: Longest sequence; what is longer is cut, the special tokens counted.

    Raises:
        ModelError: The file is not a tokenizer, or `tokenizers` is not installed.
    """

    def __init__(self, path: Path, n_max: int) -> None:
        try:
            import tokenizers
        except ImportError:
            raise ModelError(f"reading {path} needs tokenizers: pip install 'ggmlb[models]'") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no other class
            raise ModelError(f"{path} is not a tokenizer: {error}; copy or download it again") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(n_max)

    def __call__(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token numbers of each text, with the model's special tokens."""
        return [np.array(e.ids, np.int32) for e in self._tokenizer.encode_batch_fast(list(texts))]


class Batch(NamedTuple):
    """Texts that are computed together.

    Attributes:
        members: Numbers of the texts.
        n_tokens: Length to which each is padded.
    """

    members: npt.NDArray[np.intp]
    n_tokens: int


def plan_batches(lengths: Sequence[int], most: int, n_max: int) -> list[Batch]:
    """Group texts of similar length so that padding and the number of batches cost least.

    Texts are sorted by length and cut into runs. Which cuts are best is found from the front: the
    least cost of the first `i` texts is that of the first `i - k`, plus a batch of the next `k`.

    Args:
        lengths: Tokens of each text.
        most: Most texts in a batch.
        n_max: Longest sequence that the model takes.

    Returns:
        The batches, longest texts last.
    """
    order = np.argsort(lengths, kind="stable")
    # A batch is padded to what its last and longest text needs: in steps of 4 for an even number of texts,
    # of 8 for an odd one, so that their product is a multiple of 8.
    needed = [
        [min(-(-int(lengths[i]) // step) * step, n_max) for i in order]
        for step in (LENGTH_STEP, COLUMNS_STEP)
    ]
    sizes = [k for k in BATCH_SIZES if k < most] + [most]
    cost = [0]
    taken = [0]
    for end in range(1, len(order) + 1):
        least, size = min((cost[end - k] + k * needed[k % 2][end - 1], k) for k in sizes if k <= end)
        cost.append(least + BATCH_OVERHEAD)
        taken.append(size)
    batches = []
    end = len(order)
    while end:
        size = taken[end]
        batches.append(Batch(order[end - size : end], needed[size % 2][end - 1]))
        end -= size
    return batches[::-1]
