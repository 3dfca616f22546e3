"""What a node of other machines' devices refuses: handles and ranges that it does not have.

Members of a Ray cluster may run any code on its machines, so types and parameters are the driver's to check.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ggmlb
from ggmlb import BackendBroken, BackendError, Context, DType, Error, FreedError, Graph, Tensor
from ggmlb.backends.ray.files import SharedFiles
from ggmlb.backends.ray.node import Node, versions
from ggmlb.backends.ray.wire import (
    NONE,
    RefusedError,
    graph_record,
    node_record,
    packed,
    read_graph,
    unpacked,
    unsendable,
)
from ggmlb.testing.ops import RECORDS
from ggmlb.testing.programs import load_cases

SIZE = 4096
X = np.arange(16, dtype=np.float32)


def message(*commands: Any, blob: bytes = b"") -> bytes:
    return packed(pickle.dumps(commands), [np.frombuffer(blob, np.uint8)])


class Session:
    """A node with a buffer, a stream, and a plan that computes `y = silu(scale(x))`."""

    def __init__(self, *shared: str, device: str = "CPU") -> None:
        self.node = Node(versions(), [device], shared)
        self.buffer = self.ask("alloc", device, 0, SIZE)
        self.other = self.ask("alloc", device, 0, SIZE)
        self.ask("clear", self.other, 7)
        self.stream = self.ask("open", device, {})
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (16,), "x")
        y = ctx.silu(ctx.scale_bias(x, 2.0, 1.0))
        graph = Graph().build_forward_expand(y)
        records, numbers = graph_record(graph.nodes, graph.use_counts(), lambda _: self.buffer)
        placed = [record._replace(handle=self.buffer, offset=64 * i) for i, record in enumerate(records)]
        self.record: Any = (placed, numbers)
        self.y_offset = placed[-1].offset

    def run(self, *commands: Any, blob: bytes = b"") -> tuple[list[Any], bytes]:
        told, data = unpacked(self.node.run(message(*commands, blob=blob)))
        return told, data.tobytes()

    def ask(self, *command: Any) -> Any:
        told, _ = self.run(command)
        return told[0] if told else None

    def compute(self, plan: int) -> np.ndarray:
        commands = (
            ("write", self.buffer, self.record[0][0].offset, X.nbytes, False),
            ("compute", plan),
            ("read", self.buffer, self.y_offset, X.nbytes, False),
        )
        return np.frombuffer(self.run(*commands, blob=X.tobytes())[1], np.float32)

    def is_other_untouched(self) -> bool:
        return set(self.run(("read", self.other, 0, SIZE, False))[1]) == {7}


def session_on(device: str) -> Session:
    if device not in {d.name for d in ggmlb.devices()}:
        pytest.skip(f"there is no {device}")
    return Session(device=device)


@pytest.fixture
def session() -> Session:
    return Session()


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_what_is_right_is_done(session: Session) -> None:
    plan = session.ask("plan", session.stream, session.record)
    np.testing.assert_allclose(session.compute(plan), silu(2 * X + 1), rtol=1e-5)
    session.run(("copy", session.buffer, 0, session.other, 64, 64))
    assert session.run(("read", session.other, 64, 64, False))[1] == X.tobytes()
    session.run(("free", plan), ("free", session.stream), ("free", session.buffer), ("free", session.other))


def plan(session: Session, number: int = 0, nodes: Any = None, **fields: Any) -> int:
    """Make a plan of the session's graph, with other fields of one of its records."""
    records, numbers = session.record
    records[number] = records[number]._replace(**fields)
    handle: int = session.ask("plan", session.stream, (records, nodes or numbers))
    return handle


def compute_in_freed_memory(session: Session) -> None:
    kept = plan(session)
    session.ask("free", session.buffer)
    session.ask("compute", kept)


FAULTS_OF_RPC: dict[str, Callable[[Session], object]] = {
    "read at an address: CVE-2024-42478": lambda s: s.ask("read", X.ctypes.data, 0, 16, False),
    "write at an address: CVE-2024-42479": lambda s: s.run(
        ("write", X.ctypes.data, 0, 16, False), blob=bytes(16)
    ),
    "copy beyond its target: ggml PR 1103": lambda s: s.ask("copy", s.buffer, 0, s.other, SIZE - 64, 128),
    "tensor in no buffer: llama.cpp PR 20908": lambda s: plan(s, 1, handle=NONE),
    "cached graph in freed memory: llama.cpp PR 24292": compute_in_freed_memory,
}


