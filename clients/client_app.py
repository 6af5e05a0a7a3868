"""The ClientApp: the same object in simulation and on a device.

Flower calls ``app(message, context)`` for one node. Our engines call ``run_stack`` with many nodes' messages at once; both
end in the same ``Client.update``. What a node remembers is the record ``memory`` of its ``Context.state``.
"""

from collections.abc import Sequence
from typing import Any

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.base import Client, Tensors, Update
from clients.site import Site, site_for
from contrafed import codec

MEMORY = "memory"

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one node through its ``NumPyClient`` interface."""
    client, tensors, config = _open(message, context)
    arrays, count, metrics = client.fit(codec.to_list(client.names("down"), tensors), config)
    up = codec.from_list(client.names("up"), arrays)
    _commit(context, client.memories[0])
    return _reply(message, up, count, metrics)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score one node's model on its own part of the data; changes no state."""
    client, tensors, config = _open(message, context)
    loss, count, metrics = client.evaluate(codec.to_list(client.names("down"), tensors), config)
    scores = MetricRecord({"loss": loss, "num-examples": count, **metrics})
    return Message(RecordDict({codec.METRICS: scores}), reply_to=message)


@app.query()
def query(message: Message, context: Context) -> Message:
    """Tell the server which partition this node holds, and how many training examples."""
    node = int(context.node_config["partition-id"])
    site = site_for(str(codec.config_of(message)["settings"]))
    answer = MetricRecord({"partition-id": node, "num-examples": len(site.federation.partition.train(node))})
    return Message(RecordDict({codec.METRICS: answer}), reply_to=message)


def run_stack(messages: Sequence[Message], contexts: Sequence[Context], deadline: float | None = None) -> list[Message]:
    """Train the nodes of ``messages`` as one stack and return their replies in the same order.

    All messages belong to one round of one run. Every context is committed, or, when this raises, none.
    """
    config = codec.config_of(messages[0])
    site = site_for(str(config["settings"]))
    client = site.client_class(site, [_node(c) for c in contexts], [codec.state_of(c.state, MEMORY) for c in contexts])
    received = _received(messages)
    updates: list[Update] = client.update(received, int(config["server-round"]), deadline)
    replies = []
    for message, context, update in zip(messages, contexts, updates, strict=True):
        _commit(context, update.memory)
        replies.append(_reply(message, update.tensors, update.num_examples, update.metrics))
    return replies


def _received(messages: Sequence[Message]) -> list[Tensors]:
    """Decode each distinct array record once, so that a broadcast stays one set of tensors."""
    decoded: dict[int, Tensors] = {}
    out = []
    for message in messages:
        record = message.content[codec.ARRAYS]
        key = id(record)
        if key not in decoded:
            decoded[key] = codec.state_of(message.content, codec.ARRAYS)
        out.append(decoded[key])
    return out


def _node(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _open(message: Message, context: Context) -> tuple[Client, Tensors, dict[str, Any]]:
    config = codec.config_of(message)
    site: Site = site_for(str(config["settings"]))
    client = site.client_class(site, [_node(context)], [codec.state_of(context.state, MEMORY)])
    return client, codec.state_of(message.content, codec.ARRAYS), config


def _commit(context: Context, memory: Tensors) -> None:
    if memory:
        context.state[MEMORY] = codec.to_record(memory)


def _reply(message: Message, tensors: Tensors, count: int, metrics: dict[str, Any]) -> Message:
    content = RecordDict(
        {codec.ARRAYS: codec.to_record(tensors), codec.METRICS: MetricRecord({"num-examples": count, **metrics})}
    )
    return Message(content, reply_to=message)
