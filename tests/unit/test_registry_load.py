"""Backends of files, modules and folders, named in a call or in the environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ggmlb.core.errors import BackendBroken, RegistryError
from ggmlb.interface.registry import Registry
from tests.support.backend_files import Write, registry_of, source_of

# -- load ------------------------------------------------------------------------------------------


def test_load_a_module(write_backend: Write) -> None:
    write_backend("mod_echo")
    registry = registry_of()
    reg = registry.load("mod_echo")
    assert reg.name == "Echo"
    assert registry.load("mod_echo:backend_reg") is reg
    assert registry.regs() == [reg]
    with pytest.raises(BackendBroken, match="no_such_module:backend_reg fails to load: ModuleNotFoundError"):
        registry.load("no_such_module")


def test_load_what_was_discovered_returns_it(write_backend: Write) -> None:
    registry = registry_of(write_backend("mod_echo"))
    reg = registry.load("mod_echo")
    assert registry.regs() == [reg]
    assert registry.reg_by_name("echo") is reg


def test_load_a_file_once(write_backend: Write, tmp_path: Path) -> None:
    write_backend("mod_echo")
    registry = registry_of()
    reg = registry.load(tmp_path / "mod_echo.py")
    assert registry.load(str(tmp_path / "mod_echo.py")) is reg
    assert registry.load(str(tmp_path / "." / "mod_echo.py")) is reg
    assert "mod_echo" not in sys.modules  # under a name of its own: it shadows nothing
    with pytest.raises(RegistryError, match=r"no backend at '.*nope.py'"):
        registry.load(tmp_path / "nope.py")


def test_load_a_package_folder_with_imports_of_its_own(tmp_path: Path) -> None:
    package = tmp_path / "ggmlb_echo"
    package.mkdir()
    (package / "__init__.py").write_text("from .part import backend_reg\n")
    (package / "part.py").write_text(source_of("Echo"))
    assert registry_of().load(package).name == "Echo"
    (package / "__init__.py").write_text("from .missing import backend_reg\n")
    for module in [m for m in sys.modules if m.startswith("ggmlb_loaded_ggmlb_echo")]:
        del sys.modules[module]
    with pytest.raises(BackendBroken, match=r"ModuleNotFoundError: .*\.missing"):
        registry_of().load(package)


# -- folders and the environment -------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three variants of Echo, another backend, one that is broken, and files that are no backends."""
    root = tmp_path / "backends"
    (root / "ggmlb_other").mkdir(parents=True)
    files = {
        "ggmlb_echo.py": ("Echo", ""),
        "echo-fast.py": ("Echo", "score = lambda: 7"),
        "echo-never.py": ("Echo", "score = lambda: 0"),
        "ggmlb_other/__init__.py": ("Other", ""),
        "bad.py": ("Bad", "1 / 0"),
        "_hidden.py": ("Hidden", ""),
    }
    for file, (name, extra) in files.items():
        (root / file).write_text(source_of(name, extra))
    (root / "setup.py").write_text("raise SystemExit('this must not run')\n")
    (root / "notes.txt").write_text("backend_reg\n")
    return root


def test_load_all_from_path(folder: Path) -> None:
    registry = registry_of()
    regs = registry.load_all_from_path(folder)
    assert sorted(reg.name for reg in regs) == ["Echo", "Other"]
    assert registry.load(folder / "echo-fast.py") is registry.reg_by_name("Echo")
    assert [(u.name, u.kind) for u in registry.unavailable()] == [("bad", "broken"), ("echo", "absent")]
    assert registry.load_all_from_path(folder / "ggmlb_other") == []
    with pytest.raises(RegistryError, match=r"no folder '.*nope'"):
        registry.load_all_from_path(folder / "nope")


@pytest.mark.parametrize(
    "library", ["libggml-cpu.so", "ggml-vulkan.dll", "libggml.0.dylib", "libggml-base.so.0"]
)
def test_libraries_of_ggml_are_told_from_backends(tmp_path: Path, library: str) -> None:
    (tmp_path / library).write_bytes(b"\x7fELF")
    for load in (
        lambda: registry_of().load(library),
        lambda: registry_of().load(tmp_path / library),
        lambda: registry_of().load_all_from_path(tmp_path),
    ):
        with pytest.raises(RegistryError, match=r"no backend in Python; .* set the .* GGMLB_GGML_PATH to '"):
            load()


def test_a_folder_adds_to_what_is_there(write_backend: Write, folder: Path) -> None:
    registry = registry_of(write_backend("mod_other", "Other"))
    assert [reg.name for reg in registry.load_all_from_path(folder)] == ["Echo"]
    assert ("Other", "broken") in [(u.name, u.kind) for u in registry.unavailable()]


@pytest.mark.parametrize("what", ["", "echo-fast.py", "ggmlb_other"])
def test_the_environment_names_a_file_or_a_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setenv("GGMLB_BACKEND_PATH", str(folder / what))
    registry = Registry()
    names = [reg.name for reg in registry.regs()]
    assert "CPU" in names
    expected = {"": {"Echo", "Other"}, "echo-fast.py": {"Echo"}, "ggmlb_other": {"Other"}}[what]
    assert {"Echo", "Other"} & set(names) == expected


def test_the_environment_is_not_imported_to_find_the_cpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGMLB_BACKEND_PATH", str(folder))
    Registry().device_by_name("CPU")
    assert not [m for m in sys.modules if m.startswith("ggmlb_loaded_bad")]


def test_a_wrong_environment_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGMLB_BACKEND_PATH", str(tmp_path / "nope"))
    registry = Registry()
    assert registry.device_by_name("CPU") in registry.devices()
    (told,) = (u for u in registry.unavailable() if u.name == "GGMLB_BACKEND_PATH")
    assert (told.kind, told.reason) == ("broken", f"there is no file or folder {str(tmp_path / 'nope')!r}")
    with pytest.warns(RuntimeWarning, match="GGMLB_BACKEND_PATH is broken"):
        assert registry.device_by_type("CPU").name == "CPU"
    with pytest.raises(RegistryError, match="GGMLB_BACKEND_PATH is not available: there is no file or"):
        registry.device_by_name("Nope0")
    assert registry.load_all()


def test_a_file_of_a_folder_that_cannot_be_read_is_listed(folder: Path) -> None:
    (folder / "ggmlb_dangling").symlink_to(folder / "nope")
    (folder / "ggmlb_loop").mkdir()
    (folder / "ggmlb_loop" / "__init__.py").symlink_to(folder / "ggmlb_loop" / "__init__.py")
    (folder / "binary.py").write_bytes(b"backend_reg\0\xff")
    registry = registry_of()
    assert sorted(reg.name for reg in registry.load_all_from_path(folder)) == ["Echo", "Other"]
    assert {"bad", "binary"} <= {u.name for u in registry.unavailable()}
