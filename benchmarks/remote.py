"""Devices of other machines, beside Ray itself, pyzmq and a memcpy; and what a network makes of a 70B model.

One machine serves as two: two nodes of Ray, each an actor that has the machine's devices, and the driver.
A `null call` is an empty message, beside an empty call of a plain Ray actor. Transfers are `set_tensor` and
`get_tensor`, beside a plain actor that takes or returns an array, a request to a process over pyzmq (TCP),
and a copy in this process.

A `decode step` has half of the model's layers on one node, or a third on each. Two steps show Ray's floor.
`a plain call` is the step with all layers here, and between two tokens one call of a plain actor that takes
and returns an array as large as what a split takes (`two`: another actor's, of what the first one returns):
the same call as `back to back`, but threads sleep, and caches are full of weights. `by hand` is the same step
over plain Ray: an actor that has the model computes the graph up to the middle layer, and returns an array;
the other half is computed here. `over` is what a step takes beyond the same step here, by the median over
rounds in which all take turns; beside it, that of a call in shares of the plain call and of that by hand.
`lost` is how long a call takes to tell that an actor was killed (SIGKILL), or does not answer (SIGSTOP).

The simulation adds up, for one sequence on N machines in a row: each machine's weights by its memory's rate,
and for each hop a call and the activations by the network's rate; the first call of a token costs more than
the next (`Calls`). Before it is the same sum for the steps that were measured. With more sequences at once
than machines, a pipeline hides all but the slowest machine.

    python benchmarks/remote.py [--rounds 9] [--model FILE] [--threads N] [--simulate] [--save]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
from report import Table, save

import ggmlb
from ggmlb import Context, DType, TensorFlag
from ggmlb.models import Placement, TextModel

N_TOKENS = 24
SIZES = (1 << 12, 1 << 20, 1 << 24)
STORE = 256 << 20
"""Bytes of a node's object store."""

PROMPT = "Once upon a time there was"


def by_turns(runs: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run, in an order that alternates."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds + 1):
        for name in list(runs)[:: 1 if i % 2 else -1]:
            taken = runs[name]()
            if i:  # the first is to get ready
                seconds[name].append(taken)
    return seconds


def timed(call: Callable[[], object], n: int = 1) -> Callable[[], float]:
    """A run that returns the seconds of a call, the mean of `n`."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(n):
            call()
        return (time.perf_counter() - start) / n

    return run


def told(seconds: list[float]) -> tuple[str, str]:
    ms = sorted(1e3 * s for s in seconds)
    return f"{statistics.median(ms):.3f}", f"{ms[0]:.3f}-{ms[-1]:.3f}"


class Plain:
    """An actor with nothing of ours."""

    def call(self, *data: Any) -> Any:
        return data[0] if data else None

    def take(self, data: Any) -> None:
        pass

    def give(self, n: int) -> Any:
        return np.empty(n, np.uint8)


def on_node(i: int, kind: type) -> Any:
    """The kind as an actor on the machine of `node{i}`."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    own = ray.get_runtime_context().get_node_id()
    numbers = sorted((node["NodeID"] for node in ray.nodes()), key=lambda number: number != own)
    strategy = NodeAffinitySchedulingStrategy(numbers[i], soft=False)
    return ray.remote(num_cpus=0)(kind).options(scheduling_strategy=strategy)


def answer(port: Any) -> None:
    """A process that answers requests over pyzmq with as many bytes as they ask for."""
    import zmq

    socket = zmq.Context.instance().socket(zmq.REP)
    port.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    while (message := socket.recv_multipart(copy=False))[0].bytes != b"end":
        n = int(message[0].bytes)
        socket.send(np.empty(n, np.uint8), copy=False)


class Zmq:
    """A request to another process."""

    def __init__(self) -> None:
        import zmq

        ours, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=answer, args=(theirs,), daemon=True)
        self._process.start()
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.connect(f"tcp://127.0.0.1:{ours.recv()}")

    def request(self, n_back: int, data: Any = b"") -> Any:
        self._socket.send_multipart([str(n_back).encode(), data], copy=False)
        return self._socket.recv(copy=False)

    def close(self) -> None:
        self._socket.send(b"end")
        self._process.join()
        self._socket.close()


