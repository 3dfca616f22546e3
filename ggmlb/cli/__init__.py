"""The `ggmlb` command: devices, ops, test, bench, compare, generate, chat, show, quantize, embed, demo.

Each command is a module with one function, listed in `app.py`. At module level it imports only `typer`,
`ggmlb.core.errors`, `ggmlb.cli.frame` and `ggmlb.cli.plain`, and everything else in the function, so that
`--help` is fast and works without the extras.

Exit status: 0 done; 1 a ggmlb error, printed in one line (`--debug` shows the traceback); 2 wrong usage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: The arguments after the program's name; those of the process by default.
    """
    from ggmlb.cli.app import run

    return run(list(sys.argv[1:] if argv is None else argv))
