"""Epsilon is true: a reply that does not count does not reveal itself, and the noise cannot be drawn again."""

import math

import pytest
import torch
from helpers import config_of, same, slow
from safetensors.torch import load_file
from tiny import TINY_RUN, run_tiny

from contrafed.config.method import make_norm_limit
from contrafed.config.run_config import resolve
from contrafed.engines.worker import FIRST_NODE_ID
from contrafed.runs.output import print_summary
from contrafed.runs.run import run
from contrafed.server.accountant import SEED_IS_SECRET
from contrafed.server.base import FederatedStrategy
from contrafed.server.norm_limit import DEFAULT_RATIO
from contrafed.training.base import Client
from contrafed.training.privacy import PUBLIC_TENSOR


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


@pytest.mark.parametrize("method", [slow("fedavg"), slow("fedau"), "pmfl", slow("fednova"), slow("fedproto"), "fedcrl"])
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
    assert make_norm_limit(found).ratio == math.inf
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