def test_a_computation_is_stopped_by_its_number(session: Session) -> None:
    plan = session.ask("plan", session.stream, session.record)
    session.ask("clear", session.buffer, 0)
    session.node.aborted = 5
    y = ("read", session.buffer, session.y_offset, X.nbytes, False)
    assert session.run(("compute", plan, 5), y) == ([True], bytes(X.nbytes))
    for number in (6, None):
        assert session.ask("compute", plan, number) is None
    assert session.run(y)[1] != bytes(X.nbytes)


def test_features_name_the_backend() -> None:
    cpu = ggmlb.reg_by_name("CPU")
    own = cpu.get_proc_address("get_features")(cpu)
    assert own
    assert Session().ask("features") == [(f"CPU_{name}", value) for name, value in own]


@pytest.mark.parametrize("fault", FAULTS_OF_RPC.values(), ids=FAULTS_OF_RPC)
def test_a_class_of_faults_of_rpc_is_refused(session: Session, fault: Callable[[Session], object]) -> None:
    with pytest.raises((RefusedError, FreedError)):
        fault(session)
    assert session.is_other_untouched()


WRONG_HANDLES: list[Callable[[Session], Any]] = [
    lambda s: 0,
    lambda s: -1,
    lambda s: None,
    lambda s: id(s.buffer),
    lambda s: X.ctypes.data,
    lambda s: s.buffer + 1,
    lambda s: s.stream,
    lambda s: Session().buffer,
]


@pytest.mark.parametrize("wrong", WRONG_HANDLES)
def test_only_its_own_handles_of_the_kind_are_taken(
    session: Session, wrong: Callable[[Session], Any]
) -> None:
    handle = wrong(session)
    for command in (
        ("read", handle, 0, 16, False),
        ("write", handle, 0, 16, False),
        ("fill", handle, 0, 16, 1),
        ("clear", handle, 1),
        ("add", handle, 0, 16, 0, 0),
        ("usage", handle, "WEIGHTS"),
        ("copy", handle, 0, session.other, 0, 16),
        ("copy", session.buffer, 0, handle, 0, 16),
        ("compute", handle),
    ):
        with pytest.raises(RefusedError):
            session.run(command, blob=bytes(16))
    with pytest.raises(RefusedError):
        plan(session, 1, handle=handle)
    assert session.is_other_untouched()


@pytest.mark.parametrize("handle", [0, None, "CPU", 1 << 51])
def test_only_its_own_streams_are_taken(session: Session, handle: Any) -> None:
    for command in (("plan", handle, session.record), ("free", handle), ("threads", handle, 1)):
        with pytest.raises(RefusedError):
            session.ask(*command)
    with pytest.raises(RefusedError):
        session.ask("threads", session.buffer, 1)


RANGES = [
    (0, SIZE + 1), (SIZE, 1), (SIZE - 8, 16), (-16, 16), (0, -1), (1 << 62, 16), (0, 1 << 62),
    (0.0, 16), (True, 16), (None, 16), ("0", 16),
]  # fmt: skip


@pytest.mark.parametrize(("offset", "nbytes"), RANGES)
def test_ranges_lie_in_their_buffer(session: Session, offset: Any, nbytes: Any) -> None:
    for command in (
        ("read", session.buffer, offset, nbytes, False),
        ("write", session.buffer, offset, nbytes, False),
        ("fill", session.buffer, offset, nbytes, 1),
        ("add", session.buffer, offset, nbytes, 0, 0),
        ("copy", session.buffer, offset, session.other, 0, nbytes),
        ("copy", session.other, 0, session.buffer, offset, nbytes),
    ):
        with pytest.raises(RefusedError):
            session.run(command, blob=bytes(16))
    assert session.is_other_untouched()


def test_data_have_the_size_that_was_told(session: Session) -> None:
    with pytest.raises(RefusedError, match="16 bytes are to be written, and 4 were received"):
        session.run(("write", session.buffer, 0, 16, False), blob=bytes(4))
    for data in ((), (np.zeros(8, np.uint8),)):
        with pytest.raises(RefusedError):
            session.node.run(message(("write", session.buffer, 0, 16, True)), *data)


@pytest.mark.parametrize("counts", [(0, 2), (1, 1), (2, 0)])
def test_sums_are_in_order(session: Session, counts: tuple[int, int]) -> None:
    numbers = [np.array([x], np.float32) for x in (1e8, 1.0, -1e8)]  # no sum of two of them is exact
    here = numbers.pop(counts[0])
    session.run(("write", session.buffer, 64, 4, False), blob=here.tobytes())
    others = [number.view(np.uint8) for number in numbers]
    session.node.run(message(("add", session.buffer, 64, 4, *counts)), *others)
    got = np.frombuffer(session.run(("read", session.buffer, 64, 4, False))[1], np.float32)
    assert got == (np.float32(1e8) + np.float32(1)) - np.float32(1e8)


