"""engine=ray: virtual nodes on persistent Ray workers, on one machine or a cluster.

The driver hands out messages in batches, longest first: one for each worker where a round is short, else several, smaller
towards the end, to whoever is free. The broadcast is written once and every worker reads it in place; it and the replies go
through memory that the driver and its machine's workers share, to other machines through Ray's object store. What nodes
remember are objects that the driver owns by reference but never opens: they outlive the worker that made them, spill to disk
when the store is full, and any worker can take a node over.
"""

import logging
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, Error, Message, MessageType, RecordDict
from flwr.app.metadata import Metadata
from flwr.common.constant import ErrorCode

from clients.node.app import MEMORY
from clients.training.workspace import Workspace, default_device, install, uninstall
from core import codec
from core.config import Range
from core.errors import UserError
from core.tensors import on_host, size_of
from partitions.federation import Federation
from simulation import shared
from simulation.engine import Job, stack_size_for
from simulation.grid import VirtualGrid
from simulation.memory import Cost
from simulation.worker import FIRST_NODE_ID, BatchRunner, identify, reuse_memory

# A worker checks its time limit between steps; one that is this many seconds late hangs and is replaced.
GRACE = 60.0
# Seconds of work that are worth a batch of their own: between two batches a worker waits for 3 ms.
LEAST = 0.1
# A message whose workers died this often is given up: together with its batch, again, and alone.
ATTEMPTS = 3


@dataclass(frozen=True)
class Config:
    """Settings of the engine."""

    address: str | None  # null: start Ray here; auto: join the running cluster
    workers: Annotated[int, Range(ge=1)] | None  # null: one per GPU, or one per core without a GPU
    cpus_per_worker: Annotated[float, Range(gt=0)]
    gpus_per_worker: Annotated[float, Range(ge=0)] | None  # null: 1 where there are GPUs, else 0
    stack_size: Annotated[int, Range(ge=1)] | None  # nodes trained together; null: 1 on a CPU, as many as fit on a GPU
    memory_host_bytes: Annotated[int, Range(ge=80_000_000)] | None  # of Ray's object store; null: as Ray chooses
    memory_folder: str | None  # where Ray writes what does not fit; null: its own folder
    round_timeout: Annotated[float, Range(gt=0)] | None  # seconds
    max_norm: Annotated[float, Range(gt=0)] | None  # replies whose tensors' joint L2 norm is larger are rejected


def run(config: Config, job: Job) -> None:
    """Run a job against virtual nodes on Ray workers; Ray itself stays up for the next job of a sweep."""
    if config.address is not None and (config.memory_host_bytes, config.memory_folder) != (None, None):
        raise UserError("engine.memory_host_bytes and engine.memory_folder are for a Ray that starts here, not for a cluster")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reuse_memory()
    grid = None
    try:
        workspace = Workspace(job.settings, device=default_device(), federation=job.federation)
        install(job.node_settings, workspace)
        start_ray(config.address, bool(job.settings["verbose"]), config.memory_host_bytes, config.memory_folder)
        grid = RayGrid(config, workspace, job.node_settings)
        job.serve(grid)
    finally:
        if grid is not None:
            grid.close()
        uninstall()
        torch.set_num_threads(threads)


def start_ray(address: str | None, verbose: bool, memory_bytes: int | None, folder: str | None) -> None:
    """Start Ray in this process, or join a cluster; does nothing when it is already there with the same object store."""
    import ray

    global _store
    if ray.is_initialized():
        if (memory_bytes, folder) == _store:
            return
        stop_ray()
    _store = (memory_bytes, folder)
    options: dict[str, Any] = {"log_to_driver": verbose, "logging_level": logging.INFO if verbose else logging.ERROR}
    if address is None:  # a cluster that runs already has its own
        options |= {"include_dashboard": False, "object_store_memory": memory_bytes, "object_spilling_directory": folder}
    try:
        ray.init(address=address, **options)
    except ConnectionError as error:
        raise UserError(f"engine.address={address}: no Ray cluster answers there") from error


