"""An experiment's training settings: those of all methods of a table, those of one method only, and plain SGD."""

import pytest
from helpers import config_of, slow
from omegaconf import OmegaConf

from contrafed.config.compose import compose_job, expand_jobs
from contrafed.config.run_config import resolve
from contrafed.core import registry
from contrafed.core.errors import UserError

TRAINING_KEYS = tuple(OmegaConf.load(registry.CONF / "strategy" / "_local_training.yaml"))


def training_of(config):
    return {key: config["strategy"]["local"][key] for key in TRAINING_KEYS}


# What the tables and figures inherit.
BASES = [name for name in registry.choices("experiment") if name.endswith("base") or "/" not in name]


@pytest.mark.parametrize("every", [False, slow(True)], ids=["some", "every"])
@pytest.mark.parametrize("experiment", [name if name == "fedcrl/base" else slow(name) for name in BASES])
def test_an_experiment_has_the_same_training_for_every_method(experiment, every):
    """Without ``every``: for the methods that it treats in their own way, and a few others."""
    file = "fedcrl/base" if experiment == "fedcosr/base" else experiment
    own = OmegaConf.load(registry.CONF / "experiment" / f"{file}.yaml")
    expected = training_of(config_of(f"experiment={experiment}"))
    local = OmegaConf.to_container(own.strategy.local) | local_settings(own, "")
    assert all(expected[key] == value for key, value in local.items())
    for number, name in enumerate(registry.choices("strategy")):
        if not (every or number % 23 == 0 or local_settings(own, name) or name in ("fednova", "scaffold")):
            continue
        config = config_of(f"experiment={experiment}", f"strategy={name}")
        if name == "fednova" and expected["optimizer"] == "adam":  # a strategy that needs SGD's steps
            with pytest.raises(UserError, match="^strategy.server=fednova"):
                resolve(config)
            continue
        run = resolve(config)
        assert training_of(config) == expected | local_settings(own, name), name
        if client_of(run).plain_sgd_reason:
            assert (training_of(config)["optimizer"], training_of(config)["momentum"]) == ("sgd", 0.0), name


def local_settings(experiment, name):
    """Return an experiment's default settings of one method's local training alone, or without a name of all methods'."""
    found = {}
    for condition, values in OmegaConf.to_container(experiment).get("where", {}).items():
        parts = dict(part.split("=") for part in condition.split())
        names = parts.pop("strategy", "").split(",")
        if parts in ({}, {"settings": "code"}) and name in names:
            found |= {key.removeprefix("strategy.local."): v for key, v in values.items() if key.startswith("strategy.local.")}
    return found


def client_of(run):
    from contrafed.training.workspace import client_class_of

    return client_class_of(run.client.strategy)


def test_a_mapping_on_the_command_line_sets_the_keys_that_it_has():
    local = config_of("experiment=fedcrl/base", "strategy=pfedme", "strategy.local={lr:0.05}")["strategy"]["local"]
    assert (local["lr"], local["weight_decay"], local["optimizer"]) == (0.05, 0.001, "sgd")
    nothing, plain = (("experiment=fedcrl/base", "strategy=pfedme", *more) for more in (["strategy.local={}"], []))
    assert config_of(*nothing)["strategy"] == config_of(*plain)["strategy"]


def test_without_an_experiment_a_method_keeps_its_own_defaults():
    assert config_of("strategy=fedcrl")["strategy"]["local"]["optimizer"] == "adam"
    assert config_of("strategy=fedrcl")["strategy"]["local"]["epochs"] == 5


def test_fedavg_trains_with_the_experiments_settings():
    local = config_of("experiment=fedrcl/base", "strategy=fedavg")["strategy"]["local"]
    assert (local["epochs"], local["iterations"], local["batch_size"], local["clip_norm"]) == (5, None, 0.1, 10.0)


