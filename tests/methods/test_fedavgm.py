"""FedAvgM: by hand, the golden run, and FedAvg without momentum."""

from hand import path, rule_of


def test_by_hand():
    """D = 1 each round and rho = 0.5 give 1, 2.5, 4.25. A round without replies changes nothing."""
    assert path(rule_of("fedavgm", server_momentum=0.5), [1, 1, 1])[0] == [1, 2.5, 4.25]
    assert path(rule_of("fedavgm", server_momentum=0.5), [1, None, 1, 1])[0] == [1, 1, 2.5, 4.25]
    assert path(rule_of("fedavgm", server_momentum=0.0, server_lr=0.5), [1, 1])[0] == [0.5, 1]
