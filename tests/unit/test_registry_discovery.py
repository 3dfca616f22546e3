"""Discovery: candidates are text until one is needed, and fail in ways that can be told apart."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from ggmlb.core.errors import BackendBroken, BackendUnavailable, RegistryError
from ggmlb.interface import API_VERSION
from ggmlb.interface.registry import Registry, discovery
from ggmlb.interface.registry.discovery import Candidate
from tests.support.backend_files import GOOD, Write, registry_of

# -- laziness --------------------------------------------------------------------------------------


def test_only_the_backend_of_a_name_is_imported(write_backend: Write) -> None:
    registry = registry_of(write_backend("mod_echo", "Echo"), write_backend("mod_other", "Other"))
    assert registry.device_by_name("ECHO0").name == "Echo0"
    assert registry.reg_by_name("echo").name == "Echo"
    assert "mod_echo" in sys.modules
    assert "mod_other" not in sys.modules
    assert [d.name for d in registry.devices()] == ["Echo0", "Other0"]
    assert "mod_other" in sys.modules


def test_a_backend_whose_name_was_not_foreseen_is_found(write_backend: Write) -> None:
    registry = registry_of(
        write_backend("mod_echo", "Echo"), write_backend("mod_other", "Other", called="unforeseen")
    )
    assert registry.device_by_name("Other0").name == "Other0"
    assert registry.reg_by_name("other").name == "Other"


def test_candidates_are_asked_for_once(write_backend: Write) -> None:
    asked = []
    echo = write_backend("mod_echo")

    def discover() -> list[Candidate]:
        asked.append(1)
        return [echo]

    registry = Registry(discover)
    assert asked == []
    registry.devices()
    registry.device_by_name("Echo0")
    assert asked == [1]
    registry.load_all()
    assert asked == [1, 1]
    assert len(registry.devices()) == 1


def test_threads_import_a_backend_once(write_backend: Write) -> None:
    registry = registry_of(write_backend("mod_echo", extra="import time; time.sleep(0.05)"))
    with ThreadPoolExecutor(8) as pool:
        devices = list(pool.map(registry.device_by_name, ["Echo0"] * 8))
    assert all(device is devices[0] for device in devices)


# -- what cannot be used ---------------------------------------------------------------------------


def stub(arguments: str) -> str:
    """Return the source of a backend that is a `StubReg`."""
    return f"""
        from ggmlb import BackendUnavailable
        from tests.support.stub_backend import StubReg
        def backend_reg():
            return StubReg({arguments})
        """


ABSENT = {
    "on_import": (
        '    from ggmlb import BackendUnavailable; raise BackendUnavailable("no driver")',
        "no driver",
    ),
    "module": ("    import no_such_library.part", "the Python module 'no_such_library' is not installed"),
    "score": (
        GOOD.format(name="Bad", extra="score = lambda: 0"),
        "score.* is 0: it does not support this machine",
    ),
    "factory": (
        """
        from ggmlb import BackendUnavailable
        def backend_reg():
            raise BackendUnavailable("no card")
        """,
        "no card",
    ),
    "devices": (stub('"Bad", error=BackendUnavailable("driver too old")'), "driver too old"),
    "no_devices": (stub('"Bad", {{}}'), "no device was found"),
}

BROKEN = {
    "on_import": ("    1 / 0", "fails to load: ZeroDivisionError"),
    "syntax": ("    def (", "fails to load: SyntaxError"),
    "own_module": ("    import mod_bad.part", "fails to load: ModuleNotFoundError"),
    "no_factory": ("    x = 1", r"exports no backend_reg\(\)"),
    "none": ("    def backend_reg(): pass", "returned None; it must return a ggmlb.BackendReg"),
    "version": (
        stub('"Bad", api_version=99'),
        f"written for API version 99; this ggmlb has API version {API_VERSION}",
    ),
    "version_first": ("    class backend_reg: api_version = 99", "written for API version 99"),
    "abstract": (
        """
        from ggmlb import BackendReg
        class Reg(BackendReg):
            name = "Bad"
        def backend_reg():
            return Reg()
        """,
        "Reg lacks devices: a backend must define it",
    ),
    "abstract_device": (
        """
        from ggmlb import Device
        class Bad(Device):
            name = description = "Bad0"
        def backend_reg():
            return Bad()
        """,
        "Bad lacks .*declines.*: a backend must define it",
    ),
    "exits": ("    raise SystemExit(3)", "fails to load: SystemExit: 3"),
    "odd": ("    class Odd(BaseException): pass\n    raise Odd('of it')", "fails to load: Odd: of it"),
    "generator": ("    raise GeneratorExit", "fails to load: GeneratorExit"),
    "no_text": (
        """
        class Mute(Exception):
            def __str__(self): raise ValueError
        raise Mute
        """,
        r"fails to load: Mute: \(its text cannot be read: ValueError\)",
    ),
    "no_text_of_its_devices": (
        """
        from tests.support.stub_backend import StubReg
        class Mute(BaseException):
            __str__ = None
        def backend_reg():
            return StubReg("Bad", error=Mute())
        """,
        r"listing its devices failed: Mute: \(its text cannot be read: TypeError\)",
    ),
    "name": (
        """
        from tests.support.stub_backend import StubReg
        def backend_reg():
            reg = StubReg("Bad")
            reg.name = None
            return reg
        """,
        "whose name is None; it must be str",
    ),
    "priority": (stub('"Bad", priority="high"'), "whose priority is 'high'; it must be int"),
    "no_device": (
        """
        from tests.support.stub_backend import StubReg
        def backend_reg():
            reg = StubReg("Bad")
            reg._devices = ["Bad0"]
            return reg
        """,
        "'Bad0' is listed as a device",
    ),
    "device_type": (
        stub('"Bad", {{"Bad0": "a type"}}'),
        "the type of device Bad0 is 'a type'; it must be a member of ggmlb.DeviceType",
    ),
    "device_type_name": (
        stub('"Bad", {{"Bad0": "GPU"}}'),
        "the type of device Bad0 is 'GPU'; it must be a member of ggmlb.DeviceType",
    ),
    "devices": (stub('"Bad", error=OSError("boom")'), "listing its devices failed: OSError: boom"),
}


@pytest.mark.parametrize("case", ABSENT)
def test_absent(write_backend: Write, case: str) -> None:
    source, why = ABSENT[case]
    registry = registry_of(write_backend("mod_bad", "Bad", source), write_backend("mod_good", "Good"))
    (told,) = registry.unavailable()
    assert (told.name, told.kind) == ("Bad", "absent")
    with pytest.raises(BackendUnavailable, match=f"the Bad backend cannot be used: .*{why}"):
        registry.device_by_name("Bad0")
    with pytest.raises(BackendUnavailable, match=why):
        registry.reg_by_name("bad")
    with pytest.raises(RegistryError, match=f"did you mean 'Good0'.\n  Bad is not available: .*{why}"):
        registry.device_by_name("Goof0")
    assert [d.name for d in registry.devices()] == ["Good0"]
    assert registry.device_by_type("ACCEL").name == "Good0"  # a choice moves on
    with pytest.raises(BackendUnavailable, match=f"(?s)to use.*Bad is not available: .*{why}"):
        registry.init_best()
    with pytest.raises(BackendUnavailable, match=why):
        registry.load("mod_bad")


@pytest.mark.parametrize("case", BROKEN)
def test_broken(write_backend: Write, case: str) -> None:
    source, why = BROKEN[case]
    registry = registry_of(write_backend("mod_bad", "Bad", source), write_backend("mod_good", "Good"))
    (told,) = registry.unavailable()
    assert (told.name, told.kind) == ("Bad", "broken")
    assert [d.name for d in registry.devices()] == ["Good0"]  # listing goes on
    for named in (lambda: registry.device_by_name("Bad0"), lambda: registry.reg_by_name("bad")):
        with pytest.raises(BackendBroken, match=why):
            named()
    with pytest.warns(RuntimeWarning, match=f"Bad is broken, and another device is chosen.*{why}"):
        assert registry.device_by_type("ACCEL").name == "Good0"  # a choice moves on, but tells of it
    assert registry.device_by_type("ACCEL").name == "Good0"  # once
    with pytest.raises(BackendUnavailable, match=f"(?s)to use.*Bad is not available: .*{why}"):
        registry.init_best()
    assert registry.device_by_name("Good0").name == "Good0"
    with pytest.raises(BackendBroken, match=why):
        registry.load("mod_bad")


@pytest.mark.parametrize("name", ["Bad7", "bad7", "Bad70"])
def test_a_broken_backend_whose_name_ends_in_a_digit_says_why(write_backend: Write, name: str) -> None:
    registry = registry_of(write_backend("mod_bad", "Bad7", "    1 / 0"))
    with pytest.raises(BackendBroken, match=r"the Bad7 backend cannot be used: .*ZeroDivisionError"):
        registry.device_by_name(name)


def test_load_shows_where_a_backend_fails(write_backend: Write) -> None:
    write_backend("mod_bad", source="    1 / 0")
    with pytest.raises(BackendBroken) as told:
        registry_of().load("mod_bad")
    assert isinstance(told.value.__cause__, ZeroDivisionError)


def test_load_all_looks_again_at_what_failed(write_backend: Write) -> None:
    registry = registry_of(write_backend("mod_late", "Late", "    import no_such_library"))
    assert [u.name for u in registry.unavailable()] == ["Late"]
    write_backend("mod_late", "Late")
    assert [reg.name for reg in registry.load_all()] == ["Late"]
    assert registry.unavailable() == []


INTERRUPTED = {
    "import": "    import interrupts; interrupts.once()\n" + GOOD,
    "score": GOOD.format(name="{name}", extra="import interrupts; score = interrupts.once"),
    "factory": """
        import interrupts
        from tests.support.stub_backend import StubReg
        def backend_reg():
            interrupts.once()
            return StubReg("{name}")
        """,
    "devices": """
        import interrupts
        from tests.support.stub_backend import StubReg
        class Reg(StubReg):
            @property
            def devices(self):
                interrupts.once()
                return super().devices
        def backend_reg():
            return Reg("{name}")
        """,
}

INTERRUPTS = """
    n = 0
    def once():
        global n
        n += 1
        if n == 1:
            raise KeyboardInterrupt
        return 1
    """


@pytest.mark.parametrize("source", INTERRUPTED.values(), ids=INTERRUPTED)
@pytest.mark.parametrize("call", ["devices", "regs", "unavailable", "load_all", "init_best"])
def test_ctrl_c_while_backends_are_opened_loses_none(write_backend: Write, call: str, source: str) -> None:
    write_backend("interrupts", source=INTERRUPTS)
    registry = registry_of(
        write_backend("mod_first", "First"),
        write_backend("mod_bad", "Bad", "    1 / 0"),
        write_backend("mod_echo", "Echo", source),
        write_backend("mod_last", "Last"),
    )
    with pytest.raises(KeyboardInterrupt):
        getattr(registry, call)()
    assert sorted(d.name for d in registry.devices()) == ["Echo0", "First0", "Last0"]
    assert [u.name for u in registry.unavailable()] == ["Bad"]


def test_ctrl_c_while_a_variant_is_opened_loses_none(write_backend: Write) -> None:
    write_backend("interrupts", source=INTERRUPTS)
    registry = registry_of(
        write_backend("mod_none", extra="score = lambda: 0"),
        write_backend("mod_echo", extra="import interrupts; score = interrupts.once"),
        write_backend("mod_slow", extra="score = lambda: 0.5"),
    )
    with pytest.raises(KeyboardInterrupt):
        registry.device_by_name("Echo0")
    assert registry.device_by_name("Echo0").name == "Echo0"
    assert [u.kind for u in registry.unavailable()] == ["absent"]


@pytest.mark.parametrize("call", ["devices", "load"])
def test_ctrl_c_while_a_backend_imports_its_library_leaves_no_half_of_that(
    write_backend: Write, tmp_path: Path, call: str
) -> None:
    """As CuPy's own import is: what was imported of it before must be bound to the package again."""
    write_backend("interrupts", source=INTERRUPTS)
    library = tmp_path / "half_library"
    library.mkdir()
    (library / "part.py").write_text("value = 3")
    (library / "__init__.py").write_text(
        "import half_library.part\nhalf_library.part.value\nimport interrupts\ninterrupts.once()\n"
    )
    echo = write_backend("mod_echo", "Echo", "    import half_library\n" + GOOD)
    registry = registry_of(echo) if call == "devices" else registry_of()
    runs: list[AbstractContextManager[object]] = [pytest.raises(KeyboardInterrupt), nullcontext()]
    for expected in runs:
        with expected:
            registry.devices() if call == "devices" else registry.load("mod_echo")
    assert [d.name for d in registry.devices()] == ["Echo0"]


