"""FedRCL, FedSCL and FedCL: both forms of the loss by hand, the reductions, precision."""

import math

import pytest
import torch
from helpers import Schedule, close, config_of, digits_run, run_strategy, same, slow, strategy_settings, workspace_of

from contrafed.clients.fedrcl import Config, _all, _hard
from contrafed.core.build import build_model
from contrafed.core.client_run import choose
from contrafed.core.errors import UserError
from contrafed.core.schema import build
from contrafed.training.base import Batch, Client, ClientStack
from contrafed.training.batches import Batches


def settings(**changes):
    values = strategy_settings("fedrcl", **changes)
    return build(Config, {k: v for k, v in values.items() if k in Config.__dataclass_fields__}, "strategy")


def features_of(*cosines):
    """Return unit vectors. The first is (1, 0, ...), and each other has the given cosine with it and a separate direction."""
    rows = [torch.eye(len(cosines) + 1, dtype=torch.float64)[0]]
    for k, cos in enumerate(cosines):
        row = torch.zeros(len(cosines) + 1, dtype=torch.float64)
        row[0], row[k + 1] = cos, math.sqrt(1 - cos**2)
        rows.append(row)
    return torch.stack(rows)


def _first(pairs, features, y, config):
    """Return the first example's share of the loss, from weights on each example through autograd."""
    weights = torch.ones(len(y), dtype=torch.float64, requires_grad=True)
    # masked_mean is sum(v m) / sum(m): with S = sum(v m), d/dm_0 [mean * sum(m)] = v_0 where v does not depend on m.
    return [
        torch.autograd.grad(part * weights.sum(), weights, retain_graph=True)[0][0]
        for part in pairs(features, y, weights, config)
    ]


def each(pairs, features, y, **changes):
    """Return contrast and penalty of the first example."""
    config = settings(**changes)
    return [float(v) for v in _first(pairs, features, torch.tensor(y), config)]


def test_both_forms_by_hand():
    """F2: a positive at 0.8, a negative at 0.1, tau = 0.05."""
    # Form C gives log(1 + e^-14) and 0.018150. Form P gives the same contrast and 16.
    features, y = features_of(0.8, 0.1), [0, 0, 1]
    contrast, penalty = each(_hard, features, y)
    assert contrast == pytest.approx(math.log1p(math.exp(-14)), rel=1e-6)
    assert penalty == pytest.approx(0.018150, abs=1e-6)
    contrast, penalty = each(_all, features, y)
    assert contrast == pytest.approx(8.3153e-7, rel=1e-3)
    assert penalty == pytest.approx(16.0, rel=1e-12)


@pytest.mark.parametrize(("q", "value"), [(1 - 1e-12, 0.693147), (0.8, 0.018150), (0.7 + 1e-9, 0.002476), (0.69, 4.248e-18)])
def test_penalty_magnitudes_of_form_c(q, value):
    assert each(_hard, features_of(q, 0.0), [0, 0, 1])[1] == pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize(("levels", "compared"), [(5, (0, 1)), (1, (0,)), (2, (0, 1)), ("last", (1,))])
@pytest.mark.parametrize(("pairs", "form"), [("hard", _hard), ("all", _all)])
def test_the_whole_loss_of_a_network_of_two_stages(pairs, form, levels, compared):
    """Contrast and penalty are means over the levels that there are: task + 0.7 (contrast + 0.3 penalty)."""
    config = config_of("strategy=fedrcl", "num_clients=4", "model=mlp", "model.hidden=[12,9]")
    told = {"pairs": pairs, "levels": levels, "contrast_weight": 0.7, "penalty_weight": 0.3, "threshold": 0.0}
    config["strategy"] |= told
    workspace = workspace_of(config, dtype=torch.float64)
    index = torch.arange(20)
    x, y, ones = workspace.images(index), workspace.y[index], torch.ones(20, dtype=torch.float64)
    losses = workspace.client_class(workspace, [0]).loss(dict(workspace.initial), Batch(x, y, ones, {}), {})
    seen = workspace.model(x, with_levels=True)
    assert [level.shape for level in seen.levels] == [(20, 12), (20, 9)]
    each_level = [form(seen.levels[k], y, ones, settings(**told)) for k in compared]
    contrast, penalty = (sum(float(parts[i]) for parts in each_level) / len(compared) for i in (0, 1))
    task = torch.nn.functional.cross_entropy(seen.logits, y).item()
    assert min(contrast, penalty) > 0.01
    assert losses["contrast"].item() == pytest.approx(contrast, rel=1e-9)
    assert losses["penalty"].item() == pytest.approx(penalty, rel=1e-9)
    assert losses["loss"].item() == pytest.approx(task + 0.7 * (contrast + 0.3 * penalty), rel=1e-9)


