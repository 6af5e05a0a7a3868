"""engine=ray: virtual clients on persistent Ray workers, on one machine or a cluster.

The driver sends messages in batches, longest first, to free workers. Broadcast and replies use memory that the driver and its
machine's workers share. Client states are objects that the driver owns by reference but never opens (docs/ARCHITECTURE.md).
"""

import pickle
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode

from contrafed.client_app.app import CLIENT_STATE
from contrafed.core import codec
from contrafed.core.disk import expand_home
from contrafed.core.errors import UserError
from contrafed.core.schema import Range
from contrafed.core.tensors import size_of
from contrafed.engines import shared_memory
from contrafed.engines.client_state import Cost
from contrafed.engines.engine_run import EngineRun, StackSize
from contrafed.engines.grid import VirtualGrid
from contrafed.engines.ray_liveness import (
    BEAT_SECONDS,
    MAX_SILENT_SECONDS,
    Heartbeats,
    check_ray,
    find_dead_processes,
    find_machines,
    report_dead_ray,
)
from contrafed.engines.ray_start import start_ray, stop_ray
from contrafed.engines.ray_waiting import wait_for_workers
from contrafed.engines.ray_worker import BatchJob, Timing, Worker, unpack_messages
from contrafed.engines.scheduling import cost_of, cut_stacks, schedule_balanced, schedule_guided
from contrafed.engines.worker import FIRST_NODE_ID, reuse_memory
from contrafed.training.workspace import Workspace, default_device, install, uninstall

# A worker checks its time limit between steps. One that is this many seconds late hangs and is replaced.
GRACE_SECONDS = 60.0
# Smallest batch in seconds, because a worker waits 3 ms between two batches.
MIN_BATCH_SECONDS = 0.1
# Number of worker failures after which a message is given up: twice with its batch, and once alone.
MAX_ATTEMPTS = 3


@dataclass(frozen=True)
class Config:
    """Settings of the engine."""

    address: str | None  # null: start Ray here, auto: join the running cluster
    workers: Annotated[int, Range(ge=1)] | None  # null: one per GPU, or one per core without a GPU
    cpus_per_worker: Annotated[float, Range(gt=0)]
    # null: 1 if torch can use a GPU, else 0. More than 1 would be idle.
    gpus_per_worker: Annotated[float, Range(ge=0, le=1)] | None
    stack_size: StackSize
    memory_host_bytes: Annotated[int, Range(ge=80_000_000)] | None  # of Ray's object store, null: as Ray chooses
    memory_folder: str | None  # where Ray writes what does not fit, null: its own folder
    round_timeout: Annotated[float, Range(gt=0)] | None  # seconds
    max_norm: Annotated[float, Range(gt=0)] | None  # larger joint L2 norms of a reply's tensors are rejected
    max_norm_ratio: Annotated[float, Range(gt=1)] | None  # also those so many times the median of recent accepted ones


def room(gpus: int, share: float) -> int:
    """Return how many workers with a ``share`` of a GPU fit on ``gpus`` GPUs. A worker's share is of one GPU."""
    return gpus * int(1 / share)


def share_of(config: Config, gpus: int) -> float:
    """Return the share of a GPU for each worker, given the number that Ray has."""
    if config.gpus_per_worker is not None:
        return config.gpus_per_worker
    # Ray counts GPUs without torch, which may be a build for CPUs or newer than the driver. A cluster's are other machines'.
    return 1.0 if gpus and (config.address is not None or torch.cuda.is_available()) else 0.0


def run(config: Config, engine_run: EngineRun) -> None:
    """Run with virtual clients on Ray workers. Ray itself keeps running for the next job of a sweep."""
    if config.address is not None and (config.memory_host_bytes, config.memory_folder) != (None, None):
        raise UserError("engine.memory_host_bytes and engine.memory_folder are for a Ray that starts here, not for a cluster")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    reuse_memory()
    grid = None
    try:
        device = "cpu" if config.gpus_per_worker == 0 else default_device()  # the clients' device
        workspace = Workspace(engine_run.client, device=device, federation=engine_run.federation, model=engine_run.model)
        install(engine_run.client.to_json(), workspace)
        start_ray(config.address, engine_run.verbose, config.memory_host_bytes, expand_home(config.memory_folder))
        grid = RayGrid(config, workspace)
        engine_run.serve(grid)
    finally:
        if grid is not None:
            grid.close()
        if grid is not None and find_dead_processes():
            stop_ray()  # for the next job of a sweep
        uninstall()
        torch.set_num_threads(threads)


