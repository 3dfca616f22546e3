"""PTX as the compiler writes it: read, encoded for the machine, and launched.

Sections are those of the PTX ISA manual 9.0.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np

from tests.support.ptx.machine import machine

GLOBAL, SHARED, LOCAL, CONST = range(4)
SPACES: Final = {"global": GLOBAL, "shared": SHARED, "local": LOCAL, "const": CONST}
SPECIALS: Final = (
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    "%laneid", "%warpid",
)  # fmt: skip
"""Registers that the machine sets (chapter 10), in its order."""

INSN: Final = np.dtype(
    [
        ("op", "u2"), *((name, "u1") for name in ("space", "size", "n", "is_signed", "to_signed", "to_size")),
        ("guard", "i4"), ("target", "u4"), ("operands", "u8"),
    ]
)  # fmt: skip
SPAN: Final = np.dtype(
    [("begin", "u8"), ("end", "u8"), ("cells", "i8"), ("space", "u4"), ("is_writable", "u4")]
)
NONE: Final = -(1 << 63)
GAP: Final = 256
"""Bytes between arrays of a space, which belong to nobody."""

_NO_MEANING = re.compile(r"\.(nc|volatile|relaxed|acquire|sc|sys|uni|L[12]::\w+)(?![\w:])")
"""Modifiers that say how, not what: caches, order, that all threads go one way, that memory is only read."""

_TYPE = re.compile(r"[bsuf](?:8|16|32|64)$")
_VARIABLE = re.compile(
    r"\.(const|global|shared|local)\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?\s*(?:=\s*\{?([^;}]*)\}?)?;"
)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.\w(\d+)\s+(?:\.ptr(?:\s+\.\w+(?:\s+\d+)?)*\s+)?([\w$]+)(?:\[(\d+)\])?"
)
_ENTRY = re.compile(r"\.entry\s+[\w$]+\s*\((.*?)\)\s*([^{]*)\{", re.DOTALL)
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_LOCATION = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)[^\n]*?(?:inlined_at\s+\d+\s+(\d+)[^\n]*)?$", re.MULTILINE)
_TARGETS = re.compile(r"([\w$]+):\s*\.branchtargets\s+([^;]*);")
_LABEL = re.compile(r"([\w$]+):(?!:)[\s{}]*")
_STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\[[^\]]*\]|[^,|\s{}]+")
_MANGLED = re.compile(r"_ZZ\d\w*?E\d+(\w+)")
"""The name of a variable within a function."""
_NUMBER = re.compile(r"(-?)(?:0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})|(0x[0-9a-fA-F]+|\d+)U?)$")


class PtxError(AssertionError):
    """A kernel did what a card would punish, or forgive at random; or its PTX is not known."""


class Span(NamedTuple):
    """Memory of a space that a launch may touch: where it begins and ends, and whether it may be written."""

    begin: int
    end: int
    is_writable: bool = True
    space: int = GLOBAL


class _Launch(ctypes.Structure):
    """As in machine.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("code", "at", "undefined", "sizes", "registers")),
        ("arguments", ctypes.c_char_p), ("spans", ctypes.c_void_p), ("n_cells", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("n_registers", "registers_nbytes", "n_spans")),
        *((name, ctypes.c_uint32) for name in ("shared_nbytes", "local_nbytes")),
        ("grains", ctypes.c_uint32 * 4), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3),
        ("is_backward", ctypes.c_uint32),
    ]  # fmt: skip


_one_at_a_time = threading.Lock()


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


