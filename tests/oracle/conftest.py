"""What several oracle tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ggmlb import Backend, init_by_name

if TYPE_CHECKING:
    from tests.support.oracle import GgmlProcess


@pytest.fixture(scope="module")
def ggml() -> Iterator[GgmlProcess]:
    """ggml-python, in a process of its own."""
    from tests.support.oracle import GgmlProcess

    process = GgmlProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def cpu() -> Iterator[Backend]:
    with init_by_name("CPU") as backend:
        yield backend
