"""Weights with rows on several devices, and products computed by the devices that hold the rows.

memory.py     the buffer type, and how rows are sharded
product.py    the devices' shares of a product, and the collection of results

Any backend can offer it: its main device supports the buffer type, calls `declines` here in
`Device.declines`, and computes each node with `is_split` by a `RowSplitProduct`, in its stream's order.
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
