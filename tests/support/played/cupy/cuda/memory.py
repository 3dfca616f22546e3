"""The error of CuPy's pool."""


class OutOfMemoryError(MemoryError):
    pass
