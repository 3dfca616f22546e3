"""The `ggmlb` command: devices, ops, test, bench, compare, generate, chat, show, quantize, embed, demo.

Each command is a module with one function, listed in `app.py`. At module level it imports only `typer`,
`ggmlb.core.errors`, `ggmlb.cli.frame` and `ggmlb.cli.plain`, and everything else in the function, so that
`--help` is fast and works without the extras.

Exit status: 0 done; 1 a ggmlb error, printed in one line (`--debug` shows the traceback); 2 wrong usage.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ggmlb.cli import plain


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status.

    Args:
        argv: The arguments after the program's name; those of the process by default.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        import rich  # noqa: F401 (asked for here, so that no command has to)
        import typer  # noqa: F401
    except ModuleNotFoundError as missing:
        is_devices = args[:1] == ["devices"]
        if is_devices:  # the one command that tells what to install must not need anything
            try:
                plain.devices(args[1:])
                sys.stdout.flush()
            except BrokenPipeError:  # `| head`
                plain.drop_output()
                return 1
        what = "the rest of the command line" if is_devices else "the command line"
        needs = f"{what} needs the package {missing.name!r}; install it with"
        plain.echo(f"ggmlb: {needs}: pip install 'ggmlb[cli]'", sys.stderr)
        return 0 if is_devices else 1
    from ggmlb.cli.app import run

    return run(args)
