"""FedVARP: two clients and the mean over draws by hand, its table, the golden problem, and equality to FedAvg."""

import numpy as np
import pytest
import torch
from hand import COHORTS_WITH_ABSENCES, WORK, path, rule_of
from helpers import close, digits_run, same

from contrafed.strategies.fedvarp import FedVARP


def test_the_mean_over_draws_of_one_client_is_the_mean_update():
    """For any table, E v = mean Delta over all clients, here with y = (5, -1, 2) and Delta = (1, 2, 6)."""
    steps = []
    for client in range(3):
        before, after = path(rule_of("fedvarp", (4, 4, 4)), [{0: 5, 1: -1, 2: 2}, {client: (1, 2, 6)[client]}])[0]
        steps.append(after - before)
    assert np.mean(steps) == pytest.approx(3, rel=1e-12)


def test_the_table_holds_every_clients_last_update_and_their_mean():
    kept = []

    class Seen(FedVARP):
        def aggregate(self, model, replies):
            kept.append({reply.client: reply.get_tensors("delta") for reply in replies})
            return super().aggregate(model, replies)

    _, rule = digits_run("fedvarp", 4, clients=5, schedule=COHORTS_WITH_ABSENCES, local=WORK, rule=Seen)
    last = {client: delta for seen in kept for client, delta in seen.items()}
    assert rule.state["latest"].keys() == last.keys() == {0, 1, 2, 3, 4}
    for client, delta in last.items():
        close(rule.state["latest"][client], delta, 1e-15)
    mean = {n: sum(delta[n].double() for delta in last.values()) / 5 for n in last[0]}
    close(rule.state["mean"], mean, 1e-12)


def test_only_what_travels_is_in_the_table():
    _, rule = digits_run("fedper", 2, clients=3, server="fedvarp")
    names = set(rule.shared_names)
    assert names
    assert all(set(y) == names for y in rule.state["latest"].values())
    models, _ = digits_run("fedper", 2, clients=3, server="fedvarp")
    assert same({"x": models[0]["classifier.weight"]}, {"x": models[-1]["classifier.weight"]})
    assert all(isinstance(value, torch.Tensor) for value in rule.state["mean"].values())
