"""Prefetching of weights: measured once by type and layout, kept on disk, listed, or fixed."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ggmlb.backends.llvm import prefetching
from ggmlb.backends.llvm.codegen import host
from ggmlb.backends.llvm.codegen.library import Library, optimised
from ggmlb.backends.llvm.kernels import interleaved_products, matvec
from ggmlb.backends.llvm.kernels.blocks import SCALES
from ggmlb.backends.llvm.kernels.interleaved import fields_of
from ggmlb.cli import main
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import ArgumentError


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure, from small weights, and keep it in a folder of its own."""
    monkeypatch.delenv("GGMLB_PREFETCH")
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(prefetching, "_weight_nbytes", lambda: 1 << 16)


@pytest.mark.usefixtures("measuring")
@pytest.mark.parametrize(("dtype", "is_interleaved"), [("q4_0", False), ("q4_0", True), ("bf16", False)])
def test_what_was_measured_is_kept(dtype: str, is_interleaved: bool) -> None:
    first = Library(host.target_for(None))
    found = prefetching.ahead(first, dtype, is_interleaved)
    assert found.hint in prefetching.HINTS and found.nbytes in prefetching.DISTANCES
    layout = "strips" if is_interleaved else "rows"
    assert prefetching.choices(first) == {**prefetching.choices(first), f"{dtype} {layout}": found}
    again = Library(host.target_for(None))
    assert prefetching.ahead(again, dtype, is_interleaved) == found
    assert first.n_compiled > 0 and again.n_compiled == 0


@pytest.mark.usefixtures("measuring")
def test_a_type_is_measured_by_its_own_kernel() -> None:
    library = Library(host.target_for(None))
    prefetching.ahead(library, "q8_0", True)
    hint = prefetching.choices(library)["q8_0 rows"].hint
    assert library.n_compiled == len(prefetching.HINTS) + 1
    library.address(interleaved_products.few, ("q8_0", 1, "q8", hint))
    assert library.n_compiled == len(prefetching.HINTS) + 1


@pytest.mark.usefixtures("measuring")
def test_threads_measure_once() -> None:
    library = Library(host.target_for(None))
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: prefetching.ahead(library, "q4_0", False), range(4)))
    assert found == [prefetching.choices(library)["q4_0 rows"]] * 4
    assert all(choice is found[0] for choice in found)


def test_a_fixed_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGMLB_PREFETCH", "1,512")
    library = Library(host.target_for(None))
    assert prefetching.ahead(library, "q4_0", False) == (1, 512)
    assert library.n_compiled == 0
    for wrong in ("4,64", "2", "2,-1", "on", "2,4k", f"2,{1 << 62}"):
        monkeypatch.setenv("GGMLB_PREFETCH", wrong)
        with pytest.raises(ArgumentError, match=r"GGMLB_PREFETCH='.*set it as 2,4096"):
            prefetching.ahead(Library(host.target_for(None)), "q4_0", False)


@pytest.mark.parametrize("hint", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("kernel", "params"),
    [
        (matvec.few, ("q4_0", 8, 1, "q8")), (matvec.few, ("f16", 4, 1, "f32")),
        (interleaved_products.few, ("q4_0", 1, "q8")), (interleaved_products.few, ("f16", 1, "f32")),
    ],
)  # fmt: skip
def test_kernels_prefetch_with_the_hint(kernel: object, params: tuple[object, ...], hint: int) -> None:
    target = host.target_for(None)
    text = str(optimised(target, target.machine(), kernel, (*params, hint), "kernel"))  # type: ignore[arg-type]
    hints = re.findall(r"call void @llvm.prefetch.*, i32 0, i32 (\d), i32 1\)", text)
    assert set(hints) == {str(hint)}


@pytest.mark.usefixtures("measuring")
def test_the_choices_are_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetching, "choices", lambda _: {"q4_0 rows": prefetching.Ahead(2, 4096)})
    assert main(["devices", "-v"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("LLVM:"))
    assert "SIMD = " in line and "PREFETCH q4_0 rows = 2,4096" in line


@pytest.mark.parametrize("dtype", sorted(SCALES))
def test_a_strip_holds_each_byte_of_a_block_once(dtype: str) -> None:
    held = [
        place + i
        for field in fields_of(dtype)
        for place in field.places
        for i in range(field.unit or field.nbytes)
    ]
    assert sorted(held) == list(range(DType.parse(dtype).type_size))