# -- variants and duplicates -----------------------------------------------------------------------


def test_the_highest_score_of_a_name_is_taken(write_backend: Write) -> None:
    registry = registry_of(
        write_backend("mod_none", extra="score = lambda: 0"),
        write_backend("mod_plain"),  # scores 1
        write_backend("mod_fast", extra="score = lambda: 2.5"),
        write_backend("mod_slow", extra="score = lambda: 0.5"),
    )
    reg = registry.reg_by_name("Echo")
    assert type(reg).__name__ == "StubReg"
    assert registry.load("mod_fast") is reg
    assert registry.regs() == [reg]
    assert [(u.kind, u.name) for u in registry.unavailable()] == [("absent", "Echo")]


def test_equal_scores_are_duplicates(write_backend: Write) -> None:
    registry = registry_of(write_backend("mod_one"), write_backend("mod_two"))
    with pytest.raises(
        BackendBroken, match=r"2 backends are named 'Echo': mod_one.* and mod_two.*; remove one"
    ):
        registry.reg_by_name("Echo")


def test_two_backends_under_different_names_may_not_give_the_same(write_backend: Write) -> None:
    registry = registry_of(write_backend("mod_one", called="one"), write_backend("mod_two", called="two"))
    assert len(registry.regs()) == 1
    (told,) = registry.unavailable()
    assert told.kind == "broken"
    assert "'Echo' is already registered" in told.reason


