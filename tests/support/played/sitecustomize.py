"""For a process with this folder first on its path: simulated cards."""

from tests.support.played_libcuda import load

load("libcuda.so.1")  # before CuPy looks for it

from tests.support.played_cupy import install  # noqa: E402

install()
