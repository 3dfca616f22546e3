"""For a process with this folder first on its path: CuPy over a played driver."""

from tests.support.played_cupy import install

install()
