"""The reference rules, one family of ops per module; importing this package registers them all."""

from ggmlb.backends.array.ops import binary, norm, unary

__all__ = ["binary", "norm", "unary"]
