"""The weights that a server rule gives nodes over the rounds, also those that are away (PMFL, Figure 6)."""

METRIC = "weight_all"  # of nodes.csv with log=[weights]


def expected_weight(probability: float, cutoff: int) -> float:
    """Return (1 - (1 - p)^C) / p: the mean length of an interval that ends with a participation or after C rounds.

    PMFL's and FedAU's weights tend to it for a node that takes part with ``probability`` p in (0, 1] of each round's draws.
    """
    return (1 - (1 - probability) ** cutoff) / probability
