"""A user's folder of YAMLs: each misspelt or misplaced file, or one without code, gives one line with its name."""

import importlib.util
import time

import pytest
from test_external_package import METHOD, OTHER_RULE, write, write_package

from contrafed.config.compose import compose_job
from contrafed.core import registry
from contrafed.core.client_run import PACKAGES

OWN_RULE = METHOD.replace("server: my_package.my_rule\n", "")
AVERAGED_METHOD = OWN_RULE.replace("_local@local,", "_local@local, server: fedavg,").replace("share: 0.5\n", "")


@pytest.fixture
def home(on_path):
    """Return a folder with the package my_package and the YAMLs yamls/."""
    return write_package(on_path, AVERAGED_METHOD)


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("module: my_package.my_method\n", "", "strategy"),
        ("my_package.my_method", "my_method", "strategy"),
        ("name: mine", "name: mine\nserver: my_rule", "strategy"),
        ("server: fedavg", "server: fedavgg", None),
        ("_local@", "_locl@", None),
        ("_local@", "/zzz/qqqqqq@", None),
    ],
)
def test_a_yaml_without_its_module_or_with_a_misspelt_default_says_what_to_write(home, expect_error, old, new, key):
    write(home / "yamls" / "strategy" / "mine.yaml", AVERAGED_METHOD.replace(old, new))
    with expect_error(key):
        compose_job(["strategy=mine"], home / "yamls")


def test_a_yaml_for_one_of_our_modules_needs_no_package(home):
    write(home / "yamls" / "strategy" / "mine.yaml", "defaults: [fedprox, _self_]\nname: mine\nmodule: fedprox\n")
    write(home / "yamls" / "partition" / "even.yaml", "defaults: [dirichlet, _self_]\nname: even\nmodule: dirichlet\n")
    assert compose_job(["strategy=mine", "partition=even"], home / "yamls").strategy.server == "fedavg"


@pytest.mark.parametrize("group", PACKAGES)
def test_our_own_choices_have_their_modules_where_they_are_looked_for(group):
    for name in registry.choices(group):
        text = (registry.CONF / group / f"{name}.yaml").read_text()
        module = next((line.split()[1] for line in text.splitlines() if line.startswith("module:")), name)
        assert importlib.util.find_spec(f"{PACKAGES[group]}.{module}") is not None


@pytest.mark.parametrize(
    ("folder", "file", "key"),
    [
        ("yamls", "stratgy/other.yaml", "strategy"),
        ("yamls", "other.yaml", "strategy"),
        ("yamls", "strategy/other.yml", "strategy"),
        ("yamls/strategy", "strategy/other.yaml", "--config-dir"),
        ("yamls", "model/other.yaml", "strategy"),
        ("yamls", "strategy/others.yaml", "strategy"),
    ],
)
def test_a_yaml_where_none_is_looked_for_is_found(home, expect_error, folder, file, key):
    write(home / "yamls" / file, AVERAGED_METHOD.replace("name: mine", "name: other"))
    with expect_error(key):
        compose_job(["strategy=other"], home / folder)


def test_a_rule_in_the_wrong_folder_is_found_too(home, expect_error):
    write(home / "yamls" / "server" / "half.yaml", OTHER_RULE)
    with expect_error("strategy.server"):
        compose_job(["strategy=mine", "strategy.server=half"], home / "yamls")


def test_a_rule_beside_a_method_that_has_its_own_is_refused_at_once_whatever_else_is_broken(home, expect_error):
    write(home / "yamls" / "strategy" / "mine.yaml", OWN_RULE)
    write(home / "yamls" / "strategy" / "heir.yaml", "defaults: [feddyn, fedprox, _self_]\nname: heir\n")
    write(home / "yamls" / "strategy" / "heir_of_none.yaml", "defaults: [mine, _self_]\nname: heir_of_none\n")
    for name, text in {"a": "name: [", "b": "defaults: [b, '', null, 3]", "c": "- 1", "d": "defaults: 3"}.items():
        write(home / "yamls" / "strategy" / f"broken_{name}.yaml", text)
    began = time.perf_counter()
    with expect_error("strategy.server"):
        compose_job(["strategy=mine", "strategy.server=fedavgm"], home / "yamls")
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    "text",
    [
        "grid: {decay: {on: {}, off: {}}}",
        "grid: {size: {10: {}}}",
        "where: {dataset=digits: 3}",
        "where: dataset=digits",
        "published: x",
        "published: {paper: pmfl, table: I, method: mine, cells: [{setting: a, metric: accuracy, value: accuracy_final}]}",
        "published: {paper: pmfl, table: I, dataset: x, method: mine, cells: [{setting: a, metric: accuracy}]}",
        "published: {paper: pmfl, table: I, cells: 3}",
        "published: {paper: pmfl, figure: 3, plot: {kind: curves}}",
    ],
)
def test_a_slip_in_an_experiment_of_ones_own_is_one_line(home, expect_error, text):
    write(home / "yamls" / "experiment" / "mine.yaml", f"# @package _global_\n{text}\n")
    with expect_error():
        compose_job(["experiment=mine"], home / "yamls")


def test_a_case_of_an_experiment_whose_keys_were_deleted_sets_nothing(home):
    text = "# @package _global_\nwhere: {dataset=digits: }\npublished: null\n"
    write(home / "yamls" / "experiment" / "mine.yaml", text)
    assert compose_job(["experiment=mine"], home / "yamls").num_clients == compose_job([]).num_clients