class RayGrid(VirtualGrid):
    """The grid over Ray workers."""

    engine = "ray"

    def __init__(self, config: Config, workspace: Workspace) -> None:
        import ray

        super().__init__(workspace.run.num_clients)
        self.ray = ray
        machines = find_machines()
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        per_worker = share_of(config, gpus)
        # A worker's CPUs are of one machine.
        by_cpu = sum(int(each["Resources"].get("CPU", 0) / config.cpus_per_worker) for each in ray.nodes() if each["Alive"])
        most = room(gpus, per_worker) if per_worker else by_cpu
        count = config.workers or max(1, most)
        if count > by_cpu or (per_worker and count > most):
            whole = per_worker % 1 == 0
            raise UserError(
                f"engine.workers={count} needs {count * config.cpus_per_worker:g} CPUs and "
                f"{f'{count * per_worker:g}' if whole else f'{count} times {per_worker:g}'} GPUs, "
                f"Ray has {cpus} and {gpus}; lower engine.workers, engine.cpus_per_worker or engine.gpus_per_worker"
            )
        data = workspace.federation.data
        # Channels last, as in a Workspace, so that workers read Ray's shared memory without a copy.
        tensors = {"x": workspace.x.cpu().numpy(), "y": data.y.cpu().numpy(), "test": data.test.cpu().numpy()}
        nothing: dict[str, Any] = dict.fromkeys(tensors)
        empty = replace(data, **nothing)
        data_set = {"data": empty, "tensors": tensors, "partition": workspace.federation.partition}
        self._arguments = (ray.put(data_set), workspace.run.to_json(), config.stack_size)
        self._actor: Any = ray.remote(num_cpus=config.cpus_per_worker, num_gpus=per_worker, max_restarts=0)(Worker)
        self.stateful = workspace.client_class.has_client_state(workspace.model, workspace.config)
        self.client_states: dict[int, Any] = {}  # node id -> reference to its state
        self.changed: set[int] = set()
        self.sizes: dict[int, int] = {}  # node id -> bytes of its state
        self.moving = 0.0  # seconds since the last call
        self.pool, self.broadcast = shared_memory.Pool(shared_memory.limit()), shared_memory.Broadcast(shared_memory.limit())
        self.heartbeats = Heartbeats()
        self.workers = [self._spawn() for _ in range(count)]
        try:
            needs = {"CPU": config.cpus_per_worker, "GPU": per_worker}
            about = wait_for_workers(self.workers, self.broadcast.address, needs, machines)
        except BaseException as error:  # a worker that cannot start says why
            self.close()
            _, mistake, said = str(error).rpartition(f"{UserError.__module__}.UserError: ")
            if mistake and isinstance(error, ray.exceptions.RayActorError):
                raise UserError(said) from error
            raise
        self.near: list[bool] = [near for near, _, _ in about]
        # The machines that the run needs: the driver's and the workers'.
        self.machines = frozenset([ray.get_runtime_context().get_node_id(), *(machine for _, _, machine in about)])
        # The clients that share a stack determine how numbers round. So stacks must not depend on which worker is free:
        # CPUs get whole stacks, cut as in engine=local. A stack fills a GPU, so there each worker stacks the clients it has.
        self.stack_size = max(size for _, size, _ in about)
        self.whole_stacks = not per_worker
        self.pace: dict[str, float] = {}  # message type -> latest seconds per unit of cost

    def execute(self, messages: Sequence[Message], timeout: float | None) -> list[Message | None]:
        """Give batches to workers, longest first. Workers that die are replaced, and their messages run again.

        Raises ``RunStopped`` if Ray itself ended, or if a machine of the cluster is gone.
        """
        with report_dead_ray(self.machines):
            return _Dispatch(self, messages, timeout).run()

    def take_changed(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return the client states that changed since the last call, read from Ray's store in place."""
        changed, self.changed = sorted(self.changed), set()
        with report_dead_ray(self.machines):
            states = self.ray.get([self.client_states[client] for client in changed])
        return {
            client - FIRST_NODE_ID: codec.state_of(state, CLIENT_STATE) for client, state in zip(changed, states, strict=True)
        }

    def restore(self, client_states: Iterable[tuple[int, dict[str, torch.Tensor]]], *, changed: bool) -> None:
        """Set client states."""
        for client, tensors in client_states:
            self.client_states[FIRST_NODE_ID + client] = self.ray.put(RecordDict({CLIENT_STATE: codec.to_record(tensors)}))
            self.sizes[FIRST_NODE_ID + client] = size_of(tensors)
            self.changed |= {FIRST_NODE_ID + client} if changed else set()

    def memory_cost(self) -> Cost:
        """Return the cost of client state since the last call, over all workers.

        All bytes count as RAM, because Ray does not report what it has written to disk.
        """
        seconds, self.moving = self.moving, 0.0
        return Cost(seconds, 0, sum(self.sizes.values()), 0)

    def close(self) -> None:
        """End the workers and release the client states."""
        self.client_states.clear()
        for worker in self.workers if not find_dead_processes() else []:
            self.heartbeats.kill(worker)
        self.workers = []
        self.pool.close()
        self.broadcast.close()
        self._arguments = ()  # type: ignore[assignment]

    def read(self, answer: list[Any], block: shared_memory.Block | None) -> list[Message | None]:
        """Return the replies of one batch, from shared memory or from Ray."""
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

    def replace(self, worker: int) -> None:
        """Restart a worker. Its machine is not known, so it reads from the object store."""
        self.workers[worker] = self._spawn()
        self.near[worker] = False
        self.machines |= find_machines()


@dataclass
class _Batch:
    """A batch that a worker runs."""

    worker: int
    rows: list[int]  # positions of its messages
    states: list[Any]  # references to the new states of its clients
    block: shared_memory.Block | None  # for its replies
    began: float = field(default_factory=time.monotonic)


class _Dispatch:
    """The messages of one ``RayGrid.execute`` while workers process them."""

    def __init__(self, grid: RayGrid, messages: Sequence[Message], timeout: float | None) -> None:
        self.grid, self.messages, self.ray = grid, messages, grid.ray
        self.ends = None if timeout is None else time.monotonic() + timeout
        self.records, self.rest = unpack_messages(messages)
        self.broadcast = grid.broadcast.write(self.records) if any(grid.near) else None
        self.stored: Any = None  # the broadcast in Ray's store, once a worker needs it there
        self.still_read = False
        self.replies: list[Message | None] = [None] * len(messages)
        self.attempts = [0] * len(messages)
        self.pending: dict[Any, _Batch] = {}
        self.again: list[list[int]] = []  # batches whose worker died
        self.costs = [cost_of(message) for message in messages]
        self.units = self._cut()
        self.kind = messages[0].metadata.message_type
        workers, costs = len(grid.workers), [sum(self.costs[i] for i in unit) for unit in self.units]
        self.batches = schedule_balanced(costs, workers)
        if self.kind in grid.pace and (grid.whole_stacks or grid.stack_size == 1):
            self.batches = schedule_guided(costs, workers, MIN_BATCH_SECONDS / grid.pace[self.kind])

    def run(self) -> list[Message | None]:
        """Return the replies in the order of the messages, None for those that exceeded the time limit."""
        for worker in range(len(self.grid.workers)):
            self._feed(worker)
        while self.pending:
            left = BEAT_SECONDS if self.ends is None else self._compute_seconds_left() + GRACE_SECONDS
            ready, _ = self.ray.wait(list(self.pending), num_returns=1, timeout=min(left, BEAT_SECONDS))
            if not ready:
                check_ray(machines=self.grid.machines)
                if self.ends is not None and time.monotonic() >= self.ends + GRACE_SECONDS:
                    self._give_up()  # these workers hang, so their clients have not answered in time
                    break
                self._replace_silent_workers()
                continue
            batch = self.pending.pop(ready[0])
            try:
                answer = self.ray.get(ready[0])
            except (
                self.ray.exceptions.RayActorError,
                self.ray.exceptions.WorkerCrashedError,
                self.ray.exceptions.OutOfMemoryError,
            ) as error:
                check_ray(error, self.grid.machines)
                self._replace_dead_worker(batch, error)
                self._feed(batch.worker)
                continue
            elapsed = time.monotonic() - batch.began
            self.grid.pace[self.kind] = elapsed / sum(self.costs[i] for i in batch.rows)
            self._feed(batch.worker)
            self._collect(batch, answer, elapsed)
        if self.still_read:
            self.grid.broadcast.renew()
        return self.replies

    def _cut(self) -> list[list[int]]:
        """Return the positions of messages that one worker must run together."""
        every = range(len(self.messages))
        if self.grid.whole_stacks and self.grid.stack_size > 1:
            return cut_stacks(self.messages, every, self.grid.stack_size)
        return [[i] for i in every]

    def _compute_seconds_left(self) -> float:
        assert self.ends is not None
        return max(self.ends - time.monotonic(), 0.0)

    def _feed(self, worker: int) -> None:
        rows = self.again.pop() if self.again else [i for unit in next(self.batches, ()) for i in self.units[unit]]
        if rows:
            self._submit(worker, rows)

    def _submit(self, worker: int, rows: list[int]) -> None:
        grid = self.grid
        near = self.broadcast if grid.near[worker] else None
        if near is None and self.stored is None:
            self.stored = self.ray.put(self.records)
        states = [grid.client_states.get(self.messages[i].metadata.dst_node_id) for i in rows] if grid.stateful else []
        method = grid.workers[worker].run.options(num_returns=1 + len(states))
        block = grid.pool.take(len(rows)) if self.kind == MessageType.TRAIN else None  # other replies are a few numbers
        left = None if self.ends is None else self._compute_seconds_left()
        # One argument of bytes, because Ray takes a tenth of a millisecond for each of any other kind.
        job = pickle.dumps(BatchJob([self.rest[i] for i in rows], near, left, None if block is None else block.address))
        refs = method.remote(job, states, *([] if near else [self.stored]))
        refs = refs if grid.stateful else [refs]
        self.pending[refs[0]] = _Batch(worker, rows, refs[1:], block)

    def _give_up(self) -> None:
        """Replace the workers that have not answered."""
        for batch in self.pending.values():
            self.grid.heartbeats.kill(self.grid.workers[batch.worker])
            self._replace(batch)

    def _replace_silent_workers(self) -> None:
        """Replace workers that are stopped, and run their batches again."""
        for ref, batch in list(self.pending.items()):
            worker = self.grid.workers[batch.worker]
            if self.grid.heartbeats.is_silent(worker):
                self.grid.heartbeats.kill(worker)
                del self.pending[ref]
                self._replace_dead_worker(batch, TimeoutError(f"no heartbeat within {MAX_SILENT_SECONDS:g} s"))
                self._feed(batch.worker)

    def _replace(self, batch: _Batch) -> None:
        self.grid.replace(batch.worker)
        if batch.block is not None:
            self.grid.pool.drop(batch.block)

    def _replace_dead_worker(self, batch: _Batch, error: Exception) -> None:
        """Replace a worker and run its batch again: first as it was, then one by one, then no more."""
        self._replace(batch)
        rows = batch.rows
        for i in rows:
            self.attempts[i] += 1
        if self.attempts[rows[0]] >= MAX_ATTEMPTS:
            reason = f"its worker died {MAX_ATTEMPTS} times; the last time: {str(error).splitlines()[0]}"
            for i in rows:
                self.replies[i] = Message(Error(ErrorCode.CLIENT_APP_CRASHED, reason), reply_to=self.messages[i])
        else:
            self.again += [[i] for i in rows] if self.attempts[rows[0]] == MAX_ATTEMPTS - 1 else [rows]

    def _collect(self, batch: _Batch, answer: Any, elapsed: float) -> None:
        """Store the replies of a batch, and the new states of its clients."""
        grid = self.grid
        timing: Timing
        *found, reads, timing = pickle.loads(answer) if isinstance(answer, bytes) else answer
        self.still_read |= reads
        if grid.stateful:  # outside the worker's code a batch takes the time of storing states in Ray, and 3 ms of transfer
            grid.moving += timing.fetching + max(elapsed - timing.seconds, 0.0)
        for place, (i, reply) in enumerate(zip(batch.rows, grid.read(found, batch.block), strict=True)):
            self.replies[i] = reply
            trained = self.messages[i].metadata.message_type == MessageType.TRAIN
            if grid.stateful and trained and reply is not None and not reply.has_error():
                client = self.messages[i].metadata.dst_node_id
                grid.client_states[client], grid.sizes[client] = batch.states[place], timing.sizes[place]
                grid.changed.add(client)
