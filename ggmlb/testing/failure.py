"""Failures of cases: the traceback into the device's own code, and the case as a program to paste."""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import ggmlb
from ggmlb.core.errors import ArgumentError, one_line, shown
from ggmlb.system import env

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ggmlb.testing.cases import KitCase

DEBUG: Final = "GGMLB_DEBUG"
"""Environment variable: 1 shows the frames of ggmlb in the kit's tracebacks, too."""

_PACKAGE: Final = str(Path(ggmlb.__file__).parent) + os.sep
_KIT: Final = str(Path(__file__).parent) + os.sep
_BACKENDS: Final = _PACKAGE + "backends" + os.sep


class WrongValuesError(AssertionError):
    """A device's values are not those of the reference: NumPy arrays `got` and `expected`."""

    def __init__(self, told: str, got: npt.NDArray[Any], expected: npt.NDArray[Any]) -> None:
        super().__init__(told)
        self.got: npt.NDArray[np.generic] = got
        self.expected: npt.NDArray[np.generic] = expected


def traceback_of(error: BaseException) -> str:
    """Return an error's traceback as text, from the device's own code on.

    Frames of the kit and of ggmlb's interfaces above the device's code are left out, unless `GGMLB_DEBUG`
    is set.
    """
    told = traceback.TracebackException.from_exception(error, compact=True)
    if not env.flag(DEBUG, default=False):
        told.stack = traceback.StackSummary.from_list(_own_frames(told.stack))
    return shown("".join(told.format()).rstrip())


def raised(error: BaseException) -> str:
    """Return an error as one line, with the last line of the device's code in its traceback."""
    frames = _own_frames(traceback.extract_tb(error.__traceback__))
    if not frames:
        return one_line(error)
    home = str(Path(frames[0].filename).parent)
    last = next(frame for frame in reversed(frames) if frame.filename.startswith(home))
    file = Path(last.filename)
    return f"{one_line(error)} ({file.parent.name}/{file.name}:{last.lineno}, in {last.name})"


def own_traceback(error: BaseException) -> TracebackType | None:
    """Return an error's traceback from the device's own code on."""
    found = error.__traceback__
    frames = traceback.extract_tb(found)
    for _ in range(len(frames) - len(_own_frames(frames))):
        found = None if found is None else found.tb_next
    return found


def location(error: BaseException) -> tuple[str, int] | None:
    """Return the file and line of the device's code where an error was raised, or passed through."""
    frames = _own_frames(traceback.extract_tb(error.__traceback__))
    own = [f for f in frames if not f.filename.startswith((_PACKAGE, "<"))] or frames
    home = str(Path(own[0].filename).parent) if own else ""
    return next(((f.filename, f.lineno or 1) for f in reversed(own) if f.filename.startswith(home)), None)


def _own_frames(frames: Sequence[traceback.FrameSummary]) -> Sequence[traceback.FrameSummary]:
    """Return the frames from the device's code on; where there are none, those outside of the kit, or all."""
    names = [frame.filename for frame in frames]
    above = (
        [name.startswith((_PACKAGE, "<")) and not name.startswith(_BACKENDS) for name in names],
        [name.startswith(_KIT) for name in names],
    )
    for is_above in above:
        if not all(is_above):
            return frames[is_above.index(False) :]
    return frames


# -- programs to paste ---


def program_of(device: str, case: KitCase) -> str:
    """Return a Python program that computes a case on a device and on the CPU, and prints the difference."""
    leafs = {f"${leaf.name}": leaf.name for leaf in case.program.leafs}
    names = ", ".join(leafs.values()) + ("," if len(leafs) == 1 else "")
    lines = [
        f"    {leaf.name} = ctx.new_tensor({leaf.dtype.name.lower()!r}, {_text(_trimmed(leaf.ne))})"
        for leaf in case.program.leafs
    ]
    modules = set()
    for step in case.program.steps:
        for arg in step.args:
            if callable(arg) and not isinstance(arg, type):
                modules.add(f"from {arg.__module__} import {arg.__name__}")
        call = f"ctx.{step.fn}({', '.join(_text(arg) for arg in step.args)})"
        lines.append(f"    {call}" if step.out is None else f"    {step.out} = {call}")
    results = ", ".join(step.out for step in case.program.steps if step.out is not None)
    data = [
        f"        for x, data in zip(({names}), leaf_data({case.family!r}, {case.id!r})):",
        "            x.set(data)",
    ]
    return "\n".join(
        [
            "import ggmlb",
            "from ggmlb.testing.failure import leaf_data",
            *sorted(modules),
            "",
            "def computed(device):",
            "    ctx = ggmlb.Context()",
            *lines,
            "    with ggmlb.init_by_name(device) as stream, ggmlb.alloc_ctx_tensors(ctx, stream):",
            *(data if leafs else ()),
            f"        stream.graph_compute(ggmlb.Graph().build_forward_expand({results}))",
            f"        return {case.program.outputs[0]}.to_numpy()",
            "",
            f"print(computed({device!r}) - computed('CPU'))",
        ]
    )


def run_again(device: str, mode: str, family: str, case: str, memory: str = "") -> str:
    """Return a Python program that lets the kit run one case."""
    where = f", memory={memory!r}" if memory else ""
    return "\n".join(
        [
            "from ggmlb.testing.run import FamilyTask, Runner",
            "",
            "with Runner() as runner:",
            f"    task = FamilyTask({device!r}, {mode!r}, {family!r}, ({case!r},){where})",
            "    for result in runner.run(task):",
            "        print(result.outcome.value, result.reason, result.detail)",
        ]
    )


def leaf_data(family: str, case: str) -> list[npt.NDArray[np.uint8]]:
    """Return the bytes of each leaf of a case of the kit, by its family and id.

    Raises:
        ArgumentError: The family has no such case.
    """
    import numpy as np

    from ggmlb.testing.cases import FAMILIES, cases_of

    found = [c for c in cases_of(family) if c.id == case] if family in FAMILIES else []
    if not found:
        raise ArgumentError(f"the kit has no case {case!r} of family {family!r}; 'ggmlb test --list' has all")
    return [np.frombuffer(leaf.data, np.uint8) for leaf in found[0].program.leafs]


def _trimmed(ne: tuple[int, ...]) -> tuple[int, ...]:
    """Return extents without trailing ones."""
    return ne[: max((i + 1 for i, n in enumerate(ne) if n != 1), default=1)]


def _text(arg: Any) -> str:
    """Return an argument as Python text."""
    if isinstance(arg, str):
        return arg[1:] if arg.startswith("$") else repr(arg)
    if isinstance(arg, Enum):
        return f"ggmlb.{type(arg).__name__}.{arg.name}"
    if isinstance(arg, list | tuple):
        inner = ", ".join(_text(item) for item in arg)
        return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' if len(arg) == 1 else ''})"
    return str(arg.__name__) if callable(arg) else repr(arg)
