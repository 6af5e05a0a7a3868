"""The systemd units of docs/deploy: systemd takes them, and Flower's programs take their command lines."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "deploy"
UNITS = sorted(FOLDER.glob("*.service"))


def read_unit(path):
    """Return {section: {key: values}}. A line that ends in a backslash goes on, and a key may repeat."""
    found, section = {}, None
    for line in re.sub(r"\\\n\s*", " ", path.read_text()).splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            section.setdefault(key, []).append(value)
    return found


def options_of(program):
    """Return the options of one of Flower's programs."""
    if program == "flower-superlink":
        from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink as parse
    else:
        from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode as parse
    return {option for action in parse()._actions for option in action.option_strings}


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_restarts_what_ended_and_leaves_no_process(unit):
    service = read_unit(unit)["Service"]
    assert service["Restart"] == ["always"]
    assert int(service["RestartSec"][0]) >= 10
    assert service["KillMode"] == ["control-group"]
    assert int(service["TimeoutStopSec"][0]) > 0


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_units_command_has_flowers_options(unit):
    (line,) = read_unit(unit)["Service"]["ExecStart"]
    program, *arguments = shlex.split(line)
    used = {argument for argument in arguments if argument.startswith("--")}
    assert used <= options_of(Path(program).name)
    assert "--max-retries" not in used  # a device that gives up would not be started again


def test_there_is_a_unit_of_each_kind():
    assert [path.stem for path in UNITS] == ["contrafed-superlink", "contrafed-supernode"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not there")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_a_unit(tmp_path, unit):
    text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", unit.read_text()).replace("User=contrafed", "User=root")
    (tmp_path / unit.name).write_text(text)
    found = subprocess.run(["systemd-analyze", "verify", str(tmp_path / unit.name)], capture_output=True, text=True, timeout=60)
    assert unit.name not in found.stderr, found.stderr
