"""Analyses by hand, and from the folder of a run with the logs that they need."""

import csv
import itertools

import numpy as np
import pytest
import torch
from helpers import config_of
from reported import write_run
from safetensors.torch import save_file
from tiny import TINY_RUN

from contrafed import UserError, run
from contrafed.config.run_config import resolve
from contrafed.core import covariance, deviation
from contrafed.core.client_run import client_run_of
from contrafed.report import embedding
from contrafed.report.figure_data import expected_weight
from contrafed.report.gains import gaining, gains
from contrafed.report.model_distance import distance_of_runs
from contrafed.report.runs import read
from contrafed.report.style import CLASSES
from contrafed.runs.diagnostics import WEIGHT_METRIC
from contrafed.server.intervals import Intervals


def updates(*rows):
    return [{"a": torch.tensor(row[:1]), "b": torch.tensor(row[1:])} for row in rows]


@pytest.mark.parametrize(
    ("rows", "total"),
    [
        (([1.0, 2.0], [1.0, 2.0], [1.0, 2.0]), 0),
        (([1.0, 0.0], [0.0, 1.0]), 0.585786),
        (([1.0, 0.0], [-1.0, 0.0]), 2),
        (([3.0, 0.0], [0.0, 0.0]), 1),
    ],
)
def test_deviation_is_a_sum_over_participants(rows, total):
    found, mean = deviation.deviation(updates(*rows))
    assert found == pytest.approx(total, abs=1e-6)
    assert mean == pytest.approx(total / len(rows), abs=1e-6)
    assert deviation.deviation([]) == (0, 0)


def test_the_distance_of_models_is_a_mean_over_parameters(tmp_path, expect_error):
    one, other = updates([1.0, 2.0, 4.0], [1.0, 0.0, 3.0])
    assert deviation.distance(one, other) == pytest.approx(5 / 3)
    with pytest.raises(ValueError, match="alone has b"):
        deviation.distance(one, {"a": one["a"]})
    with expect_error():
        distance_of_runs(tmp_path, tmp_path)


def test_a_run_is_looked_at_where_the_folders_that_it_wrote_in_are_not(tmp_path):
    (tmp_path / "file").touch()
    for place in (f"output_dir={tmp_path}/file/run", f"engine.memory_folder={tmp_path}/gone"):
        config = config_of(*TINY_RUN, "engine=local", place)
        with pytest.raises(UserError):
            resolve(config)
        assert resolve(embedding.on_cpu(config)).num_clients == config["num_clients"]


def test_the_distance_of_runs_is_a_mean_over_clients(tmp_path, expect_error):
    """Two clients that trained alone are at 0 and at 2 from the global model in one of two parameters. A third was held out."""
    (tmp_path / "config.yaml").write_text("num_clients: 3\nheld_out_clients: 1\n")
    for name, value in (("model", 1.0), ("personal/0", 1.0), ("personal/1", 3.0), ("personal/2", 9.0)):
        prefix = "" if name == "model" else "model/"
        path = tmp_path / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file({f"{prefix}a": torch.tensor([value]), f"{prefix}b": torch.tensor([5.0])}, path)
    assert distance_of_runs(tmp_path, tmp_path) == pytest.approx((0 + 4 / 2) / 2)
    for name, more in (("local", ("save_personal=true",)), ("fedavg", ())):
        run(
            config_of(
                *TINY_RUN,
                f"strategy={name}",
                "engine=local",
                "num_rounds=1",
                "participation=full",
                *more,
                f"output_dir={tmp_path / name}",
            )
        )
    assert 0 < distance_of_runs(tmp_path / "local", tmp_path / "fedavg") < 1
    assert len(embedding.of_run(tmp_path / "fedavg")[0]) == len(embedding.of_run(tmp_path / "local", personal=True)[0]) > 0
    with expect_error("strategy"):
        embedding.of_run(tmp_path / "local")
    with expect_error():
        distance_of_runs(tmp_path / "fedavg", tmp_path / "fedavg")


def test_gains_are_over_training_alone_by_hand():
    found = gains({0: 0.5, 1: 0.75, 2: 0.5, 3: 1.0}, {2: 0.5, 1: 0.5, 0: 0.75, 5: 0.1})
    assert found == {0: -0.25, 1: 0.25, 2: 0.0}
    assert gaining(found) == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="no clients"):
        gaining({})


