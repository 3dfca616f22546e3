"""What a node of other machines' devices refuses: handles, ranges, types and parameters that are forged.

The classes of faults are those that ggml's RPC had; `test_a_class_of_faults_of_rpc_is_refused` has one
message of each, the other tests more of them.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
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
from ggmlb.backends.ray.wire import NONE, ForgedError, graph_record, packed, read_graph, unpacked, unsendable
from ggmlb.testing.ops import RECORDS
from ggmlb.testing.programs import load_cases

SIZE = 4096
X = np.arange(16, dtype=np.float32)


def message(*commands: Any, blob: bytes = b"") -> bytes:
    return packed(json.dumps(commands).encode(), [np.frombuffer(blob, np.uint8)])


def as_data(record: Any) -> Any:
    return json.loads(json.dumps(record))


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
        self.record: Any = as_data(graph_record(graph.nodes, graph.use_counts(), lambda _: self.buffer))
        for i, tensor in enumerate(self.record[0]):
            tensor[-2:] = [self.buffer, 64 * i]
        self.y_offset = self.record[0][-1][-1]

    def run(self, *commands: Any, blob: bytes = b"") -> tuple[list[Any], bytes]:
        told, data = unpacked(self.node.run(message(*commands, blob=blob)))
        return told, data.tobytes()

    def ask(self, *command: Any) -> Any:
        told, _ = self.run(command)
        return told[0] if told else None

    def compute(self, plan: int) -> np.ndarray:
        commands = (
            ("write", self.buffer, self.record[0][0][-1], X.nbytes, False),
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


def plan(session: Session, place: Sequence[int] = (), value: Any = None, nodes: Any = None) -> int:
    """Make a plan of the session's graph, with another value at a place of its records."""
    record = session.record[0]
    for i in place[:-1]:
        record = record[i]
    if place:
        record[place[-1]] = value
    handle: int = session.ask("plan", session.stream, [session.record[0], nodes or session.record[1]])
    return handle


def compute_in_freed_memory(session: Session) -> None:
    kept = plan(session)
    session.ask("free", session.buffer)
    session.ask("compute", kept)


FUNCTION = [["map_custom1", [0], [1 << 47, 1, 1 << 47]]]
FAULTS_OF_RPC: dict[str, Callable[[Session], object]] = {
    "read at an address: CVE-2024-42478": lambda s: s.ask("read", X.ctypes.data, 0, 16, False),
    "write at an address: CVE-2024-42479": lambda s: s.run(
        ("write", X.ctypes.data, 0, 16, False), blob=bytes(16)
    ),
    "copy beyond its target: ggml PR 1103": lambda s: s.ask("copy", s.buffer, 0, s.other, SIZE - 64, 128),
    "type beyond the table: CVE-2024-42477": lambda s: plan(s, (0, 1), 1 << 20),
    "tensor in no buffer: llama.cpp PR 20908": lambda s: plan(s, (1, -2), -1),
    "node that is none: llama.cpp issue 25299": lambda s: plan(s, nodes=[-1]),
    "function as a parameter: llama.cpp issue 25289": lambda s: plan(s, (1, 0), FUNCTION),
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
        ("usage", handle, "WEIGHTS"),
        ("copy", handle, 0, session.other, 0, 16),
        ("copy", session.buffer, 0, handle, 0, 16),
        ("compute", handle),
    ):
        with pytest.raises(ForgedError):
            session.run(command, blob=bytes(16))
    for tensor in session.record[0]:
        tensor[-2] = handle
    with pytest.raises(ForgedError):
        session.ask("plan", session.stream, session.record)
    assert session.is_other_untouched()


@pytest.mark.parametrize("handle", [0, None, "CPU", 1 << 51])
def test_only_its_own_streams_are_taken(session: Session, handle: Any) -> None:
    for command in (("plan", handle, session.record), ("free", handle), ("threads", handle, 1)):
        with pytest.raises(ForgedError):
            session.ask(*command)
    with pytest.raises(ForgedError):
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