def test_who_fine_tunes_at_the_end_alone_stands_beside_mpfedcons_table_with_that():
    cells = {
        name: config_of("experiment=mpfedcon/table1", "column=cifar10_2", f"strategy={name}")["published"]["cells"][0]["value"]
        for name in ("fedavg", "fedavg_ft", "fedrep")
    }
    assert cells == {
        "fedavg": "clients_accuracy_last10_mean",
        "fedavg_ft": "personal_accuracy_mean",
        "fedrep": "personal_accuracy_last10_mean",
    }


def test_mpfedcons_table_4_is_of_ten_classes_a_client_and_its_figure_4_of_more_than_one_client_a_round():
    for defence in ("original", "gaussian_1e-2", "laplace_1e-4", "mpfedcon"):
        config = config_of("experiment=mpfedcon/table4", f"defence={defence}")
        assert (config["partition"]["classes_per_client"], config["partition"]["distinct"]) == (10, True)
        assert config["strategy"]["local"]["epochs"] == 1
    for name in ("central", "local", "fedavg", "mpfedcon"):
        run = resolve(config_of("experiment=mpfedcon/figure4", f"method={name}"))
        assert run.participation.config.count(run.num_clients) is None
        assert run.client.strategy.config.local.epochs == 1


def test_mpfedcon_trains_the_body_for_one_epoch_on_cifar_10_and_for_five_elsewhere():
    for column, epochs in (("cifar10_2", 1), ("cifar10_5", 1), ("cifar100_5", 5), ("cifar100_20", 5), ("femnist_3", 5)):
        assert config_of("experiment=mpfedcon/table1", f"column={column}")["strategy"]["local"]["epochs"] == epochs


def test_fedrcls_figure_2_has_a_client_with_all_data():
    run = resolve(config_of("experiment=fedrcl/figure2", "column=central", "strategy=fedavg"))
    local = run.client.strategy.config.local
    assert (run.num_clients, run.participation.config.count(1), local.iterations, local.batch_size) == (1, 1, 250, 50)


def test_pmfls_figure_2_is_of_all_its_clients():
    assert config_of("experiment=pmfl/figure2")["num_clients"] == 250


def test_fedcrls_experiment_goes_with_its_other_partition():
    for partition, classes in (("pathological", 2), ("practical", None)):
        run = resolve(config_of("experiment=fedcrl/base", f"partition={partition}"))
        assert getattr(run.client.partition.config, "classes_per_client", None) == classes
        assert run.client.partition.config.min_client_size == 40
    assert resolve(config_of("experiment=fedcrl/base")).client.partition.config.scheme == "per_class"


def test_what_a_table_sets_for_one_method_only_is_merged_for_that_method():
    config = config_of("experiment=mpfedcon/base", "strategy=fedprox")
    assert config["strategy"]["proximal_weight"] == 0.1
    assert "where" not in config
    assert config_of("strategy=fedprox")["strategy"]["proximal_weight"] == 0.01


def test_the_command_line_wins_over_both():
    asked = ("experiment=mpfedcon/base", "strategy=fedprox", "strategy.local.lr=0.5")
    strategy = config_of(*asked, "strategy.proximal_weight=7")["strategy"]
    assert (strategy["proximal_weight"], strategy["local"]["lr"], strategy["local"]["momentum"]) == (7, 0.5, 0.5)


def write(folder, group, name, text):
    (folder / group).mkdir(parents=True, exist_ok=True)
    (folder / group / f"{name}.yaml").write_text(text)


EXPERIMENT = """# @package _global_
# a table of one's own
defaults:
  - /strategy/_local_training@strategy.local
  - _self_
strategy:
  local:
    epochs: 2
    OPTIMIZER
where:
  METHOD
"""


def experiment(folder, optimizer, method):
    write(folder, "experiment", "table", EXPERIMENT.replace("OPTIMIZER", optimizer).replace("METHOD", method))


