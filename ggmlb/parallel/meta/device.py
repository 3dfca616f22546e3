"""The meta device: several devices that compute each node together (tensor parallelism)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ggmlb.core.arguments import alias, checked
from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import ArgumentError
from ggmlb.core.placement import placement_clock
from ggmlb.core.sharding import MIRRORED, PARTIAL
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Backend, BackendReg, BufferType, Caps, Device
from ggmlb.parallel.meta.backend import MetaBackend
from ggmlb.parallel.meta.buffer import MetaBuffer, MetaBufferType
from ggmlb.parallel.meta.layout import slices_of_view
from ggmlb.parallel.meta.state import MAX_DEVICES, outcome, whole

if TYPE_CHECKING:
    from ggmlb.core.sharding import ShardOutcome, SplitState

    GetSplitState = Callable[[Tensor], SplitState]
alias("GetSplitState", "Callable")


class MetaDevice(Device):
    """Devices that compute each node together (tensor parallelism).

    `get_split_state` shards the weights; the shard rules in the ops' records (`ggmlb.core.ops.SPECS`)
    derive how results are sharded.

    Attributes:
        devices: The simple devices.
        get_split_state: Returns the split state of a weight.
        given: The states of placed weights.
    """

    type = DeviceType.META

    def __init__(self, devices: Sequence[Device], get_split_state: GetSplitState) -> None:
        self.devices = tuple(devices)
        self.get_split_state = get_split_state
        self.given: weakref.WeakKeyDictionary[Tensor, SplitState] = weakref.WeakKeyDictionary()
        self._states: weakref.WeakKeyDictionary[Tensor, SplitState] = weakref.WeakKeyDictionary()
        self._known_at = -1
        self._buffer_type: Callable[[], MetaBufferType | None] = lambda: None
        self._reg = MetaReg(self)

    @property
    def name(self) -> str:
        """`Meta(OpenCL0,OpenCL1)`."""
        return f"Meta({','.join(d.name for d in self.devices)})"

    @property
    def description(self) -> str:
        """The devices' descriptions in one text, such as `Meta(first,second)`."""
        return f"Meta({','.join(d.description for d in self.devices)})"

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total memory, each summed over all devices [bytes]."""
        free, total = zip(*(d.memory for d in self.devices), strict=True)
        return sum(free), sum(total)

    @property
    def caps(self) -> Caps:
        """Capabilities: asynchronous if any of its devices is; no events, host buffers or callers' memory."""
        return Caps(async_=any(d.caps.async_ for d in self.devices))

    @property
    def reg(self) -> BackendReg:
        """A registration of this device only, usually not in the registry."""
        return self._reg

    @property
    def buffer_type(self) -> MetaBufferType:
        """The buffer type over all devices; cached while in use."""
        made = self._buffer_type()
        if made is None:  # a weak reference, because it refers to the device
            made = MetaBufferType(self, [d.buffer_type for d in self.devices])
            self._buffer_type = weakref.ref(made)
        return made

    def init_backend(self, params: Mapping[str, Any] | None = None) -> Backend:
        """Open a stream on each device, with the same parameters."""
        return MetaBackend(self, params)

    def declines(self, op: Tensor) -> str | None:
        """Return a reason if any device declines the whole node, else `None`; plans check the slices."""
        return next((why for d in self.devices if (why := d.declines(op)) is not None), None)

    def supports_buft(self, buft: BufferType) -> bool:
        """Whether the memory is that of a meta device of the same devices, in the same order."""
        return isinstance(buft, MetaBufferType) and buft.device.devices == self.devices

    # -- how tensors are sharded -------------------------------------------------------------------

    def state(self, tensor: Tensor) -> SplitState:
        """Return how a tensor is split; never PARTIAL (an unfinished sum), because sums precede reads.

        A view that cuts through the parts of a tensor is MIRRORED: its source is gathered for it.
        """
        if self._known_at != placement_clock.now:  # states depend on placement
            self._states.clear()
            self._known_at = placement_clock.now
        known = self._states
        stack = [tensor]  # not recursive: a graph may be thousands of nodes deep
        while stack:
            top = stack[-1]
            waiting = [t for t in self._depends_on(top) if t not in known]
            if waiting:
                stack += waiting
            else:
                if top not in known:
                    known[top] = self._follows(top)
                stack.pop()
        return known[tensor]

    def _depends_on(self, tensor: Tensor) -> Sequence[Tensor]:
        if tensor in self.given or not isinstance(tensor.buffer, MetaBuffer):
            return ()
        if tensor.view_src is not None:
            return (tensor.view_src,)
        return [s for s in tensor.src if s is not None]

    def _follows(self, tensor: Tensor) -> SplitState:
        if not isinstance(tensor.buffer, MetaBuffer):
            return MIRRORED  # in other memory: the meta device reads a copy of the whole
        if tensor in self.given:
            return self.given[tensor]
        root = tensor.view_src
        if root is not None:
            state = self._states[root]
            if not state.is_cut:
                return state
            view = slices_of_view(tensor.dtype, root.ne, state, tensor.ne, tensor.nb, tensor.view_offs)
            return MIRRORED if view is None else view.state
        result = self.outcome(tensor).result if tensor.src else MIRRORED
        return MIRRORED if result == PARTIAL else result

    def outcome(self, node: Tensor) -> ShardOutcome:
        """Return how the operands of a node must be split over the devices, and how its result is then."""
        states = [MIRRORED if s is None else self.state(s) for s in node.src]
        found = outcome(node, states)
        if found.result.is_cut and node.view_src is None and not node.is_contiguous():
            return whole(states)
        for src, state, wanted in zip(node.src, states, found.wants, strict=True):
            if src is not None and wanted != state and not _is_sliceable(src, wanted):
                return whole(states)
        return found


def _is_sliceable(operand: Tensor, wanted: SplitState) -> bool:
    """Whether each device's part of a mirrored operand is a view of it."""
    if not wanted.is_cut:
        return True
    block = operand.dtype.block_size if int(wanted.axis) == 0 else 1
    return len(wanted.segments) == 1 and not any(n % block for n in wanted.segments[0])


class MetaReg(BackendReg):
    """The registration of one meta device."""

    name = "Meta"

    def __init__(self, device: MetaDevice) -> None:
        self._device = weakref.ref(device)

    @property
    def devices(self) -> Sequence[Device]:
        """The one meta device of this registration, while it exists."""
        device = self._device()
        return () if device is None else (device,)


@checked
def meta_device(devices: Sequence[Device], get_split_state: GetSplitState) -> MetaDevice:
    """Create a device of several that compute each node together; `get_split_state` tells how to cut weights.

    Open a stream on it with `init_backend`, place weights with `alloc_ctx_tensors`, and give it to a
    `Scheduler` before a CPU backend, like any device.

    Args:
        devices: Simple devices, at most 16.
        get_split_state: Called with each weight when it is placed; returns its split state.
            `SplitState(SplitAxis.AXIS_1, (split_evenly(rows, 2),))`, for instance, gives each of two
            devices half of a matrix's rows (ne[1]).

    Raises:
        ArgumentError: No devices, more than 16, or one that is a meta device.

    Source: ggml_backend_meta_device.
    """
    if not 1 <= len(devices) <= MAX_DEVICES:
        raise ArgumentError(f"meta_device: {len(devices)} devices; give 1 to {MAX_DEVICES}")
    for device in devices:
        if isinstance(device, MetaDevice):
            raise ArgumentError(f"meta_device: {device.name} is a meta device; give its devices")
    return MetaDevice(devices, get_split_state)