def transfers(device: Any, actor: Any, rounds: int) -> Table:
    import ray

    table = Table("what", "by", "bytes", "time [ms]", "least and most", "GB/s")
    zmq = Zmq()
    calls = {
        "ggmlb": timed(lambda: device.link.ask("wait"), 50),
        "Ray": timed(lambda: ray.get(actor.call.remote()), 50),
        "pyzmq": timed(lambda: zmq.request(0), 50),
    }
    for by, seconds in by_turns(calls, rounds).items():
        table.row("null call", by, 0, *told(seconds), "-")
    for n in SIZES:
        ctx = Context()
        tensor = ctx.new_tensor(DType.I8, (n,))
        with ggmlb.alloc_ctx_tensors(ctx, device.buffer_type):
            data, out = np.ones(n, np.uint8), np.empty(n, np.uint8)

            def write(tensor: Any = tensor, data: Any = data) -> None:
                tensor.set(data)
                device.link.settle()  # small ones would wait for the next command

            ways = {
                "in": {
                    "ggmlb": timed(write, 3),
                    "Ray": timed(lambda data=data: ray.get(actor.take.remote(data)), 3),
                    "pyzmq": timed(lambda data=data: zmq.request(0, data), 3),
                    "memcpy": timed(lambda out=out, data=data: np.copyto(out, data), 3),
                },
                "out": {
                    "ggmlb": timed(
                        lambda tensor=tensor, out=out: tensor.buffer.get_tensor(tensor, out=out), 3
                    ),
                    "Ray": timed(lambda n=n, out=out: np.copyto(out, ray.get(actor.give.remote(n))), 3),
                    "pyzmq": timed(lambda n=n: zmq.request(n), 3),
                },
            }
            for way, runs in ways.items():
                for by, seconds in by_turns(runs, rounds).items():
                    rate = n / statistics.median(seconds) / 1e9
                    table.row(way, by, n, *told(seconds), f"{rate:.2f}")
    zmq.close()
    return table


