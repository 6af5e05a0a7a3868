"""What only both halves of a method together can tell: whether the rule sends what nodes expect, and what privacy needs.

No data are needed for it: the names of what travels depend on the model alone, whatever the images.
"""

import contextlib
import inspect
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from contrafed.core import registry
from contrafed.core.client_run import Choice, NodeRun, choose
from contrafed.core.errors import UserError, unknown
from contrafed.core.privacy import central, gaussian, none
from contrafed.core.split_model import SplitModel, build_model
from contrafed.data.participation import make_participation, pattern_class_of
from contrafed.engines.attack import Attack, Attackers
from contrafed.server.accountant import needs_accountant
from contrafed.server.base import FederatedStrategy, Population, strategy_class_of
from contrafed.server.checks import judged_fault, sent_fault
from contrafed.server.privacy import protected
from contrafed.server.replies import OTHER
from contrafed.training.base import Client
from contrafed.training.loop import part_of
from contrafed.training.workspace import client_class_of

# Images of a common size, and their classes.
CHANNELS, SIDE, CLASSES = 3, 32, 10


def check_messages(node: NodeRun, server: Choice, participation: Choice, num_trained: int) -> FederatedStrategy:
    """Return the rule, as made for data of a common kind; raises ``UserError`` where it does not send what nodes expect.

    And for a node half that declares no shapes, or sends neither its model nor the change, for a rule without ``aggregate`` or
    that has half a model scored, for a pattern over the ``num_trained`` nodes whose ``presence`` or ``available`` has another
    shape, and where the author's own code fails, with the line.
    """
    half, rule_class, config = client_class_of(node.strategy), strategy_class_of(server), node.strategy.config
    chosen = f"strategy={node.strategy.name}: {half.__name__}", f"strategy.server={server.name}: {rule_class.__name__}"
    registry.check_overrides(half, Client)
    if half.upload not in tuple(OTHER):
        raise UserError(f"{chosen[0]}: {unknown('upload', half.upload, OTHER)}")
    model = _outline(json.dumps(dict(node.model.values), sort_keys=True))
    with _code_of(f"{chosen[0]}.messages", half):
        if fault := _declared_fault(half, model, config):
            raise UserError(f"{chosen[0]}.messages {fault}")
    if rule_class.aggregate is FederatedStrategy.aggregate and rule_class.next_model is FederatedStrategy.next_model:
        raise UserError(f"{chosen[1]} must define aggregate(self, model, replies), which returns the next global model")
    shares = np.broadcast_to(1 / CLASSES, (num_trained, CLASSES))
    try:
        with _code_of(f"participation={participation.name}", pattern_class_of(participation)):
            pattern = make_participation(participation, lambda: shares, num_trained, node.seed)
            pattern.probability()
            pattern.participants(1)
        with _code_of(f"{chosen[1]}.setup", rule_class):
            rule = rule_class(
                server.config,
                client_class=half,
                node_config=config,
                model=model,
                population=Population(np.broadcast_to(1, node.num_nodes), np.broadcast_to(0, node.num_nodes)),
                participation=pattern,
                settings="",
                num_rounds=1,
                seed=node.seed,
            )
    except MemoryError as error:
        raise UserError(f"num_nodes={node.num_nodes} or the model is too large for this machine's memory") from error
    if not hasattr(rule, "state"):
        raise UserError(f"{chosen[1]}.__init__ must call super().__init__ with all that it is given; or write setup() instead")
    initial = {name: torch.zeros(()).expand(value.shape) for name, value in model.named_parameters()}
    with _code_of(f"{chosen[1]}.broadcast", rule_class):
        shared = rule.broadcast(initial)
    with _code_of(f"{chosen[1]}.download", rule_class):
        own = rule.download(initial, 0, False)
    if fault := sent_fault(rule, shared, {} if own is None else own):
        raise UserError(fault)
    with _code_of(f"{chosen[1]}.judged", rule_class):
        if fault := judged_fault(rule, initial, rule.judged(initial)):
            raise UserError(fault)
    return rule


def _code_of(what: str, author: type) -> contextlib.AbstractContextManager[None]:
    """Return a context in which what goes wrong is the fault of an author's class."""
    return registry.blamed(what, inspect.getfile(author))


def _declared_fault(half: type[Client], model: SplitModel, config: Any) -> str:
    """Return what is wrong with the names and shapes that a node half declares; empty for nothing."""
    found: Any = half.messages(model, config)
    if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(shapes, Mapping) for shapes in found):
        return f"must return two dictionaries, what a node receives and what it sends, got {type(found).__name__}"
    for name, shape in (item for shapes in found for item in shapes.items()):
        if not isinstance(shape, tuple) or not all(isinstance(side, int | np.integer) and side >= 0 for side in shape):
            return f"must return shapes, tuples of whole numbers such as (10, 64), got {shape!r} for {name}"
    shared = half.shared_parts(config)
    for name, value in model.named_parameters():
        if part_of(name) in shared and found[0].get(f"model/{name}") != tuple(value.shape):
            return f"must have a node receive model/{name}, of shape {tuple(value.shape)}: its part is in `shared`"
    return ""


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
    if not vars(pattern_class_of(participation)).get("independent_draws", False):
        wrong = f"participation={participation.name} does not draw each node independently; participation=bernoulli does"
    elif getattr(config, "beta", None) is not None:
        wrong = "nodes have different probabilities; participation.beta=null gives them one"
    elif config.select is not None:
        wrong = "participation.select draws nodes without replacement, not independently; set it to null"
    elif getattr(server.config, "weights", None) not in strategy_class_of(server).fixed_weights:
        wrong = "a node's weight depends on who else takes part; with strategy=fedavg strategy.weights=all_nodes it is fixed"
    elif config.loss_rate == 1:
        wrong = "participation.loss_rate=1 leaves no reply"
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


def check_attack(attack: Choice, rule: FederatedStrategy, node: NodeRun, num_trained: int) -> None:
    """Raise ``UserError`` for an attack of one's own that is none, and for one on what is sent where nodes send nothing.

    And for attackers none of whom is among the ``num_trained`` nodes that train, or who need honest ones and leave none.
    """
    if attack.name == "none":
        return
    if not isinstance(attack.config, Attackers):
        wanted = "must inherit Attackers of contrafed.engines.attack, who attacks"
        raise UserError(f"attack={attack.name}: Config of {attack.module.__name__} {wanted}")
    if not attack.config.flips_labels:
        registry.only_subclass(attack.module, Attack)
        if not rule.up:
            raise UserError(f"attack={attack.name}: strategy={node.strategy.name} sends nothing that attackers could change")
    attackers = attack.config.among(node.num_nodes, node.seed)
    training = [attacker for attacker in attackers if attacker < num_trained]
    if attackers and not training:
        raise UserError(f"attack={attack.name}: its {len(attackers)} nodes are held out, and never train")
    if attack.config.needs_honest and len(training) == num_trained:
        raise UserError(f"attack={attack.name}: all {num_trained} nodes attack, and use the changes of those that do not")


@lru_cache(maxsize=1)
def _outline(values: str) -> SplitModel:
    """Return the chosen model, its parameters without numbers."""
    return build_model(choose("model", json.loads(values)), CHANNELS, (SIDE, SIDE), CLASSES, 0, tried=False).to("meta")
