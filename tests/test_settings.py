"""``settings=code|printed`` of the papers' experiments."""

import pytest
from omegaconf import OmegaConf

from contrafed.config.compose import compose_job, expand_jobs

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


@pytest.mark.parametrize("overrides", [["settings=code"], ["experiment=digits", "settings=printed"]])
def test_settings_need_an_experiment_that_has_them(overrides, expect_error):
    with expect_error("settings"):
        compose_job(overrides)


def test_supervised_contrast_is_one_method_in_all_tables_of_fedrcl():
    levels = [select(f"fedrcl/{name}", "strategy=fedscl")("strategy.levels") for name in ("figure2", "figure3", "table3")]
    assert levels == [5, 5, 5]


def test_the_authors_partitions_replace_the_skews_of_a_table():
    jobs = expand_jobs(["experiment=fedrcl/table1", "partition=file", "partition.path=parts.json", "strategy=fedavg"])
    assert [job.name for job in jobs] == ["cifar10-fedavg", "cifar100-fedavg", "tiny_imagenet-fedavg"]
    assert {compose_job(job.overrides).partition.name for job in jobs} == {"file"}
