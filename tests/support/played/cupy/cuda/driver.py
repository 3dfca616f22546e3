"""CUDA's driver as CuPy binds it: a launch with its argument block."""

from __future__ import annotations

import ctypes

from ggmlb.backends.gpu import Launch

from .._host import FUNCTIONS, HOST, HostError
from .runtime import CUDARuntimeError

END, BUFFER, SIZE = 0, 1, 2
"""CU_LAUNCH_PARAM_*."""


class CUDADriverError(CUDARuntimeError):
    pass


def launchKernel(f: int, grid_dim_x: int, grid_dim_y: int, grid_dim_z: int, block_dim_x: int,
                 block_dim_y: int, block_dim_z: int, shared_mem_bytes: int, stream: int,
                 kernel_params: int, extra: int) -> None:  # fmt: skip
    kernel, defines, wg = FUNCTIONS[f]
    assert (block_dim_x, block_dim_y, block_dim_z) == (wg, 1, 1)
    assert (shared_mem_bytes, kernel_params) == (0, 0)
    kinds = (ctypes.c_void_p * 5).from_address(extra)
    assert (kinds[0], kinds[2], kinds[4] or END) == (BUFFER, SIZE, END)
    block = ctypes.string_at(kinds[1] or 0, ctypes.c_size_t.from_address(kinds[3] or 0).value)
    launch = Launch(kernel, defines, (), (grid_dim_x, grid_dim_y, grid_dim_z), wg)
    try:
        HOST.bind(launch, block, HOST.streams[stream].device)(stream)
    except HostError as error:
        raise CUDADriverError(error.status) from None
