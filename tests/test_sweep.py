"""Sweeps: an experiment's grid, the command line's changes to it, and resuming a stopped sweep."""

import re
import time

import pytest
from helpers import check_overrides, checked_jobs, config_of, read_rows, slow
from omegaconf import OmegaConf

from contrafed.config.checks import CASE_AXES
from contrafed.config.command_line import check_arguments, read_arguments
from contrafed.config.compose import compose_job, expand_jobs, read_grid, take_shard, to_plain
from contrafed.config.overrides import rename_arguments
from contrafed.config.run_config import resolve
from contrafed.core import registry
from contrafed.core.errors import UserError
from contrafed.report.published import MEASURED_BY
from contrafed.runs.run import run

EXPERIMENT = """# @package _global_
# a table of one's own
grid:
  dataset: [digits, mnist]
  variant:
    full: {}
    flat: {model: mlp, model.hidden: [8], published.method: pmfl/flat}
    late: {strategy.buffer_start: previous, num_rounds: 7}
where:
  dataset=mnist: {num_rounds: 5}
  dataset=mnist model=mlp: {model.hidden: [6]}
  scale=small: {num_clients: 4}
  strategy=pmfl: {strategy.history_size: 5}
published: {paper: own, method: pmfl}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "conf" / "experiment" / "own").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "own" / "table.yaml").write_text(EXPERIMENT)
    return tmp_path / "conf"


TABLE = "experiment=own/table"


def names(*overrides, folder=None):
    return [job.name for job in expand_jobs([TABLE, *overrides], folder)]


def test_a_grid_is_every_combination_of_its_axes(folder):
    jobs = expand_jobs([TABLE], folder)
    assert [job.name for job in jobs] == ["digits-full", "digits-flat", "digits-late", "mnist-full", "mnist-flat", "mnist-late"]
    assert jobs[4].overrides == [TABLE, "dataset=mnist", "variant=flat"]
    assert (jobs[4].experiment, jobs[4].scale, jobs[4].name) == ("own/table", None, "mnist-flat")
    assert expand_jobs([TABLE, "scale=small"], folder)[4].scale == "small"
    assert [job.number for job in jobs] == list(range(6))


def test_a_command_line_narrows_a_grid_and_extends_it(folder, expect_error):
    assert names("dataset=mnist", "variant=full,late", folder=folder) == ["mnist-full", "mnist-late"]
    assert names("dataset=svhn", "variant=full", "seed=0,1", folder=folder) == ["svhn-full-seed=0", "svhn-full-seed=1"]
    # A choice keeps the named cases that make it. A value replaces theirs.
    assert names("dataset=digits", "model=mlp", folder=folder) == ["digits-flat"]
    assert names("dataset=digits", "num_rounds=3", folder=folder) == ["digits-full", "digits-flat", "digits-late"]
    short, long = names("dataset=digits", "variant=full", f"seed=0,{'1' * 300}", folder=folder)
    assert (short, len(long)) == ("digits-full-seed=0", 159)
    with expect_error():
        names("model=lenet", folder=folder)
    with expect_error():
        checked_jobs(TABLE, "variant=fall", folder=folder)


@pytest.mark.parametrize("values", ["shuffle(0,1,2)", "shuffle(range(3))"])
def test_values_in_an_order_of_their_own_are_refused(values, expect_error):
    """Names, folders, shards and runs would each have another order."""
    with expect_error("seed"):
        expand_jobs([f"seed={values}"])


@pytest.mark.parametrize("options", [(), ("-m",)])
@pytest.mark.parametrize("overrides", ["experiment=fedcrl/table2 variant=xyz", "experiment=pmfl/base column=cifar10"])
def test_an_axis_of_other_experiments_is_named(options, overrides, expect_error):
    with expect_error(overrides.split()[1].partition("=")[0]):
        check_arguments(read_arguments([*options, *overrides.split()]))


def test_named_axes_are_those_of_grids():
    grids = [read_grid(name) for name in registry.choices("experiment")]
    assert {name for grid in grids for name, axis in grid.items() if isinstance(axis, dict)} > {*CASE_AXES}


def test_a_choice_without_a_yaml_may_be_of_a_folder_that_was_not_named(folder):
    fix = ". Fix: for one of your own, --config-dir=FOLDER"
    with pytest.raises(UserError, match="unknown strategy 'anchor'") as found:
        compose_job(["strategy=anchor"])
    assert str(found.value).endswith(fix)
    with pytest.raises(UserError, match="unknown strategy 'anchor'") as found:
        compose_job(["strategy=anchor"], folder)
    assert fix not in str(found.value)


def test_a_choice_keeps_the_cases_that_leave_it_as_it_is(expect_error):
    def columns(*overrides):
        jobs = expand_jobs(["experiment=fedcrl/table3", "strategy=fedavg", "seed=0", *overrides])
        return [override.partition("=")[2] for job in jobs for override in job.overrides if override.startswith("column=")]

    cifar10 = ["n100", "n100_pathological", "beta_001", "beta_1"]
    assert columns("dataset=cifar10") == cifar10
    assert len(columns("dataset=cifar10,cifar100")) == len(columns()) == 6
    assert columns("dataset=cifar10", "partition=pathological") == ["n100_pathological"]
    with expect_error():
        columns("dataset=svhn")


def test_cases_and_conditions_set_what_the_command_line_does_not(folder):
    def compose_table(*overrides):
        config = OmegaConf.to_container(compose_job([TABLE, *overrides], folder), resolve=True)
        return config, (
            config["num_rounds"],
            config["num_clients"],
            config["model"]["name"],
            config["strategy"]["history_size"],
        )

    assert compose_table("variant=full")[1] == (300, 50, "cnn_pmfl", 5)
    config, values = compose_table("variant=flat", "dataset=mnist", "scale=small", "strategy.history_size=2")
    assert values == (4, 4, "mlp", 2)  # the scale comes last
    assert config["model"]["hidden"] == [8]  # the case's, which comes after what holds for the data set
    assert (config["experiment"], config["scale"], config["changed"]) == ("own/table", "small", ["strategy.history_size=2"])
    assert config["published"] == {"paper": "own", "method": "pmfl/flat"}
    assert not {"grid", "where", "variant"} & set(config)
    assert compose_table("variant=late", "dataset=mnist")[1][0] == 7
    assert compose_table("variant=late", "dataset=mnist", "num_rounds=9")[1][0] == 9
    assert compose_table("variant=flat", "dataset=mnist", "model=lenet", "seed=3")[0]["changed"] == ["model=lenet"]


NESTED = """# @package _global_
defaults: [override /model: torch]
grid: {way: {a: {strategy: {temperature: 0.2}}, b: {strategy.local: {lr: 0.02}, model: {args: {c: 3}}}}}
where:
  seed=0: {strategy: {local: {lr: 0.01}}, model.args: {a: 1, b: 2}}
  eval_train=true: {num_rounds: 7}
  federation_seed=null: {eval_every: 3}
