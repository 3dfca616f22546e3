"""Cost: bytes and launches of one token on each device, and the predicted time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from operator import add
from typing import NamedTuple

from ggmlb import Backend, Device, Op, Scheduler, Tensor
from ggmlb.models.rates import Rates
from ggmlb.models.text.config import TextConfig


class Cost(NamedTuple):
    """Bytes read and copied, nodes and time of one token on a device (a meta device counts as one).

    Attributes:
        read: Bytes of weights read.
        kv_read: Bytes of the KV cache read, for a full context.
        copied: Bytes copied to it from other memory, or between devices that share layers.
        calls: Number of transfers.
        launches: Number of computed nodes.
        seconds: Predicted time, by the rates of the devices; 0 without rates.
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
    """Computes the cost (bytes, nodes, time) of one token on each stream from a scheduler's splits.

    Devices that share a product compute it at the same time: the slowest counts. Streams wait for each
    other, as they do for one token.

    Args:
        config: The model's sizes.
        rates: Rates of all devices; empty for no times.
    """

    def __init__(self, config: TextConfig, rates: Mapping[Device, Rates]) -> None:
        experts = config.experts
        self._share = 1.0 if experts is None else experts.n_used / experts.n
        self._rates = rates

    def of(self, scheduler: Scheduler) -> list[Cost]:
        """Return the cost of the scheduler's last graph, which computes one token, on each stream."""
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
            for part in (node.operand(1), node.operand(2)):
                yield Cost(kv_read=part.nbytes, seconds=self._reading(part, streams))
        elif node.op in (Op.MUL_MAT, Op.MUL_MAT_ID):
            weight, share = node.operand(0), self._share if node.op is Op.MUL_MAT_ID else 1.0
            yield Cost(read=round(weight.nbytes * share), seconds=share * self._reading(weight, streams))
            slices = _slices(weight)
            if len(streams) > 1:  # the weight's columns are split: partial results are summed
                for _ in slices[1:] if slices[0].ne[0] < weight.ne[0] else ():
                    yield self._moved(node.nbytes, streams[:1], streams[1:2])
                    yield self._moved(node.nbytes, streams[1:2], streams[:1])
                return
            for rows in slices if len(slices) > 1 else ():  # rows of other devices
                helper = rows.placed("a cost").buft.device
                if helper is not streams[0].device:
                    for nbytes in (node.operand(1).nbytes, node.nbytes * rows.ne[1] // weight.ne[1]):
                        yield self._crossing(nbytes, (helper, streams[0].device))

    def _launch(self, streams: tuple[Backend, ...]) -> float:
        """Return the launch time of a node [s]."""
        return max((self._rates[s.device].launch for s in streams if s.device in self._rates), default=0.0)

    def _reading(self, tensor: Tensor, streams: tuple[Backend, ...]) -> float:
        """Return the time in which devices read their parts of a tensor, in parallel [s]."""
        root, found = tensor.view_src or tensor, defaultdict[Device, float](float)
        slices = _slices(root)
        for part in slices:
            own = streams[0].device if len(slices) == 1 else part.placed("a cost").buft.device
            found[own] += part.nbytes * tensor.nbytes / root.nbytes
        return max((n / self._rates[d].read for d, n in found.items() if d in self._rates), default=0.0)

    def _moved(self, nbytes: int, sources: tuple[Backend, ...], targets: tuple[Backend, ...]) -> Cost:
        """Return the cost of a transfer from one stream's memory, or the host's, to each other stream."""
        cost = Cost()
        for target in targets:
            cost = cost.plus(self._crossing(nbytes, [s.device for s in (*sources[:1], target)]))
        return cost

    def _crossing(self, nbytes: int, ends: tuple[Device, ...] | list[Device]) -> Cost:
        """Return the cost of a transfer between devices, through the host."""
        apart = [self._rates[d] for d in ends if d in self._rates and not d.buffer_type.is_host]
        return Cost(copied=nbytes, calls=1, seconds=sum(rates.call + nbytes / rates.move for rates in apart))


def _slices(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the slices of a tensor, each on one device; the tensor itself if it is not cut."""
    return (tensor,) if tensor.buffer is None else tensor.buffer.slices(tensor)