def test_covariances_by_hand():
    within, between = covariance.covariances(np.array([[0.0], [2], [4], [6]]), np.array([3, 3, 7, 7]))
    assert (within, between) == (1, 4)
    assert covariance.vci(within, between) == pytest.approx(0.2)
    f, y = np.random.default_rng(0).normal(size=(40, 3)), np.repeat([0, 1, 2, 3], [4, 6, 10, 20])
    within, between = covariance.covariances(f, y)
    np.testing.assert_allclose(within + between, np.cov(f.T, bias=True), atol=1e-12)
    mapped = covariance.covariances(f @ np.array([[2.0, 1, 0], [0, 1, 3], [1, 0, 5]]), y)
    assert covariance.vci(*mapped) == pytest.approx(covariance.vci(within, between))
    one, other = (covariance.spread(scale * f, y, normalize=True) for scale in (1, 5))
    assert list(vars(one).values()) == pytest.approx(list(vars(other).values()))


def test_collapsed_classes_and_no_classes():
    points = np.array([[0.0, 1], [0, 1], [2, 5], [2, 5], [-3, 1]])
    assert covariance.spread(points, np.array([0, 0, 1, 1, 2])).vci == pytest.approx(0)
    assert covariance.spread(points, np.zeros(5)).vci == 1
    assert covariance.spread(points, np.array([0, 0, 1, 1, 2])).within == 0


@pytest.mark.parametrize("wild", [np.nan, np.inf])
def test_features_that_are_not_finite_have_no_numbers(wild):
    found = covariance.spread(np.array([[wild, 0.0], [1, 2], [3, 4]]), np.array([0, 1, 1]))
    assert np.isnan([found.within, found.between, found.effective_rank, found.vci]).all()


def test_constant_features_have_no_spread():
    """Means of 0.1 differ from it in their last digit, so S_B is a rounding error instead of 0."""
    assert list(vars(covariance.spread(np.full((100, 16), 0.1), np.repeat(range(10), 10))).values()) == [0, 0, 0, 1]


def test_effective_rank_by_hand():
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(2, 2)))[0]
    assert covariance.effective_rank(np.eye(4)) == pytest.approx(4)
    assert covariance.effective_rank(np.diag([1.0, 0])) == pytest.approx(1)
    assert covariance.effective_rank(np.diag([3.0, 1])) == pytest.approx(1.754765, abs=1e-6)
    assert covariance.effective_rank(rotation @ np.diag([30.0, 10]) @ rotation.T) == pytest.approx(1.754765, abs=1e-6)
    assert covariance.effective_rank(np.zeros((2, 2))) == 0


def test_a_clients_weight_tends_to_the_length_of_its_intervals():
    """(1 - (1 - p)^C) / p at p = 0.402 and 0.02 with C = 50: 2.4876, and 31.79 instead of 50."""
    assert expected_weight(0.402, 50) == pytest.approx(2.4876, abs=1e-4)
    assert expected_weight(0.02, 50) == pytest.approx(31.7915, abs=1e-4)
    rng, intervals = np.random.default_rng(0), Intervals(400, 5, False, {})
    for _ in range(2000):
        intervals.tick(np.flatnonzero(rng.random(400) < 0.3))
    assert intervals.weights.mean() == pytest.approx(expected_weight(0.3, 5), rel=0.01)


def test_weights_of_clients_that_are_away_by_hand():
    now, late = Intervals(3, 3, False, {}), Intervals(3, 3, True, {})
    for clients, expected, lagging in (
        ([0], [1, np.nan, np.nan], [1, 1, 1]),
        ([0, 1], [1, 2, np.nan], [1, 1, 1]),
        ([1], [1, 1.5, 3], [1, 2, 1]),
        ([2], [1, 1.5, 2], [1, 1.5, 3]),
    ):
        np.testing.assert_array_equal(now.tick(np.array(clients)), np.array(expected)[clients])
        np.testing.assert_array_equal(now.weights, expected)
        late.tick(np.array(clients))
        np.testing.assert_array_equal(late.weights, lagging)


