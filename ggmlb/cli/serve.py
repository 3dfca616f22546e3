"""`ggmlb serve`: an HTTP server with OpenAI's API."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from ggmlb.cli import plain
from ggmlb.cli.model_options import OpenModel, takes_model
from ggmlb.cli.options import count
from ggmlb.core.errors import ModelError


@takes_model
def serve(
    open_model: OpenModel,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at (default: only this machine can reach it).")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port; 0: a free one.", min=0, max=65535)] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar="GGMLB_API_KEY", help="Key that clients must send as bearer token."),
    ] = None,
    alias: Annotated[
        str | None, typer.Option("--alias", help="Name of the model for clients (default: the file's).")
    ] = None,
    max_requests: Annotated[
        int | None, count("--max-requests", help="Answers under way at once (default: 256).")
    ] = None,
    max_body: Annotated[
        int | None, count("--max-body", help="Largest body of a request in bytes (default: 8 MiB).")
    ] = None,
) -> None:
    """Serve a GGUF model with OpenAI's API, and a page to chat in.

    Ctrl-C or SIGTERM stops it; running answers end first.

    Examples:
      ggmlb serve -m model.gguf
      ggmlb serve -m model.gguf --host 0.0.0.0 --port 8000 --api-key secret -c 16384
    """
    try:
        from ggmlb import serve as server
    except ImportError as error:
        raise ModelError(f"the server needs {error.name}: pip install 'ggmlb[server]'") from error
    default = server.Limits()
    limits = server.Limits(
        n_requests=max_requests or default.n_requests, body_nbytes=max_body or default.body_nbytes
    )
    if not api_key and host not in server.LOOPBACK:
        plain.note(
            f"anyone who can reach {host} may use this model, and so may web pages in their browsers (DNS "
            "rebinding); --api-key asks for a key"
        )
    with open_model() as model:
        server.serve(
            model, host, port, name=alias, api_key=api_key, limits=limits,
            on_start=lambda url: plain.echo(f"{model.file.path.name} at {url} (API: {url}/v1)", sys.stderr),
        )  # fmt: skip
