"""A minimal backend.

A registration, a device and a stream, with ggmlb's buffer type for host memory. The device declines other ops
with a reason; the scheduler runs them on the CPU. For a complete one, see [Writing a
backend](../backend.md).
"""

import numpy as np

import ggmlb
from ggmlb import Backend, BackendReg, Device, DeviceType, DType, GraphPlan, Op, Status
from ggmlb.interface import HostBufferType

FUNCTIONS = {Op.ADD: np.add, Op.MUL: np.multiply, Op.SQR: np.square}


class Slate(Device):
    name, description, type, memory = "Slate0", "NumPy with chalk", DeviceType.ACCEL, (0, 0)
    reg = buffer_type = None

    def __init__(self, reg):
        self.reg, self.buffer_type = reg, HostBufferType(self, "Slate", 64)

    def init_backend(self, params=None):
        return SlateStream(self)

    def supports_buft(self, buft):
        return buft.is_host

    def declines(self, op):
        if op.op not in (Op.NONE, *FUNCTIONS):
            return f"no chalk for {op.op}"
        for t in (op, *op.src):
            if t.dtype is not DType.F32 or not t.is_contiguous() or t.ne != op.ne:
                return f"{t.describe()} is not contiguous f32 of the result's shape"
        return None


class SlateStream(Backend):
    name = guid = "Slate"

    def _plan(self, graph):
        plan = GraphPlan(self, graph)
        plan.steps = [(n, [array(s) for s in n.src], array(n)) for n in graph.nodes if n.op in FUNCTIONS]
        return plan

    def _compute(self, plan):
        for node, operands, out in plan.steps:
            print("Slate0 computes", node.op)
            FUNCTIONS[node.op](*operands, out)
        return Status.SUCCESS


class SlateReg(BackendReg):
    name, devices = "Slate", ()

    def __init__(self):
        self.devices = [Slate(self)]


def array(tensor):
    memory = tensor.buffer.base[tensor.offset : tensor.offset + tensor.nbytes]
    return memory.view(np.float32).reshape(tensor.ne[::-1])


ggmlb.register(SlateReg())
ctx = ggmlb.Context()
x = ctx.new_tensor("f32", 4, name="x")
y = ctx.relu(ctx.sqr(ctx.add(x, x)))
print(ggmlb.evaluate(y, {"x": [0, 1, 2, 3]}, devices=["Slate0", "CPU"]))
print(ggmlb.device_by_name("Slate0").declines(y))
