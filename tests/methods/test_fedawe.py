"""FedAWE: the golden problem by hand, the start model of each client, and equality to FedAvg under full participation."""

import numpy as np
import pytest
from hand import COHORTS_WITH_ABSENCES, WORK
from helpers import Schedule, config_of, digits_run, run_strategy, same, strategy_settings, workspace_of

from contrafed.strategies.fedawe import FedAWE


def test_every_client_goes_on_from_the_model_it_left_with():
    sent = []

    class Seen(FedAWE):
        def next_model(self, model, replies):
            sent.append({reply.client: reply.get_tensors("model") and reply.received for reply in replies})
            return super().next_model(model, replies)

    models, rule = digits_run(
        "fedawe", len(COHORTS_WITH_ABSENCES), clients=5, schedule=COHORTS_WITH_ABSENCES, local=WORK, rule=Seen
    )
    left = dict.fromkeys(range(5), 0)  # last round of each client's participation
    for t, here in enumerate(COHORTS_WITH_ABSENCES, 1):
        assert sent[t - 1].keys() == set(here)
        for client in here:
            assert same(sent[t - 1][client], {f"model/{n}": v for n, v in models[left[client]].items()}), (t, client)
        left |= dict.fromkeys(here, t)
    assert rule.state["active"].tolist() == list(left.values())
    assert rule.state["models"].keys() == set(left.values())  # only models that a client continues from are stored
    for t, kept in rule.state["models"].items():
        assert same(kept, models[t])


def test_how_long_clients_were_away_is_logged():
    seen = []

    class Logged(FedAWE):
        def next_model(self, model, replies):
            new = super().next_model(model, replies)
            seen.append([array.tolist() for array in self.round.client_metrics.get("weight", (np.zeros(0),) * 2)])
            return new

    digits_run("fedawe", len(COHORTS_WITH_ABSENCES), clients=5, schedule=COHORTS_WITH_ABSENCES, local=WORK, rule=Logged)
    assert seen == [[[0, 1, 2, 3], [1] * 4], [[1, 4], [1, 2]], [[], []], [[0, 4], [3, 2]]]


@pytest.mark.parametrize("after_training", [False, True])
def test_clients_are_evaluated_by_the_last_active_clients_mean(after_training):
    """All clients are evaluated by the same model, and after local training by their own start model's result."""
    config = config_of("num_clients=5", "model=mlp", "model.hidden=[12]", "partition.test_fraction=0.3")
    config["strategy"] = strategy_settings("fedawe", local=WORK)
    given = {}

    class Evaluating(FedAWE):
        def __init__(self, *arguments, **named):
            super().__init__(*arguments, **named | {"after_training": after_training})

        def per_client_broadcast(self, model, client, evaluating):
            own = super().per_client_broadcast(model, client, evaluating)
            if evaluating:
                given[self.round.server_round, client] = own
            return own

    run_strategy(
        workspace_of(config),
        config,
        Schedule(COHORTS_WITH_ABSENCES),
        len(COHORTS_WITH_ABSENCES),
        rule=Evaluating,
        evaluated=range(5),
    )
    own = {client for (t, client), tensors in given.items() if t == 4 and tensors is not None}
    assert own == ({1, 2, 3} if after_training else set())


def test_of_methods_that_keep_a_head_it_moves_the_body():
    _, rule = digits_run("fedper", 2, clients=3, server="fedawe", schedule=[[0, 1], [1, 2]])
    assert all(set(kept) == set(rule.shared_names) for kept in rule.state["models"].values())
