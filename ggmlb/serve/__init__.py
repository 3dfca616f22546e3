"""An HTTP server for a text model, with OpenAI's API."""

from ggmlb.serve.server import LOOPBACK, Limits, create_app, serve

__all__ = ["LOOPBACK", "Limits", "create_app", "serve"]
