"""Faults of ggml's CPU that docs/ggml-faults.md reports: one that has gone is to be taken from the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from ggmlb.backends.ggml.find import libraries
from tests.support.ggml_faults import REPORTS, what_it_lacks

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize("name", [name for name in REPORTS if name.startswith("cpu-")])
def test_it_is_there(name: str, tmp_path: Path) -> None:
    library = next((found for found in libraries() if found.origin.startswith("xllamacpp")), None)
    if library is None:
        pytest.skip("xllamacpp is not installed")
    assert not (why := what_it_lacks(name, library, tmp_path)), why
