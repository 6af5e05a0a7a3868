"""The papers' figures with a picture per run: t-SNE, classes of clients, and participation."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import config_of, read_rows
from omegaconf import OmegaConf

from contrafed import report_command, run
from contrafed.core import registry
from contrafed.core.client_run import client_run_of
from contrafed.core.run_folder import read_config
from contrafed.data.federation import load_federation
from contrafed.report import embedding, figures, pictures, plots
from contrafed.report.runs import find

TINY_RUN = (
    *("engine=local", "tracker=none", "model=mlp", "model.hidden=[8]", "num_clients=5", "num_rounds=1"),
    *("partition.min_client_size=8", "strategy.local.iterations=1", "strategy.local.epochs=null"),
)


def ran(folder, experiment, **many):
    """Run jobs of an experiment, each into a folder of its name, and return the folder."""
    for name, choices in many.items():
        run(config_of(f"experiment={experiment}", "dataset=digits", *TINY_RUN, *choices, f"output_dir={folder / name}"))
    return folder


def panels(figure):
    return {part.get_suptitle(): part.axes for part in figure.subfigs if part.axes}


@pytest.mark.parametrize("experiment", registry.choices("experiment"))
def test_every_experiments_figure_is_drawn(experiment):
    published = OmegaConf.load(registry.CONF / "experiment" / f"{experiment}.yaml").get("published") or {}
    assert (published.get("plot") or {}).get("kind", "curves") in {**plots.KINDS, **pictures.KINDS}


@pytest.fixture(scope="module")
def embedded_runs(tmp_path_factory):
    jobs = {"global": ["strategy=fedavg"], "own": ["strategy=fedcrl"]}
    return ran(tmp_path_factory.mktemp("tsne"), "fedcrl/figure4", **jobs)


def test_representations_stand_beside_each_other_each_of_its_runs_models(embedded_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pictures, "POINTS", 60)
    assert report_command.main([str(embedded_runs), "--out", str(tmp_path)]) == 0
    assert {"fedcrl-figure4.png", "fedcrl-figure4.pdf"} <= {path.name for path in tmp_path.iterdir()}
    assert "left out" not in capsys.readouterr().err
    figure = figures.of_papers(find([embedded_runs]))["fedcrl-figure4"]
    shown = panels(figure)
    assert list(shown) == ["fedavg", "fedcrl"]
    for (axes,), name, whose in zip(shown.values(), ("global", "own"), ("global model", "clients' own models"), strict=True):
        z, labels, _ = embedding.of_run(embedded_runs / name, personal=name == "own", limit=60)
        points = embedding.tsne(z)
        assert axes.get_title() == f"{whose}, 60 test images"
        for dots in axes.collections:
            np.testing.assert_allclose(dots.get_offsets(), points[labels == int(dots.get_label())])
        assert sum(len(dots.get_offsets()) for dots in axes.collections) == 60
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [str(label) for label in range(10)]


def test_a_run_whose_models_are_not_there_is_named_and_left_out(embedded_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pictures, "POINTS", 60)
    first, second = find([embedded_runs])
    (tmp_path / "damaged").mkdir()
    for name in ("config.yaml", "metrics.csv", "summary.json"):
        (tmp_path / "damaged" / name).write_bytes((embedded_runs / "own" / name).read_bytes())
    (damaged,) = find([tmp_path])
    assert list(panels(figures.of_papers([first, damaged])["fedcrl-figure4"])) == ["fedavg"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("left out of FedCRL, Figure 4")
    assert line.endswith(f"damaged: there are no personal models in {tmp_path / 'damaged'}; the run needs save_personal=true")
    (tmp_path / "damaged" / "personal").mkdir()
    assert figures.of_papers([damaged]) == {}
    assert "damaged: there is no personal model of client 0" in capsys.readouterr().err
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"cut off")
    assert figures.of_papers([replace(damaged, config=first.config)]) == {}
    assert "model.safetensors is no safetensors file" in capsys.readouterr().err
    assert figures.of_papers([replace(second, summary={**second.summary, "stand_in": "generated"})]) == {}
    assert "it ran on generated images, and at hand is the data set itself" in capsys.readouterr().err
    assert figures.of_papers([replace(one, folder=None) for one in (first, second)]) == {}  # as results keeps them
    assert capsys.readouterr().err == ""


def test_who_holds_which_classes_is_what_the_clients_train_on(tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "my.npz", x=rng.integers(0, 256, (120, 8, 8), dtype=np.uint8), y=np.arange(120) % 3)
    own = ["partition=practical", "dataset=npz", f"dataset.path={tmp_path / 'my.npz'}"]
    ran(tmp_path, "fedcosr/partitions", a=["partition=pathological"], b=own)
    runs = find([tmp_path])
    found = {number: drawn for one in runs for number, drawn in figures.of_papers([one]).items()}
    assert list(found) == ["fedcosr-figurepartitions"]
    figure = pictures.draw("partition", runs, "")
    assert list(panels(figure)) == ["digits, pathological", "npz, practical"]
    for name, (grid, sizes, _) in zip("ab", panels(figure).values(), strict=True):
        federation = load_federation(client_run_of(read_config(tmp_path / name)))
        y = federation.data.y.numpy()
        counts = [np.bincount(y[federation.partition.train(client)], minlength=y.max() + 1).tolist() for client in range(5)]
        assert grid.images[0].get_array().filled(0).tolist() == counts
        assert [bar.get_width() for bar in sizes.patches] == [sum(row) for row in counts]
    (tmp_path / "my.npz").unlink()
    assert list(panels(pictures.draw("partition", runs, "it"))) == ["digits, pathological"]
    assert capsys.readouterr().err.startswith(f"left out of it: b: dataset.path: there is nothing at {tmp_path / 'my.npz'}")


def test_pmfls_figure_2_is_of_probabilities_and_of_classes(tmp_path):
    ran(tmp_path, "pmfl/figure2", a=[])
    found = figures.of_papers(find([tmp_path]))
    assert list(found) == ["pmfl-figure2-probability", "pmfl-figure2-partition"]
    ((grid, _, _),) = panels(found["pmfl-figure2-partition"]).values()
    assert grid.images[0].get_array().shape == (5, 10)


def test_who_is_there_is_who_took_part(tmp_path, capsys):
    rounds = ["num_rounds=5", "participation.mean_probability=0.5"]
    ran(tmp_path, "pmfl/figure3", **{name: [f"participation={name}", *rounds] for name in ("bernoulli", "cyclic")})
    (figure,) = figures.of_papers(find([tmp_path])).values()
    assert list(panels(figure)) == ["bernoulli", "cyclic"]
    for name, axes in panels(figure).items():
        took = np.zeros((5, 5))
        for row in read_rows(tmp_path / name / "participants.csv"):
            took[int(row["client"]), int(row["round"]) - 1] = 1
        assert 0 < took.sum() < 25
        assert_shows(axes, took)
    (tmp_path / "bernoulli" / "participants.csv").write_text("round,client\n2,0\n2,3\n4,3\n")
    (tmp_path / "cyclic" / "participants.csv").unlink()
    (figure,) = figures.of_papers(find([tmp_path])).values()
    ((axes),) = panels(figure).values()
    assert_shows(axes, np.array([[0, 1, 0, 0, 0], [0] * 5, [0] * 5, [0, 1, 0, 1, 0], [0] * 5]))
    assert "cyclic: cannot read" in capsys.readouterr().err
    (tmp_path / "bernoulli" / "participants.csv").write_text("round,client\n")
    assert figures.of_papers(find([tmp_path])) == {}
    assert "bernoulli: no client participated in any round" in capsys.readouterr().err


def assert_shows(axes, took):
    """Assert that the two axes of a picture show the participants: clients x rounds (K, T)."""
    top, raster = axes
    assert top.patches[0].get_data().values.tolist() == took.sum(0).tolist()
    assert raster.images[0].get_array().tolist() == took.tolist()


def test_pictures_of_one_kind_are_a_row_and_no_more_than_can_be_told_apart(embedded_runs, capsys, monkeypatch):
    kinds = [f"{kind}, {method}" for kind in ("iid", "skewed") for method in range(3)]
    assert pictures._rows(kinds) == [kinds[:3], kinds[3:]]
    assert pictures._rows(["a, b", "c, d", "e, f"]) == [["a, b", "c, d", "e, f"]]
    assert pictures._rows(list("abcdefg")) == [list("abcde"), list("fg")]
    monkeypatch.setattr(pictures, "PANELS", 1)
    assert len(panels(pictures.draw("partition", find([embedded_runs]), "it"))) == 1
    assert capsys.readouterr().err == "left out of it: own: 1 panels are the most\n"
