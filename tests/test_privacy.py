"""Differential privacy of clients: clip and noise by hand, refused settings, and epsilon of the accountant."""

import importlib.util
import math
import re
import secrets
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from flwr.supercore import privacy_accounting as flower
from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant
from helpers import config_of, same, slow
from messages import ROOT
from safetensors import safe_open
from safetensors.torch import load_file
from scipy.optimize import brentq
from scipy.stats import norm
from stopped import SMALL_RUN, equal, outcome
from tiny import TINY_RUN, run_tiny

from contrafed.config.method import make_norm_limit, try_method
from contrafed.config.run_config import resolve
from contrafed.core.display_names import name_method
from contrafed.core.errors import UserError
from contrafed.core.privacy import central, laplace, local
from contrafed.core.privacy.mechanism import noise
from contrafed.core.randomness import torch_generator
from contrafed.core.registry import choices
from contrafed.engines.worker import FIRST_NODE_ID
from contrafed.runs.output import print_summary
from contrafed.runs.run import run
from contrafed.runs.setup import compose_deployed_run
from contrafed.server import privacy
from contrafed.server.accountant import SEED_IS_SECRET, Budget
from contrafed.server.base import FederatedStrategy
from contrafed.server.norm_limit import DEFAULT_RATIO
from contrafed.server.privacy import PrivateReplies, complete_cohort
from contrafed.server.replies import Replies, Reply
from contrafed.training.base import Client
from contrafed.training.privacy import PUBLIC_TENSOR, made_private

HOW = {"clip_norm": 1.0, "prototype_clip": 2.0, "noise_multiplier": 0.5, "delta": 1e-5, "seeded_noise": True}
CENTRAL, LOCAL = central.Config(**HOW, amplification=False), local.Config(**HOW)
SEED, ROUND = 7, 3

SUMS = (
    "fedavg", "fedavgm", "fedadam", "fedagm", "fedau", "pmfl", "fedhyper", "fednova", "fedawe", "pfedme", "fedproc",
    "fedcrl", "fedproto", "mpfedcon",
)  # fmt: skip
SAMPLED_RUN = ("strategy=fedavg", "strategy.weights=all_clients", "participation=bernoulli", "participation.beta=null",
           "privacy=central", "privacy.amplification=true")  # fmt: skip


def draw_noise(purpose, *shape, client=0):
    return torch.randn(shape, generator=torch_generator(SEED, purpose, ROUND, client), dtype=torch.float64)


def replies_of(*sent, received=(1.0, 1.0)):
    """Return replies of clients 0, 1, ... with a model of two numbers and two prototypes (C, D) = (2, 1)."""
    # Each prototype is of one example.
    base = {"model/w": torch.tensor(received)}
    table = {"proto/mean": torch.tensor([[3.0], [4.0]]), "proto/count": torch.tensor([1.0, 1.0])}
    return Replies(
        Reply(k, {"model/w": torch.tensor(w)} | table, 10 * (k + 1), {"loss": 1.0}, base) for k, w in enumerate(sent)
    )


def hidden(config=CENTRAL, **changes):
    # Changes (3, 4), of norm 5, and (0.3, 0.4), of norm 0.5.
    replies = replies_of([4.0, 5.0], [1.3, 1.4])
    return PrivateReplies(replies, central.Config(**HOW | changes, amplification=False) if changes else config, SEED, ROUND)


def test_a_sum_is_of_clipped_changes_with_noise_by_the_largest_weight():
    weights = np.array([0.25, 0.75])
    clipped = 0.25 * torch.tensor([0.6, 0.8], dtype=torch.float64) + 0.75 * torch.tensor([0.3, 0.4], dtype=torch.float64)
    noisy = clipped + 0.5 * 1.0 * 0.75 * draw_noise("update noise", 2)
    torch.testing.assert_close(hidden().weighted_sum("delta", weights)["w"], noisy, rtol=0, atol=1e-7)
    torch.testing.assert_close(hidden().mean("model", weights * 8)["w"], 1 + noisy, rtol=0, atol=1e-7)
    ((term,), factors) = hidden().weighted_terms("delta", weights)
    torch.testing.assert_close(term["w"], noisy, rtol=0, atol=1e-7)
    assert factors == [1.0]
    silent = hidden(noise_multiplier=0.0).weighted_sum("delta", weights)["w"]
    torch.testing.assert_close(silent, clipped, rtol=0, atol=1e-7)


