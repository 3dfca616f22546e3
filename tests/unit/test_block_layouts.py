"""Where a block's fields lie is told once, by `DType.codec.layout`; kernels take it from there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ggmlb.backends
from ggmlb import DType
from ggmlb.backends.gpu.source import BLOCKS, _text

BACKENDS = Path(ggmlb.backends.__file__).parent
WITH_BLOCKS = [
    *(BACKENDS / "gpu/kernels" / name for name in ("rows.h", "rows_k.h", "rows_iq.h", "quantize.h")),
    BACKENDS / "cuda/kernels/sub_blocks.h",
    *(BACKENDS / "llvm/kernels" / f"{name}.py" for name in ("blocks", "convert", "interleaved")),
]


@pytest.mark.parametrize("dtype", [d for d in DType if d.is_quantized], ids=str)
def test_kernels_are_told_each_field(dtype: DType) -> None:
    name, text = dtype.name.lower(), _text("", BLOCKS)
    told = {field: int(at) for field, at in re.findall(rf"\b([A-Z0-9_]+)_{name} = (\d+)", text)}
    assert told.pop("GROUPS") * 8 == dtype.block_size
    assert told.pop("BYTES") == dtype.type_size
    layout = dtype.codec.layout
    assert told == {field.upper(): layout.fields[field][1] for field in layout.names}


@pytest.mark.parametrize("path", WITH_BLOCKS, ids=lambda path: path.name)
def test_no_kernel_counts_bytes_itself(path: Path) -> None:
    """Where a field begins is never a number in the text, added to the address of a block."""
    block = "p" if path.suffix == ".py" else "(?:b|d|at)"
    assert not re.findall(rf".*\b{block} \+ \(?\d+\b(?!\*[A-Z]).*", path.read_text())