def test_the_released_codes_beta_raises_the_negatives_and_not_the_penaltys_weight():
    """F2 with beta = 2: 20 ln 2 is added to each negative's logit, in form C also to the penalty's."""
    # Otherwise the penalty doubles.
    features, y, raised = features_of(0.8, 0.1), [0, 0, 1], 20 * math.log(2)
    plain = each(_hard, features, y)
    contrast, penalty = each(_hard, features, y, negative_weight=2.0)
    assert contrast == pytest.approx(math.log1p(math.exp(-14 + raised)), rel=1e-9)
    assert penalty == pytest.approx(math.log1p(math.exp(-4 + raised)), rel=1e-9)
    contrast, penalty = each(_all, features, y, negative_weight=2.0)
    assert contrast == pytest.approx(math.log1p(math.exp(-14 + raised)), rel=1e-9)
    assert penalty == pytest.approx(16.0, rel=1e-12)
    loss = [
        digits_run("fedrcl", 1, clients=2, local=PLAIN_TRAINING, threshold=0.0, **c)[0][-1]
        for c in ({}, {"penalty_weight": 2.0})
    ]
    assert not same(*loss)
    assert each(_hard, features, y, negative_weight=1.0) == plain


def test_form_c_takes_the_hardest_positive_and_the_two_hardest_negatives():
    features, y = features_of(0.9, 0.3, 0.5, 0.4, -0.2), [0, 0, 0, 1, 1, 1]
    scores = [math.exp((n - 0.3) / 0.05) for n in (0.5, 0.4)]
    contrast, penalty = each(_hard, features, y)
    assert contrast == pytest.approx(math.log1p(sum(scores)), rel=1e-9)
    assert penalty == pytest.approx(math.log1p(math.exp(-40)), rel=1e-9)  # 0.3 is below lambda
    assert each(_hard, features, y, hard_negatives=1)[0] == pytest.approx(math.log1p(scores[0]), rel=1e-9)


def test_an_example_alone_in_its_class():
    """In form C its own similarity 1 replaces the positive. In form P it adds 0."""
    features = features_of(0.4, 0.2)
    expected = math.log1p(sum(math.exp((n - 1) / 0.05) for n in (0.4, 0.2)))
    assert each(_hard, features, [0, 1, 1]) == pytest.approx([expected, math.log1p(math.exp(-40))], rel=1e-6)
    assert each(_all, features, [0, 1, 1]) == [0, 0]


def test_a_batch_of_one_class_has_no_contrast_in_form_c():
    assert each(_hard, features_of(0.4, 0.2), [0, 0, 0])[0] == 0
    assert each(_all, features_of(0.4, 0.2), [0, 0, 0])[0] == pytest.approx(
        2 * math.log(math.exp(8) + math.exp(4)) - 12, rel=1e-12
    )