def test_prototypes_are_clipped_over_all_classes_and_noised_class_by_class():
    # Each table (3, 4) has norm 5 and is scaled by 2/5. Only client 0 has class 0, and both have class 1.
    weights = torch.tensor([[1.0, 1.0], [0.0, 3.0]], dtype=torch.float64)
    noise = draw_noise("prototype noise", 2, 1)
    expected = torch.tensor([[1.2], [1.6]], dtype=torch.float64) + 0.5 * 2.0 * torch.tensor([[1.0], [0.75]]) * noise
    torch.testing.assert_close(hidden().class_means(weights), expected, rtol=0, atol=1e-7)


def test_a_rule_reads_no_single_reply_and_no_second_sum():
    replies = hidden()
    for read in (replies.models, replies.deltas, lambda: replies[0].get_tensors("model")):
        with pytest.raises(UserError, match="sums alone have noise"):
            read()
    assert all(set(reply.tensors) == {"proto/count"} for reply in replies)
    replies.weighted_sum("delta", np.ones(2))
    with pytest.raises(UserError, match="two sums of the updates"):
        replies.mean("model", np.ones(2))
    with pytest.raises(UserError, match="sums control, which is not clipped"):
        replies.weighted_sum("control", np.ones(2))


def test_a_client_clips_and_adds_noise_of_its_own():
    received = {"model/w": torch.ones(2, 2, dtype=torch.float64)}
    sent = {"model/w": torch.tensor([[4.0, 5.0], [1.3, 1.4]], dtype=torch.float64)}
    sent |= {"proto/mean": torch.tensor([[[3.0], [4.0]], [[0.0], [1.0]]], dtype=torch.float64), "proto/count": torch.ones(2, 2)}
    got = made_private(sent, received, LOCAL, SEED, ROUND, [5, 9])
    for row, client, change, table in ((0, 5, [0.6, 0.8], [[1.2], [1.6]]), (1, 9, [0.3, 0.4], [[0.0], [1.0]])):
        change, table = torch.tensor(change, dtype=torch.float64), torch.tensor(table, dtype=torch.float64)
        torch.testing.assert_close(got["model/w"][row], 1 + change + 0.5 * draw_noise("update noise", 2, client=client))
        torch.testing.assert_close(got["proto/mean"][row], table + 1.0 * draw_noise("prototype noise", 2, 1, client=client))
        alone = made_private({n: v[row : row + 1] for n, v in sent.items()}, {n: v[:1] for n, v in received.items()},
                             LOCAL, SEED, ROUND, [client])  # fmt: skip
        assert all(torch.equal(alone[name][0], got[name][row]) for name in sent)
    assert torch.equal(got["proto/count"], sent["proto/count"])
    delta = made_private({"delta/w": sent["model/w"] - 1}, {}, LOCAL, SEED, ROUND, [5, 9])["delta/w"]
    torch.testing.assert_close(1 + delta, got["model/w"])


def test_a_client_adds_laplace_noise_of_its_variance_and_clips_nothing(tmp_path):
    how = laplace.Config(variance=1e-2, seeded_noise=True)
    sent = {"model/w": torch.full((2, 100_000), 1e3, dtype=torch.float64), "proto/mean": torch.zeros(2, 100_000, 1)}
    got = made_private(sent, {"model/w": torch.ones(2, 100_000)}, how, SEED, ROUND, [5, 9])
    for name, value in got.items():
        noise = (value - sent[name]).double().flatten(1)
        torch.testing.assert_close(noise.var(1), torch.full((2,), 1e-2, dtype=torch.float64), rtol=0.03, atol=0)
        kurtosis = (noise**4).mean(1) / noise.var(1) ** 2
        torch.testing.assert_close(kurtosis, torch.full((2,), 6.0, dtype=torch.float64), rtol=0.1, atol=0)
        assert not torch.equal(noise[0], noise[1])
    alone = made_private({n: v[1:] for n, v in sent.items()}, {"model/w": torch.ones(1, 100_000)}, how, SEED, ROUND, [9])
    assert all(torch.equal(alone[name][0], got[name][1]) for name in sent)
    summary, noisy, *_ = run_tiny(tmp_path / "noisy", "strategy=fedavg", "engine=local", "num_rounds=1", "privacy=laplace")
    assert "epsilon" not in summary
    assert not same(run_tiny(tmp_path / "plain", "strategy=fedavg", "engine=local", "num_rounds=1")[1], noisy)


