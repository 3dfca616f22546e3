"""Holding up a CUDA stream, so that what runs ahead of it shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ggmlb.backends.cuda.backend import CudaBackend

SPIN = r"""
extern "C" __global__ void spin(long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles) { }
}
"""


def hold_up(backend: CudaBackend, milliseconds: int = 30) -> None:
    """Keep the stream busy. The played driver's streams need no holding up: they run when waited for."""
    driver = backend.device.driver
    if driver.xp.__name__ == "numpy":
        return
    cupy = driver.xp
    kernel = cupy.RawKernel(SPIN, "spin")
    with backend.device.on(), driver.current(backend.stream.handle, backend.device.index):
        kernel((1,), (1,), (cupy.int64(milliseconds * 2_000_000),))