"""


def test_a_mapping_of_a_case_or_condition_sets_what_the_command_line_does_not(folder):
    (folder / "experiment" / "own" / "table.yaml").write_text(NESTED)

    def compose_way(*overrides):
        config = compose_job([TABLE, *overrides], folder)
        return config.strategy.local.lr, config.strategy.temperature, OmegaConf.to_container(config.model.args)

    assert compose_way("way=a") == (0.01, 0.2, {"a": 1, "b": 2})
    assert compose_way("way=b", "seed=1") == (0.02, 0.5, {"c": 3})
    assert compose_way("way=a", "strategy.local.lr=0.3", "strategy.temperature=0.7")[:2] == (0.3, 0.7)
    assert compose_way("way=b", "strategy.local={lr:0.3}")[0] == 0.3
    # model.args declares no keys, so that it takes any
    assert compose_way("way=b", "model.args={a:5,d:4}")[2] == {"a": 5, "d": 4, "b": 2, "c": 3}
    assert compose_way("way=b", "model.args={c:9}", "seed=1")[2] == {"c": 9}


def test_a_condition_may_be_yes_no_or_nothing(folder):
    (folder / "experiment" / "own" / "table.yaml").write_text(NESTED)
    config = compose_job([TABLE, "eval_train=true"], folder)
    assert (config.num_rounds, config.eval_every) == (7, 3)
    config = compose_job([TABLE, "eval_train=false", "federation_seed=1"], folder)
    assert (config.num_rounds, config.eval_every) == (300, 10)


@pytest.mark.parametrize(
    ("condition", "values", "key"),
    [
        ("seed=0", "{model: mlp}", "model"),
        ("strategy=fedavg", "{strategy: {server: fedadam}}", "strategy.server"),
        ("variant=full", "{eval_every: 2}", "variant"),
        ("seed=0", "{strategy: {local: {lrr: 1}}}", None),
    ],
)
def test_what_a_condition_cannot_have_is_one_line(folder, condition, values, key, expect_error):
    (folder / "experiment" / "own" / "table.yaml").write_text(EXPERIMENT.replace("where:", f"where:\n  {condition}: {values}"))
    with expect_error(key):
        compose_job([TABLE, "variant=full", "strategy=fedavg" if "fedavg" in condition else "strategy=pmfl"], folder)


def test_what_an_own_experiment_sets_for_a_method_is_recorded(folder):
    pmfl, fedavg = (compose_job([TABLE, "variant=full", "dataset=digits", *more], folder) for more in ([], ["strategy=fedavg"]))
    assert (pmfl.method_keys, fedavg.method_keys) == (["strategy.history_size"], [])
    assert "method_keys" not in compose_job(["experiment=pmfl/table1", "strategy=pmfl"])
    assert resolve(to_plain(pmfl)).composed["method_keys"] == ["strategy.history_size"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dataset: [digits, mnist]", "dataset: digits"),
        ("num_rounds: 7", "num_round: 7"),
        ("num_rounds: 5", "num_round: 5"),
        ("dataset=mnist model=mlp", "dataset=mnist mlp"),
        ("[digits, mnist]", "[digits, mnits]"),
    ],
)
def test_a_mistake_in_a_grid_is_one_line_before_any_job(folder, old, new, expect_error):
    path = folder / "experiment" / "own" / "table.yaml"
    path.write_text(EXPERIMENT.replace(old, new, 1))
    with expect_error():
        checked_jobs(TABLE, folder=folder)


def test_overrides_that_are_set_are_those_that_hydra_would_set():
    """Values are set in a copy of Hydra's composition of the choices. A new key needs a full composition."""
    asked = [
        "strategy=moon", "dataset=mnist", "model=lenet", "model.projection=[4,5]", "strategy.local.lr=1e-3", "init_from='a, b'",
    ]  # fmt: skip
    plain = compose_job(asked)
    assert plain.model.projection == [4, 5]
    asked.append("output_dir=x")  # else it is the time
    assert compose_job([*asked, "++seed=0"]) == compose_job(asked)
    assert (plain.strategy.local.lr, plain.init_from) == (0.001, "a, b")


