"""The array rules over CuPy, for the few ops that have no kernel.

They run between CUDA graphs, not in them: CuPy allocates, and its BLAS refuses to be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ggmlb.backends.cpu.array.ops  # noqa: F401 (registers the reference rules)
from ggmlb.backends.common.workspace import Workspace
from ggmlb.backends.cpu.array.casts import Casts
from ggmlb.backends.cpu.array.lowering import Lowering
from ggmlb.backends.cpu.array.rules import RuleTable, reference
from ggmlb.backends.cuda.buffer import ALIGNMENT, CudaBuffer
from ggmlb.backends.cuda.work import allocate
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.common.workspace import Array
    from ggmlb.backends.cpu.array.views import View
    from ggmlb.backends.cuda.backend import CudaBackend
    from ggmlb.backends.cuda.work import Binder, Outside

OPS = frozenset({
    Op.RMS_NORM_BACK, Op.OUT_PROD, Op.SOFT_MAX_BACK, Op.WIN_PART, Op.WIN_UNPART, Op.GET_REL_POS,
    Op.ADD_REL_POS, Op.CROSS_ENTROPY_LOSS, Op.CROSS_ENTROPY_LOSS_BACK, Op.OPT_STEP_ADAMW, Op.OPT_STEP_SGD,
})  # fmt: skip
"""What is computed so: rules of few calls, all of which CuPy has, and none of which look at values."""


class _PlainCasts(Casts):
    """Of plain types only: blocks are read by kernels."""

    def can_load(self, dtype: DType) -> bool:
        """Not blocks."""
        return not dtype.is_quantized

    def can_store(self, dtype: DType) -> bool:
        """Not blocks."""
        return not dtype.is_quantized


_TABLES: dict[int, RuleTable] = {}


def _table(xp: Any) -> RuleTable:
    """Return the rules over an array namespace."""
    key = id(xp)
    if key not in _TABLES:
        _TABLES[key] = RuleTable(_PlainCasts(xp), reference)
    return _TABLES[key]


def declines(node: Tensor) -> str | None:
    """Return why the array rules do not compute a node."""
    if node.op not in OPS:
        return f"no array rule for {node.op} on CUDA"
    return _table(None).declines(node)


class ArrayLowering(Lowering):
    """Binds views of device memory.

    Args:
        backend: The stream that the steps are for.
        binder: The plan's; the nodes share scratch, which the plan owns.
    """

    def __init__(self, backend: CudaBackend, binder: Binder) -> None:
        self._backend = backend
        self._binder = binder
        self._driver = backend.device.driver
        self.xp = self._driver.xp
        super().__init__(_table(self.xp), Workspace(self._allocate))

    def _allocate(self, nbytes: int) -> Array:
        return self._binder.use(allocate(self._backend, max(nbytes, ALIGNMENT))).base[:nbytes]

    def step(self, node: Tensor) -> Outside:
        """Return the step of a node that is not declined; the stream is the library's current one in it."""
        steps, _ = self.lower([node])
        driver, index = self._driver, self._backend.device.index
        for t in (node, *node.src):
            if t is not None and isinstance(t.buffer, CudaBuffer):
                self._binder.use(t.buffer)

        def run(stream: int) -> None:
            with driver.current(stream, index):
                for step in steps:
                    step()

        return run

    def bind(self, view: View) -> Array:
        """An array over a device buffer, or over scratch."""
        return self._driver.view(view.buffer.base, view.shape, view.item, view.offset, view.strides)

    def address(self, view: View) -> int:
        """Where the first item lies."""
        memory = view.buffer
        start = memory.address if isinstance(memory, CudaBuffer) else self._driver.array_address(memory.base)
        return start + view.offset