def test_an_installed_name_is_reserved_before_it_is_imported(write_backend: Write) -> None:
    from tests.support.stub_backend import StubReg

    registry = registry_of(write_backend("mod_echo"))
    write_backend("mod_mine")
    for add in (lambda: registry.register(StubReg("ECHO")), lambda: registry.load("mod_mine")):
        with pytest.raises(RegistryError, match=r"'Echo' is installed \(mod_echo 1.0\); unload that one"):
            add()
    assert "mod_echo" not in sys.modules
    registry.unload(registry.reg_by_name("Echo"))
    mine = StubReg("ECHO")
    registry.register(mine)
    assert registry.regs() == [mine]


def test_unloaded_stays_out_until_load_all(write_backend: Write) -> None:
    registry = registry_of(write_backend("mod_echo"))
    registry.unload(registry.reg_by_name("Echo"))
    assert registry.devices() == []
    registry.load_all()
    assert [d.name for d in registry.devices()] == ["Echo0"]


# -- the real thing --------------------------------------------------------------------------------


def test_ggmlbs_own_backends_are_found_without_installation() -> None:
    found = {candidate.name: candidate for candidate in discovery.in_tree()}
    assert {"cpu", "cuda", "opencl"} <= set(found)
    assert "array" not in found
    assert found["cpu"].target == "ggmlb.backends.cpu:backend_reg"