class ByHand:
    """A model whose graph of a token is cut after a layer, to be computed in two parts.

    Attributes:
        whole: The graph.
        n_inputs: Bytes of its inputs.
    """

    def __init__(self, path: str, device: str, options: Mapping[str, Any]) -> None:
        self._model = TextModel(path, [device, "CPU"], **options)
        self._model.generate(PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
        scheduler, middle = self._model.scheduler, f"blk.{self._model.config.n_layer // 2 - 1}.out"
        assert scheduler is not None and scheduler.graph is not None and scheduler.n_splits == 1
        self._stream, self.whole = scheduler.splits[0].backend, scheduler.graph
        nodes = self.whole.nodes
        at = 1 + next(i for i, node in enumerate(nodes) if node.name == middle)
        self._first, self._rest = self.whole.view(0, at), self.whole.view(at, len(nodes))
        self._cut, self._logits = nodes[at - 1], nodes[-1]
        self._inputs = [leaf for leaf in self.whole.leafs if leaf.flags & TensorFlag.INPUT]
        self.n_inputs = sum(leaf.nbytes for leaf in self._inputs)

    def set_inputs(self, data: Any) -> None:
        for leaf in self._inputs:
            leaf.set(data[: leaf.nbytes])
            data = data[leaf.nbytes :]

    def all(self, data: Any) -> Any:
        self.set_inputs(data)
        self._stream.graph_compute(self.whole)
        return self._logits.get()

    def first(self, data: Any) -> Any:
        self.set_inputs(data)
        self._stream.graph_compute(self._first)
        return self._cut.get()

    def rest(self, data: Any) -> Any:
        self._cut.set(data)
        self._stream.graph_compute(self._rest)
        return self._logits.get()


def decode(
    path: str, devices: Sequence[Any], actor: Any, rounds: int, n_threads: int | None
) -> tuple[Table, Table, Calls]:
    """The table of steps, the table of the simulation's sums beside them, and seconds of calls."""
    import ray

    links = [device.link for device in devices]
    here = devices[0].remote_name
    options: dict[str, Any] = {"n_ctx": 256, "threads": n_threads}
    with TextModel(path, [here, "CPU"], **options) as model:
        n_layer, n_embd = model.config.n_layer, model.config.n_embd
    data = np.zeros(2 * n_embd, np.float32)
    tokens: dict[tuple[int, ...], None] = {}

    def spread(stack: ExitStack, remote: Sequence[Any]) -> TextModel:
        """The model with its first layers on other machines, as many on each as here."""
        names = [device.name for device in remote]
        each = n_layer // (len(names) + 1)
        layers = {name: f"{i * each}-{(i + 1) * each - 1}" for i, name in enumerate(names)}
        layers[here] = f"{len(names) * each}-{n_layer - 1}"
        return stack.enter_context(
            TextModel(path, [*names, here, "CPU"], Placement(layers=layers), **options)
        )

    def step(model: TextModel, on_token: Callable[[str], object] | None = None) -> Callable[[], float]:
        def run() -> float:
            made = model.generate(
                PROMPT, on_token=on_token, max_tokens=N_TOKENS, temperature=0, ignore_eos=True
            )
            tokens.setdefault(tuple(made.tokens), None)
            return made.seconds / (len(made.tokens) - 1)

        return run

    near = ByHand(path, here, options)
    far = on_node(0, ByHand).remote(path, here, options)
    other, inputs = on_node(1, Plain).remote(), np.zeros(near.n_inputs, np.uint8)
    with ExitStack() as stack:
        local = spread(stack, ())
        runs = {
            "all here": step(local),
            "all here, a plain call": step(local, lambda _: ray.get(actor.call.remote(data))),
            "all here, two plain calls": step(
                local, lambda _: ray.get(other.call.remote(actor.call.remote(data)))
            ),
            "half on one machine": step(spread(stack, devices[:1])),
            "thirds on two machines": step(spread(stack, devices[:2])),
            "by hand: all here": timed(lambda: near.all(inputs), N_TOKENS),
            "by hand: half in a plain actor": timed(
                lambda: near.rest(ray.get(far.first.remote(inputs))), N_TOKENS
            ),
        }
        calls = {"a plain call, back to back": timed(lambda: ray.get(actor.call.remote(data)), N_TOKENS)}
        seconds = by_turns({**runs, **calls}, rounds)
        sent = {}
        for name, run in runs.items():
            before = [(link.n_calls, link.n_sent) for link in links]
            run()
            after = [(link.n_calls, link.n_sent) for link in links]
            sent[name] = (np.array(after) - before).sum(axis=0) / N_TOKENS
    if len(tokens) != 1:
        raise SystemExit(f"{len(tokens)} different texts, and they should be the same")

    def over(name: str) -> float:
        """Seconds beyond the step here."""
        base = "by hand: all here" if name.startswith("by hand") else "all here"
        return statistics.median(a - b for a, b in zip(seconds[name], seconds[base], strict=True))

    plain, by_hand = over("all here, a plain call"), over("by hand: half in a plain actor")
    table = Table(
        "decode step", "time [ms]", "least and most", "over [ms]", "calls", "of a plain call",
        "of one by hand", "bytes sent",
    )  # fmt: skip
    (back_to_back,) = calls
    table.row(back_to_back, *told(seconds[back_to_back]), "-", 1, "-", "-", data.nbytes)
    sums = Table("decode step", "measured [ms]", "by the simulation's sum [ms]")
    n_plain = {
        "all here, a plain call": 1,
        "all here, two plain calls": 2,
        "by hand: half in a plain actor": 1,
    }
    measured = Calls(plain, over("all here, two plain calls") - plain)
    for name in runs:
        n_calls, n_sent = sent[name]
        if name in n_plain:
            n_calls, n_sent = n_plain[name], inputs.nbytes if "hand" in name else n_plain[name] * data.nbytes
        shares = [f"{over(name) / n_calls / floor:.2f}" if n_calls else "-" for floor in (plain, by_hand)]
        table.row(
            name, *told(seconds[name]), f"{1e3 * over(name):.3f}", f"{n_calls:.2f}", *shares, f"{n_sent:.0f}"
        )
        if "machine" in name:
            sum_s = statistics.median(seconds["all here"]) + measured.seconds(round(n_calls))
            sums.row(name, told(seconds[name])[0], f"{1e3 * sum_s:.3f}")
    return table, sums, measured


def losses(devices: Sequence[Any]) -> Table:
    """Seconds till a call tells that its machine is lost; the devices are lost."""
    import ray

    table = Table("lost", "told after [s]")
    for device, fault in zip(devices, (signal.SIGKILL, signal.SIGSTOP), strict=False):
        number = ray.get(device.link._actor.ping.remote())
        os.kill(number, fault)
        start = time.perf_counter()
        try:
            device.link.ask("memory", device.remote_name)
        except ggmlb.DeviceLostError:
            table.row(fault.name, f"{time.perf_counter() - start:.3f}")
        if fault is signal.SIGSTOP:
            os.kill(number, signal.SIGKILL)
    return table


class Calls(NamedTuple):
    """Seconds of an actor's call.

    Attributes:
        first: After the driver has computed.
        next: After another call. All calls of a token are sent at once; each waits for the one before.
    """

    first: float
    next: float

    def seconds(self, n: int) -> float:
        """Seconds of `n` calls, one after another."""
        return self.first + (n - 1) * self.next


class Network(NamedTuple):
    """Machines in a row.

    Attributes:
        n: Machines, each with as many layers.
        weights_nbytes: Of the model.
        hop_nbytes: Activations of a token between two machines.
        memory_rate: Bytes per second at which a machine reads weights.
        network_rate: Bytes per second between two machines.
        calls: Of actors on other machines.
    """

    n: int
    weights_nbytes: float
    hop_nbytes: float
    memory_rate: float
    network_rate: float
    calls: Calls

    @property
    def stage_s(self) -> float:
        """Seconds of a machine for a token."""
        return self.weights_nbytes / self.n / self.memory_rate

    @property
    def hops_s(self) -> float:
        """Seconds of a token between machines; the last one answers the driver."""
        return self.calls.seconds(self.n) + self.n * self.hop_nbytes / self.network_rate

    @property
    def token_s(self) -> float:
        """Seconds for a token of one sequence."""
        return self.n * self.stage_s + self.hops_s

    def tokens_per_s(self, n_sequences: int) -> float:
        """Tokens per second of all sequences, in a pipeline: bounded by a token's way or a machine."""
        return min(n_sequences / self.token_s, 1 / (self.stage_s + self.hop_nbytes / self.network_rate))


def simulation(measured: Calls) -> Table:
    """A 70B model (4.5 bits a weight, 8192 wide) on 1 to 8 machines of 10 Gbit/s."""
    table = Table(
        "machines", "memory [GB/s]", "calls: first, next [ms]", "a token, one sequence [ms]", "of it hops",
        "tokens/s of 1", "of 8", "of 32",
    )  # fmt: skip
    for memory in (200e9, 1000e9):
        for n in (1, 2, 4, 8):
            for calls in (Calls(0.2e-3, 0.2e-3), measured):
                net = Network(n, 70e9 * 4.5 / 8, 2 * 8192 * 4, memory, 10e9 / 8, calls)
                rates = (f"{net.tokens_per_s(k):.1f}" for k in (1, 8, 32))
                table.row(
                    n,
                    f"{memory / 1e9:.0f}",
                    ", ".join(f"{1e3 * s:.2f}" for s in calls),
                    f"{net.token_s * 1e3:.1f}",
                    f"{net.hops_s / net.token_s:.0%}",
                    *rates,
                )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", help="GGUF file; the installed SmolLM2 by default")
    parser.add_argument("--device", default="LLVM", help="that is there and here")
    parser.add_argument("--threads", type=int, help="of each device; by default as many as it takes itself")
    parser.add_argument("--simulate", action="store_true", help="the simulation alone, with calls of 1 ms")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    load = Table("load of the machine, of one minute", "")
    load.row("before", f"{os.getloadavg()[0]:.1f}")
    if args.simulate:
        simulation(Calls(1e-3, 1e-3))
        return
    import ray
    from ray.cluster_utils import Cluster

    from ggmlb.models.folder import default_text_model

    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=1, include_dashboard=False, object_store_memory=STORE)
        nodes.add_node(num_cpus=1, object_store_memory=STORE)
        with ggmlb.connect(nodes.address, [args.device]) as cluster:
            actor = on_node(0, Plain).remote()
            table = transfers(cluster.devices[0], actor, args.rounds)
            model = args.model or str(default_text_model())
            steps, sums, calls = decode(model, cluster.devices, actor, args.rounds, args.threads)
            lost = losses(cluster.devices)
    finally:
        ray.shutdown()
        nodes.shutdown()
    simulated = simulation(calls)
    load.row("after", f"{os.getloadavg()[0]:.1f}")
    if args.save:
        save("remote", __doc__, load, table, steps, sums, lost, simulated, packages=("numpy", "ray", "pyzmq"))


if __name__ == "__main__":
    main()