class Program:
    """A module with one kernel.

    Args:
        text: PTX.

    Attributes:
        arguments_nbytes: Size of its argument block.
        shared_nbytes: Static shared memory of a block.
        lines: For each instruction the lines of its source, the innermost first, where the text tells them.

    Raises:
        PtxError: It has instructions that the machine lacks, all of which are named.
    """

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*|^\s*\.file[^\n]*", "", text.partition(".section")[0], flags=re.MULTILINE)
        entry, *others = _ENTRY.finditer(text)
        if others:
            raise PtxError("the module has more than one kernel")
        limit = re.search(r"\.maxntid\s+(\d+)(?:,\s*(\d+),\s*(\d+))?", entry[2])
        self._most = int(np.prod([int(n or 1) for n in limit.groups()])) if limit else 1024
        self._params: dict[str, int] = {}
        end = 0
        for align, bits, name, n in _PARAM.findall(entry[1]):
            size = int(bits) // 8
            self._params[name] = _up(end, int(align or size))
            end = self._params[name] + size * int(n or 1)
        self.arguments_nbytes = end
        self._symbols: dict[str, int] = {}
        self._place_variables(text)
        self._sizes = [4] * len(SPECIALS)
        self._registers = {name: i for i, name in enumerate(SPECIALS)}
        self._declared: dict[str, int] = {}
        self._constants: dict[tuple[int, int], int] = {}
        self._grains = [16, 16, 16, 16]
        self.shared_nbytes = sum(s.end - s.begin for s, _ in self._variables if s.space == SHARED)
        self.lines: list[tuple[int, ...]] = []
        self._encode(list(self._statements(text[entry.end() :])))

    def _place_variables(self, text: str) -> None:
        """Give each variable an address (5.4): a constant that of its value, others one in their space."""
        self._variables: list[tuple[Span, str]] = []
        self._ends = {SHARED: GAP, LOCAL: GAP}
        self._values: list[Any] = []
        self._dynamic: str | None = None

        def is_dynamic(name: str) -> bool:
            return re.search(rf"\.extern\s[^;]*\s{re.escape(name)}\[\]", text) is not None

        # Dynamic shared memory comes after all other.
        for word, align, bits, name, n, initial in sorted(
            _VARIABLE.findall(text), key=lambda found: is_dynamic(found[3])
        ):
            space, size = SPACES[word], int(bits) // 8
            nbytes = size * int(n or 1)
            if space in (GLOBAL, CONST):
                numbers = [int(number, 0) % (1 << 8 * size) for number in re.findall(r"-?\w+", initial)]
                self._values.append(np.zeros(nbytes // size, f"u{size}"))
                self._values[-1][: len(numbers)] = numbers
                begin = int(self._values[-1].ctypes.data)
            else:
                begin = _up(self._ends[space], max(int(align or 1), 16))
                self._ends[space] = begin + nbytes + GAP
            self._symbols[name] = begin
            if is_dynamic(name):
                self._dynamic = name
            else:
                self._variables.append(
                    (Span(begin, begin + nbytes, space in (SHARED, LOCAL), space), _MANGLED.sub(r"\1", name))
                )

    # -- instructions --------------------------------------------------------------------------------

    def _statements(self, body: str) -> Iterator[str]:
        """Yield labels with their colon, places in the source as `loc n n`, and the rest.

        A branch by a table (9.7.12.3) becomes one for each of its places.
        """
        tables = {name: targets.split(",") for name, targets in _TARGETS.findall(body)}
        body = _TARGETS.sub("", body)
        for statement in _LOCATION.sub(lambda m: f"loc {m[1]} {m[2] or ''};", body).split(";"):
            left = statement.strip("{} \t\n")
            while label := _LABEL.match(left):
                yield label[1] + ":"
                left = left[label.end() :]
            if declared := _REGISTERS.match(left):
                size = 1 if declared[1] == "pred" else int(declared[1][1:]) // 8
                self._declared |= {name.strip().split("<")[0]: size for name in declared[2].split(",")}
            elif by_table := re.match(r"brx\.idx\s+(%\w+),\s*([\w$]+)", left):
                self._declared["%is_target"] = 1
                for i, target in enumerate(tables[by_table[2]]):
                    yield f"setp.eq.u32 %is_target, {by_table[1]}, {i}"
                    yield f"@%is_target bra {target.strip()}"
            elif left and not left.startswith((".pragma", ".local", ".shared")):
                yield left

    def _encode(self, statements: list[str]) -> None:
        labels, n = {}, 0
        for statement in statements:
            labels[statement[:-1]] = n
            n += not statement.endswith(":") and not statement.startswith("loc ")
        lacking, line = set[str](), tuple[int, ...]()
        insns, operands = [], list[int]()
        for statement in statements:
            if statement.startswith("loc "):
                line = tuple(map(int, statement.split()[1:]))
            elif not statement.endswith(":"):
                negated, guard, name, rest = _STATEMENT.match(statement).groups()  # type: ignore[union-attr]
                if name.startswith("mov") and "{" in rest:
                    name += " unpack" if rest.startswith("{") else " pack"
                if (decoded := self._decode(name)) is None:
                    lacking.add(name)
                    continue
                op, letters, facts = decoded
                start, is_branch = len(operands), name.startswith("bra")
                if not is_branch:
                    operands += self._operands(statement, rest, letters, facts.get("size", 2))
                condition = self._register(guard) * (-1 if negated else 1) if guard else 0
                fields = (facts.get(field, 0) for field in INSN.names[1:7])  # type: ignore[index]
                insns.append(
                    (machine().ops[op][0], *fields, condition, labels[rest] if is_branch else 0, start)
                )
                self.lines.append(line)
        if lacking:
            raise PtxError(f"the machine lacks {', '.join(sorted(lacking))}")
        assert len(insns) < 1 << 16
        self._code, self._operand_array = np.array(insns, INSN), np.array(operands, np.uint32)
        self._code["operands"] = self._code["operands"] * 4 + self._operand_array.ctypes.data
        ends = list(accumulate(_up(32 * size, 64) for size in self._sizes))
        self._at, self._size_array = np.array([0, *ends[:-1]], np.uint32), np.array(self._sizes, np.uint8)
        self._image, self._undefined = np.zeros(ends[-1], np.uint8), np.full(len(ends), -1, np.int32)
        self._undefined[: len(SPECIALS)] = 0
        for (size, value), i in self._constants.items():
            self._undefined[i] = 0
            self._image[self._at[i] :][: 32 * size] = np.full(32, value, f"u{size}").view(np.uint8)

    def _decode(self, name: str) -> tuple[str, str, dict[str, int]] | None:
        """Return the machine's name for an instruction, its operands, and its types; None if it lacks it."""
        plain = _NO_MEANING.sub("", name)
        opcode, *parts = plain.split(".")
        types = [(int(part[1:]) // 8, part[0] == "s") for part in parts if _TYPE.match(part)]
        if opcode in ("ld", "st") and len(types) == 1:
            n = {"v2": 2, "v4": 4}.get(parts[1], 1)
            size, is_signed = types[0]
            facts = {"size": size, "n": n, "is_signed": int(is_signed)}
            if parts[0] == "param":
                return "ld.param", "?m", facts
            if len(parts) == 2 + (n > 1) and parts[0] in SPACES:
                facts["space"] = SPACES[parts[0]]
                self._note_access(facts["space"], n * size)
                return opcode, "?" * n + "m" if opcode == "ld" else "m" + "?" * n, facts
        if opcode == "cvt" and len(types) == len(parts) == 2 and not any(part[0] in "bf" for part in parts):
            (to_size, to_signed), (size, is_signed) = types
            return (
                "cvt integer",
                "??",
                {"size": size, "is_signed": is_signed, "to_size": to_size, "to_signed": to_signed},
            )
        if plain not in machine().ops:
            return None
        if opcode in ("ldmatrix", "atom"):
            self._note_access(*{"ldmatrix": (SHARED, 2), "atom": (GLOBAL, 4)}[opcode])
        return plain, machine().ops[plain][1], {}

    def _note_access(self, space: int, nbytes: int) -> None:
        self._grains[space] = min(self._grains[space], nbytes)

    def _operands(self, statement: str, rest: str, letters: str, nbytes: int) -> list[int]:
        """Return numbers of registers, and of each address its register and offset."""
        found = _OPERAND.findall(rest)
        if letters.startswith("4p") and "|" not in rest:
            found.insert(1, "_")
        if len(found) != len(letters):
            raise PtxError(f"{statement!r} has {len(found)} operands, not {len(letters)}")
        flat = []
        for text, letter in zip(found, letters, strict=True):
            if letter == "m":
                base, _, offset = (part.strip() for part in text[1:-1].partition("+"))
                start = self._params.get(base)
                flat += [
                    self._operand(base, 8) if start is None else 0,
                    (int(offset or 0) + (start or 0)) % (1 << 32),
                ]
                continue
            size = {"p": 1, "?": max(nbytes, 2)}.get(letter) or int(letter)
            flat.append(self._operand(text, size))
            if letter != "?" and self._sizes[flat[-1]] != size:
                raise PtxError(f"{statement!r}: {text} is of another size")
        return flat

    def _operand(self, text: str, size: int) -> int:
        """Return the register of an operand: a constant has one of its own."""
        if text == "_":
            self._declared[text := f"%_{size}"] = size
        if text[0] == "%" or text in self._declared:
            return self._register(text)
        number = _NUMBER.match(text)
        if number is None:
            value = self._symbols[text]
        else:
            sign, single, double, integer = number.groups()
            value = int(single or double, 16) if single or double else int(integer, 0) * (-1 if sign else 1)
        key = size, value % (1 << 8 * size) if size > 1 else value & 1
        if key not in self._constants:
            self._constants[key] = len(self._sizes)
            self._sizes.append(size)
        return self._constants[key]

    def _register(self, name: str) -> int:
        if name not in self._registers:
            self._registers[name] = len(self._sizes)
            self._sizes.append(self._declared.get(name) or self._declared[name.rstrip("0123456789")])
        return self._registers[name]

    # -- launches --------------------------------------------------------------------------------------

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: bytes,
        tensors: Sequence[Span],
        is_backward: bool = False,
        shared_nbytes: int = 0,
    ) -> None:
        """Run it as `cuLaunchKernel` would.

        Args:
            grid: Blocks.
            block: Threads of a block.
            arguments: The argument block.
            tensors: What may be touched.
            is_backward: Whether the last warps and blocks go first.
            shared_nbytes: Dynamic shared memory.

        Raises:
            PtxError: It did what it must not, or the launch is not one for it.
        """
        if len(arguments) != self.arguments_nbytes:
            raise PtxError(f"it takes {self.arguments_nbytes} bytes of arguments, not {len(arguments)}")
        if not 0 < np.prod(block) <= self._most:
            raise PtxError(f"it takes blocks of up to {self._most} threads, not {block}")
        named = [(span, f"the memory of tensor {i}") for i, span in enumerate(tensors)] + self._variables
        if self._dynamic is not None:
            begin = self._symbols[self._dynamic]
            named.append((Span(begin, begin + shared_nbytes, True, SHARED), self._dynamic))
        shared, local = _up(self._ends[SHARED] + shared_nbytes, 16), _up(self._ends[LOCAL], 16)
        firsts = {SHARED: 0, LOCAL: shared // self._grains[SHARED]}
        n_cells = firsts[LOCAL] + local // self._grains[LOCAL] * int(np.prod(block))
        watched, n_cells = _watched(tensors, n_cells, self._grains[GLOBAL])
        spans = np.array(
            [
                (s.begin, s.end, watched.get(s, firsts.get(s.space, NONE)), s.space, s.is_writable)
                for s, _ in named
            ],
            SPAN,
        )
        asked = _Launch(
            *(x.ctypes.data for x in (self._code, self._at, self._undefined, self._size_array, self._image)),
            arguments, spans.ctypes.data, n_cells, len(self._sizes), len(self._image), len(spans),
            shared, local, tuple(self._grains), grid, block, is_backward,
        )  # fmt: skip
        with _one_at_a_time:
            why = machine().launch(ctypes.byref(asked))
        if why:
            raise PtxError(re.sub(r"\{(\d+)\}", lambda m: named[int(m[1])][1], why.decode()))


def _watched(tensors: Sequence[Span], n_cells: int, grain: int) -> tuple[dict[Span, int], int]:
    """Give cells to memory that may be written, all those to one that overlap in 16 aligned bytes.

    Returns:
        For such spans the cell that address 0 would have; and how many cells there are now.
    """
    groups: list[list[Span]] = []
    end = 0
    for span in sorted(tensors):
        if not groups or span.begin // 16 * 16 >= end:
            groups.append([])
        groups[-1].append(span)
        end = max(end, _up(span.end, 16))
    firsts: dict[Span, int] = {}
    for group in groups:
        if any(span.is_writable for span in group):
            begin, end = group[0].begin // 16 * 16, _up(max(span.end for span in group), 16)
            firsts |= dict.fromkeys(group, n_cells - begin // grain)
            n_cells += (end - begin) // grain
    return firsts, n_cells