def test_form_p_with_every_positive_close_is_pure_repulsion():
    """F3: beta = 1, all positives above lambda: |P_i| logsumexp over all others."""
    contrast, penalty = each(_all, features_of(0.9, 0.8, 0.1), [0, 0, 0, 1])
    every = math.log(sum(math.exp(s / 0.05) for s in (0.9, 0.8, 0.1)))
    assert contrast + penalty == pytest.approx(2 * every, rel=1e-12)
    contrast, penalty = each(_all, features_of(0.9, 0.8, 0.1), [0, 0, 0, 1], positive_reduce="mean")
    assert contrast + penalty == pytest.approx(every, rel=1e-12)


@pytest.mark.parametrize("pairs", [_hard, _all])
@pytest.mark.parametrize("changes", [{}, {"positives": "self"}, {"positive_reduce": "mean"}])
def test_the_loss_knows_neither_scale_nor_order_nor_padding(pairs, changes):
    """F4."""
    rng = torch.Generator().manual_seed(0)
    features = torch.randn(9, 5, dtype=torch.float64, generator=rng)
    y, mask, config = torch.arange(9) % 3, torch.ones(9, dtype=torch.float64), settings(threshold=0.0, **changes)
    reference = torch.stack(pairs(features, y, mask, config))
    order = torch.randperm(9, generator=rng)
    scale = torch.rand(9, 1, dtype=torch.float64, generator=rng) + 0.1
    torch.testing.assert_close(torch.stack(pairs((features * scale)[order], y[order], mask, config)), reference)
    padded = torch.cat([features, torch.randn(3, 5, dtype=torch.float64, generator=rng)])
    mask = torch.cat([mask, torch.zeros(3, dtype=torch.float64)])
    torch.testing.assert_close(torch.stack(pairs(padded, torch.cat([y, y[:3]]), mask, config)), reference)


@pytest.mark.parametrize(("cos", "sign"), [(0.8, 1), (0.5, -1)])
def test_gradient_in_a_positive_pairs_similarity(cos, sign):
    """F5, form P with beta = 1: repelled above lambda, attracted below."""
    value = torch.tensor(cos, dtype=torch.float64, requires_grad=True)
    other = torch.stack([value, (1 - value**2).sqrt(), torch.zeros_like(value)])
    fixed = features_of(0.0, 0.1)
    features = torch.stack([fixed[0], other, fixed[2]])
    config = settings()
    contrast, penalty = _all(features, torch.tensor([0, 0, 1]), torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64), config)
    (gradient,) = torch.autograd.grad(contrast + penalty, value)
    assert gradient.item() * sign > 0


@pytest.mark.parametrize("pairs", [_hard, _all])
def test_features_of_zero_have_finite_gradients(pairs):
    features = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    total = sum(pairs(features, torch.tensor([0, 0, 1, 2]), torch.ones(4, dtype=torch.float64), settings()))
    (gradient,) = torch.autograd.grad(total, features)
    assert torch.isfinite(gradient).all()


def test_fedcl_pushes_from_the_nearest_whatever_their_label():
    features, y = features_of(0.9, 0.3, 0.5), [0, 0, 0, 1]
    expected = math.log1p(math.exp(-0.1 / 0.05) + math.exp(-0.5 / 0.05))
    assert each(_hard, features, y, positives="self") == pytest.approx([expected, math.log1p(math.exp(-40))], rel=1e-6)
    every = math.log1p(sum(math.exp((s - 1) / 0.05) for s in (0.9, 0.3, 0.5)))
    assert each(_all, features, y, positives="self") == pytest.approx([every, 0], rel=1e-6)


def two_views(pairs, **changes):
    """Return a FedCL client's contrast of a batch with two views, and the unit features (2b, D), first views first."""
    config = config_of("strategy=fedcl", "strategy.views=2", f"strategy.pairs={pairs}", "num_clients=4", "model=mlp")
    config["strategy"] |= changes
    workspace = workspace_of(config, dtype=torch.float64)
    client, seen = workspace.client_class(workspace, [0]), []
    loss = client.loss
    client.loss = lambda params, batch, loss_inputs: (
        seen.append((params, batch, loss_inputs)) or loss(params, batch, loss_inputs)
    )
    client.update([{f"model/{n}": v for n, v in workspace.initial.items()}], 1)
    params, batch, loss_inputs = seen[0]
    assert not torch.equal(batch.x, loss_inputs["view"])
    with torch.no_grad(), workspace.model.holding(params) as model:
        features = torch.cat([model(x, with_levels=True).levels[0] for x in (batch.x, loss_inputs["view"])])
        return client.loss(params, batch, loss_inputs)["contrast"].item(), torch.nn.functional.normalize(features), batch.y


