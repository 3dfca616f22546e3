"""Functions on simulated cards: in a process of their own, because its driver stays."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import ggmlb.backends.cuda

T = TypeVar("T")


def on_played_cards(function: Callable[..., T], *args: Any, **options: Any) -> T:
    """Return what a function returns where `CUDA0` and `CUDA1` are played; graphs must have been replayed."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_played, function, args, options).result()


def _played(function: Callable[..., T], args: tuple[Any, ...], options: dict[str, Any]) -> T:
    from tests.support.host_driver import HostDriver

    driver = HostDriver(n_devices=2)
    ggmlb.backends.cuda.load_driver = lambda: driver
    found = function(*args, **options)
    assert driver.cards.counts["replay"], driver.cards.counts
    return found
