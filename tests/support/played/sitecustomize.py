"""For a process with this folder first on its path: CuPy over a played driver."""

from tests.support.played_libcuda import library

library()  # before CuPy looks for it

from tests.support.played_cupy import install  # noqa: E402

install()
