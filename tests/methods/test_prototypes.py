"""Class prototypes of FedCRL, FedCoSR, MpFedcon and FedProto: the clients' class means, and the server's table."""

import numpy as np
import pytest
import torch
from hand import prototypes_of
from helpers import config_of, workspace_of

from contrafed.server.base import Replies, Reply
from contrafed.server.prototypes import Prototypes


def merge_rows(rows, weighting="class_count", means=None, valid=None):
    """Return the table after replies (num_examples, counts (C,), means (C, D))."""
    shape, state = np.shape(rows[0][2]), {}
    table = Prototypes(state, {"proto/mean": shape, "proto/valid": shape[:1]})
    if means is not None:
        state |= {"means": torch.tensor(means), "valid": torch.tensor(valid)}
    table.merge(
        Replies(
            Reply(k, {"proto/count": torch.tensor(c), "proto/mean": torch.tensor(m)}, n, {}) for k, (n, c, m) in enumerate(rows)
        ),
        weighting,
    )
    return state["means"].tolist(), state["valid"].tolist()


def test_prototypes_are_pooled_by_class_count():
    """I6: 3 examples of mean (1,0) and 1 of mean (0,4) give (0.75, 1). A client without the class changes nothing."""
    rows = [(3, [3.0], [[1.0, 0.0]]), (1, [1.0], [[0.0, 4.0]]), (9, [0.0], [[0.0, 0.0]])]
    assert merge_rows(rows) == ([[0.75, 1.0]], [1.0])


def test_prototype_weightings_by_hand():
    """M7: two holders with counts (3,1) and centres 1 and 5: by class count 2, plain 3, by data (n = 10, 30) 4."""
    rows = [(10, [3.0], [[1.0]]), (30, [1.0], [[5.0]])]
    assert merge_rows(rows)[0] == [[2.0]]
    assert merge_rows(rows, "plain")[0] == [[3.0]]
    assert merge_rows(rows, "data")[0] == [[4.0]]


def test_a_class_that_nobody_held_keeps_its_prototype():
    """c_0 = (9,9) stays, c_1 from counts (1,3) and centres (1,1), (5,1) becomes (4,1)."""
    rows = [(1, [0.0, 1.0], [[0.0, 0.0], [1.0, 1.0]]), (3, [0.0, 3.0], [[0.0, 0.0], [5.0, 1.0]])]
    assert merge_rows(rows, means=[[9.0, 9.0], [0.0, 0.0]], valid=[1.0, 0.0]) == ([[9.0, 9.0], [4.0, 1.0]], [1.0, 1.0])


@pytest.mark.parametrize("clients", [[2], [0, 1, 3]])
def test_prototypes_are_class_means_over_the_whole_training_part(clients):
    config = config_of("strategy=fedproto", "num_clients=5", "model=mlp", "model.hidden=[6]")
    workspace = workspace_of(config, dtype=torch.float64)
    means, counts = prototypes_of(workspace, clients)
    for row, client in enumerate(clients):
        index = torch.from_numpy(workspace.federation.partition.train(client))
        z, y = workspace.model(workspace.images(index)).z, workspace.y[index]
        assert counts[row].tolist() == torch.bincount(y, minlength=10).tolist()
        for c in y.unique():
            torch.testing.assert_close(means[row, c], z[y == c].mean(0), rtol=1e-9, atol=1e-9)
        assert (counts[row] == 0).any()
        assert means[row][counts[row] == 0].abs().max() == 0


def test_pooled_prototypes_are_those_of_the_pooled_data():
    """I7: with one shared body, Equation 6 over clients is the mean over all their examples."""
    workspace = workspace_of(config_of("strategy=fedcrl", "num_clients=4", "model=mlp"), dtype=torch.float64)
    parts, rows = [workspace.federation.partition.train(client) for client in range(4)], []
    for client, part in enumerate(parts):
        means, counts = prototypes_of(workspace, [client])
        rows.append((len(part), counts[0].tolist(), means[0].tolist()))
    table = torch.tensor(merge_rows(rows)[0])
    every = torch.from_numpy(np.concatenate(parts))
    with torch.no_grad():
        z = workspace.model(workspace.images(every)).z
    labels = workspace.labels(every)
    for label in labels.unique():
        torch.testing.assert_close(table[label], z[labels == label].mean(0).to(table), rtol=1e-5, atol=1e-6)