def test_the_entry_points_name_the_same_targets_as_the_folders() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for candidate in discovery.in_tree():
        assert f'{candidate.name} = "{candidate.target}"' in text


@pytest.mark.parametrize("value", ["", "no module", "mod_gone:backend_reg", ":", "mod_gone [extra]"])
def test_a_malformed_entry_point_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: thing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ggmlb.backends]\nthing = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry = Registry(lambda: list(discovery.installed()))
    assert "CPU" in [d.name for d in registry.devices()]
    (told,) = (u for u in registry.unavailable() if u.name == "thing")
    assert told.kind == "broken"


def test_another_packages_backend_is_found_beside_those_of_the_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = frozenset(candidate.target for candidate in discovery.in_tree())
    assert not [*discovery.installed(known)]
    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: thing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[console_scripts]\nthing = thing:main\n\n[ggmlb.backends]\n"
        "cpu = ggmlb.backends.cpu:backend_reg\nthing = thing.backend\n\n[others]\na = b\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (found,) = discovery.installed(known)
    assert found == Candidate("thing", "thing.backend:backend_reg", "thing", "thing 1.0")


def test_host_memory_stays_when_the_cpu_is_unloaded() -> None:
    code = """
import ggmlb, numpy as np
{before}
ggmlb.unload(ggmlb.reg_by_name("CPU"))
buffer_type = ggmlb.cpu_buffer_type()
x = ggmlb.Context().from_array(np.arange(6, dtype=np.float32))
y = ggmlb.Context().from_array([[1.0, 2.0]])
assert x.buffer.buft is y.buffer.buft is buffer_type
assert ggmlb.cpu_buffer_from_ptr(np.zeros(4)).buft.device is buffer_type.device
assert x.to_numpy().tolist() == list(range(6))
assert "CPU" not in [d.name for d in ggmlb.devices()]
ggmlb.load_all()
assert ggmlb.device_by_name("CPU").supports_buft(ggmlb.cpu_buffer_type())
"""
    for before in ("", "ggmlb.cpu_buffer_type()"):
        subprocess.run([sys.executable, "-c", code.format(before=before)], check=True)
