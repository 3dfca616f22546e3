"""The conformance kit finds backends that are broken on purpose, each by the case that is meant to."""

from __future__ import annotations

import re
from functools import partial

import pytest

from ggmlb.backends.cpu.device import CpuReg
from ggmlb.backends.cpu.float_buffer import FloatBuffer
from ggmlb.parallel.meta import meta_device
from ggmlb.testing.behaviour import CHECKS, behaves
from ggmlb.testing.cases import cases_of
from ggmlb.testing.compute import Bench
from ggmlb.testing.devices import sharded_by_chance
from ggmlb.testing.fake import FakeReg
from ggmlb.testing.results import Outcome
from tests.meta.broken import memory, order, values, weights
from tests.meta.broken.memory import storing
from tests.meta.broken.order import queueing
from tests.meta.broken.values import computing, refusing
from tests.meta.broken.weights import keeping


def reasons(device, family, mode="test"):
    """What the kit says about the cases of a family that fail."""
    with Bench(device) as bench:
        results = [getattr(bench, mode)(case) for case in cases_of(family)]
    return [r.reason for r in results if r.outcome is Outcome.FAILED]


WRONG_VALUES = [
    (values.WrongStride, "add", "nmse"),
    (values.WrongBroadcast, "mul", "nmse"),
    (values.UnalignedOffset, "cont", "must be equal|NaN"),
    (values.OneByteTooMany, "sqr", "guard bytes were overwritten, the first 0 bytes after the end"),
    (values.OneByteBefore, "rope", "1 guard bytes were overwritten, the first 1 bytes before the start"),
    (values.LastElementMissing, "soft_max_ext", "NaN"),
    (values.ChangesItsInput, "sum_rows", "changed in an input"),
    (values.FillsTheGaps, "cpy", "bytes were changed in an input"),
    (values.NoInfinity, "diag_mask_inf", "infinite"),
    (values.LowPrecision, "norm", "nmse .* is above"),
    (values.WorksOnce, "sqr", "computed a second time: .* NaN"),
    (values.InOrderOfNe, "map_custom1", "ValueError: arrays have the shapes"),
]


@pytest.mark.parametrize(("kind", "family", "told"), WRONG_VALUES, ids=lambda x: getattr(x, "__name__", None))
def test_wrong_values_are_found(kind, family, told):
    found = reasons(computing(kind), family)
    assert found
    assert any(re.search(told, reason) for reason in found), found


@pytest.mark.parametrize(
    ("kind", "told"),
    [(values.OneByteTooMany, "guard bytes were overwritten"), (values.LastElementMissing, "NaN")],
)
def test_wrong_values_of_one_of_two_devices_are_found(kind, told):
    devices = [computing(values.WrongBackend), computing(kind)]
    found = reasons(meta_device(devices, partial(sharded_by_chance, n_devices=2)), "sqr")
    assert found
    assert any(told in reason for reason in found), found


LIES = [
    (refusing(values.ClaimsAll), "claims the op, then fails: it raised BackendError: no kernel"),
    (refusing(values.SaysNoForYes), "supports_op says False, declines says None"),
    (refusing(values.NoReason), "declines gives no reason"),
    (refusing(values.ChangesItsMind), "the answer changes once the tensors are in a buffer"),
    (
        refusing(values.RefusesAbs, values.ComputesWhatItRefuses),
        "refuses the op (not of mine), then computes it",
    ),
    (refusing(values.RefusesAbs, values.OtherError), "not with an UnsupportedOpError: it raised KeyError"),
]


@pytest.mark.parametrize(("device", "told"), LIES, ids=lambda x: x if isinstance(x, str) else None)
def test_lies_are_found(device, told):
    found = reasons(device, "abs", "support")
    assert found
    assert all(told in reason for reason in found), found


