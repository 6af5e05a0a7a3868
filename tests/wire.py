"""Devices in one process: a Flower Grid whose clients are the ClientApp, behind Flower's own encoding."""

import csv
import json
from types import SimpleNamespace

from flwr.app import Context, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from helpers import TWO_STEPS
from safetensors.torch import load_file

import contrafed.client_app.app
import contrafed.engines.device_grid
from contrafed.engines.device_grid import DeviceGrid
from contrafed.engines.worker import identify
from contrafed.runs.server_app import serve
from contrafed.runs.setup import compose_deployed_run

RUN = 4242
SMALL_RUN = (
    "num_clients=3", "num_rounds=3", "eval_every=1", "participation=full", "model=mlp", "model.hidden=[12]",
    "partition.min_client_size=5", "partition.test_fraction=0.2", "engine=local", *TWO_STEPS,
)  # fmt: skip


# The grids here have no SuperLink to ask. test_proxy and test_repository ask a real one.
contrafed.engines.device_grid.demands_keys = lambda grid: bool(getattr(grid, "keys", ()))


def pull_object(request):
    return SimpleNamespace(object_found=True, object_available=True, object_content=request.content)


def over_the_wire(message, pull=pull_object):
    """Return the message as its receiver gets it, after Flower's serialisation of each part."""
    parts = {i: SimpleNamespace(object_id=i, content=part.deflate()) for i, part in get_all_nested_objects(message).items()}
    parts = {i: pull(part).object_content for i, part in parts.items()}
    found = inflate_object_from_contents(message.object_id, parts)
    found.metadata.__dict__["_message_id"] = message.object_id
    return found


class Wire:
    """A Flower Grid whose clients are ``app`` in this process, behind Flower's own encoding. Client k has the id 10 + k.

    ``change(k, message, reply)`` simulates changes of a reply: it returns another, None for none, or raises.
    """

    def __init__(self, *configs, change=None, offline=(), run_id=RUN, keys=()):
        identify()
        self.keys = list(keys)  # of client k, where the SuperLink demands keys
        self.run_id = run_id
        self.contexts = [Context(run_id, 10 + k, c, RecordDict(), {}) for k, c in enumerate(configs)]
        self.change, self.offline = change or (lambda k, message, reply: reply), set(offline)
        self.replies, self.log = {}, []
        self._runtime_client = SimpleNamespace(PullMessages=None, PullObject=pull_object, ConfirmMessageReceived=None)

    def get_node_ids(self):
        return [c.node_id for c in self.contexts if c.node_id - 10 not in self.offline]

    def get_nodes(self):
        keys = dict(enumerate(self.keys))
        return [SimpleNamespace(node_id=i, public_key=keys.get(i - 10, b""), name="") for i in self.get_node_ids()]

    def push_messages(self, messages):
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            k = message.metadata.dst_node_id - 10
            self.log.append((k, message.metadata.message_type, message.metadata.ttl))
            received = over_the_wire(message)
            if k in self.offline:
                ids.append("")  # as Flower 1.41 has it
                continue
            ids.append(message.object_id)
            try:
                reply = contrafed.client_app.app.app(received, self.contexts[k])
            except Exception as error:
                reply = Message(clients_error(error), reply_to=received)
            self.replies[message.object_id] = lambda k=k, m=received, r=reply: self.change(k, m, r)
        return ids

    def pull_messages(self, ids):
        assert all(ids), "a message that was not taken is waited for"
        found = [self.replies.pop(i)() for i in list(ids) if i in self.replies]
        return [over_the_wire(reply, self._runtime_client.PullObject) for reply in found if reply is not None]


def answers_but(client, server_round, what, kind="train"):
    """Return a change of Wire: ``what(message, reply)`` are a client's replies to a kind of message, in a round or in all."""

    def change(k, message, reply):
        about = message.metadata
        return (
            what(message, reply)
            if (k, kind) == (client, about.message_type) and server_round in (None, about.group_id)
            else reply
        )

    return change


def clients_error(error):
    from flwr.app import Error

    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error)}:<'{error}'>")


def plain(**more):
    return [{"partition-id": k, **{key: str(value).format(k=k) for key, value in more.items()}} for k in range(3)]


def run_devices(folder, wire, *overrides):
    """Run on the devices behind ``wire``, and return (model, metrics.csv, clients.csv, summary)."""
    config = compose_deployed_run(" ".join([*SMALL_RUN, *overrides, f"output_dir={folder}"]))
    serve(DeviceGrid(wire, wire.run_id, config.wait_for_clients), config)
    read = lambda name: (folder / name).read_bytes()  # noqa: E731
    return load_file(folder / "model.safetensors"), read("metrics.csv"), read("clients.csv"), json.loads(read("summary.json"))


def rows_of(metrics, name):
    return {int(r["round"]): float(r["value"]) for r in csv.DictReader(metrics.decode().splitlines()) if r["metric"] == name}
