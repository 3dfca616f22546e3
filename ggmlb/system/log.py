"""Log records: backends loaded, devices opened, kernels compiled, plans made, fallbacks taken, with times.

They go to loggers below `ggmlb` of the standard library's `logging`, at levels INFO and DEBUG: nothing is
shown unless the program configures logging, or `GGMLB_LOG` names a level (`GGMLB_LOG=debug`), which shows
records on standard error. Problems are `warnings` instead, which
`logging.captureWarnings(True)` turns into records.

`logging` takes 10 ms to import, so ggmlb imports it for `GGMLB_LOG` only: what happens before the
program imports it leaves no record.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

from ggmlb.core.errors import shown
from ggmlb.system import env

DEBUG: Final = 10
INFO: Final = 20


def is_enabled(area: str, level: int) -> bool:
    """Return whether an area (logger below `ggmlb`) logs a level, so that costly records need not be made."""
    logging = sys.modules.get("logging")
    return logging is not None and logging.getLogger(f"ggmlb.{area}").isEnabledFor(level)


def record(area: str, level: int, message: str, *args: object) -> None:
    """Write a log record of an area, a logger below `ggmlb`.

    Args:
        area: The logger, below `ggmlb`: `devices`, `kernels`, `plans`, `scheduler`.
        level: `DEBUG` or `INFO`.
        message: Text with `%` fields, filled in only if it is shown.
        args: Values of the fields; control characters of texts are escaped.
    """
    if is_enabled(area, level):
        shown_args = tuple(shown(arg) if isinstance(arg, str) else arg for arg in args)
        sys.modules["logging"].getLogger(f"ggmlb.{area}").log(level, message, *shown_args, stacklevel=2)


@contextmanager
def timed(area: str, level: int, message: str, *args: object) -> Iterator[None]:
    """Context manager that logs `message % args` and its body's duration or error, to the logger `area`."""
    start = perf_counter()
    try:
        yield
    except Exception as error:
        record(area, level, f"{message} failed: %s: %s", *args, type(error).__name__, str(error))
        raise
    record(area, level, f"{message} in %.1f ms", *args, 1e3 * (perf_counter() - start))


def show(level: str) -> None:
    """Show log records of a level and above on standard error.

    Raises:
        ValueError: There is no such level.
    """
    import logging

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger: Any = logging.getLogger("ggmlb")
    logger.setLevel(level.upper())
    logger.addHandler(handler)


def _show_wanted() -> None:
    """Show the records that `GGMLB_LOG` asks for."""
    if level := env.text("GGMLB_LOG"):
        try:
            show(level)
        except ValueError:
            warnings.warn(
                f"GGMLB_LOG is {shown(level)!r}, which is no level; give debug, info, warning or error",
                RuntimeWarning,
                stacklevel=2,
            )


_show_wanted()