def test_the_tests_put_together_what_hydra_composes():
    asked = (
        "strategy=moon", "strategy.server=fednova", "strategy.local.lr=0.5", "model=mlp", "model.hidden=[4]", "partition=iid",
        "engine=local", "engine.stack_size=3", "privacy=central", "num_clients=3", "output_dir=x",
    )  # fmt: skip
    assert config_of(*asked) == OmegaConf.to_container(compose_job(list(asked)), resolve=True)


def test_values_may_be_ranges_choices_and_globs():
    jobs = expand_jobs(["seed=range(0,3)", "strategy=glob(feda*)", "num_rounds=choice(1,2)"])
    assert {job.name.split("-")[0] for job in jobs} == {"seed=0", "seed=1", "seed=2"}
    names = {name for name in registry.choices("strategy") if name.startswith("feda")}
    assert len(names) > 3
    assert {job.name.split("-")[1] for job in jobs} == names
    assert len(jobs) == 3 * len(names) * 2
    assert all(not job.overrides[1].startswith("strategy=_") for job in expand_jobs(["seed=0", "strategy=glob(*)"]))


def test_jobs_are_split_by_their_numbers(expect_error):
    assert take_shard(list("abcdef"), None) == list("abcdef")
    assert [take_shard(list("abcdef"), f"{k}/4") for k in (1, 2, 3, 4)] == [["a", "e"], ["b", "f"], ["c"], ["d"]]
    for wrong in ("0/4", "5/4", "2", "a/b"):
        with expect_error("shard"):
            take_shard(["a"], wrong)
    with expect_error("shard"):
        take_shard(["a"], "2/2")


EXPERIMENTS = list(registry.choices("experiment"))


def sample_jobs(experiment):
    """Return jobs of a grid with every value of every axis."""
    jobs = expand_jobs([f"experiment={experiment}"])
    seen, kept = set(), []
    for job in jobs:
        if set(job.overrides) - seen:
            seen |= set(job.overrides)
            kept.append(job)
    return kept


# One of each paper, of tables and figures.
FEW_EXPERIMENTS = (
    "digits", "pmfl/table5", "pmfl/figure8", "fedcrl/table3", "fedcosr/figure12", "fedrcl/table4", "mpfedcon/table1",
)  # fmt: skip


