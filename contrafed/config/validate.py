"""Check a run's choices together before anything is built: a method's client and strategy, privacy, attacks."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from contrafed.core import registry
from contrafed.core.client_run import Choice, ClientRun
from contrafed.core.errors import UserError, unknown
from contrafed.core.privacy import central, gaussian
from contrafed.data.participation import Participation, make_participation, pattern_class_of, read_deadline
from contrafed.engines.attack import Attack, Attackers
from contrafed.server.accountant import needs_accountant
from contrafed.server.base import FederatedStrategy, strategy_class_of
from contrafed.server.replies import OTHER_PREFIX
from contrafed.server.schedule import buffered
from contrafed.training.base import Client
from contrafed.training.workspace import client_class_of

EVEN_CLASSES = 10  # of the even class proportions for a trial of a pattern
TRIAL_ROUNDS = 8  # of an own pattern: in order, and some of them at once


def check_classes(strategy: Choice, server: Choice) -> None:
    """Raise ``UserError`` for a client that uploads neither model nor update, and for a strategy without ``aggregate``.

    It is also raised for functions of a client that cannot be called like those of ``Client``. So it is for a strategy that
    inherits ``aggregate`` without the keys that it reads.
    """
    client, found = client_class_of(strategy), strategy_class_of(server)
    registry.check_overrides(client, Client)
    if client.upload not in tuple(OTHER_PREFIX):
        raise UserError(f"strategy={strategy.name}: {client.__name__}: {unknown('upload', client.upload, OTHER_PREFIX)}")
    if found.aggregate is FederatedStrategy.aggregate and found.next_model is FederatedStrategy.next_model:
        wanted = "must define aggregate(self, model, replies), which returns the next global model"
        raise UserError(f"strategy.server={server.name}: {found.__name__} {wanted}")
    author = sys.modules[found.aggregate.__module__]
    keys = [each.name for each in fields(author.Config)] if is_dataclass(getattr(author, "Config", None)) else []
    read = inspect.unwrap(found.aggregate).__code__.co_names  # of an inherited ``aggregate`` too
    if lacking := [key for key in keys if key in read and not hasattr(server.config, key)]:
        fix = f"give its Config the key, or use {author.__name__}.Config"
        raise UserError(
            f"strategy.server={server.name}: {found.__name__} inherits aggregate, which needs {lacking[0]}. Fix: {fix}"
        )


def check_participation(participation: Choice, num_trained: int, seed: int, num_rounds: int) -> None:
    """Raise ``UserError`` for a pattern whose ``presence`` or ``available`` has another shape than ``num_trained`` clients.

    It is also raised, with the line, if the author's code fails, and for an author's pattern with other clients after a resume.
    The pattern is tried with even class proportions.
    """
    found = pattern_class_of(participation)
    shares = np.broadcast_to(1 / EVEN_CLASSES, (num_trained, EVEN_CLASSES))
    try:
        with registry.report_author_errors(f"participation={participation.name}", inspect.getfile(found)):
            pattern = make_participation(participation, lambda: shares, num_trained, seed)
            pattern.probability()
            pattern.participants(1)
            if participation.is_own:
                _check_rounds(found, lambda: make_participation(participation, lambda: shares, num_trained, seed), num_rounds)
    except MemoryError as error:
        raise UserError(f"num_clients={num_trained}: too large for this machine's memory. Fix: a smaller number") from error


def _check_rounds(found: type[Participation], make: Callable[[], Participation], num_rounds: int) -> None:
    """Raise ``UserError`` if a pattern has other clients in a round that is asked for alone, as after a resume."""

    def ask(pattern: Participation, server_round: int) -> tuple[list[bool], list[int]]:
        answers = pattern.available(server_round), pattern.participants(server_round)
        return np.asarray(answers[0]).tolist(), np.asarray(answers[1]).tolist()

    pattern, last = make(), min(TRIAL_ROUNDS, num_rounds)
    in_order = {server_round: ask(pattern, server_round) for server_round in range(1, last + 1)}
    for server_round in ((last + 1) // 2, last):
        if ask(make(), server_round) != in_order[server_round]:
            wrong = f"round {server_round} has other clients if no earlier round is asked for, as in a resumed run"
            fix = 'draw from generator(self.seed, "a name", server_round), or compute earlier rounds again from round 1'
            raise UserError(f"{found.__name__}.available: {wrong}. Fix: {fix}")


def check_lateness(participation: Choice, clock: Choice, client: Choice, server: Choice) -> None:
    """Raise ``UserError`` for deadlines without a clock, and for methods that do not go with late clients."""
    config, wrong, key = participation.config, "", "participation.late"
    read_deadline(config.deadline)
    can_be_late = config.deadline is not None or config.over_select is not None
    asked = "deadline" if config.deadline is not None else "over_select"
    if clock.name == "none" and can_be_late:
        key, wrong = f"participation.{asked}", "clock=none has no time. Fix: clock=lognormal, or leave it out"
    elif config.over_select is not None and config.select is None:
        key, wrong = "participation.over_select", "every client is selected already. Fix: set participation.select"
    elif config.late != "drop" and not can_be_late:
        wrong = "without a deadline nobody is late. Fix: set participation.deadline or participation.over_select"
    elif config.staleness_a and config.late != "stale":
        key, wrong = "participation.staleness_a", "no late reply is used later. Fix: participation.late=stale, or leave it out"
    elif can_be_late and getattr(server.config, "weights", None) == "known_probability":
        key, wrong = "strategy.weights", "known_probability does not know who is late. Fix: strategy.weights=samples"
    elif config.late == "partial":
        halves = client_class_of(client), strategy_class_of(server)
        for name, half in zip((f"strategy={client.name}", f"strategy.server={server.name}"), halves, strict=True):
            if half.whole_training_reason:
                wrong = f"{name} trains as planned: {half.whole_training_reason}. Fix: participation.late=drop"
    if wrong:
        raise UserError(f"{key}: {wrong}")


def check_privacy(privacy: Choice, client: Choice, server: Choice, participation: Choice) -> None:
    """Raise ``UserError`` if epsilon would not hold: for strategies that do more than sum, and for some kinds of sampling."""
    if isinstance(privacy.config, gaussian.Gaussian) and privacy.config.noise_multiplier:
        needs_accountant()
    if not isinstance(privacy.config, central.Config):
        return
    if reason := strategy_class_of(server).needs_individual_updates(server.config):
        method = f"strategy={client.name}" if client.name == server.name else f"strategy.server={server.name}"
        raise UserError(
            f"privacy=central: its noise is for one weighted sum of clipped updates, but {method} {reason}. "
            "Fix: another strategy, such as strategy=fedavg"
        )
    if privacy.config.amplification:
        _check_sampling(server, participation)


def _check_sampling(server: Choice, participation: Choice) -> None:
    """Raise ``UserError`` unless all clients are drawn independently with one probability, and with fixed weights."""
    config, wrong = participation.config, ""
    if not vars(pattern_class_of(participation)).get("independent_draws", False):
        wrong = f"participation={participation.name} does not draw each client independently. Fix: participation=bernoulli"
    elif getattr(config, "beta", None) is not None:
        wrong = "clients have different probabilities. Fix: participation.beta=null"
    elif config.select is not None:
        wrong = "participation.select draws clients without replacement, not independently. Fix: participation.select=null"
    elif getattr(server.config, "weights", None) not in strategy_class_of(server).fixed_weights:
        wrong = "a client's weight depends on who else participates. Fix: strategy=fedavg strategy.weights=all_clients"
    elif isinstance(config.deadline, str):
        wrong = "who else participates decides whether a client is late. Fix: a participation.deadline in seconds"
    elif config.loss_rate == 1:
        wrong = "participation.loss_rate=1 leaves no reply. Fix: a smaller one"
    if wrong:
        raise UserError(f"privacy.amplification=true: {wrong}")


def check_mean(aggregation: Choice, server: Choice, privacy: Choice) -> None:
    """Raise ``UserError`` for an aggregation other than the mean if the strategy does not average, or if the mean has noise."""
    if aggregation.name == "mean":
        return
    if isinstance(privacy.config, central.Config):
        raise UserError(f"privacy=central: aggregation={aggregation.name} is no weighted mean. Fix: aggregation=mean")
    # The class states it for itself, because a subclass may use replies differently.
    averages, weights = (
        vars(strategy_class_of(server)).get("linear_in_updates", False),
        getattr(server.config, "weights", "samples"),
    )
    what = f"strategy.weights={weights}" if averages else f"strategy.server={server.name}"
    if not averages or weights not in ("samples", "uniform"):
        problem = f"it replaces a mean of the participants, which {what} does not take"
        raise UserError(f"aggregation={aggregation.name}: {problem}. Fix: aggregation=mean")


def check_schedule(chosen: Mapping[str, Choice], server: Choice, top: Any) -> None:
    """Raise ``UserError`` if a buffered schedule does not go with another choice.

    Args:
        chosen: The choice of each of the server's groups.
        server: The server's strategy.
        top: The top-level keys.
    """
    config: Any = chosen["schedule"].config
    if not isinstance(config, buffered.Config):
        return
    engine, clock, attack, pattern = (chosen[group] for group in ("engine", "clock", "attack", "participation"))
    found, name = strategy_class_of(server), f"strategy.server={server.name}"
    can_start = pattern.config.count(top.num_trained) or top.num_trained
    fix = "a strategy that averages updates, such as strategy.server=fedavg"
    faults = {
        "clock=none: schedule=buffered follows simulated time. Fix: clock=lognormal or clock=trace": clock.name == "none",
        "engine=flower: its clients take their own time, and schedule=buffered simulates it. Fix: engine=local or engine=ray": (
            engine.name == "flower"
        ),
        f"schedule=buffered: {name} does more than average updates, so a stale one has no weight. Fix: {fix}": (
            not vars(found).get("linear_in_updates", False)  # as in check_mean, a subclass may use replies differently
        ),
        f"schedule=buffered: {name} selects its own cohort, and here a place that is free takes a client. Fix: {fix}": (
            found.select is not FederatedStrategy.select
        ),
        f"schedule=buffered: {name} sends each client its own tensors, which a stale one has not. Fix: {fix}": (
            found.per_client_broadcast is not FederatedStrategy.per_client_broadcast
        ),
        "strategy.weights=known_probability: how often a client arrives is not known with schedule=buffered. "
        "Fix: strategy.weights=uniform": getattr(server.config, "weights", "") == "known_probability",
        "privacy=central: its noise is for the cohort of a synchronous round. Fix: privacy=local or schedule=synchronous": (
            isinstance(chosen["privacy"].config, central.Config)
        ),
        f"attack={attack.name}: its attackers use all updates of a synchronous round. Fix: schedule=synchronous": (
            isinstance(attack.config, Attackers) and attack.config.needs_honest
        ),
        f"schedule.buffer_size={config.buffer_size} is more than the {top.num_trained} clients that train, and each arrives "
        "once in a round. Fix: a smaller one": config.buffer_size > top.num_trained,
        f"schedule.buffer_size={config.buffer_size} is more than participation.select={pattern.config.select} lets start in a "
        "round, so the buffer would never be full. Fix: participation.select=null": can_start < config.buffer_size,
        f"min_replies={top.min_replies} is more than schedule.buffer_size={config.buffer_size}: the model would never change. "
        "Fix: a smaller one": top.min_replies > config.buffer_size,
    }
    for key in ("deadline", "over_select"):
        value = getattr(pattern.config, key)
        faults[f"participation.{key}={value}: only a synchronous round has one. Fix: null or schedule=synchronous"] = (
            value is not None
        )
    if fault := next((fault for fault, holds in faults.items() if holds), ""):
        raise UserError(fault)


def check_attack(attack: Choice, client: ClientRun, num_trained: int) -> None:
    """Raise ``UserError`` for a malformed attack of the user's, or for unusable attackers.

    Attackers are unusable if they need honest clients and leave none of ``num_trained``.
    """
    if attack.name == "none":
        return
    if not isinstance(attack.config, Attackers):
        wanted = "must inherit Attackers of contrafed.engines.attack, who attacks"
        raise UserError(f"attack={attack.name}: Config of {attack.module.__name__} {wanted}")
    if not attack.config.flips_labels:
        registry.only_subclass(attack.module, Attack)
    attackers = attack.config.among(num_trained, client.seed)
    if attack.config.needs_honest and len(attackers) == num_trained:
        problem = f"all {num_trained} clients attack, and it needs some that do not"
        raise UserError(f"attack={attack.name}: {problem}. Fix: a smaller attack.fraction, or fewer attack.clients")
