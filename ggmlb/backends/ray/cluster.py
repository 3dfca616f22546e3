"""Cluster: a connection to the machines of a Ray cluster, whose devices it registers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from ggmlb.backends.ray import RayReg, backend_reg
from ggmlb.backends.ray.files import SharedFiles
from ggmlb.backends.ray.node import versions
from ggmlb.core.errors import ArgumentError, BackendUnavailable, Error, RegistryError, one_line
from ggmlb.core.lifetime import Closeable
from ggmlb.interface import Device, registry

if TYPE_CHECKING:
    from ggmlb.backends.ray.link import Link

START_S: Final = 120.0
"""Time limit for a machine to start its actor [s]."""

_open: list[Cluster] = []


class Cluster(Closeable):
    """A connection to a Ray cluster; as a context manager it is closed on exit.

    Attributes:
        reg: The registry entry of its devices.
    """

    def __init__(self, reg: RayReg, actors: Mapping[str, Any], links: Sequence[Link], is_ours: bool) -> None:
        self.reg = reg
        self._actors = dict(actors)
        self._links = tuple(links)
        self._is_ours = is_ours
        self._is_open = True

    @property
    def devices(self) -> Sequence[Device]:
        """The devices of all machines, machine by machine; empty after `close`."""
        return tuple(self.reg.found)

    def close(self) -> None:
        """End the actors, which frees their memory; no effect if already closed."""
        import ray

        if not self._is_open:
            return
        self._is_open = False
        _open.remove(self)
        for link in self._links:
            link.end_progress()
        with suppress(RegistryError):  # the user may have unloaded it
            registry.unload(self.reg)
        self.reg.found.clear()
        if ray.is_initialized():
            for actor in self._actors.values():
                ray.kill(actor)
            if self._is_ours:
                ray.shutdown()

    def __repr__(self) -> str:
        return f"<Cluster {', '.join(device.name for device in self.devices)}>"


def connect(address: str, names: Sequence[str] | None, shared: Sequence[str]) -> Cluster:
    """Start a Ray actor per machine, register devices (`names` or all); `shared`: folders on all machines."""
    if not isinstance(address, str) or not address:
        raise ArgumentError(f"connect: address is {address!r}; give a string: 'auto', 'local' or 'HOST:PORT'")
    for what, texts in (("devices", () if names is None else names), ("shared", shared)):
        if isinstance(texts, str) or not (
            isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
        ):
            raise ArgumentError(f"connect: {what} is {texts!r}; give a list of strings")
    # In a notebook Ray warns of missing ipywidgets, by log and warning, for displays that are not used.
    logging.getLogger("ray.widgets").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import ray
    except ImportError as error:
        raise BackendUnavailable(f"Ray cannot be imported ({error}): pip install 'ggmlb[ray]'") from error
    from ggmlb.backends.ray.device import RayDevice
    from ggmlb.backends.ray.link import Link

    if _open:
        raise RegistryError(f"connect: already connected, {_open[0]!r}; close() it first")
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            ray.init(
                address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise BackendUnavailable(
                f"no Ray cluster at {address!r}, or it needs another RAY_AUTH_TOKEN: {one_line(error)}; "
                "start one with 'ray start --head', or use connect('local')"
            ) from error
    actors: dict[str, Any] = {}
    links: list[Link] = []
    reg, files = backend_reg(), SharedFiles(shared)
    reg.found.clear()
    try:
        for i, machine in enumerate(_machines()):
            actors[f"node{i}"] = _start(machine, names)
        started = [actor.start.remote(versions(), names, files.folders) for actor in actors.values()]
        for (node, actor), answer in zip(actors.items(), started, strict=True):
            links.append(link := Link(actor, node, files))
            for facts in _facts(node, answer):
                reg.found.append(RayDevice(reg, link, node, facts))
        registry.load(f"{backend_reg.__module__}:{backend_reg.__name__}")
    except BaseException:
        reg.found.clear()
        for actor in actors.values():
            ray.kill(actor)
        if is_ours:
            ray.shutdown()
        raise
    cluster = Cluster(reg, actors, links, is_ours)
    _open.append(cluster)
    return cluster


def _machines() -> list[Mapping[str, Any]]:
    """Return Ray's record of each living machine: this one first, the others by address."""
    import ray

    own = ray.get_runtime_context().get_node_id()
    alive = [machine for machine in ray.nodes() if machine["Alive"]]
    return sorted(alive, key=lambda m: (m["NodeID"] != own, m["NodeManagerAddress"], m["NodeID"]))


def _start(machine: Mapping[str, Any], names: Sequence[str] | None) -> Any:
    """Start the actor of a machine; reserve all its GPUs, unless `names` has no GPU."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from ggmlb.backends.ray.actor import WATCH, NodeActor

    wants_gpus = names is None or any(name.upper().startswith(("CUDA", "OPENCL")) for name in names)
    actor: Any = ray.remote(concurrency_groups={WATCH: 1})(NodeActor)
    return actor.options(
        num_cpus=0,
        num_gpus=machine["Resources"].get("GPU", 0) if wants_gpus else 0,
        max_restarts=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False),
    ).remote()


def _facts(node: str, answer: Any) -> list[Mapping[str, Any]]:
    """Wait for an actor to start; return the properties of its devices.

    Raises:
        BackendUnavailable: It does not start.
        Error: An error of `NodeActor.start`.
    """
    import ray
    from ray import exceptions

    try:
        facts: list[Mapping[str, Any]] = ray.get(answer, timeout=START_S)
        return facts
    except exceptions.GetTimeoutError:
        raise BackendUnavailable(
            f"{node} has not started within {START_S:.0f} s; see 'ray status' whether its GPUs are in use"
        ) from None
    except exceptions.RayError as error:
        cause: Any = getattr(error, "cause", None)
        while isinstance(cause, exceptions.RayTaskError):
            cause = cause.cause
        if isinstance(cause, Error):
            raise cause from None
        raise BackendUnavailable(f"{node} cannot start its actor: {one_line(error)}") from None