def test_a_key_that_the_method_does_not_have_is_named(tmp_path, expect_error):
    experiment(tmp_path, "lr: 0.2", "strategy=fedprox: {strategy.proximal_wait: 1}")
    with expect_error():
        compose_job(["experiment=table", "strategy=fedprox"], tmp_path)
    assert compose_job(["experiment=table", "strategy=moon"], tmp_path).strategy.local.lr == 0.2


@pytest.fixture
def plain(monkeypatch):
    from contrafed.clients.fedavg import FedAvgClient

    monkeypatch.setattr(FedAvgClient, "plain_sgd_reason", "its corrections are sums of plain steps")


@pytest.mark.parametrize("optimizer", ["{optimizer: adam, lr: 0.003}", "{momentum: 0.9, lr: 0.02}"])
def test_a_method_of_plain_sgd_is_refused_with_more_unless_the_experiment_says_otherwise(
    tmp_path, plain, optimizer, expect_error
):
    text = "\n    ".join(f"{k}: {v}" for k, v in OmegaConf.to_container(OmegaConf.create(optimizer)).items())
    experiment(tmp_path, text, "strategy=moon: {}")
    with expect_error("strategy"):
        resolve(OmegaConf.to_container(compose_job(["experiment=table", "strategy=fedavg"], tmp_path), resolve=True))
    sgd = "strategy=fedavg: {strategy.local.optimizer: sgd, strategy.local.momentum: 0.0, strategy.local.lr: 0.07}"
    experiment(tmp_path, text, sgd)
    job = compose_job(["experiment=table", "strategy=fedavg"], tmp_path)
    local = job.strategy.local
    assert (local.optimizer, local.momentum, local.lr, local.epochs) == ("sgd", 0, 0.07, 2)
    resolve(OmegaConf.to_container(job, resolve=True))
    # What the command line sets stays, and is refused.
    assert compose_job(["experiment=table", "strategy=fedavg", "strategy.local.lr=9"], tmp_path).strategy.local.lr == 9
    explicit = compose_job(["experiment=table", "strategy=fedavg", "strategy.local.momentum=0.5"], tmp_path)
    with expect_error("strategy"):
        resolve(OmegaConf.to_container(explicit, resolve=True))


def test_without_an_experiment_a_momentum_beside_plain_sgd_is_refused(plain, expect_error):
    with expect_error("strategy"):
        resolve(config_of("strategy=fedavg", "strategy.local.momentum=0.9"))


def test_a_run_records_what_it_was_merged_to_and_is_repeated_by_it(tmp_path):
    import yaml

    from contrafed import compose, run

    small = ("dataset=digits", "num_clients=10", "num_rounds=1", "model=mlp")
    cfg = compose("experiment=mpfedcon/base", "strategy=fedprox", "engine=local", *small, f"output_dir={tmp_path}/a")
    run(cfg)
    stored = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    assert stored["strategy"]["proximal_weight"] == 0.1
    assert "where" not in stored
    assert resolve(stored).client.to_json() == resolve(OmegaConf.to_container(cfg, resolve=True)).client.to_json()
    run(stored | {"output_dir": f"{tmp_path}/b"})
    assert (tmp_path / "a" / "metrics.csv").read_bytes() == (tmp_path / "b" / "metrics.csv").read_bytes()


LOCAL = "strategy.local."


def select(experiment, *overrides):
    """Return a job's values by dotted key."""
    config = compose_job([f"experiment={experiment}", *overrides])
    return lambda key: OmegaConf.select(config, key)


