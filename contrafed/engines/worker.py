"""Run a batch of messages on one worker: stacking, isolation of a faulty client, transactional client state."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from contrafed.client_app.app import app, run_stack
from contrafed.core import codec
from contrafed.core.errors import RunStopped
from contrafed.core.tensors import Tensors
from contrafed.engines.scheduling import STACKED_MESSAGE_TYPES, cut_stacks
from contrafed.training.base import DeadlineError, LocalError, NoRoomError
from contrafed.training.errors import device_lost

# glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3

RUN_ID = 1  # a process has one run at a time
FIRST_NODE_ID = 1000  # client k's id is this + k, because 0 and 1 have a meaning in Flower


def identify() -> None:
    """Tell Flower which task this process runs. Without it no message can be made."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, RUN_ID, SUPERLINK_NODE_ID


def reuse_memory() -> None:
    """Make glibc keep freed memory. Otherwise activations of some 10 MB are mapped again at every layer of every step.

    This saves a third of a small CNN's time on a CPU. Without glibc it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((M_MMAP_THRESHOLD, 32 << 20), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 64 << 20)):
            mallopt(parameter, value)


def context_of(message: Message, num_clients: int) -> Context:
    """Return a client's context for a message that needs no client state."""
    node_id = message.metadata.dst_node_id
    node_config: dict[str, Any] = {"partition-id": node_id - FIRST_NODE_ID, "num-partitions": num_clients}
    return Context(run_id=RUN_ID, node_id=node_id, node_config=node_config, state=RecordDict(), run_config={})


class BatchRunner:
    """Runs batches of messages in this process, ``stack_size`` clients at a time."""

    def __init__(self, num_clients: int, stack_size: int) -> None:
        self.num_clients = num_clients
        self.stack_size = stack_size
        self.told = False  # whether the failure of a stack was reported whose clients succeed alone

    def run(
        self,
        messages: Sequence[Message],
        state_of: Callable[[int], Tensors],
        keep: Callable[[int, Tensors], None],
        timeout: float | None,
    ) -> list[Message | None]:
        """Return a reply per message, None for a client that did not finish within ``timeout`` seconds.

        Args:
            messages: The messages.
            state_of: Returns the client state for message i, when its stack starts, empty without one.
            keep: Receives i and the new state when its stack is done, so that an accelerator does not hold those of a whole
                round. Called only after successful training.
            timeout: Seconds, None for no limit.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message | None] = [None] * len(messages)
        todo, failed = self._cut(messages, range(len(messages))), list[tuple[list[int], str]]()
        while todo:
            rows = todo.pop()
            try:
                states = self._stack(rows, messages, state_of, replies, deadline)
            except DeadlineError:
                break
            except Exception as error:
                if isinstance(error, RunStopped) or device_lost(error):  # other clients would fail, whosever fault it is
                    raise
                if len(rows) == 1:
                    replies[rows[0]] = _build_error_reply(messages[rows[0]], error)
                    continue
                no_room, said = isinstance(error, NoRoomError), str(error).partition(": ")[2]
            else:  # errors here are not a client's fault, and nothing is repeated
                for i in list(states):
                    keep(i, states.pop(i))
                continue
            # Here nothing holds the stack's results any more, which is true only after the handler.
            half = len(rows) // 2
            if no_room:
                self.stack_size = half  # from here on
                torch.cuda.empty_cache()
                todo = self._cut(messages, [i for stack in (rows, *reversed(todo)) for i in stack])
            else:  # until only the faulty client fails
                failed.append((rows, said))
                todo += [rows[half:], rows[:half]]
        self._tell(failed, replies)
        return replies

    def _tell(self, failed: Sequence[tuple[list[int], str]], replies: Sequence[Message | None]) -> None:
        """Report once, with a client's answer, why a stack failed whose clients succeed one by one."""
        for rows, said in failed:
            answers = [reply for i in rows if (reply := replies[i]) is not None and not reply.has_error()]
            if not self.told and len(answers) == len(rows):
                self.told = True
                if "vmap" in said or "Batching rule" in said:  # it refuses the method's code in every stack
                    self.stack_size = 1
                note = f"clients were run one by one, since as a stack, which is faster, they raise {said}"
                answers[0].content[codec.CONFIG] = ConfigRecord({**codec.config_of(answers[0]), codec.NOTE: note})

    def _cut(self, messages: Sequence[Message], rows: Sequence[int]) -> list[list[int]]:
        """Return stacks of at most ``stack_size`` messages, the last to run first."""
        return cut_stacks(messages, rows, self.stack_size)[::-1]

    def _stack(
        self,
        rows: list[int],
        messages: Sequence[Message],
        state_of: Callable[[int], Tensors],
        replies: list[Message | None],
        deadline: float | None,
    ) -> dict[int, Tensors]:
        """Fill in the replies of ``rows``, and return the new states of clients that trained."""
        asked = copy_records([messages[i] for i in rows])
        kind = asked[0].metadata.message_type
        if kind not in STACKED_MESSAGE_TYPES:
            replies[rows[0]] = app(asked[0], context_of(asked[0], self.num_clients))
            return {}
        clients = [message.metadata.dst_node_id - FIRST_NODE_ID for message in asked]
        answers, states = run_stack(asked, clients, [state_of(i) for i in rows], deadline)
        for i, answer in zip(rows, answers, strict=True):
            replies[i] = answer
        return dict(zip(rows, states, strict=True)) if kind == MessageType.TRAIN else {}


def copy_records(messages: Sequence[Message]) -> list[Message]:
    """Return the messages of a stack with copies of their records, one of each record that they share.

    So a client cannot change through them what clients of other stacks receive. The tensors are shared and never written to.
    """
    copies = {id(record): record for message in messages for record in message.content.values()}
    copies = {key: record.copy() for key, record in copies.items()}
    contents = [{name: copies[id(record)] for name, record in message.content.items()} for message in messages]
    return [
        Message(content=codec.make_record(RecordDict, content.items()), metadata=message.metadata)  # type: ignore[call-overload]
        for content, message in zip(contents, messages, strict=True)
    ]


def _build_error_reply(message: Message, error: Exception) -> Message:
    reason = str(error) if isinstance(error, LocalError) else f"{type(error).__name__}: {error}"
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
