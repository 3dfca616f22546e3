"""Weights whose rows lie on several devices, and products that are computed where the rows are.

memory.py     the buffer type, and how rows are sharded
product.py    what each device computes of a product, and how results come together

Any backend may offer it: all is done through the interfaces. The backend whose device is the main one
supports the buffer type, declines what `declines` does, and lets a `RowSplitProduct` compute what `is_split`
says, in its stream's order.
"""

from ggmlb.parallel.row_split.memory import SplitBuffer, SplitBufferType, split_buffer_type
from ggmlb.parallel.row_split.product import Helpers, RowSplitProduct, declines, is_split

__all__ = [
    "Helpers",
    "RowSplitProduct",
    "SplitBuffer",
    "SplitBufferType",
    "declines",
    "is_split",
    "split_buffer_type",
]