@pytest.mark.parametrize("every", [False, slow(True)], ids=["last", "every"])
@pytest.mark.parametrize("experiment", [name if name in FEW_EXPERIMENTS else slow(name) for name in EXPERIMENTS])
def test_every_experiment_composes(experiment, every):
    """Its last job, or jobs with every value of every axis."""
    for job in sample_jobs(experiment)[0 if every else -1 :]:
        run = check_overrides(*job.overrides)
        assert (run.composed["experiment"], run.composed["changed"]) == (experiment, [])
        said = run.composed.get("published") or {}
        if said.get("table"):  # the column of the paper's table that our value fills
            columns = {(dataset, setting, metric) for dataset, setting, _, metric in rows_of(said["paper"], said["table"])}
            assert {(said["dataset"], cell["setting"], cell["metric"]) for cell in said["cells"]} <= columns


def test_what_is_no_axis_of_the_grid_changes_its_setting():
    asked = ["experiment=fedrcl/table5", "strategy.server=fedadam", "strategy=fedrcl", "seed=3", "strategy.local.lr=0.5"]
    assert check_overrides(*rename_arguments(asked)).composed["changed"] == ["strategy.local.lr=0.5"]


@pytest.mark.slow
def test_every_axis_of_a_grid_is_a_list_or_cases():
    found = {name: read_grid(name) for name in EXPERIMENTS}
    assert sum(bool(axes) for axes in found.values()) > 40


PUBLISHED = {
    ("pmfl", "I"): "table1", ("pmfl", "II"): "table2", ("pmfl", "III"): "table3", ("pmfl", "IV"): "table4",
    ("pmfl", "V"): "table5", ("fedcrl", "II"): "table2", ("fedcrl", "III"): "table3", ("fedcosr", "II"): "table2",
    ("fedcosr", "III"): "table3", **{("mpfedcon", str(n)): f"table{n}" for n in (1, 2, 3, 4)},
    **{("fedrcl", str(n)): f"table{n}" for n in range(1, 7)},
}  # fmt: skip


def rows_of(paper, table):
    """Return the published rows of a table, as (dataset, setting, method, metric)."""
    rows = [
        row
        for row in read_rows(registry.CONF.parent / "contrafed" / "report" / "published" / f"{paper}.csv")
        if row["table"] == table and row["metric"] not in MEASURED_BY
    ]
    return {tuple(row[key] for key in ("dataset", "setting", "method", "metric")) for row in rows}


def list_filled_rows(experiment, *overrides):
    """Return the rows that a grid's jobs fill."""
    found = set()
    for job in expand_jobs([f"experiment={experiment}", *overrides]):
        said = OmegaConf.to_container(compose_job(job.overrides).published, resolve=True)
        found |= {(said["dataset"], cell["setting"], said["method"], cell["metric"]) for cell in said["cells"]}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "table"), PUBLISHED)
def test_every_published_row_has_a_job(paper, table):
    experiment = f"{paper}/{PUBLISHED[paper, table]}"
    seed = ["seed=0"] if "seed" in read_grid(experiment) else []
    wanted = rows_of(paper, table)
    assert wanted
    assert list_filled_rows(experiment, *seed) == wanted


# Generated images diverge at the last cell's rates, 0.3 on clients and 2 on the server, or in its twenty steps.
LARGEST_LAST_EXPERIMENTS = {"pmfl/figure10", "pmfl/figure14"}


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_cell_of_every_experiment_runs_at_a_small_scale(experiment, tmp_path):
    """Each on generated images of its data set's shape and classes, and the digits on themselves."""
    jobs = expand_jobs([f"experiment={experiment}", "scale=small", "engine=local"])
    job = jobs[0 if experiment in LARGEST_LAST_EXPERIMENTS else -1]
    downloads = "download" in compose_job(job.overrides).dataset
    paths = ["dataset.download=false", f"dataset.root={tmp_path}"] if downloads else []
    began = time.monotonic()
    wanted = check_overrides(*job.overrides, *paths, f"output_dir={tmp_path}/run")
    summary = run(wanted.composed)
    print(f"{experiment}: {time.monotonic() - began:.1f} s, {job.name}, {summary.get('stand_in')}", flush=True)
    assert (summary["status"], summary["scale"], summary["rounds"]) == ("finished", "small", 4)
    assert summary["failures"] == summary["replies_rejected"] == 0
    for cell in wanted.composed.get("published", {}).get("cells", []):
        if not re.search(r"_to_target$|_ema_\d+$", cell["value"]):  # of a round that the small scale does not reach
            assert 0 <= summary[cell["value"]] <= 1