@pytest.mark.parametrize(
    ("experiment", "overrides", "key", "code", "printed"),
    [
        ("fedcrl/table2", ["strategy=fedavg"], f"{LOCAL}optimizer", "sgd", "adam"),
        ("fedcrl/table2", ["strategy=pfedme"], f"{LOCAL}lr", 0.01, 0.01),
        ("fedcrl/table2", ["strategy=perfedavg"], "strategy.inner_lr", 0.005, 0.003),
        ("fedcosr/table3", ["strategy=fedcosr"], "dataset.normalize", "half", "moments"),
        ("fedcosr/table2", ["partition=pathological"], "partition.pieces", "uniform", "equal"),
        ("fedcrl/table2", ["partition=pathological"], "partition.pieces", "uniform", "random"),
        ("mpfedcon/table1", ["strategy=local"], "participation.select", None, 0.1),
        ("mpfedcon/table1", ["strategy=local"], f"{LOCAL}weight_decay", 0.0, 0.0),
        ("mpfedcon/table1", ["strategy=fedrep"], f"{LOCAL}weight_decay", 0.0001, 0.0),
        ("mpfedcon/table1", ["strategy=mpfedcon"], "strategy.temperature", 5.0, 0.5),
        ("mpfedcon/table1", ["strategy=mpfedcon"], "model.projection", [256, 256], [256, 256]),
        ("mpfedcon/table1", ["strategy=fedavg"], "model.projection", [], [256, 256]),
        ("mpfedcon/table1", ["strategy=perfedavg"], "evaluate_after", "local_training", "download"),
        ("mpfedcon/table3", ["dataset=cifar100"], "model.hidden", [256, 128], None),
        ("mpfedcon/table1", ["participation=full"], "participation.select", None, None),
        ("pmfl/table1", ["strategy=pmfl"], "strategy.history_step", "unmixed", "mixed"),
        ("pmfl/table1", ["strategy=mifa"], f"{LOCAL}lr", 0.0562, 0.1),
        ("pmfl/table1", ["strategy=fedppo"], "strategy.choose_from", "everyone", "available"),
        ("fedrcl/table1", ["strategy=fedrcl"], "strategy.pairs", "hard", "all"),
    ],
)
def test_a_papers_settings(experiment, overrides, key, code, printed):
    assert select(experiment, *overrides)(key) == select(experiment, *overrides, "settings=code")(key) == code
    other = select(experiment, *overrides, "settings=printed")
    if printed is not None or key == "participation.select":
        assert other(key) == printed
    else:
        assert other(key) != code
    assert not [change for change in other("changed") if "settings" in change]  # both are the paper's


def test_supervised_contrast_is_one_method_in_all_tables_of_fedrcl():
    levels = [select(f"fedrcl/{name}", "strategy=fedscl")("strategy.levels") for name in ("figure2", "figure3", "table3")]
    assert levels == [5, 5, 5]


def test_the_authors_partitions_replace_the_skews_of_a_table():
    jobs = expand_jobs(["experiment=fedrcl/table1", "partition=file", "partition.path=parts.json", "strategy=fedavg"])
    assert [job.name for job in jobs] == ["cifar10-fedavg", "cifar100-fedavg", "tiny_imagenet-fedavg"]
    assert {compose_job(job.overrides).partition.name for job in jobs} == {"file"}


def test_a_small_figure_over_the_number_of_clients_has_several_points():
    cases = ("k200", "k220", "k240", "k250", "k260", "k280", "k300")
    sizes = [config_of("experiment=pmfl/figure13", f"clients={case}", "scale=small")["num_clients"] for case in cases]
    assert len(set(sizes)) == len(cases)
    assert config_of("experiment=pmfl/figure13", "clients=k220", "scale=small", "num_clients=9")["num_clients"] == 9


@pytest.mark.parametrize(
    ("asked", "selected"),
    [
        (("experiment=mpfedcon/table1", "column=cifar10_2", "strategy=local"), None),
        (("experiment=mpfedcon/table1", "column=cifar10_2", "strategy=fedavg"), 0.2),
        (("experiment=mpfedcon/figure4", "method=fedavg"), None),
    ],
)
def test_a_small_run_keeps_a_cohort_of_all_clients(asked, selected):
    assert config_of(*asked, "scale=small")["participation"]["select"] == selected
    assert (config_of(*asked)["participation"]["select"] is None) == (selected is None)
