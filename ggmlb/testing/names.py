"""Parsing of users' lists of names."""

from __future__ import annotations

import re


def device_names(text: str) -> list[str]:
    """Split a comma-separated list of names; `"CPU, Meta(OpenCL0,OpenCL1)"` has two."""
    parts = re.split(r",(?![^(]*\))", text)
    return [part.strip() for part in parts if part.strip()]