_store: tuple[int | None, str | None] = (None, None)  # of the Ray that runs: its size in bytes, and where it spills


def stop_ray() -> None:
    """Stop the Ray that ``start_ray`` started, if any."""
    import sys

    if (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        ray.shutdown()


# A message's metadata, its records but arrays, and the places of its array records among those of the broadcast.
Unpacked = tuple[Metadata, dict[str, Any], dict[str, int]]


class Parcel(NamedTuple):
    """What a worker needs to run a batch, beside the states of its nodes."""

    jobs: list[Unpacked]
    letter: shared.Letter | None  # where the broadcast is
    timeout: float | None  # seconds
    address: shared.Address | None  # of the block for the replies


class Spent(NamedTuple):
    """What a batch took of its worker, and what its nodes remember takes now."""

    seconds: float
    fetching: float  # of these, those of reading what nodes remember
    sizes: list[int]  # bytes, by message; empty where nodes remember nothing


class Worker:
    """One persistent worker process: the data set on its device and a ``BatchRunner``."""

    def __init__(
        self, data_set: Mapping[str, Any], node_settings: str, settings: Mapping[str, Any], stack_size: int | None
    ) -> None:
        torch.set_num_threads(1)
        identify()
        reuse_memory()
        tensors: dict[str, Any] = {name: torch.from_numpy(values) for name, values in data_set["tensors"].items()}
        tensors["x"] = tensors["x"].permute(0, 3, 1, 2)
        data = replace(data_set["data"], **tensors)
        federation = Federation(data, data_set["partition"])
        device = default_device()
        install(node_settings, Workspace(settings, device=device, federation=federation))
        self.runner = BatchRunner(settings["num_nodes"], stack_size_for(stack_size, device, settings["num_nodes"]))

        self.mapped: dict[str, Any] = {}  # blocks of memory shared with the driver, to write replies
        self.letters: dict[str, Any] = {}  # and to read broadcasts

    def ready(self, address: shared.Address | None) -> tuple[bool, bool]:
        """Answer once the worker is up: whether it shares memory with the driver, and whether it trains nodes as stacks."""
        return shared.reachable(address), self.runner.stack_size > 1

    def run(self, parcel: bytes, states: list[Any], broadcast: list[ArrayRecord] | None = None) -> Any:
        """Run a batch and return the replies, whether the broadcast is still read, and ``Spent``; pickled, where the replies
        were written to the block that the batch came with. For nodes that remember, one new state per message follows.

        ``parcel`` is a pickled ``Parcel``. The ``broadcast`` comes beside it where there is no letter.
        """
        began = time.monotonic()
        sent: Parcel = pickle.loads(parcel)
        still_read = None
        if sent.letter is not None:
            broadcast, still_read = shared.read(sent.letter, self.letters)
        assert broadcast is not None
        self.fetching = 0.0
        kept: list[RecordDict | None] = [None] * len(states)
        results = self._results(broadcast, sent, states, kept)
        del broadcast
        replies = shared.write(results, sent.address, self.mapped)
        del results
        sizes = [0 if state is None else size_of(codec.state_of(state, MEMORY)) for state in kept]
        answer: Any = (*replies, still_read is not None and still_read(), Spent(time.monotonic() - began, self.fetching, sizes))
        if replies[0] == "shared":
            answer = pickle.dumps(answer)  # Ray sends bytes as they are
        return [answer, *kept] if states else answer

    def _results(
        self, records: list[ArrayRecord], sent: Parcel, states: list[Any], kept: list[RecordDict | None]
    ) -> list[Message | None]:
        import ray

        messages = []
        for metadata, content, places in sent.jobs:
            arrays = {name: records[place] for name, place in places.items()}
            messages.append(Message(content=RecordDict({**content, **arrays}), metadata=metadata))  # type: ignore[call-overload]

        def state_of(place: int) -> RecordDict | None:
            if not states or states[place] is None:
                return None
            began = time.monotonic()
            state: RecordDict = ray.get(states[place])
            self.fetching += time.monotonic() - began
            return state

        def keep(place: int, state: RecordDict) -> None:
            if kept:  # on the host, so that an accelerator does not hold what a whole batch of nodes remembers
                kept[place] = RecordDict({MEMORY: codec.to_record(on_host(codec.state_of(state, MEMORY)))})

        return self.runner.run(messages, state_of, keep, sent.timeout)


class RayGrid(VirtualGrid):
    """The grid over Ray workers."""

    def __init__(self, config: Config, workspace: Workspace, node_settings: str) -> None:
        import ray

        super().__init__(workspace.settings["num_nodes"])
        self.ray = ray
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        per_worker = config.gpus_per_worker if config.gpus_per_worker is not None else (1.0 if gpus else 0.0)
        count = config.workers or (max(1, int(gpus / per_worker)) if per_worker else max(1, int(cpus / config.cpus_per_worker)))
        if count * config.cpus_per_worker > cpus or count * per_worker > gpus:
            raise UserError(
                f"engine.workers={count} needs {count * config.cpus_per_worker:g} CPUs and {count * per_worker:g} GPUs, "
                f"Ray has {cpus} and {gpus}; lower engine.workers, engine.cpus_per_worker or engine.gpus_per_worker"
            )
        data = workspace.federation.data
        # Channels last, as a Workspace wants them: workers then read Ray's shared memory without a copy of their own.
        tensors = {"x": workspace.x.cpu().numpy(), "y": data.y.cpu().numpy(), "test": data.test.cpu().numpy()}
        nothing: dict[str, Any] = dict.fromkeys(tensors)
        empty = replace(data, **nothing)
        data_set = {"data": empty, "tensors": tensors, "partition": workspace.federation.partition}
        self._arguments = (ray.put(data_set), node_settings, dict(workspace.settings), config.stack_size)
        self._actor: Any = ray.remote(num_cpus=config.cpus_per_worker, num_gpus=per_worker, max_restarts=0)(Worker)
        self.stateful = workspace.client_class.remembers(workspace.model, workspace.config)
        self.memory: dict[int, Any] = {}  # node id -> reference to its state
        self.changed: set[int] = set()
        self.sizes: dict[int, int] = {}  # node id -> bytes of its state
        self.moving = 0.0  # seconds since they were last asked for
        self.pool, self.broadcast = shared.Pool(shared.limit()), shared.Broadcast(shared.limit())
        self.workers = [self._spawn() for _ in range(count)]
        # A worker that cannot start says why here.
        about = ray.get([worker.ready.remote(self.broadcast.address) for worker in self.workers])
        self.near: list[bool] = [near for near, _ in about]
        # Which nodes share a stack decides how their numbers round, so it must not depend on who is free when.
        self.stacked = any(stacked for _, stacked in about)
        self.pace: dict[str, float] = {}  # message type -> seconds per unit of cost, as last seen

    def execute(self, messages: Sequence[Message], timeout: float | None) -> list[Message | None]:
        """Give batches to workers, longest first; replace workers that die and run their messages again."""
        ray = self.ray
        ends = None if timeout is None else time.monotonic() + timeout
        records, jobs = _unpacked(messages)
        letter = self.broadcast.write(records) if any(self.near) else None
        stored, still_read = None, False
        replies: list[Message | None] = [None] * len(messages)
        attempts = [0] * len(messages)
        pending: dict[Any, tuple[int, list[int], list[Any], shared.Block | None]] = {}
        again: list[list[int]] = []  # batches whose worker died
        costs = [_cost(message) for message in messages]
        began = [0.0] * len(self.workers)
        kind = messages[0].metadata.message_type
        batches = _balanced(costs, len(self.workers))
        if not self.stacked and kind in self.pace:
            batches = _guided(costs, len(self.workers), LEAST / self.pace[kind])

        def submit(worker: int, rows: list[int]) -> None:
            nonlocal stored
            near = letter if self.near[worker] else None
            if near is None and stored is None:
                stored = ray.put(records)
            left = None if ends is None else max(ends - time.monotonic(), 0.0)
            states = [self.memory.get(messages[i].metadata.dst_node_id) for i in rows] if self.stateful else []
            method = self.workers[worker].run.options(num_returns=1 + len(states))
            block = self.pool.take(len(rows)) if kind == MessageType.TRAIN else None  # other replies are a few numbers
            # One argument of bytes: Ray takes a tenth of a millisecond for each of any other kind.
            parcel = pickle.dumps(Parcel([jobs[i] for i in rows], near, left, None if block is None else block.address))
            refs = method.remote(parcel, states, *([] if near else [stored]))
            refs = refs if self.stateful else [refs]
            pending[refs[0]] = (worker, rows, refs[1:], block)
            began[worker] = time.monotonic()

        def feed(worker: int) -> None:
            rows = again.pop() if again else next(batches, None)
            if rows:
                submit(worker, rows)

        for worker in range(len(self.workers)):
            feed(worker)
        while pending:
            patience = None if ends is None else max(ends - time.monotonic(), 0.0) + GRACE
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=patience)
            if not ready:  # these workers hang: their nodes have not answered in time
                for worker, _, _, block in pending.values():
                    ray.kill(self.workers[worker])
                    self._replace(worker)
                    if block is not None:
                        self.pool.drop(block)
                break
            worker, rows, states, block = pending.pop(ready[0])
            try:
                answer = ray.get(ready[0])
            except (
                ray.exceptions.RayActorError,
                ray.exceptions.WorkerCrashedError,
                ray.exceptions.OutOfMemoryError,
            ) as error:
                self._replace(worker)
                if block is not None:
                    self.pool.drop(block)
                for i in rows:
                    attempts[i] += 1
                if attempts[rows[0]] >= ATTEMPTS:
                    reason = f"its worker died {ATTEMPTS} times; the last time: {str(error).splitlines()[0]}"
                    for i in rows:
                        replies[i] = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=messages[i])
                else:
                    again += [[i] for i in rows] if attempts[rows[0]] == ATTEMPTS - 1 else [rows]
                feed(worker)
                continue
            elapsed = time.monotonic() - began[worker]
            self.pace[kind] = elapsed / sum(costs[i] for i in rows)
            feed(worker)
            spent: Spent
            *found, reads, spent = pickle.loads(answer) if isinstance(answer, bytes) else answer
            still_read |= reads
            if self.stateful:  # what a batch takes outside the worker's code is Ray storing the states, and 3 ms on the way
                self.moving += spent.fetching + max(elapsed - spent.seconds, 0.0)
            for place, (i, reply) in enumerate(zip(rows, self._read(found, block), strict=True)):
                replies[i] = reply
                trained = messages[i].metadata.message_type == MessageType.TRAIN
                if self.stateful and trained and reply is not None and not reply.has_error():
                    node = messages[i].metadata.dst_node_id
                    self.memory[node], self.sizes[node] = states[place], spent.sizes[place]
                    self.changed.add(node)
        if still_read:
            self.broadcast.renew()
        return replies

    def take_changed(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return what nodes remember whose memory changed since the last call, read from Ray's store in place."""
        changed, self.changed = sorted(self.changed), set()
        states = self.ray.get([self.memory[node] for node in changed])
        return {node - FIRST_NODE_ID: codec.state_of(state, MEMORY) for node, state in zip(changed, states, strict=True)}

    def restore(self, memories: Mapping[int, dict[str, torch.Tensor]], *, changed: bool) -> None:
        """Give nodes what they remember."""
        for node, tensors in memories.items():
            self.memory[FIRST_NODE_ID + node] = self.ray.put(RecordDict({MEMORY: codec.to_record(tensors)}))
            self.sizes[FIRST_NODE_ID + node] = size_of(tensors)
        self.changed |= {FIRST_NODE_ID + node for node in memories} if changed else set()

    def memory_cost(self) -> Cost:
        """Return what nodes' memories took since the last call, over all workers.

        All bytes count as RAM: Ray does not say what it has written to disk.
        """
        seconds, self.moving = self.moving, 0.0
        return Cost(seconds, 0, sum(self.sizes.values()), 0)

    def close(self) -> None:
        """End the workers and let go of what the nodes remember."""
        self.memory.clear()
        for worker in self.workers:
            self.ray.kill(worker)
        self.workers = []
        self.pool.close()
        self.broadcast.close()
        self._arguments = ()  # type: ignore[assignment]

    def _read(self, answer: list[Any], block: shared.Block | None) -> list[Message | None]:
        """Return the replies of one batch, whichever way they came."""
        how, value, extent = answer
        if how == "shared":
            if block is None:
                return pickle.loads(value)  # type: ignore[no-any-return]
            return block.read(value, extent, partial(self.pool.give_back, block))  # type: ignore[no-any-return]
        self.pool.wanted = max(self.pool.wanted, -(-extent // len(value)))
        if block is not None:
            self.pool.give_back(block)
        return value  # type: ignore[no-any-return]

    def _spawn(self) -> Any:
        return self._actor.remote(*self._arguments)

    def _replace(self, worker: int) -> None:
        """Start a worker anew; where Ray starts it is not known, so it reads from the object store."""
        self.workers[worker] = self._spawn()
        self.near[worker] = False


def _cost(message: Message) -> float:
    return max(float(codec.config_of(message).get("cost", 1)), 1.0)  # a node without work still takes a moment


def _balanced(costs: Sequence[float], workers: int) -> Iterator[list[int]]:
    """Deal tasks to workers, longest first to the least loaded: a batch for each; within a batch in request order."""
    loads, rows = np.zeros(workers), [[] for _ in range(workers)]  # type: ignore[var-annotated]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        worker = int(loads.argmin())
        loads[worker] += costs[i]
        rows[worker].append(i)
    return (sorted(part) for part in rows if part)


def _guided(costs: Sequence[float], workers: int, least: float) -> Iterator[list[int]]:
    """Cut tasks into batches for whoever is free, longest first: each half of an equal share of what is left, or ``least``.

    Workers differ in speed, and costs are estimates: with a batch for each the round would wait for the slowest. What is
    too little to be cut is balanced.
    """
    left = sum(costs)
    if left <= 2 * workers * least:
        yield from _balanced(costs, workers)
        return
    order = sorted(range(len(costs)), key=lambda i: -costs[i])
    while order:
        aim, taken = max(left / (2 * workers), least), 0.0
        batch: list[int] = []
        while order and (not batch or taken + costs[order[0]] <= aim):
            taken += costs[order[0]]
            batch.append(order.pop(0))
        left -= taken
        yield sorted(batch)


def _unpacked(messages: Sequence[Message]) -> tuple[list[ArrayRecord], list[Unpacked]]:
    """Return the array records of all messages, each once, and the messages without them."""
    records: list[ArrayRecord] = []
    place_of: dict[int, int] = {}
    jobs = []
    for message in messages:
        rest: dict[str, Any] = {}
        places = {}
        for name, record in message.content.items():
            if isinstance(record, ArrayRecord):
                if id(record) not in place_of:
                    place_of[id(record)] = len(records)
                    records.append(record)
                places[name] = place_of[id(record)]
            else:
                rest[name] = record
        jobs.append((message.metadata, rest, places))
    return records, jobs
