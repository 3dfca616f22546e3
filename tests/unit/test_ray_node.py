"""What a node of other machines' devices refuses: handles, ranges, types and parameters that are forged.

The classes of faults are those that ggml's RPC had; `test_a_class_of_faults_of_rpc_is_refused` has one
message of each, the other tests more of them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggmlb import BackendBroken, BackendError, Context, DType, Error, FreedError, Graph, RopeType
from ggmlb.backends.ray.files import SharedFiles
from ggmlb.backends.ray.node import Node, versions
from ggmlb.backends.ray.wire import ForgedError, graph_record, node_record, packed, unpacked, unsendable

SIZE = 4096
X = np.arange(16, dtype=np.float32)


def message(*commands: Any, blob: bytes = b"") -> bytes:
    return packed(json.dumps(commands).encode(), [np.frombuffer(blob, np.uint8)])


class Session:
    """A node with a buffer, a stream, and a plan that computes `y = silu(scale(x))`."""

    def __init__(self, *shared: str) -> None:
        self.node = Node(versions(), ["CPU"], shared)
        self.buffer = self.ask("alloc", "CPU", 0, SIZE)
        self.other = self.ask("alloc", "CPU", 0, SIZE)
        self.ask("clear", self.other, 7)
        self.stream = self.ask("open", "CPU", {})
        ctx = Context()
        x = ctx.new_tensor(DType.F32, (16,), "x")
        y = ctx.silu(ctx.scale_bias(x, 2.0, 1.0))
        graph = Graph().build_forward_expand(y)
        self.record: Any = graph_record(graph.nodes, graph.use_counts(), lambda _: self.buffer)
        for i, tensor in enumerate(self.record[0]):
            tensor[7:9] = [self.buffer, 64 * i]
        self.y_offset = self.record[0][-1][8]

    def run(self, *commands: Any, blob: bytes = b"") -> tuple[list[Any], bytes]:
        told, data = unpacked(self.node.run(message(*commands, blob=blob)))
        return told, data.tobytes()

    def ask(self, *command: Any) -> Any:
        told, _ = self.run(command)
        return told[0] if told else None

    def compute(self, plan: int) -> np.ndarray:
        commands = (
            ("write", self.buffer, self.record[0][0][8], X.nbytes, False),
            ("compute", plan),
            ("read", self.buffer, self.y_offset, X.nbytes, False),
        )
        return np.frombuffer(self.run(*commands, blob=X.tobytes())[1], np.float32)

    def is_other_untouched(self) -> bool:
        return set(self.run(("read", self.other, 0, SIZE, False))[1]) == {7}


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
    session.run(("drop", plan), ("close", session.stream), ("free", session.buffer), ("free", session.other))


def plan(session: Session, fields: Mapping[int, Any], nodes: Sequence[int] | None = None) -> int:
    """Make a plan of the session's graph, with other values in some fields of its node of SCALE."""
    for field, value in fields.items():
        session.record[0][1][field] = value
    handle: int = session.ask("plan", session.stream, [session.record[0], nodes or session.record[1]])
    return handle


def compute_in_freed_memory(session: Session) -> None:
    kept = plan(session, {})
    session.ask("free", session.buffer)
    session.ask("compute", kept)


FUNCTION = {"fun": 1 << 47, "n_tasks": 1, "userdata": 1 << 47}
FAULTS_OF_RPC: dict[str, Callable[[Session], object]] = {
    "read at an address: CVE-2024-42478": lambda s: s.ask("read", X.ctypes.data, 0, 16, False),
    "write at an address: CVE-2024-42479": lambda s: s.run(
        ("write", X.ctypes.data, 0, 16, False), blob=bytes(16)
    ),
    "copy beyond its target: ggml PR 1103": lambda s: s.ask("copy", s.buffer, 0, s.other, SIZE - 64, 128),
    "type beyond the table: CVE-2024-42477": lambda s: plan(s, {1: 1 << 20}),
    "tensor in no buffer: llama.cpp PR 20908": lambda s: plan(s, {7: -1}),
    "node that is none: llama.cpp issue 25299": lambda s: plan(s, {}, [-1]),
    "function as a parameter: llama.cpp issue 25289": lambda s: plan(s, {0: "CUSTOM", 10: FUNCTION}),
    "cached graph in freed memory: llama.cpp PR 24292": compute_in_freed_memory,
}


@pytest.mark.parametrize("fault", FAULTS_OF_RPC.values(), ids=FAULTS_OF_RPC)
def test_a_class_of_faults_of_rpc_is_refused(session: Session, fault: Callable[[Session], object]) -> None:
    with pytest.raises((ForgedError, FreedError)):
        fault(session)
    assert session.is_other_untouched()


