"""A run's folder and a checkpoint of before the keys were renamed are refused in one line."""

import json

import pytest
import yaml
from tiny import TINY_RUN, config_of

from contrafed import run
from contrafed.core.errors import UserError
from contrafed.core.run_folder import read_config
from contrafed.report.runs import read
from contrafed.runs import checkpoint


def check_refusal(match, function, *arguments):
    with pytest.raises(UserError, match=match) as found:
        function(*arguments)
    assert "\n" not in str(found.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with a checkpoint, and with the names that a run had."""
    out = tmp_path_factory.mktemp("old") / "run"
    run(config_of(*TINY_RUN, "strategy=fedavg", "engine=local", "checkpoint_every=1", f"output_dir={out}"))
    return out


def make_old(folder):
    """Give a folder's configuration and checkpoints an old name and no number of their format."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["num_nodes"] = config.pop("num_clients")
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    for file in folder.glob("checkpoints/*/state.json"):
        content = json.loads(file.read_text())
        del content["format"], content["sha256"]
        content["nodes"] = content.pop("clients")
        file.write_text(json.dumps(content))


def test_they_are_refused(folder):
    newest = checkpoint.list_checkpoints(folder / checkpoint.FOLDER)[-1]
    assert checkpoint.find(folder).path == newest
    make_old(folder)
    check_refusal("resume: .*another Contrafed", checkpoint.find, folder)
    check_refusal("resume: .*another Contrafed", checkpoint.find, newest)
    check_refusal("older Contrafed", read_config, folder)
    check_refusal("older Contrafed", read, folder, "run")
    again = ["engine=local", f"output_dir={folder.parent}/again"]
    check_refusal("another Contrafed", lambda: run(config_of(*TINY_RUN, "strategy=fedavg", f"resume={folder}", *again)))
    check_refusal("older Contrafed", lambda: run(config_of(f"evaluate_only={folder}", *again)))