def test_points_for_an_embedding_are_stratified():
    labels = np.repeat([0, 1, 2], [500, 300, 200])[np.random.default_rng(0).permutation(1000)]
    chosen = embedding.sample_stratified(labels, 100)
    assert np.bincount(labels[chosen]).tolist() == [50, 30, 20]
    assert len(np.unique(chosen)) == 100
    assert embedding.sample_stratified(labels, 1000).tolist() == list(range(1000))
    assert embedding.sample_stratified(labels, 100).tolist() == chosen.tolist()
    assert embedding.sample_stratified(labels, 100, seed=1).tolist() != chosen.tolist()


@pytest.mark.parametrize("classes", [10, 11])
def test_ten_classes_of_an_embedding_differ_in_colour_and_marker(classes):
    figure = embedding.draw(np.random.default_rng(0).normal(size=(5 * classes, 2)), np.repeat(range(classes), 5))
    drawn = figure.axes[0].collections
    assert len({tuple(dots.get_facecolor()[0]) for dots in drawn}) == classes
    assert len({dots.get_paths()[0].vertices.tobytes() for dots in drawn}) == (10 if classes == 10 else 1)


# Machado, Oliveira and Fernandes 2009: linear RGB as protanopes and deuteranopes see it.
SEEN_METRICS = {
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


@pytest.mark.parametrize("eye", SEEN_METRICS)
def test_colours_of_classes_are_apart_for_the_colour_blind(eye):
    """In CIE L*a*b* a distance of 2.3 is just visible. matplotlib's tab10 has 4.6 and 7.2."""
    rgb = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in CLASSES])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4) @ np.array(SEEN_METRICS[eye]).T
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = linear.clip(0, 1) @ to_xyz.T / to_xyz.sum(1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116).T
    lab = np.stack([116 * y, 500 * (x - y), 200 * (y - z)], 1)
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(lab, 2)) > 15


@pytest.fixture(scope="module")
def logged_runs(tmp_path_factory):
    """Run PMFL with all logs and varying participation, and the same run without logs."""
    folder = tmp_path_factory.mktemp("logged")
    tiny = (
        *TINY_RUN, "strategy=pmfl", "engine=local", "participation=bernoulli", "participation.beta=null", "eval_clients=true",
    )  # fmt: skip
    tiny += ("participation.mean_probability=0.5", "num_rounds=4", "eval_every=2")
    summary = run(config_of(*tiny, "log=[deviation,weights,features,clients_train,probability]", f"output_dir={folder / 'a'}"))
    run(config_of(*tiny, f"output_dir={folder / 'b'}"))
    return summary, folder / "a", folder / "b"


def rows(folder, name):
    with open(folder / f"{name}.csv") as file:
        return list(csv.reader(file))


