"""The list of commands, and their error handling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import console
from ggmlb.core.errors import ArgumentError, Error, one_line, shown

COMMANDS: Final = (
    "devices", "ops", "test", "bench", "compare", "diff", "generate", "fit", "chat", "serve", "perplexity",
    "show", "quantize", "embed", "demo", "env", "new-backend",
)  # fmt: skip
"""Each is a function in the module of its name, with `_` for `-`."""

KEPT: Final = {
    "bench": "devices not measured to the end are left out",
    "generate": "the text so far is above; with --json, nothing is printed",
    "quantize": "the new file was not written, and the old one is as it was",
    "embed": "no file was written",
}
"""Message at Ctrl-C about what was written, for commands that print or write before their end."""


EXIT_STATUS: Final = (
    "Exit status: 0 done; 1 failed; 2 wrong usage; 4 no backend has a device of that name; "
    "130 stopped by Ctrl-C."
)


def _version(asked: bool) -> None:
    if asked:
        from ggmlb import __version__

        plain.echo(f"ggmlb {__version__}")
        raise typer.Exit


def ggmlb(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Show the traceback of an error, and of failing cases; allowed anywhere on the line.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Hide progress and notes; allowed anywhere on the line.")
    ] = False,
) -> None:
    """One compute graph over many devices: ggml's backend layer for Python.

    Examples:
      ggmlb devices                          list the devices
      ggmlb test -d OpenCL0                  test a device against the CPU
      ggmlb generate -m model.gguf -p Once   generate text
      ggmlb serve -m model.gguf              answer OpenAI's API and a chat page
      ggmlb bench                            measure devices
      ggmlb diff -d CPU,OpenCL0 model.py:build   find the first node that differs
    """


def application(args: Sequence[str]) -> typer.Typer:
    """Return the command line with the requested command, or with all if none is given."""
    app = typer.Typer(
        name="ggmlb",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(ggmlb)
    asked = next((arg for arg in args if not arg.startswith("-")), "")
    for name in [asked] if asked in COMMANDS else COMMANDS:
        function = name.replace("-", "_")
        command = getattr(import_module(f"ggmlb.cli.{function}"), function)
        has_own = "Exit status:" in (command.__doc__ or "")
        app.command(name, epilog=None if has_own else EXIT_STATUS)(_stoppable(command))
    return app


def _stoppable(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command report at Ctrl-C what it leaves, and exit with status 130, as shells do."""

    @wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except KeyboardInterrupt:
            left = KEPT.get(command.__name__, "nothing was written")
            plain.echo(f"\nggmlb: stopped by Ctrl-C: {left}", sys.stderr)
            raise typer.Exit(130) from None

    return run


def run(args: Sequence[str]) -> int:
    """Run one command and return the exit status; ggmlb's errors become one line on stderr."""
    debug = "--debug" in args
    if debug:
        plain.show_tracebacks()
    if "--quiet" in args:
        plain.be_quiet()
    command: Any = typer.main.get_command(application(args))
    try:
        try:
            for arg in args:
                text = arg.encode(errors="replace").decode()  # names of files need not be UTF-8
                if shown(text) != text:  # it would stand in the messages of typer, which sends it as it is
                    raise ArgumentError(f"the argument {arg} holds a control character; leave it out")
            command.main([arg for arg in args if arg not in ("--debug", "--quiet")], prog_name="ggmlb")
        finally:
            sys.stdout.flush()
    except Error as error:
        if debug:
            raise
        return _failed(f"ggmlb: {error}", _status(error))
    except OSError as error:  # of a file that our commands have no own words for, as a full standard output
        if debug:
            raise
        if error.filename is None:
            plain.drop_output()
        where = "the output cannot be written" if error.filename is None else error.filename
        return _failed(f"ggmlb: {where}: {error.strerror or error}")
    except Exception as error:  # a bug: the traceback is shown with --debug
        if debug:
            raise
        told = one_line(error)
        return _failed(
            f"ggmlb: this should not happen: {told}; see the traceback with --debug, and please report it"
        )
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else int(done.code is not None)
    return 0


def _status(error: Error) -> int:
    from ggmlb.testing.devices import UnknownDeviceError
    from ggmlb.testing.results import SOME_FAILED, UNKNOWN_DEVICE

    return UNKNOWN_DEVICE if isinstance(error, UnknownDeviceError) else SOME_FAILED


def _failed(line: str, status: int = 1) -> int:
    console(sys.stderr).print(line, style="red", markup=False, soft_wrap=True)
    return status
