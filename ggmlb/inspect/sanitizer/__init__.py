"""The sanitizer: finds reads and writes that nothing orders.

ranges.py     who last wrote and read each byte of a buffer
watches.py    host memory that queued work reads, and that programs may change unseen
sanitizer.py  which work comes before which, and the rules that an access must keep
"""

from ggmlb.inspect.sanitizer.sanitizer import Sanitizer, sanitize, start_sanitizer

__all__ = ["Sanitizer", "sanitize", "start_sanitizer"]