MISBEHAVIOUR = [
    (computing(values.StalePlan), "plans", "a_plan_follows_moved_tensors", "moved"),
    (computing(values.StalePlan), "plans", "a_plan_follows_changed_parameters", "scale was changed"),
    (computing(values.StaleKeptPlan), "plans", "a_plan_follows_moved_tensors", "by graph_plan_compute"),
    (computing(values.StaleKeptPlan), "plans", "a_plan_follows_changed_parameters", "by graph_plan_compute"),
    (computing(values.WorksOnce), "plans", "a_plan_can_be_computed_again", "run 1"),
    (computing(values.IgnoresAbort), "plans", "an_abort_callback_stops", "never called"),
    (storing(memory.MemsetOffByOne), "transfers", "memset_writes_its_bytes_only", "1 of"),
    (storing(memory.SetIgnoresOffset), "transfers", "set_writes_its_bytes_only", "after set_tensor"),
    (storing(memory.GetIgnoresOffset), "transfers", "get_reads_from_its_offset", "bytes from"),
    (storing(memory.WrongPitch), "transfers", "two_dimensional_transfers", "after set_tensor_2d:"),
    (storing(memory.ClearStopsShort), "transfers", "clear_sets_every_byte", "after clear"),
    (
        storing(memory.KeepsTheData),
        "transfers",
        "data_of_a_synchronous_write_may_change",
        "was changed after",
    ),
    (keeping(weights.RowsBeginAtZero), "weights", "weights_are_written_by_rows", "written by rows: row"),
    (keeping(weights.ReadsWhatItKeeps), "weights", "weights_give_right_products", "the bytes of"),
    (keeping(weights.MatricesUpsideDown), "weights", "weights_are_copied_in", "copied from the CPU: row"),
    (keeping(FloatBuffer, weights.too_small), "weights", "weights_do_not_touch_each_other", "reshape"),
    (storing(memory.MisalignedType), "memory", "alignment_is_kept", "begins at 0x"),
    (storing(memory.NoNothing), "memory", "empty_buffers_and_tensors", "ZeroDivisionError: 0 pages"),
    (storing(memory.OtherMemoryError), "memory", "too_much_is_an_allocation_error", "raised OverflowError"),
    (queueing(order.NeverWaits), "order", "synchronize_waits", "after synchronize"),
    (queueing(order.NeverWaits), "order", "graph_compute_waits", "after graph_compute"),
    (queueing(order.LastFirst), "order", "a_stream_runs_in_order", "queued without waiting"),
    (queueing(order.AsyncGetReturnsEarly), "order", "a_stream_runs_in_order", "queued without waiting"),
    (queueing(order.EventDoesNotWait), "order", "an_event_orders_streams", "after event_wait"),
    (queueing(event=order.DeadEvent), "order", "an_event_can_be_waited_for", "after Event.synchronize"),
    (queueing(order.CopyOvertakesSource), "order", "a_copy_waits_for_its_source", "still being computed"),
    (queueing(order.SourceDoesNotWait), "order", "a_copy_waits_for_its_source", "still being computed"),
    (
        queueing(order.CopyOvertakesReaders),
        "order",
        "a_copy_waits_for_its_destination",
        "later copy",
    ),
    (queueing(buffer=order.CopyIgnoresOffset), "transfers", "copies_respect_offsets", "a copy from offset"),
    (queueing(order.FreeForgetsWork), "memory", "freeing_a_stream_ends_its_work", "stream that was freed"),
    (queueing(buffer=order.FreedTooEarly), "memory", "freeing_with_work_pending", "was freed while"),
    (queueing(device=order.NoEventsAfterAll), "order", "an_event_orders_streams", "BackendError: no events"),
    (queueing(device=order.WrongFacts), "memory", "facts_are_sound", "bytes are free"),
    (queueing(device=order.NoHostBuffer), "memory", "facts_are_sound", "caps.host_buffer is True"),
]


@pytest.mark.parametrize(
    ("device", "group", "name", "told"), MISBEHAVIOUR, ids=lambda x: x if isinstance(x, str) else None
)
def test_misbehaviour_is_found(device, group, name, told):
    result = behaves(device, group, name)
    assert result.outcome is Outcome.FAILED
    assert told in result.reason


@pytest.mark.parametrize(("group", "name"), [(group, name) for group in CHECKS for name in CHECKS[group]])
@pytest.mark.parametrize("base", ["fake", "cpu"])
def test_what_they_are_made_of_behaves(base, group, name):
    device = FakeReg(1).devices[0] if base == "fake" else values.WrongDevice(CpuReg())
    result = behaves(device, group, name)
    assert not result.outcome.is_bad, result.reason


@pytest.mark.parametrize("family", sorted({family for _, family, _ in WRONG_VALUES} | {"abs"}))
def test_what_they_are_made_of_computes(family):
    device = values.WrongDevice(CpuReg())
    assert reasons(device, family) == reasons(device, family, "support") == []
