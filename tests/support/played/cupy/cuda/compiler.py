"""The error of CuPy's compiler."""


class CompileException(Exception):
    def __str__(self) -> str:
        return str(self.args[0])