def test_what_is_logged_is_beside_what_is_always_there(logged_runs):
    _, folder, plain = logged_runs
    more = ("deviation", "deviation_mean", "features_", "weight_all", "train_loss", "train_accuracy", "probability")
    for name, column in (("metrics", 3), ("clients", 2)):
        kept = [row for row in rows(folder, name) if not row[column].startswith(more)]
        assert kept == rows(plain, name)
        assert len(kept) < len(rows(folder, name))
    assert (folder / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_the_deviation_is_that_of_parameters(tmp_path):
    """Counters of BatchNorm are equal on all clients, and would dominate the cosine."""
    small = ("model=cnn_bn", "model.channels=[3]", "model.hidden=[8]", "engine=local", "num_clients=4", "num_rounds=1")
    found = []
    for buffers in ("average", "local"):
        asked = ("strategy=fedavg", "participation=full", "partition.min_client_size=20", f"model.buffers={buffers}")
        run(config_of(*small, *asked, "log=[deviation]", f"output_dir={tmp_path / buffers}"))
        found.append([row for row in rows(tmp_path / buffers, "metrics") if row[3].startswith("deviation")])
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_a_runs_deviation_and_features(logged_runs):
    _, folder, _ = logged_runs
    found = {(int(r[0]), r[3]): float(r[4]) for r in rows(folder, "metrics") if r[2] == "fit"}
    here = {t: sum(r[0] == str(t) for r in rows(folder, "participants")) for t in range(1, 5)}
    for t, m in here.items():
        assert 0 < found[t, "deviation"] < 2 * m
        assert found[t, "deviation"] == pytest.approx(m * found[t, "deviation_mean"])
    assert {t for t, name in found if name == "features_vci"} == {2, 4}
    assert 1 <= found[4, "features_effective_rank"] <= 12
    assert 0 <= found[4, "features_vci"] <= 1


def test_a_runs_weights_are_those_its_participants_had(logged_runs):
    _, folder, _ = logged_runs
    left = read(folder, "a")
    table = left.of_clients(WEIGHT_METRIC).pivot(index="round", columns="client", values="value")
    found = table.to_numpy()
    assert (table.index.tolist(), table.columns.tolist(), found.shape) == ([1, 2, 3, 4], [0, 1, 2, 3, 4, 5], (4, 6))
    used = [r for r in rows(folder, "clients")[1:] if r[2] == "weight"]
    assert [found[int(r[0]) - 1, int(r[1])] for r in used] == [float(r[3]) for r in used]
    assert len(used) < np.isfinite(found).sum()
    assert left.mean_over_clients(WEIGHT_METRIC)[-1] == (4, pytest.approx(np.nanmean(found[-1])))
    assert read(logged_runs[2], "b").mean_over_clients(WEIGHT_METRIC) == []


def test_a_runs_probabilities_are_those_of_its_participation(logged_runs):
    assert read(logged_runs[1], "a").last_of_clients("probability") == dict.fromkeys(range(6), 0.5)


def test_a_runs_training_scores_by_client_are_its_training_accuracy(logged_runs, tmp_path):
    summary, folder, _ = logged_runs
    scores = read(folder, "a").last_of_clients("train_accuracy")
    sizes = np.array([len(part) for part in parts_of(folder)])
    scored = run(config_of("engine=local", f"evaluate_only={folder}", "eval_train=true", f"output_dir={tmp_path / 'e'}"))
    assert np.average([scores[client] for client in range(6)], weights=sizes) == pytest.approx(scored["train_accuracy_final"])
    assert read(logged_runs[2], "b").last_of_clients("train_loss") == {}


def test_clients_values_of_a_run_that_is_still_written_or_is_none(tmp_path, expect_error):
    file = write_run(tmp_path / "a") / "clients.csv"
    file.write_text("round,client,metric,value\n1,0,accuracy,0.5\n1,1,accuracy,0.25\n2,0,accur")
    assert read(tmp_path / "a", "a").last_of_clients("accuracy") == {0: 0.5, 1: 0.25}
    file.write_text("round,client,value\n1,0,0.5\n")
    with expect_error():
        read(tmp_path / "a", "a").last_of_clients("accuracy")


def parts_of(folder):
    from contrafed.core.run_folder import read_config
    from contrafed.data.federation import load_federation

    partition = load_federation(client_run_of(read_config(folder))).partition
    return [partition.train(client) for client in range(partition.num_clients)]


def test_a_runs_traffic_is_its_formula(logged_runs):
    summary, folder, _ = logged_runs
    found = read(folder, "a")
    assert {found.number(f"bytes_{way}_per_client") for way in ("down", "up")} == {4 * summary["parameters"]}


@pytest.mark.figures
def test_an_embedding_of_a_run(logged_runs):
    _, folder, _ = logged_runs
    assert embedding.main([str(folder), "--points", "60"]) == 0
    with np.load(folder / "embedding.npz") as found:
        assert found["x"].shape == (60, 2)
        assert np.isfinite(found["x"]).all()
        assert set(found["client"].tolist()) <= set(range(6))
    assert (folder / "embedding.png").stat().st_size > 1000
    assert (folder / "embedding.pdf").read_bytes().startswith(b"%PDF")
    assert embedding.main([str(folder), "--personal"]) == 2


def test_an_embedding_of_personal_models(tmp_path, capsys):
    tiny = (*TINY_RUN, "strategy=fedper", "engine=local", "num_rounds=1", "save_personal=true")
    for name, more in (("own", ("partition.test_fraction=0.3",)), ("none", ("partition.test_fraction=0",))):
        run(config_of(*tiny, *more, f"output_dir={tmp_path / name}"))
    assert embedding.main([str(tmp_path / "own"), "--personal"]) == 0
    with np.load(tmp_path / "own" / "embedding_personal.npz") as found:
        assert set(found["client"].tolist()) == set(range(6))
    capsys.readouterr()
    assert embedding.main([str(tmp_path / "none"), "--personal"]) == 2
    assert "clients have no test images of their own" in capsys.readouterr().err