FORGED = {
    "type beyond the table": (0, 1, 999),
    "negative type": (0, 1, -1),
    "removed type": (0, 1, "Q4_2"),
    "type is true": (0, 1, True),
    "no type": (0, 1, None),
    "three extents": (0, 2, [16, 1, 1]),
    "negative extent": (0, 2, [-16, 1, 1, 1]),
    "extents overflow": (0, 2, [1 << 62, 1 << 62, 1, 1]),
    "more than the buffer": (0, 2, [SIZE, 1, 1, 1]),
    "fewer than the op reads": (0, 2, [0, 1, 1]),
    "strides leave the buffer": (0, 3, [SIZE, SIZE, SIZE, SIZE]),
    "stride out of range": (0, 3, [4, -64, 64, 64]),
    "flags of a leaf": (0, 4, 1 << 40),
    "a viewed tensor that follows": (0, 6, 1),
    "offset beyond": (0, 8, SIZE),
    "negative offset": (1, 8, -64),
    "offset not aligned": (1, 8, 2),
    "extents that the calls do not give": (1, 2, [32, 1, 1, 1]),
    "another type": (1, 1, "F16"),
    "calls are a number": (1, 0, 5),
    "a call is a name": (1, 0, ["sqr"]),
    "no op": (1, 0, [["format_disk", [0], []]]),
    "op is a number": (1, 0, [[3, [0], []]]),
    "a method that is no op": (1, 0, [["new_tensor", [], ["F32", [16]]]]),
    "a hidden method": (1, 0, [["_take", [0], []]]),
    "a method that reads": (1, 0, [["flash_attn_ext_get_prec", [0], []]]),
    "a change of another node": (1, 0, [["sqr", [0], []], ["mul_mat_set_prec", [], [10]]]),
    "an operand that follows": (1, 0, [["sqr", [1], []]]),
    "an operand beyond": (1, 0, [["sqr", [99], []]]),
    "an operand that is no number": (1, 0, [["sqr", ["x"], []]]),
    "an operand too few": (1, 0, [["add", [0], []]]),
    "an operand too many": (1, 0, [["sqr", [0, 0], []]]),
    "an absent operand": (1, 0, [["sqr", [-1], []]]),
    "an argument too few": (1, 0, [["scale", [0], []]]),
    "code": (1, 0, [["scale", [0], ["__import__('os')"]]]),
    "no number": (1, 0, [["scale", [0], [None]]]),
    "an object": (1, 0, [["scale", [0], [{"scale": 1}]]]),
    "beyond an enum": (1, 0, [["unary", [0], [99]]]),
    "a function's address": (1, 0, [["map_custom1", [0], [140_000_000, 1, 0]]]),
    "a function's name": (1, 0, [["map_custom1", [0], ["os.system", 1, "ls"]]]),
    "a function of all": (1, 0, [["custom_4d", [0], [1 << 47, 1, 1 << 47]]]),
    "a view beyond its tensor": (1, 0, [["view", [0], [[16, 1, 1, 1], [4, 64, 64, 64], 64]]]),
    "a view of negative strides": (1, 0, [["view", [0], [[16, 1, 1, 1], [-4, 64, 64, 64], 0]]]),
    "flags of a node": (1, 4, 1 << 40),
    "flags are text": (1, 4, "1"),
}


@pytest.mark.parametrize(("number", "field", "value"), FORGED.values(), ids=FORGED)
def test_forged_tensors_are_refused(session: Session, number: int, field: int, value: Any) -> None:
    with pytest.raises(ForgedError):
        plan(session, (number, field), value)


@pytest.mark.parametrize("record", [[], [1], [[]] * 3, 5, None, {"calls": []}])
def test_what_is_no_record_is_refused(session: Session, record: Any) -> None:
    session.record[0][1] = record
    with pytest.raises(ForgedError):
        plan(session)


def small(session: Session, op: str, sizes: Sequence[int], n: int, args: Sequence[Any] = ()) -> Any:
    """Return a graph of an op whose operands are rows of these sizes, and its result a row of `n`."""

    def row(calls: Any, n: int, offset: int) -> list[Any]:
        return [calls, "F32", [n, 1, 1, 1], [4, 4 * n, 4 * n, 4 * n], 0, "", -1, session.buffer, offset]

    operands = [row([], size, SIZE - 64) for size in sizes]
    return [[*operands, row([[op, list(range(len(sizes))), args]], n, 0)], [len(sizes)]]


