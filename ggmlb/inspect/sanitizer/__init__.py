"""The sanitizer: finds unordered reads and writes (races).

ranges.py     the last write and reads of each byte of a buffer
watches.py    host memory that queued work reads, and that programs may change directly
sanitizer.py  the order of work by vector clocks, and the rules of accesses
"""

from ggmlb.inspect.sanitizer.sanitizer import Sanitizer, sanitize, start_sanitizer

__all__ = ["Sanitizer", "sanitize", "start_sanitizer"]
