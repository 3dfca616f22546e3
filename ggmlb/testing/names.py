"""Lists of names, as users write them."""

from __future__ import annotations

import re


def device_names(text: str) -> list[str]:
    """Return the names in a list: `"CPU, Meta(OpenCL0,OpenCL1)"` has two."""
    parts = re.split(r",(?![^(]*\))", text)
    return [part.strip() for part in parts if part.strip()]
