"""NCCL as CuPy binds it."""

from __future__ import annotations

from typing import Any

from ggmlb.core.dtypes import DType

from .._host import HOST

available = True

# Constants of CuPy's.
NCCL_FLOAT16 = 6
NCCL_FLOAT32 = 7
NCCL_BFLOAT16 = 9
NCCL_SUM = 0

_TYPES = {NCCL_FLOAT16: DType.F16, NCCL_FLOAT32: DType.F32, NCCL_BFLOAT16: DType.BF16}
_group: list[tuple[int, int, int, int]] | None = None


class NcclError(RuntimeError):
    pass


def groupStart() -> None:
    global _group
    assert _group is None
    _group = []


def groupEnd() -> None:
    """Queue the sums of all devices; the first one's tells how many of what."""
    global _group
    assert _group is not None
    calls, _group = _group, None
    if "sum" in HOST.fail:
        raise NcclError("a call of the group failed")
    collective: Any = HOST.collective([])
    collective.all_reduce([(place, stream) for place, *_, stream in calls], calls[0][1], _TYPES[calls[0][2]])


class NcclCommunicator:
    @staticmethod
    def initAll(devices: Any) -> list[NcclCommunicator]:
        return [NcclCommunicator() for _ in devices]

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        assert (sendbuf, op) == (recvbuf, NCCL_SUM)
        assert _group is not None, "one thread calls for all devices: in a group"
        if _group and "sum" in HOST.fail:
            raise NcclError("unhandled system error")
        _group.append((sendbuf, count, datatype, stream))

    def destroy(self) -> None:
        pass
