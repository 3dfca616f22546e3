"""The disk cache runs what it finds: only what nobody else can have put there."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ggmlb.system import disk_cache

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners and modes as POSIX has them")

CODE = b"machine code"


@pytest.fixture
def entry(tmp_path: Path) -> Iterator[Path]:
    """A file of the cache, which is there, and of this user alone."""
    path = tmp_path / "cache" / "llvm" / "kernel.o"
    disk_cache.save(path, CODE)
    assert disk_cache.load(path) == CODE
    disk_cache._checked.clear()
    yield path
    disk_cache._checked.clear()


def test_folders_are_made_for_the_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        disk_cache.save(tmp_path / "a" / "b" / "kernel.o", CODE)
    finally:
        os.umask(old)
    places = [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "b" / "kernel.o"]
    assert [place.stat().st_mode & 0o777 for place in places] == [0o700, 0o700, 0o600]


UNSAFE: dict[str, Callable[[Path], None]] = {
    "others write in the folder": lambda entry: entry.parent.chmod(0o777),
    "the group writes in the folder": lambda entry: entry.parent.chmod(0o770),
    "others write in the folder, sticky or not": lambda entry: entry.parent.chmod(0o1777),
    "others write above it": lambda entry: entry.parent.parent.chmod(0o777),
    "the group writes far above it": lambda entry: entry.parents[2].chmod(0o770),
}


@pytest.mark.parametrize("case", UNSAFE)
def test_a_folder_that_others_write_in_is_not_used(case: str, entry: Path) -> None:
    UNSAFE[case](entry)
    with pytest.warns(RuntimeWarning, match="are not cached in .* others can write in .* chmod go-w"):
        assert disk_cache.load(entry) is None
    with warnings.catch_warnings():  # told once
        warnings.simplefilter("error")
        disk_cache.save(entry.with_name("other.o"), CODE)
    assert not entry.with_name("other.o").exists()


def test_a_filter_that_makes_warnings_errors_does_not_break_it(entry: Path) -> None:
    entry.parent.chmod(0o777)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert disk_cache.load(entry) is None


def test_a_folder_with_the_sticky_bit_may_be_above(entry: Path) -> None:
    entry.parent.parent.chmod(0o1777)
    assert disk_cache.load(entry) == CODE


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("which", [0, 1, 2, 3], ids=["the file", "its folder", "above", "far above"])
def test_what_belongs_to_somebody_else_is_not_used(which: int, entry: Path) -> None:
    os.chown([entry, *entry.parents][which], 12345, -1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert disk_cache.load(entry) is None


def test_a_link_to_a_folder_of_others_is_seen_through(entry: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(entry.parent)
    assert disk_cache.load(link / entry.name) == CODE
    disk_cache._checked.clear()
    entry.parent.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="others can write in"):
        assert disk_cache.load(link / entry.name) is None


IRREGULAR: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a link": lambda path: path.symlink_to(path.with_name("real")),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("case", IRREGULAR)
def test_what_is_no_regular_file_is_no_entry(case: str, entry: Path) -> None:
    entry.rename(entry.with_name("real"))
    IRREGULAR[case](entry)
    assert disk_cache.load(entry) is None


def test_an_entry_is_loaded_under_its_own_key_only(entry: Path) -> None:
    other = entry.with_name("other.o")
    disk_cache.save(other, b"other code")
    (swapped := entry.with_name("swapped")).write_bytes(entry.read_bytes())
    os.replace(other, entry)
    os.replace(swapped, other)
    assert disk_cache.load(entry) is None and disk_cache.load(other) is None


def test_a_file_that_others_write_is_no_entry(entry: Path) -> None:
    entry.chmod(0o620)
    assert disk_cache.load(entry) is None


def test_a_relative_path_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `~/.cache` is where there is no home: it must not become a folder `~` in the working folder."""
    monkeypatch.chdir(tmp_path)
    disk_cache.save(Path("~/.cache/ggmlb/llvm/kernel.o"), CODE)
    assert not any(tmp_path.iterdir())
    assert disk_cache.load(Path("~/.cache/ggmlb/llvm/kernel.o")) is None