@pytest.mark.parametrize(
    ("op", "sizes", "args"),
    [
        ("add", (16, 3), ()),
        ("mul_mat", (16, 8), ()),
        ("silu_back", (16, 4), ()),
        ("reshape_4d", (16,), (512, 1, 1, 1)),
        ("repeat_back", (16, 5), ()),
        ("get_rows_back", (16, 4, 8), ()),
        ("swiglu_split", (16, 8), ()),
        ("acc", (16, 16), (64, 64, 64, 4)),
        ("ssm_conv", (4, 16), ()),
        ("group_norm", (16,), (0, 1e-6)),
    ],
)
def test_operands_that_do_not_fit_are_refused(
    session: Session, op: str, sizes: Sequence[int], args: Any
) -> None:
    with pytest.raises(ForgedError, match=op):
        session.ask("plan", session.stream, small(session, op, sizes, 16, args))


@pytest.mark.parametrize("device", ["CPU", "LLVM"])
@pytest.mark.parametrize("op", ["sqr", "silu", "cont", "soft_max"])
def test_results_have_the_extents_of_what_they_read(device: str, op: str) -> None:
    """A node with another result than its operand's read foreign memory."""
    session = session_on(device)
    session.run(("plan", session.stream, small(session, op, [16], 16)))
    for n_read, n in ((16, 512), (16, 15), (17, 17)):
        with pytest.raises(ForgedError):
            session.ask("plan", session.stream, small(session, op, [n_read], n))


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
        data = as_data(graph_record(graph.nodes, {}, lambda _: NONE))
        for node, got in zip(graph.nodes, read_graph(data, lambda _: None).nodes, strict=True):
            seen.add(node.op)
            operands = [[t and (t.dtype, t.ne, t.nb) for t in of.src] for of in (node, got)]
            assert (facts(got), operands[1]) == (facts(node), operands[0]), name
            near = {k: pytest.approx(v) if isinstance(v, float) else v for k, v in node.params.items()}
            assert got.params == near, name
            assert [type(got.params[k]) for k in near] == [type(v) for v in node.params.values()], name
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
    with pytest.raises(ForgedError):
        session.ask("read", session.buffer, 0, 4, False)
    with pytest.raises(ForgedError):
        session.ask("free", session.buffer)
    session.ask("free", plan)
    for command in (("compute", plan), ("free", plan)):
        with pytest.raises(ForgedError):
            session.run(command)


def test_a_plan_of_a_closed_stream_is_not_computed(session: Session) -> None:
    plan = session.ask("plan", session.stream, session.record)
    session.ask("free", session.stream)
    with pytest.raises(Error):
        session.ask("compute", plan)
    session.ask("free", plan)
    with pytest.raises(ForgedError):
        session.ask("free", plan)


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


NUMBERS = st.lists(st.integers(-3, 5000), max_size=5)
MAPPINGS = st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
SINGLE = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.integers(), st.floats(), st.text(max_size=5)
)
FIELDS = st.one_of(SINGLE, NUMBERS, MAPPINGS)


@pytest.mark.parametrize("device", ["CPU", "LLVM"])
@given(data=st.data())
def test_a_changed_plan_is_refused_or_stays_in_its_memory(device: str, data: st.DataObject) -> None:

    session = session_on(device)
    record = copy.deepcopy(session.record)
    for _ in range(data.draw(st.integers(1, 3))):
        tensor = data.draw(st.sampled_from(record[0]))
        field = data.draw(st.integers(0, len(tensor) - 1))
        if isinstance(tensor[field], list) and tensor[field] and data.draw(st.booleans()):
            tensor[field][data.draw(st.integers(0, len(tensor[field]) - 1))] = data.draw(FIELDS)
        else:
            tensor[field] = data.draw(FIELDS)
    with suppress(Error):
        session.compute(session.ask("plan", session.stream, record))
    assert session.is_other_untouched()
