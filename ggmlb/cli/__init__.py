"""The `ggmlb` command line; `app.COMMANDS` lists the commands.

Each command is a module with one function, listed in `app.py`. At module level it imports only `typer`,
`ggmlb.core.errors`, `ggmlb.cli.frame` and `ggmlb.cli.plain`, and everything else in the function, so that
`--help` is fast and works without the extras.

Exit status: 0 done; 1 a ggmlb error, printed in one line (`--debug` shows the traceback); 2 wrong usage;
4 no backend has a device of that name.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from typing import Final

NEW_OBJECTS: Final = 200_000
"""New objects between two collections of garbage; at Python's 700, a start collects 150 times for nothing."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: The arguments after the program's name; those of the process by default.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed, as by `>&-`: no file that is opened may take its number
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    gc.set_threshold(NEW_OBJECTS)
    atexit.register(gc.freeze)  # else the interpreter's end goes through all objects, several times
    from ggmlb.cli.app import run

    return run(list(sys.argv[1:] if argv is None else argv))
