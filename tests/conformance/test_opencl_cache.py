"""Compiled programs on disk: found again, and compiled anew where that fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pyopencl
import pytest

from ggmlb import Context, DType
from ggmlb.backends.gpu import Target, lower
from ggmlb.backends.opencl import _can_cache, pocl
from ggmlb.backends.opencl.program import CacheEntry, Programs
from tests.support.gpus import OPENCL, device_fixture

if TYPE_CHECKING:
    from ggmlb.backends.opencl.device import OpenClDevice

KEYS = [
    (launch.kernel, launch.defines, launch.wg, True)
    for launch in lower(Context().relu(Context().new_tensor(DType.F32, (8, 8))), Target(True, 2, 1))
]


device = device_fixture(OPENCL)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each program that is looked up was found."""
    found: list[bool] = []
    load = CacheEntry.load

    def spy(*args: object) -> object:
        program = load(*args)  # type: ignore[arg-type]
        found.append(program is not None)
        return program

    monkeypatch.setattr(CacheEntry, "load", spy)
    return found


@pytest.fixture(autouse=True)
def not_pocl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pose as a runtime that has no cache of its own."""
    monkeypatch.setattr(pocl, "is_pocl", lambda platform: False)


def build(device: OpenClDevice) -> None:
    ((_, kernel),) = Programs(device.context, device.cl_device, "x").borrow(KEYS)
    assert kernel.function_name == "map"


def test_a_program_that_is_needed_again_is_compiled_no_more(
    device: OpenClDevice, loads: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path))
    build(device)
    build(device)
    assert loads == [False, True]
    (entry,) = (tmp_path / "opencl").glob("*.bin")
    whole = entry.read_bytes()
    for damaged in (b"", whole[:100], whole[:-1], whole[:-1] + b"?"):
        entry.write_bytes(damaged)
        build(device)
        assert loads.pop() is False
        build(device)
        assert loads.pop() is True


def test_a_program_is_stored_once(
    device: OpenClDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(tmp_path / "ggmlb"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if pyopencl._PYOPENCL_NO_CACHE:
        pytest.skip("PyOpenCL was told to cache nothing")
    monkeypatch.setattr("pyopencl.characterize.has_src_build_cache", lambda device: None)  # as of Intel's
    build(device)
    assert len(list((tmp_path / "ggmlb/opencl").glob("*.bin"))) == 1
    assert not (tmp_path / "pyopencl").exists()


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners and modes as POSIX has them")
def test_generated_code_is_not_read_where_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert _can_cache()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write in"):
        assert not _can_cache()


def test_a_folder_that_cannot_be_written_does_no_harm(
    device: OpenClDevice, loads: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("GGMLB_CACHE_DIR", str(file))
    build(device)
    assert loads == [False]


def test_two_plans_never_share_a_kernel_object(device: OpenClDevice) -> None:
    programs = Programs(device.context, device.cl_device, "x")
    first, second = (programs.borrow(KEYS * 2) for _ in range(2))
    pointers = [kernel.int_ptr for _, kernel in (*first, *second)]
    assert len(set(pointers)) == 4
    programs.give_back(first)
    assert {kernel.int_ptr for _, kernel in programs.borrow(KEYS * 3)} & set(pointers[2:]) == set()