def test_fedcl_with_two_views_has_an_images_other_view_as_its_positive():
    """-log(e^(s_ij / tau) / sum_(k != i) e^(s_ik / tau)), j the other view of i, over both views of every image."""
    found, u, _ = two_views("all", levels=1)
    b = len(u) // 2
    scores = u @ u.T / 0.05
    rows = [torch.logsumexp(torch.cat([s[:i], s[i + 1 :]]), 0) - s[(i + b) % (2 * b)] for i, s in enumerate(scores)]
    assert found == pytest.approx(torch.stack(rows).mean().item(), rel=1e-9)
    hard, u, _ = two_views("hard", levels=1)
    rows = []
    for i, s in enumerate(u @ u.T / 0.05):
        others = torch.tensor([k for k in range(2 * b) if k % b != i % b])
        rows.append(math.log1p(sum(math.exp(n - s[(i + b) % (2 * b)]) for n in s[others].topk(2).values)))
    assert hard == pytest.approx(sum(rows) / len(rows), rel=1e-9)


def test_with_two_views_and_labels_every_view_of_the_class_is_a_positive():
    found, u, y = two_views("all", levels=1, positives="label")
    y, scores = y.repeat(2), u @ u.T / 0.05
    rows = []
    for i, s in enumerate(scores):
        same = (y == y[i]) & (torch.arange(len(y)) != i)
        rows.append(same.sum() * torch.logsumexp(torch.cat([s[:i], s[i + 1 :]]), 0) - s[same].sum())
    assert found == pytest.approx(torch.stack(rows).mean().item(), rel=1e-9)


def test_the_second_view_moves_no_draw_and_needs_augmentation():
    workspace = workspace_of(config_of("strategy=fedcl", "num_clients=4", "model=mlp"))
    stack = ClientStack([2], [workspace.federation.partition.train(2)], 3, {}, {}, {})
    batches = Batches.draw(workspace, workspace.config.local, stack, "batches")
    first = batches.augmented.clone()
    second = batches.second_view
    assert torch.equal(batches.augmented, first)
    assert second is batches.second_view
    assert torch.equal(second.index, batches.index)
    assert (second.augmented != first).flatten(3).any(-1).float().mean() > 0.9
    with pytest.raises(
        UserError, match="strategy.views=2 compares two augmented views of an image, and strategy.local.augment"
    ):
        workspace_of(config_of("strategy=fedcl", "strategy.views=2", "strategy.local.augment=[]"))


PLAIN_TRAINING = {"epochs": None, "iterations": 3, "batch_size": 16, "augment": []}


def test_without_weights_it_is_fedavg_with_the_same_clipping_and_decay():
    """F1."""
    local = strategy_settings("fedrcl")["local"] | {"epochs": 2, "batch_size": 0.25}
    fedavg, _ = digits_run("fedavg", 2, clients=4, weights="uniform", local=local)
    fedrcl, _ = digits_run("fedrcl", 2, clients=4, contrast_weight=0.0, local=local)
    assert same(fedavg[-1], fedrcl[-1])
    active, _ = digits_run("fedrcl", 2, clients=4, local=local)
    with pytest.raises(AssertionError):
        close(active[-1], fedavg[-1])