@pytest.mark.parametrize(
    "how",
    [central.Config(**HOW | {"seeded_noise": False}, amplification=False), laplace.Config(variance=1.0, seeded_noise=False)],
)
def test_secret_noise_cannot_be_drawn_again(monkeypatch, how):
    """Nor guessed: of a seed for torch's generators 32 bits matter, which a search finds in hours."""
    keys = []
    monkeypatch.setattr(secrets, "randbits", lambda bits: keys.append(bits) or 5 + len(keys) * 2**100)
    like = {"model/w": torch.zeros(2, 50_000), "model/b": torch.zeros(())}
    first, second = (noise(like, how, SEED, "update noise", ROUND) for _ in range(2))
    assert min(keys) >= 128
    assert {n: (v.shape, v.dtype) for n, v in first.items()} == {n: (v.shape, torch.float64) for n, v in like.items()}
    assert not torch.equal(first["model/w"], second["model/w"])
    variance = 1.0 if isinstance(how, central.Config) else 2.0
    assert float(first["model/w"].mean()) == pytest.approx(0, abs=0.02)
    assert float(first["model/w"].var()) == pytest.approx(variance, rel=0.03)


def test_the_seed_that_noise_comes_of_is_not_in_the_released_model(tmp_path):
    def about(folder, *overrides):
        run_tiny(folder, "strategy=fedavg", "engine=local", "num_rounds=1", *overrides)
        with safe_open(folder / "model.safetensors", "pt") as file:
            return file.metadata()

    assert about(tmp_path / "open")["seed"] == "0"
    for name in ("central", "laplace"):
        assert about(tmp_path / name, f"privacy={name}") == {"strategy": "fedavg"}


@pytest.mark.parametrize("name", [name if name in ("pmfl", "fedcrl") else slow(name) for name in SUMS])
def test_every_rule_that_sums_goes_with_central_privacy(tmp_path, name):
    spent = run_tiny(tmp_path / "run", f"strategy={name}", "engine=local", "num_rounds=2", "privacy=central", "eval_every=2")[0]
    assert spent["failures"] == spent["replies_rejected"] == 0
    assert spent["epsilon"] > 0


def test_the_page_names_the_methods_that_privacy_refuses():
    """RELIABILITY.md has the same lists as the code."""
    page = (ROOT / "docs" / "RELIABILITY.md").read_text(encoding="utf-8")
    refused = {}
    for name in choices("strategy"):
        run = partial(config_of, f"strategy={name}")
        for kind in ("central", "local", "laplace"):
            try:
                try_method(resolve(run(f"privacy={kind}")))
            except UserError:
                refused.setdefault(kind, set()).add(name_method(name))
    assert refused["local"] == refused["laplace"] < refused["central"]
    alone = re.search(r"\*\*Refused by `central` alone\*\*: ([^.]*)\.", page)[1]
    every = re.search(r"\*\*Refused by all three\*\*: ([^.]*)\.", page)[1]
    assert {word.strip() for word in alone.split(",")} == refused["central"] - refused["local"]
    assert {word.strip() for word in every.split(",")} == refused["local"]


def test_with_amplification_a_round_that_nobody_came_to_has_noise_too(tmp_path):
    few = (*SAMPLED_RUN, "num_rounds=1", "seed=1", "participation.mean_probability=0.000001", "engine=local")
    spent, moved, *_ = run_tiny(tmp_path / "a", *few)
    begun = run_tiny(tmp_path / "b", *few, "privacy.amplification=false")[1]
    # The weight is 1/6. The sample's std is within a few percent of the noise's.
    change = torch.cat([(moved[name] - begun[name]).flatten() for name in moved])
    assert float(change.std()) == pytest.approx(1 / 6, rel=0.1)
    assert spent["privacy_rounds"] == 1


@pytest.mark.parametrize(("choice", "method", "engine"), [("central", "pmfl", "local"), slow("local", "fedcrl", "ray")])
def test_a_stopped_run_goes_on_to_the_same_epsilon_also_in_ray(tmp_path, stop_run, choice, method, engine):
    with_noise = (f"privacy={choice}", "privacy.seeded_noise=true", f"strategy={method}")
    whole = run(config_of(*SMALL_RUN, *with_noise, f"output_dir={tmp_path}/whole"))
    folder = stop_run(method, *with_noise[:2])
    there = ("engine=ray", "engine.workers=2") if engine == "ray" else ()
    summary = run(config_of(*SMALL_RUN, *with_noise, *there, "resume=latest", f"output_dir={folder}"))
    assert equal(outcome(folder), outcome(tmp_path / "whole"))
    assert [summary[key] for key in ("epsilon", "privacy_rounds")] == [whole[key] for key in ("epsilon", "privacy_rounds")]
    rows = [line.split(",") for line in (folder / "participants.csv").read_text().splitlines()[1:]]
    assert summary["privacy_rounds"] == max(Counter(client for _, client in rows).values())
    plain = run(config_of(*SMALL_RUN, f"strategy={method}", f"output_dir={tmp_path}/plain"))
    assert "epsilon" not in plain
    assert not same(outcome(tmp_path / "plain")[0], outcome(folder)[0])


