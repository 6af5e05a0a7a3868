"""Run batches on a Ray worker, and define the messages from and to it."""

import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.app.metadata import Metadata

from contrafed.client_app.app import CLIENT_STATE
from contrafed.core import codec
from contrafed.core.client_run import ClientRun
from contrafed.core.tensors import Tensors, on_host, size_of
from contrafed.data.federation import Federation
from contrafed.engines import shared_memory
from contrafed.engines.engine_run import StackSize, stack_size_for
from contrafed.engines.ray_liveness import StateLost, start_heartbeats
from contrafed.engines.worker import BatchRunner, identify, reuse_memory
from contrafed.training.errors import device_lost
from contrafed.training.workspace import Workspace, default_device, install

# A message's metadata, its records except arrays, and the positions of its array records among those of the broadcast.
Unpacked = tuple[Metadata, dict[str, Any], dict[str, int]]


class BatchJob(NamedTuple):
    """What a worker needs to run a batch, in addition to the states of its clients."""

    messages: list[Unpacked]
    broadcast: shared_memory.BroadcastHandle | None  # None: it is sent separately
    timeout: float | None  # seconds
    address: shared_memory.Address | None  # of the block for the replies


class Timing(NamedTuple):
    """The time of a batch on its worker, and the size of its clients' states."""

    seconds: float
    fetching: float  # part of it: loading client states
    sizes: list[int]  # bytes, by message, empty for clients without state


def unpack_messages(messages: Sequence[Message]) -> tuple[list[ArrayRecord], list[Unpacked]]:
    """Return the array records of all messages, each once, and the messages without them."""
    records: list[ArrayRecord] = []
    place_of: dict[int, int] = {}
    rest_of = []
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
        rest_of.append((message.metadata, rest, places))
    return records, rest_of


class Worker:
    """One persistent worker process: the data set on its device and a ``BatchRunner``."""

    def __init__(self, data_set: Mapping[str, Any], client_run_of: str, stack_size: StackSize) -> None:
        start_heartbeats()
        torch.set_num_threads(1)
        identify()
        reuse_memory()
        tensors: dict[str, Any] = {name: torch.from_numpy(values) for name, values in data_set["tensors"].items()}
        if data_set["data"].kind == "image":
            tensors["x"] = tensors["x"].permute(0, 3, 1, 2)
        data = replace(data_set["data"], **tensors)
        federation = Federation(data, data_set["partition"])
        device = default_device()
        if device == "cuda":
            keep_to_share()
        run = ClientRun.from_json(client_run_of)
        workspace = Workspace(run, device=device, federation=federation)
        install(client_run_of, workspace)
        self.runner = BatchRunner(run.num_clients, stack_size_for(stack_size, workspace))

        self.mapped: dict[str, Any] = {}  # blocks of memory shared with the driver, to write replies
        self.broadcasts: dict[str, Any] = {}  # and to read broadcasts

    def ready(self, address: shared_memory.Address | None) -> tuple[bool, int, str]:
        """Return, once the worker runs, whether it shares memory with the driver, how many clients it trains together, and the
        id of its machine.
        """
        import ray

        return shared_memory.reachable(address), self.runner.stack_size, ray.get_runtime_context().get_node_id()

    def run(self, job: bytes, states: list[Any], records: list[ArrayRecord] | None = None) -> Any:
        """Run a batch. If clients have state, one new state per message follows the answer.

        Args:
            job: A pickled ``BatchJob``.
            states: References to client states, by message.
            records: The broadcast, if the job has no handle of it.

        Returns:
            The replies, whether the broadcast is still read, and ``Timing``. They are pickled if the replies are in the job's
            block.
        """
        began = time.monotonic()
        batch: BatchJob = pickle.loads(job)
        still_read = None
        if batch.broadcast is not None:
            records, still_read = shared_memory.read(batch.broadcast, self.broadcasts)
        assert records is not None
        self.fetching = 0.0
        kept: list[RecordDict | None] = [None] * len(states)
        results = self._results(records, batch, states, kept)
        del records
        replies = shared_memory.write(results, batch.address, self.mapped)
        del results
        sizes = [0 if state is None else size_of(codec.state_of(state, CLIENT_STATE)) for state in kept]
        timing = Timing(time.monotonic() - began, self.fetching, sizes)
        answer: Any = (*replies, still_read is not None and still_read(), timing)
        if replies[0] == "shared":
            answer = pickle.dumps(answer)  # Ray sends bytes as they are
        return [answer, *kept] if states else answer

    def _results(
        self, records: list[ArrayRecord], batch: BatchJob, states: list[Any], kept: list[RecordDict | None]
    ) -> list[Message | None]:
        import ray

        messages = []
        for metadata, content, places in batch.messages:
            arrays = {name: records[place] for name, place in places.items()}
            messages.append(Message(content=RecordDict({**content, **arrays}), metadata=metadata))  # type: ignore[call-overload]

        def state_of(place: int) -> Tensors:
            if not states or states[place] is None:
                return {}
            began = time.monotonic()
            try:
                state: RecordDict = ray.get(states[place])
            except ray.exceptions.ObjectLostError as error:
                raise StateLost("engine=ray: Ray lost a client state") from error
            self.fetching += time.monotonic() - began
            return codec.state_of(state, CLIENT_STATE)

        def keep(place: int, state: Tensors) -> None:
            if kept:  # on the host, so that an accelerator does not hold the states of a whole batch
                kept[place] = RecordDict({CLIENT_STATE: codec.to_record(on_host(state))})

        try:
            return self.runner.run(messages, state_of, keep, batch.timeout)
        except Exception as error:
            if device_lost(error):
                os._exit(1)  # the driver starts another worker, which can use the GPU again
            raise


def keep_to_share() -> None:
    """Limit this worker to its share of a GPU's memory. A tenth of the share is for CUDA itself."""
    import ray

    share = ray.get_runtime_context().get_assigned_resources().get("GPU", 1)
    if share < 1:
        torch.cuda.set_per_process_memory_fraction(0.9 * share)
