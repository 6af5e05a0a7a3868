"""Feature shift: every client's images change in its own way, on top of any partition, alike in all engines."""

import math

import numpy as np
import pytest
import torch
from helpers import config_of
from test_stopping import SIX_ROUNDS, metrics
from tiny import run_tiny, tiny_workspace

from contrafed.config.run_config import resolve
from contrafed.data.feature_shift import FeatureShift, blur, draw_noise, draw_shifts, rotate
from contrafed.runs.run import run
from contrafed.training.workspace import Workspace

ROTATION = "partition.feature_shift.kind=rotation"
IMAGES = torch.arange(2 * 9 * 9, dtype=torch.float32).view(2, 9, 9, 1)
KINDS = ("rotation", "brightness", "blur", "noise")


def amount(*values):
    return torch.tensor(values, dtype=torch.float32).view(-1, 1, 1, 1)


def test_a_quarter_turn_is_exact_and_none_changes_nothing():
    turned = rotate(IMAGES, amount(math.pi / 2, 0.0))
    torch.testing.assert_close(turned[0], torch.rot90(IMAGES[0]), atol=1e-4, rtol=0)
    assert torch.equal(turned[1], IMAGES[1])


def test_a_blur_by_hand_and_none_changes_nothing():
    dot = torch.zeros(2, 7, 7, 1)
    dot[:, 3, 3] = 1
    found = blur(dot, amount(1.0, 0.0), 3)
    weights = np.exp(-(np.arange(-3, 4) ** 2) / 2)
    expected = torch.from_numpy(np.outer(weights, weights) / weights.sum() ** 2).float()
    torch.testing.assert_close(found[0, ..., 0], expected)
    assert torch.equal(found[1], dot[1])


def test_noise_has_mean_0_and_deviation_1_and_is_always_the_same():
    x, index = torch.zeros(200, 8, 8, 1), torch.arange(200) + 10**6
    found = draw_noise(x, index)
    assert abs(float(found.mean())) < 0.03
    assert float(found.std()) == pytest.approx(1, abs=0.03)
    assert torch.equal(draw_noise(x[:1], index[7:8])[0], found[7])
    assert not torch.equal(draw_noise(x, index, 1), found)
    pairs = np.corrcoef(found.flatten(1).numpy())
    assert np.abs(pairs[~np.eye(200, dtype=bool)]).max() < 0.7


def test_another_seed_has_other_noise():
    first, again, second = (
        tiny_workspace("partition.feature_shift.kind=noise", f"federation_seed={seed}")[1].shifter.noise_place
        for seed in (0, 0, 1)
    )
    assert first == again != second


@pytest.mark.parametrize("kind", KINDS)
def test_shifts_are_a_function_of_seed_and_client(kind):
    config = FeatureShift(kind, 45, 0.5)
    few, many = draw_shifts(config, 5, 3), draw_shifts(config, 400, 3)
    assert (few == many[:5]).all()
    assert (draw_shifts(config, 5, 4) != few).all()
    low, high = {"rotation": (-45, 45), "brightness": (0.5, 1.5)}.get(kind, (0, 0.5))
    assert low <= many.min() < low + 0.05 * (high - low)
    assert high - 0.05 * (high - low) < many.max() <= high


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "pathological", "sampled"])
def test_it_goes_on_top_of_any_partition(partition):
    more = (f"partition={partition}", *(["partition.test_fraction=null"] if partition == "sampled" else []))
    (_, plain, _), (_, shifted, _) = tiny_workspace(*more), tiny_workspace(*more, ROTATION)
    dealt, marked, count = plain.federation.partition, shifted.federation.partition, len(plain.x)
    for client in range(6):
        for part in ("train", "test", "validation", "true_train"):
            own, index = getattr(dealt, part)(client), torch.from_numpy(getattr(marked, part)(client))
            assert (index.numpy() % count == own).all()
            assert torch.equal(shifted.labels(index), plain.labels(torch.from_numpy(own)))
    assert (dealt.class_counts() == marked.class_counts()).all()
    assert (dealt.sizes == marked.sizes).all()
    index = torch.from_numpy(marked.train(2))
    angle = amount(*[marked.shifts[2]] * len(index)).deg2rad()
    expected = rotate(plain.raw_images(index % count).float(), angle).clamp(0, 255).round()
    assert torch.equal(shifted.raw_images(index).float(), expected)
    central = torch.from_numpy(shifted.federation.central_test)
    assert torch.equal(shifted.images(central), plain.images(central))
    assert shifted.x.dtype == torch.uint8


@pytest.mark.parametrize("kind", KINDS)
def test_images_do_not_depend_on_those_beside_them(kind):
    _, workspace, _ = tiny_workspace(f"partition.feature_shift.kind={kind}")
    partition = workspace.federation.partition
    every = torch.from_numpy(np.concatenate([partition.train(k) for k in range(6)]))
    together = workspace.raw_images(every)
    for place in (0, len(every) // 2, len(every) - 1):
        assert torch.equal(workspace.raw_images(every[place : place + 1])[0], together[place])
    plain = tiny_workspace()[1].raw_images(every % len(workspace.x))
    assert (together != plain).any()


def test_a_run_tells_it_and_writes_each_clients_shift(tmp_path, capsys):
    asked = (*SIX_ROUNDS, "num_rounds=1", "partition=feature_shift", "log=[features]", f"output_dir={tmp_path}/run")
    run(config_of(*asked, "strategy.local.augment=[crop]"))
    assert "feature shift: rotation by" in (out := capsys.readouterr().out)
    assert "the central test images are not shifted" in out
    rows = [line for line in (tmp_path / "run" / "clients.csv").read_text().splitlines() if "feature_shift" in line]
    assert len(rows) == 6
    assert metrics(tmp_path / "run")


def test_a_stack_equals_its_clients_alone(tmp_path):
    asked = ("engine=local", "strategy=fedper", ROTATION, "num_rounds=1")
    one, two = (run_tiny(tmp_path / str(n), *asked, f"engine.stack_size={n}") for n in (1, 6))
    for name in one[1]:
        torch.testing.assert_close(one[1][name], two[1][name], atol=1e-5, rtol=1e-5)


def test_wrong_labels_of_some_change_no_image_of_others():
    """Copies of an attacker's examples have the noise of the originals."""
    shifted = ("partition.feature_shift.kind=noise", "partition.feature_shift.strength=0.5", "dataset.merge_splits=true")
    plain, wrong = (
        Workspace(resolve(config_of(*shifted, "num_clients=4", "partition=iid", *more)).client)
        for more in ((), ("attack=label_flip", "attack.clients=[0]"))
    )
    for client, part in ((0, "train"), (0, "test"), (3, "train"), (3, "test")):
        one, other = (getattr(each.federation.partition, part)(client) for each in (plain, wrong))
        assert torch.equal(*(each.raw_images(torch.from_numpy(i)) for each, i in ((plain, one), (wrong, other))))