def test_epsilon_is_that_of_flowers_accountant():
    no, poisson = flower.SamplingMethod.NO_AMPLIFICATION, flower.SamplingMethod.POISSON
    for sampling, probability in ((no, None), (poisson, 0.25)):
        theirs = RdpAccountant(flower.PrivacyConfig(1e-5, 100, flower.NeighboringRelation.ADD_OR_REMOVE_ONE, sampling))
        theirs.compose(flower.GaussianPrivacyEvent(0.5, 25, 100), 30)
        budget = Budget(LOCAL, 1, 4, probability)
        for server_round in range(30):
            budget.pass_round(np.array([0, server_round % 3 + 1]))
        assert budget.releases == 30
        assert budget.epsilon() == theirs.get_epsilon(1e-5)


def test_epsilon_of_the_accountants_own_example():
    """Its table of Renyi divergences: 50 rounds, noise 2.5, probability 0.01, at orders that it tries itself."""
    divergences = {5: 2.18075656e-03, 50: 2.38460375e-02}
    budget = Budget(local.Config(**HOW | {"noise_multiplier": 2.5}), 1, 1, 0.01)
    budget.rounds = 50
    delta = HOW["delta"]
    bounds = [rdp + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, rdp in divergences.items()]
    assert 0.8 * min(bounds) < budget.epsilon() <= min(bounds) * (1 + 1e-6)


def gaussian_epsilon(sigma, delta):
    """Return the exact epsilon of one Gaussian mechanism: Balle and Wang 2018 (arXiv:1805.06530), Theorem 8."""

    def excess(epsilon):
        a, b = 1 / (2 * sigma), epsilon * sigma
        return norm.cdf(a - b) - math.exp(epsilon + norm.logcdf(-a - b)) - delta

    return brentq(excess, 0, 1000)


def test_mechanisms_of_one_round_compose_as_the_accountants_example_says():
    """Its effective noise of several Gaussians is (sum of their squares' inverses)^(-1/2). The exact epsilon is below."""
    both, one = Budget(LOCAL, 2, 3, None), Budget(LOCAL, 1, 3, None)
    for _ in range(5):
        both.pass_round(np.array([1]))
        one.pass_round(np.array([1]))
        one.pass_round(np.array([1]))
    assert both.releases == 5
    assert both.epsilon() == pytest.approx(one.epsilon(), rel=1e-9)
    exact = gaussian_epsilon(0.5 / math.sqrt(10), 1e-5)
    assert exact <= one.epsilon() <= 1.1 * exact
    assert Budget(LOCAL, 1, 3, None).epsilon() == 0
    silent = Budget(local.Config(**HOW | {"noise_multiplier": 0.0}), 1, 1, None)
    silent.pass_round(np.array([0]))
    assert silent.epsilon() == math.inf


def test_without_the_accountant_a_line_names_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "dp_accounting" else find(name, *a))
    with pytest.raises(UserError, match="^privacy: .* pip install dp-accounting$"):
        resolve(config_of("strategy=fedavg", "privacy=central"))
    resolve(config_of("strategy=fedavg", "privacy=central", "privacy.noise_multiplier=0"))
    resolve(config_of("strategy=fedavg"))


def test_devices_take_noise_that_is_secret(tmp_path):
    assert compose_deployed_run(f"privacy=local num_clients=3 output_dir={tmp_path}/b").client.privacy is not None


def test_clients_are_told_of_their_own_noise_alone():
    told = {
        choice: resolve(config_of("strategy=fedavg", f"privacy={choice}")).client.to_json()
        for choice in ("none", "central", "local", "laplace")
    }
    assert told["none"] == told["central"]
    assert len(set(told.values())) == 3
    assert "privacy" not in told["none"]