def test_a_sum_needs_its_arrays(session: Session) -> None:
    for counts in ((0, 3), (1 << 10, 0)):
        with pytest.raises(RefusedError):
            session.node.run(message(("add", session.buffer, 0, 4, *counts)), np.zeros(4, np.uint8))


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    "offset beyond": (0, {"offset": SIZE}),
    "negative offset": (1, {"offset": -64}),
    "offset not aligned": (1, {"offset": 2}),
    "offset is no number": (1, {"offset": "0"}),
    "more than the buffer": (0, {"ne": (SIZE, 1, 1, 1), "nb": None}),
    "strides leave the buffer": (0, {"ne": (2, 2, 1, 1), "nb": (4, SIZE, SIZE, SIZE)}),
    "a view that ends beyond": (1, {"viewed": 0, "offset": SIZE}),
    "a viewed tensor that follows": (0, {"viewed": 1}),
    "an operand that follows": (1, {"src": (2,)}),
    "in no buffer": (1, {"handle": NONE}),
}


@pytest.mark.parametrize(("number", "fields"), PLACES.values(), ids=PLACES)
def test_tensors_lie_in_their_buffers(session: Session, number: int, fields: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        plan(session, number, **fields)


@pytest.mark.parametrize("record", [(), 5, None, {"op": "sqr"}])
def test_what_is_no_record_is_refused(session: Session, record: Any) -> None:
    session.record[0][1] = record
    with pytest.raises(RefusedError):
        plan(session)


def nowhere(handle: int) -> Any:
    """In no buffer."""


def graphs() -> Iterator[tuple[str, Graph]]:
    """Yield a graph of each sample of each op, in each type, and of each golden case."""
    for record in RECORDS.values():
        for (name, sample), dtype in itertools.product(record.samples.items(), DType):
            with suppress(Error):
                yield name, Graph().build_forward_expand(sample(Context(), dtype))
    for case in load_cases("tests/golden/programs"):
        yield case.id, case.build().graph


def test_graphs_come_as_they_were() -> None:
    def facts(t: Tensor | None) -> Any:
        return t and (t.dtype, t.ne, t.nb, t.op, t.flags, t.name, t.view_offs, facts(t.view_src))

    seen = set()
    for name, graph in graphs():
        if any(unsendable(node) for node in graph.nodes):
            continue
        records = pickle.loads(pickle.dumps(graph_record(graph.nodes, {}, lambda _: NONE)))
        for node, got in zip(graph.nodes, read_graph(records, nowhere).nodes, strict=True):
            seen.add(node.op)
            operands = [[t and (t.dtype, t.ne, t.nb) for t in of.src] for of in (node, got)]
            assert (facts(got), operands[1]) == (facts(node), operands[0]), name
            assert got.params == node.params, name
            assert [type(v) for v in got.params.values()] == [type(v) for v in node.params.values()], name
            hash(node_record(node))
    assert seen >= {op for op, record in RECORDS.items() if record.of_ggml}


def test_functions_are_not_sent() -> None:
    ctx = Context()
    node = ctx.map_custom1(ctx.new_tensor(DType.F32, (4,)), lambda dst, a, *_: None)
    assert "functions are not sent" in str(unsendable(node))


def test_memory_that_was_freed_is_not_computed_in(session: Session) -> None:
    """A plan that is kept does not outlive its memory, its stream, or itself."""
    plan = session.ask("plan", session.stream, session.record)
    session.ask("free", session.buffer)
    again = session.ask("alloc", "CPU", 0, SIZE)  # perhaps at the same place
    session.ask("clear", again, 7)
    with pytest.raises(FreedError):
        session.ask("compute", plan)
    assert set(session.run(("read", again, 0, SIZE, False))[1]) == {7}
    with pytest.raises(RefusedError):
        session.ask("read", session.buffer, 0, 4, False)
    with pytest.raises(RefusedError):
        session.ask("free", session.buffer)
    session.ask("free", plan)
    for command in (("compute", plan), ("free", plan)):
        with pytest.raises(RefusedError):
            session.run(command)


def test_a_plan_of_a_closed_stream_is_not_computed(session: Session) -> None:
    plan = session.ask("plan", session.stream, session.record)
    session.ask("free", session.stream)
    with pytest.raises(Error):
        session.ask("compute", plan)
    session.ask("free", plan)
    with pytest.raises(RefusedError):
        session.ask("free", plan)


@pytest.mark.parametrize(
    "commands",
    [
        [("facts",)],
        [("alloc",)],
        [("alloc", "CPU", 0)],
        [("alloc", "CPU", 9, 16)],
        [("alloc", "/etc/passwd", 0, 16)],
        [("alloc", "CPU", 0, -1)],
        [("open", "CPU", {"n_threads": 1 << 40})],
        [("declines", "CPU", ())],
        [("usage", 1, "OTHER")],
    ],
)
def test_other_messages_are_errors_of_ours(session: Session, commands: Any) -> None:
    with pytest.raises(Error):
        session.run(*commands)


def test_what_was_read_is_of_its_time(session: Session) -> None:
    """Though what follows in the message changes or frees it."""
    read = ("read", session.other, 0, 8, False)
    commands = (read, ("clear", session.other, 9), read, ("free", session.other))
    assert session.run(*commands)[1] == bytes([7] * 8 + [9] * 8)


def test_only_shared_files_are_read(tmp_path: Path) -> None:
    (shared := tmp_path / "shared").mkdir()
    (file := shared / "weights").write_bytes(bytes(range(200)))
    (secret := tmp_path / "secret").write_bytes(bytes(200))
    (shared / "link").symlink_to(secret)
    (tmp_path / "shared2").mkdir()
    (beside := tmp_path / "shared2" / "weights").write_bytes(bytes(200))
    session, stat = Session(str(shared)), file.stat()
    facts = (stat.st_size, stat.st_mtime_ns)
    session.ask("load", session.buffer, 64, 100, str(file), 50, *facts)
    assert session.run(("read", session.buffer, 64, 100, False))[1] == bytes(range(50, 150))
    for path in (secret, shared / "link", shared / ".." / "secret", beside, "weights", "/etc/passwd"):
        with pytest.raises(RefusedError):
            session.ask("load", session.buffer, 0, 100, str(path), 0, 200, facts[1])
    for offset, n in ((150, 100), (-1, 10), (1 << 60, 10)):
        with pytest.raises(RefusedError):
            session.ask("load", session.buffer, 0, n, str(file), offset, *facts)
    for size, time in ((201, facts[1]), (200, facts[1] + 1)):
        with pytest.raises(BackendError, match="differs in size or modification time"):
            session.ask("load", session.buffer, 0, 10, str(file), 0, size, time)
    with pytest.raises(BackendError, match="cannot be read here"):
        session.ask("load", session.buffer, 0, 10, str(shared / "absent"), 0, *facts)
    with pytest.raises(RefusedError):
        Session().ask("load", session.buffer, 0, 10, str(file), 0, *facts)


def test_data_of_a_mapped_file_are_recognised(tmp_path: Path) -> None:
    (tmp_path / "a b").write_bytes(bytes(1 << 16))
    mapped = np.memmap(tmp_path / "a b", np.uint8, "r")
    files = SharedFiles([str(tmp_path)])
    part = files.part_of(mapped[5000:9000])
    assert part is not None
    assert (part.path, part.offset, part.size) == (str(tmp_path / "a b"), 5000, 1 << 16)
    assert files.part_of(np.zeros(100, np.uint8)) is None
    assert files.part_of(np.memmap(tmp_path / "a b", np.uint8, "r+")) is None
    assert SharedFiles([str(tmp_path / "other")]).part_of(mapped) is None


def test_what_follows_a_failure_is_not_done_but_releases(session: Session) -> None:
    with pytest.raises(BackendError, match="nothing"):
        session.run(("nothing",), ("clear", session.other, 9), ("free", session.buffer))
    assert session.is_other_untouched()
    with pytest.raises(RefusedError):
        session.ask("clear", session.buffer, 1)


def test_other_versions_are_refused() -> None:
    with pytest.raises(BackendBroken, match=r"ggmlb 9\.9"):
        Node({**versions(), "ggmlb": "9.9"}, ["CPU"])


@given(
    number=st.integers(0, 2),
    field=st.sampled_from(["offset", "handle", "viewed"]),
    value=st.one_of(st.integers(-3, 2 * SIZE), st.integers()),
)
def test_another_place_is_refused_or_in_the_memory(number: int, field: str, value: int) -> None:
    session = Session()
    with suppress(Error):
        session.compute(plan(session, number, **{field: value}))
    assert session.is_other_untouched()
