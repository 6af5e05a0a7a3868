"""Replies that are empty, doubled, late or of another round, clients that all fail, and long silence.

Other invalid replies are in test_grid.py and test_devices.py. Two exact steps of 0.1 from w towards a = (0, 6, 3).
"""

from itertools import count

import pytest
from flwr.app import Error, Message, RecordDict
from helpers import Scalar, Schedule, Through, run_strategy, scalar_settings, scalar_workspace

from contrafed.core import codec
from contrafed.engines.grid import LocalGrid
from contrafed.engines.worker import FIRST_NODE_ID

ALL_CLIENTS = [0, 1, 2]


def rounds_of(schedule, change=lambda server_round, replies: replies, name="fedavg", **settings):
    """Return W after each round of the scalar problem, each round's rejected replies, and the grid."""
    config, grid, rejected, rounds = scalar_settings(name, weights="uniform", **settings), LocalGrid(3, 1), [], count(1)
    models, _ = run_strategy(
        scalar_workspace(config, Scalar(2.0)), config, Schedule(schedule), len(schedule), grid=grid, may_fail=True,
        wrap=lambda grid: Through(grid, lambda _, replies: change(next(rounds), replies)),
        after_round=lambda done: rejected.append(dict(done.rejected)),
    )  # fmt: skip
    return [float(model["classifier.w"]) for model in models[1:]], rejected[1:], grid


def with_tensors(reply, tensors):
    content = RecordDict({**reply.content, codec.ARRAYS: codec.to_record(tensors)})
    return Message(content=content, metadata=reply.metadata)


def refuse_reply(reply):
    return Message(error=Error(0, "no"), metadata=reply.metadata)


def test_a_doubled_reply_counts_once():
    found, rejected, _ = rounds_of([ALL_CLIENTS] * 2, lambda server_round, replies: [*replies, replies[1], replies[1]])
    assert found == rounds_of([ALL_CLIENTS] * 2)[0]
    assert rejected == [{"not asked for": 2}] * 2


def test_a_late_reply_counts_in_no_round():
    """Client 1's reply to round 1 comes with those to round 2."""
    late = []

    def change(server_round, replies):
        late.extend(replies[1:2] if server_round == 1 else ())
        return [replies[0], replies[2]] if server_round == 1 else [*late, *replies]

    found, rejected, _ = rounds_of([ALL_CLIENTS] * 2, change)
    assert found == rounds_of([[0, 2], ALL_CLIENTS])[0]
    assert rejected == [{"no answer": 1}, {"not asked for": 1}]


def test_a_reply_to_another_round_in_place_of_its_own_is_none():
    old = []

    def change(server_round, replies):
        old.extend(replies[1:2] if server_round == 1 else ())
        return [replies[0], old[0], replies[2]] if server_round == 2 else replies

    found, rejected, _ = rounds_of([ALL_CLIENTS] * 2, change)
    assert found == rounds_of([ALL_CLIENTS, [0, 2]])[0]
    assert rejected == [{}, {"not asked for": 1, "no answer": 1}]


@pytest.mark.parametrize("name", ["fedavg", "fedau", "fedvarp", "pmfl"])
def test_rounds_in_which_all_clients_fail_are_rounds_without_replies(name):
    def change(server_round, replies):
        return [refuse_reply(reply) for reply in replies] if server_round in (2, 3) else replies

    found, rejected, _ = rounds_of([ALL_CLIENTS] * 4, change, server=name)
    assert found == rounds_of([ALL_CLIENTS, [], [], ALL_CLIENTS], server=name)[0]
    assert rejected == [{}, {"failed": 3}, {"failed": 3}, {}]


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "moon"])
def test_long_silence_changes_nothing_and_clients_go_on_with_what_they_remember(name):
    found, rejected, grid = rounds_of([ALL_CLIENTS, *[[]] * 60, ALL_CLIENTS], name=name)
    assert found[0] == found[60]
    assert found[61] != found[60]
    assert not any(rejected)
    before = rounds_of([ALL_CLIENTS], name=name)[2]
    silent = rounds_of([ALL_CLIENTS, *[[]] * 60], name=name)[2]
    for client in range(FIRST_NODE_ID, FIRST_NODE_ID + 3):
        assert {n: v.tolist() for n, v in silent.client_states.get(client).items()} == {
            n: v.tolist() for n, v in before.client_states.get(client).items()
        }