def replace_reply(monkeypatch, how):
    """Have client 1 upload nothing new, upload NaN, fail, or not answer, in every round."""
    original, aggregate = Client.update, FederatedStrategy.aggregate_train

    def update(self, received, server_round, *args):
        if how == "fails" and 1 in self.clients:
            raise ValueError("no")
        updates = original(self, received, server_round, *args)
        for k, (one, found) in enumerate(zip(self.clients, updates, strict=True)):
            if one != 1:
                continue
            for name, value in found.tensors.items():
                old = received[k][name] if name.startswith("model/") else torch.zeros_like(value)
                if name != PUBLIC_TENSOR:
                    found.tensors[name] = torch.full_like(value, math.nan) if how == "rejected" else old.to(value)
        return updates

    def aggregate_train(self, server_round, replies):
        replies = [reply for reply in replies if how != "late" or reply.metadata.src_node_id != FIRST_NODE_ID + 1]
        return aggregate(self, server_round, replies)

    monkeypatch.setattr(Client, "update", update)
    monkeypatch.setattr(FederatedStrategy, "aggregate_train", aggregate_train)


@pytest.mark.parametrize("method", [slow("fedavg"), slow("fedau"), "pmfl", slow("fednova"), slow("fedproto"), slow("fedcrl")])
def test_a_reply_that_does_not_count_leaves_the_model_that_zeros_leave(tmp_path, method):
    """Otherwise the noise or the weights would reveal it."""
    how = (f"strategy={method}", "engine=local", "engine.stack_size=1", "privacy=central", "privacy.seeded_noise=true")
    models, summaries = {}, {}
    for case in ("zeros", "rejected", "fails", "late"):
        with pytest.MonkeyPatch.context() as patched:
            replace_reply(patched, case)
            summaries[case] = run(
                config_of(*TINY_RUN, *how, "num_rounds=2", "participation=full", f"output_dir={tmp_path}/{case}")
            )
        models[case] = load_file(tmp_path / case / "model.safetensors")
    assert [summaries[case]["replies_rejected"] + summaries[case]["failures"] for case in summaries] == [0, 2, 2, 2]
    assert all(same(models["zeros"], model) for model in models.values())


@pytest.mark.parametrize("engine", ["local", "ray", "flower"])
def test_the_default_limit_on_norms_is_off(engine):
    found = resolve(config_of("strategy=fedavg", "privacy=central", f"engine={engine}"))
    assert found.engine.config.max_norm_ratio == DEFAULT_RATIO
    assert make_norm_limit(found, ()).ratio == math.inf
    resolve(config_of("strategy=fedavg", "privacy=central", f"engine={engine}", "engine.max_norm_ratio=null"))


@pytest.mark.parametrize("choice", ["central", "local", "laplace"])
def test_noise_is_the_operating_systems_unless_the_seed_is_asked_for(tmp_path, capsys, choice):
    how = ("strategy=fedavg", "engine=local", "num_rounds=1", f"privacy={choice}")
    first, second = (run_tiny(tmp_path / f"own{k}", *how) for k in range(2))
    assert not same(first[1], second[1])
    assert "epsilon_condition" not in first[0]
    first, second = (run_tiny(tmp_path / f"seeded{k}", *how, "privacy.seeded_noise=true") for k in range(2))
    assert same(first[1], second[1])
    if choice != "laplace":
        assert first[0]["epsilon_condition"] == SEED_IS_SECRET
        print_summary(first[0], first[0]["folder"])
        assert SEED_IS_SECRET in capsys.readouterr().out


@pytest.mark.parametrize("method", ["fedavg", "fedcrl"])
def test_a_late_client_counts_as_zeros(tmp_path, monkeypatch, method):
    """With stops at the deadline the late clients are not asked, so they have received nothing here."""
    cohorts = []

    def complete(strategy, replies):
        cohorts.append(({reply.client for reply in replies}, complete_cohort(strategy, replies)))
        return cohorts[-1][1]

    monkeypatch.setattr(privacy, "complete_cohort", complete)
    private = (*TINY_RUN, "engine=local", "num_rounds=2", "participation=full", "privacy=central", "privacy.seeded_noise=true")
    late = ("clock=lognormal", "clock.step_sigma=1.5", "participation.deadline=q0.5")
    run(config_of(*private, *late, f"strategy={method}", f"output_dir={tmp_path}"))
    for answered, cohort in cohorts:
        assert 0 < len(answered) < len(cohort) == 6
        for reply in cohort:
            assert any(bool(value.any()) for value in reply.get_tensors("delta").values()) == (reply.client in answered)
            assert reply.received.keys() == cohort[0].received.keys() != set()