WRONG_HANDLES: list[Callable[[Session], Any]] = [
    lambda s: 0,
    lambda s: -1,
    lambda s: None,
    lambda s: id(s.buffer),
    lambda s: X.ctypes.data,
    lambda s: s.buffer + 1,
    lambda s: float(s.buffer),
    lambda s: str(s.buffer),
    lambda s: [s.buffer],
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
        ("free", handle),
        ("usage", handle, "WEIGHTS"),
        ("copy", handle, 0, session.other, 0, 16),
        ("copy", session.buffer, 0, handle, 0, 16),
        ("compute", handle),
        ("drop", handle),
    ):
        with pytest.raises(ForgedError):
            session.run(command, blob=bytes(16))
    for tensor in session.record[0]:
        tensor[7] = handle
    with pytest.raises(ForgedError):
        session.ask("plan", session.stream, session.record)
    assert session.is_other_untouched()


@pytest.mark.parametrize("handle", [0, None, "CPU", 1 << 51])
def test_only_its_own_streams_are_taken(session: Session, handle: Any) -> None:
    for command in (("plan", handle, session.record), ("close", handle), ("threads", handle, 1)):
        with pytest.raises(ForgedError):
            session.ask(*command)
    with pytest.raises(ForgedError):
        session.ask("close", session.buffer)


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
        with pytest.raises(ForgedError):
            session.run(command, blob=bytes(16))
    assert session.is_other_untouched()


def test_data_have_the_size_that_was_told(session: Session) -> None:
    with pytest.raises(ForgedError, match="16 bytes are to be written, and 4 came"):
        session.run(("write", session.buffer, 0, 16, False), blob=bytes(4))
    for data in ((), (b"x" * 16,), (np.zeros(4, np.float32),), (np.zeros(8, np.uint8),)):
        with pytest.raises(ForgedError):
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


@pytest.mark.parametrize(
    ("nbytes", "counts"),
    [(4, (0, 3)), (4, (-1, 1)), (4, (1 << 40, 0)), (4, (None, 1)), (6, (0, 1)), (8, (1, 0))],
)
def test_forged_sums_are_refused(session: Session, nbytes: int, counts: tuple[Any, Any]) -> None:
    with pytest.raises(ForgedError):
        session.node.run(message(("add", session.buffer, 0, nbytes, *counts)), np.zeros(4, np.uint8))


@pytest.mark.parametrize(
    "data", [b"abc", None, "[]", [1], b"\xff\xff\xff\xff[", b"\2\0\0\0[[", b"\1\0\0\0005"]
)
def test_what_is_no_message_is_an_error(session: Session, data: Any) -> None:
    with pytest.raises(ForgedError):
        session.node.run(data)


FORGED_TENSORS = {
    "no op": (0, "FORMAT_DISK"),
    "op is a number": (0, 3),
    "type beyond the table": (1, 999),
    "negative type": (1, -1),
    "removed type": (1, 4),
    "type is text": (1, "F32"),
    "type is true": (1, True),
    "three extents": (2, [16, 1, 1]),
    "negative extent": (2, [-16, 1, 1, 1]),
    "extents overflow": (2, [1 << 62, 1 << 62, 1, 1]),
    "more than the buffer": (2, [SIZE, 1, 1, 1]),
    "strides leave the buffer": (3, [SIZE, SIZE, SIZE, SIZE]),
    "stride out of range": (3, [4, -64, 64, 64]),
    "an operand that follows": (4, [1]),
    "an operand beyond": (4, [99]),
    "an operand that is no number": (4, ["x"]),
    "a viewed tensor that follows": (5, 7),
    "offset beyond": (8, SIZE),
    "negative offset": (8, -64),
    "offset not aligned": (8, 2),
    "flags": (9, 1 << 40),
    "params are a list": (10, []),
    "a name that is no text": (11, 5),
}


@pytest.mark.parametrize(("field", "value"), FORGED_TENSORS.values(), ids=FORGED_TENSORS)
def test_forged_tensors_are_refused(session: Session, field: int, value: Any) -> None:
    session.record[0][1][field] = value  # the node of SCALE
    with pytest.raises(ForgedError):
        session.ask("plan", session.stream, session.record)


@pytest.mark.parametrize(
    ("op", "params"),
    [
        ("SCALE", {"scale": 1.0}),
        ("SCALE", {"scale": 1.0, "bias": 0.0, "fun": 140_000_000}),
        ("SCALE", {"scale": "__import__('os')", "bias": 0.0}),
        ("SCALE", {"scale": None, "bias": 0.0}),
        ("SCALE", {"scale": {"RopeType": 2, "Op": 1}, "bias": 0.0}),
        ("SCALE", {"scale": {"Function": 2}, "bias": 0.0}),
        ("SCALE", {"scale": {}, "bias": 0.0}),
        ("SCALE", {"scale": [1] * 5, "bias": 0.0}),
        ("UNARY", {"op": {"UnaryOp": 99}}),
        ("UNARY", {"op": {"UnaryOp": "SILU"}}),
        ("MAP_CUSTOM1", {"fun": 140_000_000, "n_tasks": 1, "userdata": 0}),
        ("MAP_CUSTOM1", {"fun": "os.system", "n_tasks": 1, "userdata": "ls"}),
        ("CUSTOM", {"fun": 1 << 47, "n_tasks": 1, "userdata": 1 << 47}),
    ],
)
def test_forged_parameters_and_functions_are_refused(
    session: Session, op: str, params: dict[str, Any]
) -> None:
    session.record[0][1][0], session.record[0][1][10] = op, params
    with pytest.raises(Error):
        session.ask("plan", session.stream, session.record)


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
    with pytest.raises(ForgedError):
        session.ask("read", session.buffer, 0, 4, False)
    with pytest.raises(ForgedError):
        session.ask("free", session.buffer)
    session.ask("drop", plan)
    for command in (("compute", plan), ("drop", plan)):
        with pytest.raises(ForgedError):
            session.run(command)


