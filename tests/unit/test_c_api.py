"""docs/c-api.md: every function of ggml's backend headers has a row, and every Python name resolves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ggmlb

ROOT = Path(__file__).parents[2]
NAMES = (Path(__file__).parent / "c_api_names.txt").read_text().split()
TABLE = dict(re.findall(r"^\| `(\w+)` \| (`[\w.]+`) \|", (ROOT / "docs/c-api.md").read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, object]]:
    """An object of each class whose attributes are set when it is made."""
    ctx = ggmlb.Context()
    tensor = ctx.new_tensor(ggmlb.DType.F32, (4,))
    with ggmlb.init_by_name("CPU") as backend, ggmlb.alloc_ctx_tensors(ctx, backend) as buffer:
        meta = ggmlb.meta_device([backend.device], lambda t: ggmlb.SplitState(ggmlb.SplitAxis.MIRRORED))
        with meta.init_backend() as together:
            found = (tensor, backend, buffer, buffer.buft, together)
            kinds = ("Tensor", "Backend", "Buffer", "BufferType", "MetaBackend")
            yield dict(zip(kinds, found, strict=True))


def test_every_function_has_a_row() -> None:
    assert len(NAMES) == len(set(NAMES)) == 139
    assert list(TABLE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_python_name_resolves(name: str, examples: dict[str, object]) -> None:
    package, first, *rest = TABLE[name].strip("`").split(".")
    assert package == "ggmlb"
    assert first in ggmlb.__all__
    found = getattr(ggmlb, first)
    for member in rest:
        assert not member.startswith("_")
        found = getattr(found, member) if hasattr(found, member) else getattr(examples[first], member)
