"""What only both halves of a method together can tell: whether the rule sends what nodes expect, and what privacy needs.

No data are needed for it: the names of what travels depend on the model alone, whatever the images.
"""

import json
from functools import lru_cache

import numpy as np
import torch

from clients.training.workspace import client_class_of
from core import registry
from core.errors import UserError
from core.privacy import central, gaussian, none
from core.run import Choice, NodeRun, choose
from models.base import SplitModel, build_model
from partitions.participation.base import Participation, make_participation
from partitions.participation.bernoulli import Bernoulli
from strategies.accountant import needs_accountant
from strategies.base import FederatedStrategy, Population, strategy_class_of
from strategies.fedavg import FIXED
from strategies.privacy import protected

# Images of a common size, and their classes.
CHANNELS, SIDE, CLASSES = 3, 32, 10


def check_messages(node: NodeRun, server: Choice, participation: Choice) -> FederatedStrategy:
    """Return the rule, as made for data of a common kind; raises ``UserError`` where it does not send what nodes expect."""
    model = _outline(json.dumps(dict(node.model.values), sort_keys=True))
    shares = np.broadcast_to(1 / CLASSES, (node.num_nodes, CLASSES))
    try:
        rule = strategy_class_of(server)(
            server.config,
            client_class=client_class_of(node.strategy),
            node_config=node.strategy.config,
            model=model,
            population=Population(np.broadcast_to(1, node.num_nodes), np.broadcast_to(0, node.num_nodes)),
            participation=make_participation(participation, lambda: shares, node.num_nodes, node.seed),
            settings="",
            num_rounds=1,
            seed=node.seed,
        )
    except MemoryError as error:
        raise UserError(f"num_nodes={node.num_nodes} or the model is too large for this machine's memory") from error
    initial = {name: torch.zeros(()).expand(value.shape) for name, value in model.named_parameters()}
    rule.check_sent(rule.broadcast(initial) | (rule.download(initial, 0, False) or {}))
    return rule


def check_privacy(
    privacy: Choice, node: NodeRun, rule: FederatedStrategy, server: Choice, participation: Choice, min_replies: int
) -> None:
    """Raise ``UserError`` where epsilon would not hold: for tensors without a clip, rules that do more than sum, sampling."""
    if isinstance(privacy.config, none.Config):
        return
    protected(list(rule.up), list(rule.down), node.strategy.name)
    if isinstance(privacy.config, gaussian.Gaussian) and privacy.config.noise_multiplier:
        needs_accountant()
    if not isinstance(privacy.config, central.Config):
        return
    if reason := type(rule).single_replies(server.config):
        raise UserError(
            f"privacy=central adds noise to one weighted sum of clipped updates, but strategy.server={server.name} {reason}; "
            "privacy=local goes with any rule"
        )
    if privacy.config.amplification:
        _check_sampling(server, participation, min_replies)


def _check_sampling(server: Choice, participation: Choice, min_replies: int) -> None:
    """Raise ``UserError`` unless all nodes are drawn independently with one probability, at weights of their own."""
    config, wrong = participation.config, ""
    if registry.only_subclass(participation.module, Participation) is not Bernoulli:
        wrong = f"participation={participation.name} does not draw each node independently; participation=bernoulli does"
    elif config.beta is not None:
        wrong = "nodes have different probabilities; participation.beta=null gives them one"
    elif config.select is not None:
        wrong = "participation.select draws nodes without replacement, not independently; set it to null"
    elif getattr(server.config, "weights", None) not in FIXED:
        wrong = f"a node's weight depends on who else takes part; with strategy=fedavg strategy.weights={FIXED[0]} it is fixed"
    elif min_replies:
        wrong = "min_replies tells how many took part; set it to 0"
    if wrong:
        raise UserError(f"privacy.amplification=true: {wrong}")


def check_mean(aggregation: Choice, server: Choice, privacy: Choice) -> None:
    """Raise ``UserError`` for another aggregation than the mean where a rule takes none, or where the mean has noise."""
    if aggregation.name == "mean":
        return
    if isinstance(privacy.config, central.Config):
        raise UserError(f"privacy=central adds noise to a weighted mean; aggregation={aggregation.name} is none")
    # What a class says of itself: one that inherits a rule may do something else with replies.
    averages, weights = vars(strategy_class_of(server)).get("averages", False), getattr(server.config, "weights", "samples")
    what = f"strategy.weights={weights}" if averages else f"strategy.server={server.name}"
    if not averages or weights not in ("samples", "uniform"):
        raise UserError(f"aggregation={aggregation.name} stands in for a mean of the participants, which {what} does not take")


def check_attack(attack: Choice, rule: FederatedStrategy, node: NodeRun) -> None:
    """Raise ``UserError`` for attackers that change what they send where nodes send nothing; label_flip changes labels."""
    if attack.name not in ("none", "label_flip") and not rule.up:
        raise UserError(f"attack={attack.name}: strategy={node.strategy.name} sends nothing that attackers could change")


@lru_cache(maxsize=1)
def _outline(values: str) -> SplitModel:
    """Return the chosen model, its parameters without numbers."""
    return build_model(choose("model", json.loads(values)), CHANNELS, (SIDE, SIDE), CLASSES, 0).to("meta")
