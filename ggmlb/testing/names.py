"""Parsing of users' lists of names."""

from __future__ import annotations

import re


def device_names(text: str) -> list[str]:
    """Split a list of device names at commas outside brackets; `"CPU, Meta(A,B)"` gives two names."""
    parts = re.split(r",(?![^(]*\))", text)
    return [part.strip() for part in parts if part.strip()]