def test_a_plan_of_a_closed_stream_is_not_computed(session: Session) -> None:
    plan = session.ask("plan", session.stream, session.record)
    session.ask("close", session.stream)
    with pytest.raises(Error):
        session.ask("compute", plan)
    session.ask("drop", plan)
    with pytest.raises(ForgedError):
        session.ask("drop", plan)


@pytest.mark.parametrize(
    "commands",
    [
        [("facts",)],
        [("__init__",)],
        [("_do_alloc", "CPU", 0, 16)],
        [(None,)],
        [("alloc",)],
        [("alloc", "CPU", 0)],
        [("alloc", "CPU", 9, 16)],
        [("alloc", "/etc/passwd", 0, 16)],
        [("alloc", "CPU", 0, -1)],
        [("open", "CPU", {"n_threads": 1 << 40})],
        [("open", "CPU", 5)],
        [("declines", "CPU", "[]")],
        [("declines", "CPU", "no json")],
        [("declines", "CPU", None)],
        [("stores", "CPU", 1, "[[], []]")],
        [("usage", 1, "OTHER")],
        [()],
        [5],
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
    for path in (
        secret,
        shared / "link",
        shared / ".." / "secret",
        beside,
        "weights",
        "/etc/passwd",
        5,
        "a\0b",
    ):
        with pytest.raises(ForgedError):
            session.ask("load", session.buffer, 0, 100, path if path == 5 else str(path), 0, 200, facts[1])
    for offset, n in ((150, 100), (-1, 10), (1 << 60, 10)):
        with pytest.raises(ForgedError):
            session.ask("load", session.buffer, 0, n, str(file), offset, *facts)
    for size, time in ((201, facts[1]), (200, facts[1] + 1)):
        with pytest.raises(BackendError, match="another file here"):
            session.ask("load", session.buffer, 0, 10, str(file), 0, size, time)
    with pytest.raises(BackendError, match="cannot be read here"):
        session.ask("load", session.buffer, 0, 10, str(shared / "absent"), 0, *facts)
    with pytest.raises(ForgedError):
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
    with pytest.raises(ForgedError, match="no command"):
        session.run(("nothing",), ("clear", session.other, 9), ("free", session.buffer))
    assert session.is_other_untouched()
    with pytest.raises(ForgedError):
        session.ask("clear", session.buffer, 1)


def test_other_versions_are_refused() -> None:
    with pytest.raises(BackendBroken, match=r"ggmlb 9\.9"):
        Node({**versions(), "ggmlb": "9.9"}, ["CPU"])


def test_parameters_come_as_they_were() -> None:
    from ggmlb.backends.ray.wire import read_node

    ctx = Context()
    a, positions = ctx.new_tensor(DType.F32, (8, 2, 3)), ctx.new_tensor(DType.I32, (12,))
    node = ctx.rope_multi(a, positions, None, 8, (1, 2, 1, 0), RopeType.MROPE, freq_base=1e6)
    node.params["ext_factor"] = float("-inf")
    got = read_node(node_record(node), lambda handle: None)  # type: ignore[arg-type,return-value]
    assert got.params == node.params
    assert [type(v) for v in got.params.values()] == [type(v) for v in node.params.values()]


NUMBERS = st.lists(st.integers(-3, 5000), max_size=5)
MAPPINGS = st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
SINGLE = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.integers(), st.floats(), st.text(max_size=5)
)
FIELDS = st.one_of(SINGLE, NUMBERS, MAPPINGS)


@given(st.data())
def test_a_changed_plan_is_refused_or_stays_in_its_memory(data: st.DataObject) -> None:
    session = Session()
    record = copy.deepcopy(session.record)
    for _ in range(data.draw(st.integers(1, 3))):
        tensor = data.draw(st.sampled_from(record[0]))
        field = data.draw(st.integers(0, 11))
        if isinstance(tensor[field], list) and tensor[field] and data.draw(st.booleans()):
            tensor[field][data.draw(st.integers(0, len(tensor[field]) - 1))] = data.draw(FIELDS)
        else:
            tensor[field] = data.draw(FIELDS)
    with suppress(Error):
        session.compute(session.ask("plan", session.stream, record))
    assert session.is_other_untouched()
