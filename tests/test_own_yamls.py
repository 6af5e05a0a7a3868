"""A user's folder of YAMLs: each misspelt or misplaced file, or one without code, gives one line with its name."""

import importlib.util
import time

import pytest
from test_external_package import METHOD, OTHER_RULE, write, write_package

from contrafed.config.compose import compose_job
from contrafed.core import registry
from contrafed.core.client_run import PACKAGES
from contrafed.core.errors import UserError

OWN_RULE = METHOD.replace("server: my_package.my_rule\n", "")
AVERAGED_METHOD = OWN_RULE.replace("_local@local,", "_local@local, server: fedavg,").replace("share: 0.5\n", "")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return a folder with the package my_package and the YAMLs yamls/."""
    write(tmp_path / "yamls" / "strategy" / "mine.yaml", AVERAGED_METHOD)
    yield from write_package(tmp_path, monkeypatch)


def get_error_line(folder, *overrides):
    with pytest.raises(UserError) as found:
        compose_job(list(overrides), folder)
    assert "\n" not in str(found.value)
    return str(found.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "module: my_package.my_method\n",
            "",
            "there is no module contrafed.clients.mine; a file of your own package is module: PACKAGE.FILE",
        ),
        (
            "my_package.my_method",
            "my_method",
            "there is no module contrafed.clients.my_method; a file of your own package is module: PACKAGE.FILE",
        ),
        (
            "name: mine",
            "name: mine\nserver: my_rule",
            "there is no module contrafed.strategies.my_rule; a file of your own package is server: PACKAGE.FILE",
        ),
    ],
)
def test_a_yaml_without_its_module_says_how_to_name_one(home, old, new, message):
    write(home / "yamls" / "strategy" / "mine.yaml", AVERAGED_METHOD.replace(old, new))
    assert get_error_line(home / "yamls", "strategy=mine") == f"strategy=mine: {message}"


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
    ("folder", "file", "message"),
    [
        ("yamls", "stratgy/other.yaml", "strategy=other is looked for in {home}/yamls/strategy/other.yaml, but it is {file}"),
        ("yamls", "other.yaml", "strategy=other is looked for in {home}/yamls/strategy/other.yaml, but it is {file}"),
        ("yamls", "strategy/other.yml", "strategy=other is looked for in {home}/yamls/strategy/other.yaml, but it is {file}"),
        (
            "yamls/strategy",
            "strategy/other.yaml",
            "--config-dir must be the folder in which strategy is, not {home}/yamls/strategy",
        ),
        ("yamls", "model/other.yaml", "unknown strategy 'other'; choices: apfl, "),
        ("yamls", "strategy/others.yaml", "unknown strategy 'other', did you mean 'others'? choices: apfl, "),
    ],
)
def test_a_yaml_where_none_is_looked_for_is_found(home, folder, file, message):
    write(home / "yamls" / file, AVERAGED_METHOD.replace("name: mine", "name: other"))
    message = message.format(home=home, file=home / "yamls" / file)
    assert get_error_line(home / folder, "strategy=other").startswith(message)


def test_a_rule_in_the_wrong_folder_is_found_too(home):
    write(home / "yamls" / "server" / "half.yaml", OTHER_RULE)
    expected = f"is looked for in {home}/yamls/strategy/server/half.yaml, but it is {home}/yamls/server/half.yaml"
    assert get_error_line(home / "yamls", "strategy=mine", "strategy.server=half") == f"strategy.server=half {expected}"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "server: fedavg",
            "server: fedavgg",
            "In 'strategy/mine': Could not find 'strategy/server/fedavgg', did you mean 'fedavg'?",
        ),
        ("_local@", "_locl@", "In 'strategy/mine': Could not load 'strategy/_locl', did you mean '_local'?"),
        ("_local@", "/zzz/qqqqqq@", "In 'strategy/mine': Could not load 'zzz/qqqqqq'"),
    ],
)
def test_a_misspelt_default_is_named_with_the_nearest(home, old, new, message):
    write(home / "yamls" / "strategy" / "mine.yaml", AVERAGED_METHOD.replace(old, new))
    assert get_error_line(home / "yamls", "strategy=mine") == f"cannot compose the configuration: {message}"


def test_a_rule_beside_a_method_that_has_its_own_is_refused_at_once_whatever_else_is_broken(home):
    write(home / "yamls" / "strategy" / "mine.yaml", OWN_RULE)
    write(home / "yamls" / "strategy" / "heir.yaml", "defaults: [feddyn, fedprox, _self_]\nname: heir\n")
    write(home / "yamls" / "strategy" / "heir_of_none.yaml", "defaults: [mine, _self_]\nname: heir_of_none\n")
    for name, text in {"a": "name: [", "b": "defaults: [b, '', null, 3]", "c": "- 1", "d": "defaults: 3"}.items():
        write(home / "yamls" / "strategy" / f"broken_{name}.yaml", text)
    began = time.perf_counter()
    found = get_error_line(home / "yamls", "strategy=mine", "strategy.server=fedavgm")
    assert time.perf_counter() - began < 5
    assert found.startswith("strategy.server: strategy=mine ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "grid: {decay: {on: {}, off: {}}}",
            "experiment=mine: grid.decay has a case True that is no text: put it in quotes",
        ),
        ("grid: {size: {10: {}}}", "experiment=mine: grid.size has a case 10 that is no text: put it in quotes"),
        (
            "where: {dataset=digits: 3}",
            "the experiment's where must be mappings by condition, such as GROUP=CHOICE: {KEY: VALUE}, "
            "got {'dataset=digits': 3}",
        ),
        (
            "where: dataset=digits",
            "the experiment's where must be mappings by condition, such as GROUP=CHOICE: {KEY: VALUE}, got 'dataset=digits'",
        ),
        ("published: x", "the experiment's published must be a mapping, got 'x'"),
    ],
)
def test_a_slip_in_an_experiment_of_ones_own_is_one_line(home, text, message):
    write(home / "yamls" / "experiment" / "mine.yaml", f"# @package _global_\n{text}\n")
    assert get_error_line(home / "yamls", "experiment=mine") == message


def test_a_case_of_an_experiment_whose_keys_were_deleted_sets_nothing(home):
    text = "# @package _global_\nwhere: {dataset=digits: }\npublished: null\n"
    write(home / "yamls" / "experiment" / "mine.yaml", text)
    assert compose_job(["experiment=mine"], home / "yamls").num_clients == compose_job([]).num_clients