@pytest.mark.parametrize(("pairs", "tolerance"), [("all", 1e-12), ("hard", 1e-9)])
def test_without_penalty_it_is_fedscl(pairs, tolerance):
    """F1: beta = 0, or a lambda that no pair reaches, which in form C differs by up to 4e-18 a pair."""
    scl, _ = digits_run("fedscl", 2, clients=4, local=PLAIN_TRAINING, pairs=pairs)
    for changes in ({"penalty_weight": 0.0}, {"threshold": 1.1}):
        models, _ = digits_run("fedrcl", 2, clients=4, local=PLAIN_TRAINING, pairs=pairs, **changes)
        close(models[-1], scl[-1], tolerance)


def test_ablations_differ():
    runs = {
        key: digits_run(name, 1, clients=3, local=PLAIN_TRAINING, model="lenet", **changes)[0][-1]
        for key, name, changes in (
            ("rcl", "fedrcl", {"threshold": 0.0}),
            ("p", "fedrcl", {"threshold": 0.0, "pairs": "all"}),
            ("scl", "fedscl", {}),
            ("cl", "fedcl", {}),
            ("last", "fedrcl", {"threshold": 0.0, "levels": "last"}),
        )
    }
    for a in runs:
        for b in runs:
            assert same(runs[a], runs[b]) == (a == b), (a, b)


def test_equal_sizes_make_uniform_and_samples_the_same():
    """F6."""
    results = []
    for weights in ("uniform", "samples"):
        config = config_of(
            "strategy=fedrcl", f"strategy.weights={weights}", "num_clients=6", "model=mlp", "partition=balanced_dirichlet"
        )
        config["strategy"]["local"] |= PLAIN_TRAINING
        results.append(run_strategy(workspace_of(config, dtype=torch.float64), config, Schedule([range(6)] * 2), 2)[0][-1])
    close(*results)


@pytest.mark.parametrize("pairs", ["hard", slow("all")])
@pytest.mark.parametrize(
    ("augment", "views"), [slow([], 1), slow(["rotation", "crop", "flip"], 1), (["jitter", "crop", "flip"], 2)]
)
def test_stacked_equals_one_by_one_on_convolutions(pairs, augment, views):
    runs = []
    for stack_size in (1, 3):
        config = config_of("strategy=fedrcl", "num_clients=6", "model=resnet18", "model.width=4", f"strategy.pairs={pairs}")
        config["strategy"]["views"] = views
        config["strategy"]["local"] |= {"epochs": 2, "batch_size": 0.5, "augment": augment}
        workspace = workspace_of(config, dtype=torch.float64)
        runs.append(run_strategy(workspace, config, Schedule([range(3)]), 1, stack_size=stack_size)[0][-1])
    close(*runs, 1e-8)


def test_levels_of_the_resnet():
    """F8: five levels of 64, 64, 128, 256 and 512 channels for 32x32 images."""
    model = build_model(choose("model", config_of("model=resnet18")["model"]), 3, (32, 32), 10, 0)
    with torch.no_grad():
        levels = model(torch.zeros(2, 3, 32, 32), None, True).levels
    assert [tuple(level.shape) for level in levels] == [(2, c) for c in (64, 64, 128, 256, 512)]


@pytest.mark.parametrize("stack_size", [1, 4])
def test_mixed_precision_trains_in_bfloat16_where_it_is_allowed(monkeypatch, stack_size):
    """The setting has no effect on a CPU. If allowed there, training stays near full precision without equality."""

    def train_models(mixed):
        local = {**PLAIN_TRAINING, "mixed_precision": mixed, "lr": 0.01}
        models, _ = digits_run(
            "fedrcl", 1, clients=4, dtype=torch.float32, model="cnn_pmfl", stack_size=stack_size, local=local
        )
        return models[0], models[-1]

    start, full = train_models(False)
    assert same(train_models(True)[1], full)
    monkeypatch.setattr(Client, "mixed_on", ("cpu",))
    _, mixed = train_models(True)
    assert not same(mixed, full)
    distance = sum((mixed[n] - full[n]).square().sum() for n in full).sqrt()
    assert distance < 0.2 * sum((full[n] - start[n]).square().sum() for n in full).sqrt()
