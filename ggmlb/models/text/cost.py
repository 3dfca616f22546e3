"""Cost: what one token reads, copies and launches on each device, and how long that takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import add
from typing import NamedTuple

from ggmlb import Backend, Device, Op, Scheduler, Tensor
from ggmlb.models.rates import Rates
from ggmlb.models.text.config import TextConfig


class Cost(NamedTuple):
    """What a token costs the stream of a device, or of several that share its layers.

    Attributes:
        read: Bytes of the matrices that it multiplies by.
        kv_read: Bytes of the keys and values that attention reads, of a whole context.
        copied: Bytes that are copied to it from other memory, or between the devices that share its work.
        calls: Transfers of these.
        launches: Nodes that are computed.
        seconds: The time of all that, by the rates of the devices; 0 where these are not given.
    """

    read: int = 0
    kv_read: int = 0
    copied: int = 0
    calls: int = 0
    launches: int = 0
    seconds: float = 0.0

    def plus(self, other: Cost) -> Cost:
        """Return the sum of two costs."""
        return Cost._make(map(add, self, other))


class TokenCosts:
    """What the graph of a token costs, as a scheduler split it.

    Devices that share a product compute it at the same time: the slowest counts. Streams wait for each
    other, as they do for one token.

    Args:
        config: The model's sizes.
        rates: Of all devices; empty for no times.
    """

    def __init__(self, config: TextConfig, rates: Mapping[Device, Rates]) -> None:
        experts = config.experts
        self._share = 1.0 if experts is None else experts.n_used / experts.n
        self._rates = rates

    def of(self, scheduler: Scheduler) -> list[Cost]:
        """Return what the graph that was split last costs each stream."""
        found = [Cost()] * scheduler.n_backends
        for split in scheduler.splits:
            streams = split.backend.streams
            n = len(split.order)
            cost = found[split.backend_id].plus(Cost(launches=n, seconds=n * self._launch(streams)))
            for item in split.inputs:
                nbytes = round(item.nbytes * (self._share if item.has_experts else 1))
                cost = cost.plus(self._moved(nbytes, () if item.is_staged else item.backend.streams, streams))
            for node in split.nodes:
                for more in self._of_node(node, streams):
                    cost = cost.plus(more)
            found[split.backend_id] = cost
        return found

    def _of_node(self, node: Tensor, streams: tuple[Backend, ...]) -> Iterator[Cost]:
        if node.op is Op.FLASH_ATTN_EXT:
            for kv_read in (node.operand(1), node.operand(2)):
                yield Cost(kv_read=kv_read.nbytes, seconds=self._reading(kv_read, streams))
        elif node.op in (Op.MUL_MAT, Op.MUL_MAT_ID):
            weight, share = node.operand(0), self._share if node.op is Op.MUL_MAT_ID else 1.0
            yield Cost(read=round(weight.nbytes * share), seconds=share * self._reading(weight, streams))
            slices = _slices(weight)
            if len(streams) > 1:  # they share the weight's columns, and sum what each finds
                for _ in slices[1:] if slices[0].ne[0] < weight.ne[0] else ():
                    yield self._moved(node.nbytes, streams[:1], streams[1:2])
                    yield self._moved(node.nbytes, streams[1:2], streams[:1])
                return
            for rows in slices if len(slices) > 1 else ():  # of which another device sends its own
                helper = rows.placed("a cost").buft.device
                if helper is not streams[0].device:
                    for nbytes in (node.operand(1).nbytes, node.nbytes * rows.ne[1] // weight.ne[1]):
                        yield self._crossing(nbytes, (helper, streams[0].device))

    def _launch(self, streams: tuple[Backend, ...]) -> float:
        """The time of a further node [s]."""
        return max((self._rates[s.device].launch for s in streams if s.device in self._rates), default=0.0)

    def _reading(self, tensor: Tensor, streams: tuple[Backend, ...]) -> float:
        """The time in which devices read their parts of a tensor, at the same time [s]."""
        root, found = tensor.view_src or tensor, defaultdict[Device, float](float)
        slices = _slices(root)
        for part in slices:
            own = streams[0].device if len(slices) == 1 else part.placed("a cost").buft.device
            found[own] += part.nbytes * tensor.nbytes / root.nbytes
        return max((n / self._rates[d].read for d, n in found.items() if d in self._rates), default=0.0)

    def _moved(self, nbytes: int, sources: tuple[Backend, ...], targets: tuple[Backend, ...]) -> Cost:
        """The cost of a transfer from one stream's memory, or the host's, to that of each other stream."""
        cost = Cost()
        for target in targets:
            cost = cost.plus(self._crossing(nbytes, [s.device for s in (*sources[:1], target)]))
        return cost

    def _crossing(self, nbytes: int, ends: tuple[Device, ...] | list[Device]) -> Cost:
        """The cost of a transfer by way of the host, between devices."""
        apart = [self._rates[d] for d in ends if d in self._rates and not d.buffer_type.is_host]
        return Cost(copied=nbytes, calls=1, seconds=sum(rates.call + nbytes / rates.move for rates in apart))


def _slices(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors on one device each that hold a weight, or keys or values: itself, or its parts."""
    return (tensor,) if tensor.buffer is None else tensor.buffer.slices(tensor)
