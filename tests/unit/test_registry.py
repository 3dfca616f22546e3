"""The registry: what is registered, in which order it is listed, how it is looked up and chosen."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import ggmlb
from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import (
    ArgumentError,
    BackendBroken,
    BackendError,
    BackendUnavailable,
    Error,
    RegistryError,
)
from ggmlb.interface import API_VERSION
from ggmlb.interface.registry import Registry
from ggmlb.interface.registry.discovery import Candidate
from tests.support.stub_backend import StubReg

CPU, GPU, IGPU, ACCEL, META = (DeviceType[n] for n in ("CPU", "GPU", "IGPU", "ACCEL", "META"))


def registry_of(*regs: StubReg) -> Registry:
    registry = Registry(discover=list)
    for reg in regs:
        registry.register(reg)
    return registry


def names(registry: Registry) -> list[str]:
    return [device.name for device in registry.devices()]


# -- listing ---------------------------------------------------------------------------------------


def test_devices_come_by_type_then_priority_then_their_own_order() -> None:
    registry = registry_of(
        StubReg("Host", {"Host": CPU}, priority=1000),
        StubReg("Low", {"Low0": GPU, "Low1": GPU, "LowAccel": ACCEL}),
        StubReg("Meta", {"Meta0": META}),
        StubReg("High", {"HighI": IGPU, "High0": GPU, "High1": GPU}, priority=10),
    )
    assert names(registry) == ["High0", "High1", "Low0", "Low1", "HighI", "LowAccel", "Host", "Meta0"]


def test_unproven_devices_and_those_by_name_only_come_last_of_their_type() -> None:
    unproven, shy = StubReg("New", {"New0": GPU}, priority=100), StubReg("Shy", {"Shy0": GPU}, priority=90)
    unproven.unproven = "no card has run it"
    shy.devices[0].by_name_only = True
    registry = registry_of(unproven, shy, StubReg("Old", {"Old0": GPU}), StubReg("Host", {"Host": CPU}))
    assert names(registry) == ["Old0", "New0", "Shy0", "Host"]
    assert registry.init_best() == ("stream on", "Old0", None)


def test_devices_of_other_packages_are_used_by_name_only() -> None:
    class ForeignReg(StubReg):
        __module__ = "someone_elses"

    registry = registry_of(
        ForeignReg("New", {"New0": GPU, "New1": CPU}, priority=100), StubReg("Host", {"Host": CPU})
    )
    assert names(registry) == ["New0", "Host", "New1"]
    assert registry.init_best()[1] == "Host"
    assert registry.init_by_name("New0")[1] == "New0"


def test_what_a_usable_backend_could_not_use_is_told() -> None:
    class Picky(StubReg):
        unusable = (("Picky's old card", "its driver is too old"),)

    registry = registry_of(Picky("Picky"))
    assert registry.unavailable() == [("Picky's old card", "its driver is too old", "absent")]


def test_regs_come_by_priority_then_name() -> None:
    registry = registry_of(StubReg("b"), StubReg("a"), StubReg("c", priority=1))
    assert [reg.name for reg in registry.regs()] == ["c", "a", "b"]


def test_registering_again_changes_nothing() -> None:
    reg = StubReg("Echo")
    registry = registry_of(reg, reg)
    registry.register_device(reg.devices[0])
    assert registry.regs() == [reg]
    assert names(registry) == ["Echo0"]


def test_a_device_can_be_registered_alone_and_goes_with_its_backend() -> None:
    reg = StubReg("Echo", {"Echo0": GPU, "Echo1": GPU})
    registry = registry_of()
    registry.register_device(reg.devices[1])
    assert names(registry) == ["Echo1"]
    assert registry.regs() == []
    with pytest.raises(RegistryError, match="'Echo' is not registered"):
        registry.unload(reg)
    assert names(registry) == ["Echo1"]
    registry.register(reg)
    assert names(registry) == ["Echo0", "Echo1"]
    registry.unload(reg)
    assert names(registry) == []


@pytest.mark.parametrize("second", ["Echo", "ECHO"])
def test_a_backend_name_is_taken_in_any_case(second: str) -> None:
    registry = registry_of(StubReg("Echo"))
    with pytest.raises(RegistryError, match=r"named 'Echo' is already registered; unload it first"):
        registry.register(StubReg(second, {"Other0": GPU}))


def test_a_device_name_is_taken_and_nothing_is_half_registered() -> None:
    registry = registry_of(StubReg("Echo", {"Echo0": GPU}))
    with pytest.raises(RegistryError, match="'echo0' of the Clash backend is taken by a device of the Echo"):
        registry.register(StubReg("Clash", {"Clash0": GPU, "echo0": GPU}))
    assert names(registry) == ["Echo0"]
    with pytest.raises(RegistryError, match="'Echo0' of the Other backend is taken"):
        registry.register_device(StubReg("Other", {"Echo0": GPU}).devices[0])


def test_a_device_of_no_type_is_refused_and_the_list_goes_on() -> None:
    registry = registry_of(StubReg("Echo", {"Echo0": GPU}))
    with pytest.raises(BackendBroken, match="device Bad0 is 'GPU'; it must be a member"):
        registry.register_device(StubReg("Bad", {"Bad0": "GPU"}).devices[0])  # type: ignore[dict-item]
    assert names(registry) == ["Echo0"]


def test_two_devices_of_one_backend_must_differ() -> None:
    reg = StubReg("Clones", {"T0": GPU, "t0": GPU})
    with pytest.raises(RegistryError, match="'t0' of the Clones backend is taken by a device of the Clones"):
        registry_of(reg)


@pytest.mark.parametrize(
    ("reg", "error", "message"),
    [
        (StubReg("Old", api_version=API_VERSION + 1), BackendBroken, "written for API version"),
        (StubReg("None", {}), BackendUnavailable, "no device was found"),
        (StubReg("Gone", error=BackendUnavailable("no driver")), BackendUnavailable, "no driver"),
        (StubReg("Bug", error=OSError("boom")), BackendBroken, "devices failed: OSError: boom"),
        ("a text", ArgumentError, "register: reg is 'a text'; give a BackendReg"),
    ],
)
def test_what_cannot_be_registered_is_an_error_at_once(
    reg: StubReg, error: type[Error], message: str
) -> None:
    registry = registry_of()
    with pytest.raises(error, match=message):
        registry.register(reg)
    assert registry.regs() == []
    assert registry.unavailable() == []


def test_unload_removes_the_backend_and_its_devices() -> None:
    echo, other = StubReg("Echo", {"Echo0": GPU}), StubReg("Other", {"Other0": GPU})
    registry = registry_of(echo, other)
    registry.register_device(StubReg("X", {"X0": CPU}).devices[0])
    registry.unload(echo)
    assert names(registry) == ["Other0", "X0"]
    with pytest.raises(RegistryError, match="'Echo' is not registered"):
        registry.unload(echo)
    registry.register(echo)
    assert names(registry) == ["Echo0", "Other0", "X0"]


# -- looking up ------------------------------------------------------------------------------------


def test_an_unknown_name_suggests_the_nearest() -> None:
    registry = registry_of(StubReg("OpenCL", {"OpenCL0": GPU}))
    with pytest.raises(RegistryError, match="no device 'OpenCL1'; did you mean 'OpenCL0'"):
        registry.device_by_name("OpenCL1")
    with pytest.raises(RegistryError, match="no backend 'OpenCP'; did you mean 'OpenCL'"):
        registry.reg_by_name("OpenCP")
    with pytest.raises(RegistryError, match="no device 'x'; none are known"):
        registry_of().device_by_name("x")


def test_by_type() -> None:
    registry = registry_of(StubReg("A", {"A0": ACCEL, "A1": GPU}), StubReg("B", {"B0": GPU}, priority=1))
    assert registry.device_by_type(GPU).name == "B0"
    assert registry.device_by_type("gpu").name == "B0"
    assert registry.device_by_type("ACCEL").name == "A0"
    with pytest.raises(RegistryError, match="no device of type IGPU"):
        registry.device_by_type(IGPU)
    with pytest.raises(ArgumentError, match=r"'TPU' is not a DeviceType; did you mean '.?GPU'"):
        registry.device_by_type("TPU")


# -- opening ---------------------------------------------------------------------------------------


def test_init_passes_the_parameters() -> None:
    registry = registry_of(StubReg("Echo", {"Echo0": GPU}))
    assert registry.init_by_name("echo0", {"a": 1}) == ("stream on", "Echo0", {"a": 1})
    assert registry.init_by_type("GPU", {"b": 2}) == ("stream on", "Echo0", {"b": 2})


@pytest.mark.parametrize(
    ("devices", "best"),
    [
        ({"c": CPU, "a": ACCEL, "i": IGPU, "g": GPU}, "g"),
        ({"c": CPU, "a": ACCEL, "i": IGPU}, "i"),
        ({"c": CPU, "a": ACCEL}, "c"),
    ],
)
def test_init_best(devices: dict[str, DeviceType], best: str) -> None:
    assert registry_of(StubReg("Echo", devices)).init_best()[1] == best


def test_init_best_goes_on_when_a_device_is_unavailable() -> None:
    gone = {"g0": BackendUnavailable("in use"), "g1": BackendUnavailable("too old")}
    registry = registry_of(StubReg("G", {"g0": GPU, "g1": GPU}, failing=gone), StubReg("Host", {"c": CPU}))
    assert registry.init_best()[1] == "c"


def test_init_best_tells_every_reason() -> None:
    gone = {"g0": BackendUnavailable("in use"), "c": BackendUnavailable("no memory")}
    registry = registry_of(StubReg("G", {"g0": GPU, "c": CPU, "a": ACCEL}, failing=gone))
    with pytest.raises(
        BackendUnavailable, match=r"no GPU or CPU device to use\n  g0: in use\n  c: no memory$"
    ):
        registry.init_best()


@pytest.mark.parametrize("error", [BackendBroken("a bug"), TypeError("a bug")])
def test_init_best_goes_on_when_a_device_is_broken_but_tells(error: Exception) -> None:
    registry = registry_of(StubReg("G", {"g0": GPU}, failing={"g0": error}), StubReg("Host", {"c": CPU}))
    with pytest.warns(RuntimeWarning, match="g0 is broken, and another device is chosen.*a bug"):
        assert registry.init_best()[1] == "c"


@pytest.mark.parametrize("call", ["init_best", "init_by_type", "device_by_type"])
def test_a_warning_of_a_broken_device_points_to_the_line_that_chooses(call: str) -> None:
    broken = Candidate("Bad", "/nowhere/bad.py", "Bad", "a test")
    registry = Registry(discover=lambda: [broken] if call != "init_best" else [])
    failing = {"g0": BackendBroken("a bug")} if call == "init_best" else {}
    registry.register(StubReg("Host", {"g0": GPU, "c": CPU}, failing=failing))
    with pytest.warns(RuntimeWarning, match="is broken, and another device is chosen") as told:
        getattr(registry, call)(*([] if call == "init_best" else ["CPU"]))
    assert [warning.filename for warning in told] == [__file__]


def test_init_best_does_not_hide_a_failure() -> None:
    failing = {"g0": BackendError("out of memory")}
    registry = registry_of(StubReg("G", {"g0": GPU, "c": CPU}, failing=failing))
    with pytest.raises(BackendError, match="out of memory"):
        registry.init_best()


# -- threads ---------------------------------------------------------------------------------------


def test_threads_see_one_registry() -> None:
    n = 16
    registry = registry_of()
    start = threading.Barrier(n)

    def work(i: int) -> str:
        start.wait()
        reg = StubReg(f"R{i}", {f"R{i}dev": GPU})
        registry.register(reg)
        found = registry.device_by_name(f"r{i}DEV").name
        if i % 2:
            registry.unload(reg)
        return found

    with ThreadPoolExecutor(n) as pool:
        assert list(pool.map(work, range(n))) == [f"R{i}dev" for i in range(n)]
    assert sorted(names(registry)) == sorted(f"R{i}dev" for i in range(0, n, 2))


def test_default_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """`GGMLB_DEVICES`, or what the program sets, is taken wherever no device is named."""
    assert ggmlb.default_devices() == ()
    ctx = ggmlb.Context()
    y = ctx.sqr(ctx.from_array([1.0, 2.0]))
    monkeypatch.setenv("GGMLB_DEVICES", "Nowhere0, CPU")
    assert ggmlb.default_devices() == ("Nowhere0", "CPU")
    with pytest.raises(RegistryError, match="Nowhere0"):
        ggmlb.evaluate(y)
    ggmlb.set_default_devices("CPU")
    try:
        assert ggmlb.default_devices() == ("CPU",)
        assert ggmlb.evaluate(y).tolist() == [1, 4]
        with pytest.raises(RegistryError, match="Nowhere1"):
            ggmlb.set_default_devices("Nowhere1")
        assert ggmlb.default_devices() == ("CPU",)
    finally:
        ggmlb.set_default_devices()
    assert ggmlb.default_devices() == ("Nowhere0", "CPU")
