"""Other files of the repository: the workflow, the citation, the changelog, the containers, Flower's description of the app."""

import ast
import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from test_deployment import ROOT, Federation, app_folder, command, free_ports, listens, wait_for, wait_for_summary
from test_proxy import NGINX, read_bound_keys, start_proxy

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Pages whose sections have no numbers, and such a number next to the name, also across lines of a comment.
PAGE, NUMBER = r"\b(?:METHODS|BASELINES)(?:\.md)?\b", r"(?:[Ss]ections?|[Ss]ec\.|§)[\s#]*\d"
BEFORE, AFTER = rf"{NUMBER}[\d., and]*[\s#]*(?:of|in)\s+(?:docs/)?{PAGE}", rf"{PAGE}[\s:,(#]*{NUMBER}"
NUMBERED_PATTERN = re.compile(rf"{BEFORE}|{AFTER}|\b(?:METHODS|BASELINES)\s+[A-Z]?\d")


# Permissions of the jobs that publish.
PYPI, PAGES = {"publish": {"id-token": "write"}}, {"publish": {"id-token": "write", "pages": "write"}}


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def workflow(name="test"):
    return yaml.safe_load(text_of(f".github/workflows/{name}.yml"))


def commands_of(job):
    return [line for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_the_workflow_runs_lint_types_and_tests_on_every_python():
    assert set(workflow()[True]) == {"push", "pull_request"}  # YAML 1.1 reads "on" as a truth
    assert workflow()["permissions"] == {"contents": "read"}
    job = workflow()["jobs"]["test"]
    pythons = job["strategy"]["matrix"]["python"]
    wanted = SpecifierSet(PROJECT["project"]["requires-python"])
    assert pythons == [f"3.{minor}" for minor in range(8, 30) if f"3.{minor}" in wanted]
    said = {f"Programming Language :: Python :: {python}" for python in pythons}
    assert said <= set(PROJECT["project"]["classifiers"])
    lines = [line for line in commands_of(job) if "matrix.flower" not in line]
    assert lines == ['pip install -e ".[test]"', "ruff check .", "ruff format --check .", ".ci/mypy", "pytest"]
    for line in lines:
        assert line in text_of("CONTRIBUTING.md"), line


@pytest.mark.parametrize(("name", "actions", "writes"), [("test", 4, {}), ("release", 5, PYPI), ("site", 4, PAGES)])
def test_a_workflow_has_actions_by_commit_and_the_least_permissions(name, actions, writes):
    lines = [line.strip() for line in text_of(f".github/workflows/{name}.yml").splitlines() if "uses:" in line]
    assert len(lines) == actions
    assert all(re.fullmatch(r"- uses: (?:actions|pypa)/[a-z-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line) for line in lines)
    assert workflow(name)["permissions"] == {"contents": "read"}
    jobs = workflow(name)["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == writes
    checkouts = [step for job in jobs.values() for step in job["steps"] if "checkout" in step.get("uses", "")]
    assert all(step["with"] == {"persist-credentials": False} for step in checkouts)


def test_a_release_builds_and_checks_what_it_publishes():
    lines = commands_of(workflow("release")["jobs"]["build"])
    assert lines[-2:] == ["python -m build", "twine check --strict dist/*"]
    assert all(f".release/bin/{line}" in text_of("docs/releasing.md") for line in lines[-2:])
    assert workflow("release")["jobs"]["publish"]["environment"] == "pypi"
    assert "mkdocs build --strict" in commands_of(workflow("site")["jobs"]["build"])


def test_issue_templates_are_forms():
    forms = [
        yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
    ]
    assert len(forms) == 3
    assert all(
        {"name", "description", "body"} <= form.keys() and all("id" in field for field in form["body"]) for form in forms
    )


def test_the_constraints_fit_the_dependencies_and_name_no_machine():
    lines = [line for line in text_of("results/constraints.txt").splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==\d+(\.\d+)+", line) for line in lines)  # no +cpu, no address, no marker
    versions_of = dict(line.split("==") for line in lines)
    wanted = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["dp"]
    for requirement in map(Requirement, wanted):
        assert versions_of[requirement.name] in requirement.specifier, requirement
    assert "PIP_CONSTRAINT=results/constraints.txt" in text_of(".ci/run")


def test_the_workflow_runs_the_tests_on_every_flower():
    (wanted,) = [r for r in map(Requirement, PROJECT["project"]["dependencies"]) if r.name == "flwr"]
    job = workflow()["jobs"]["test"]
    assert job["strategy"]["matrix"]["flower"] == [f"1.{minor}" for minor in range(30, 60) if f"1.{minor}" in wanted.specifier]
    assert 'pip install "flwr[simulation]==${{ matrix.flower }}.*"' in commands_of(job)


def test_flowers_nightly_may_fail_and_nothing_else():
    jobs = workflow()["jobs"]
    assert [name for name, job in jobs.items() if "continue-on-error" in job] == ["nightly"]
    assert jobs["nightly"]["continue-on-error"] is True
    assert 'pip install --pre "flwr-nightly[simulation]"' in commands_of(jobs["nightly"])
    assert "pytest" in commands_of(jobs["nightly"])


def test_the_extra_for_tests_brings_what_they_need():
    extras = {name: list(map(Requirement, wanted)) for name, wanted in PROJECT["project"]["optional-dependencies"].items()}
    assert set().union(*(wanted.extras for wanted in extras["test"] if wanted.name == "contrafed")) == {"dp", "sweeps"}
    assert [wanted.name for wanted in extras["dp"]] == ["dp-accounting"]
    assert [wanted.name for wanted in extras["sweeps"]] == [
        "hydra-joblib-launcher", "hydra-submitit-launcher", "hydra-optuna-sweeper",
    ]  # fmt: skip


def test_the_citation_and_the_changelog_are_of_this_version():
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= citation.keys()
    assert (citation["version"], citation["license"]) == (PROJECT["project"]["version"], PROJECT["project"]["license"])
    assert [author["name"] for author in citation["authors"]] == [a["name"] for a in PROJECT["project"]["authors"]]
    assert f"## {citation['version']}\n" in text_of("CHANGELOG.md")


def test_contributing_names_what_is_there():
    contributing = text_of("CONTRIBUTING.md")
    for path in re.findall(r"\]\(([^)h][^)]*)\)", contributing):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"`([a-z_/.]+)/NAME\.(?:py|yaml)`", contributing):
        assert (ROOT / path).is_dir(), path


# A file or folder of this repository, as pages write it. core/ and simulation/ were such folders.
PLACE = re.compile(
    r"(?<![\w./-])(?:contrafed|clients|strategies|models|partitions|hydra_plugins|tests|benchmarks|docs|core|simulation|\.ci)/"
    r"[\w/]*(?:\.\w+)?(?![\w{*.<-])"
)


def named_places(text):
    """Return the files and folders that a page names, without placeholders (``clients/NAME.py``)."""
    return {place.rstrip("/") for place in PLACE.findall(text) if not re.search(r"[A-Z]{3}", place.partition(".")[0])}


def test_files_that_pages_name_are_there():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    found = {page.name: named_places(page.read_text(encoding="utf-8")) for page in pages}
    missing = {name: {place for place in places if not (ROOT / place).exists()} for name, places in found.items()}
    assert {name: places for name, places in missing.items() if places} == {}
    assert len(found["ARCHITECTURE.md"]) > 30


def test_a_file_that_is_not_there_is_noticed():
    text = (
        "see `clients/client/app.py`, [this](contrafed/analysis/) and clients/NAME.py, not https://x.org/clients/ or my/models/"
    )
    assert named_places(text) == {"clients/client/app.py", "contrafed/analysis"}


def test_no_text_refers_to_a_numbered_section_of_methods():
    """docs/METHODS.md has headings without numbers."""
    if not (ROOT / ".git").exists():
        pytest.skip("no repository: which files are tracked is not known")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    read, found = 0, []
    for name in filter(None, listed.split("\0")):
        if name.endswith((".png", ".pdf")) or not (ROOT / name).is_file():
            continue
        text, read = text_of(name), read + 1
        found += [f"{name}:{text.count(chr(10), 0, hit.start()) + 1}: {hit[0]}" for hit in NUMBERED_PATTERN.finditer(text)]
    assert found == []
    assert read > 500


def test_flower_is_told_all_that_its_format_has_room_for():
    app, project = PROJECT["tool"]["flwr"]["app"], PROJECT["project"]
    # Format 1 takes no SPDX expression: https://packaging.python.org/en/latest/specifications/license-expression
    assert (app["fab-format-version"], project["license"]) == (0, "Apache-2.0")
    assert 0 < len(project["description"]) <= 200  # what Flower's hub takes
    assert {"LICENSE", "README.md"} <= set(app["fab-include"])


def services():
    return yaml.safe_load(text_of("compose.yaml"))["services"]


def test_the_containers_are_a_superlink_with_a_proxy_and_three_supernodes():
    found = services()
    assert set(found) == {"superlink", "proxy", "supernode-0", "supernode-1", "supernode-2"}
    assert (found["superlink"]["networks"], found["proxy"]["networks"]) == (["server"], ["server", "devices"])
    site, _, mode = found["proxy"]["volumes"][0].split(":")
    assert (ROOT / site).is_file()
    assert mode == "ro"
    assert "ports" not in found["proxy"]
    for k in range(3):
        client = found[f"supernode-{k}"]
        assert client["command"][0] == "flower-supernode"
        assert client["command"][-1] == f'partition-id={k} state-dir="/state"'
        assert client["depends_on"] == {"proxy": {"condition": "service_started"}}
        assert client["networks"] == ["devices"]
        assert client["command"][client["command"].index("--superlink") + 1] == "proxy:8443"
        assert client["volumes"] == [f"supernode-{k}:/state"]
    assert found["superlink"]["command"][0] == "flower-superlink"
    assert found["superlink"]["ports"] == ["127.0.0.1:8000:8000"]
    declared = yaml.safe_load(text_of("compose.yaml"))["volumes"]
    assert {v.partition(":")[0] for name, one in found.items() if name != "proxy" for v in one["volumes"]} == set(declared)
    assert found["superlink"]["build"] == {"context": "."}  # its Dockerfile
    assert "ARG TORCH=cpu" in text_of("Dockerfile")


@pytest.mark.slow
def test_the_commands_of_the_containers_make_a_federation(tmp_path):
    """Processes on loopback run the commands. The containers themselves are not built here."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    one = Federation(tmp_path)
    (proxy,) = free_ports(1)
    try:
        app_folder(tmp_path / "app")
        ports = iter(one.ports)
        for name, service in services().items():
            (tmp_path / name).mkdir()
            if name == "proxy":
                there = {"superlink:8000": f"127.0.0.1:{one.link}", "8443": str(proxy)}
                start_proxy(one, name, "nginx-compose.conf", proxy, **there)
                continue
            there = {"0.0.0.0": "127.0.0.1", "proxy:8443": f"127.0.0.1:{proxy}", "8000": str(one.link)}
            there["9094"] = str(next(ports))
            words = [there.get(word, word).replace("/state", str(tmp_path / name), 1) for word in service["command"]]
            one.start(name, command(words[0]), *words[1:])
            if name == "superlink":
                wait_for("the SuperLink", lambda: listens(one.link), 300)
        one.operator = one.environment_of("operator", one.link, "insecure = true")
        small = "strategy=pmfl num_clients=3 num_rounds=1 participation=full model=mlp model.hidden=[12] checkpoint_every=1"
        with one.running(f"{small} output_dir={tmp_path}/runs/a"):
            summary = wait_for_summary(tmp_path / "runs" / "a")
    finally:
        one.stop()
    assert (summary["status"], summary["engine"], summary["failures"]) == ("finished", "devices", 0)
    assert read_bound_keys(tmp_path / "runs" / "a") == ["", "", ""]  # without keys that last, none is bound


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


def test_what_the_benchmarks_import_is_there():
    found = set()
    for path in (ROOT / "benchmarks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("contrafed"):
                found |= {(path.name, str(node.module), each.name) for each in node.names}
    assert len(found) > 50
    for script, module, name in sorted(found):
        there = hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")
        assert there, (script, module, name)


def test_the_table_of_every_method_is_that_of_its_results():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import methods

    page = (ROOT / "docs" / "METHODS.md").read_text(encoding="utf-8")
    shown = page.split(methods.BEGIN)[1].split(methods.END)[0].strip().splitlines()
    assert shown == methods.build_table()
