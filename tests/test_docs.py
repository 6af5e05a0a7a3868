"""The README and the site: commands and code blocks run, or are composed or parsed, and links are valid."""

import ast
import json
import os
import pydoc
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from command_parsers import check_command
from helpers import checked_jobs, slow
from messages import ROOT
from reported import method, write_run

import contrafed.command
from contrafed.config.compose import expand_jobs
from contrafed.core import registry
from contrafed.core.errors import UserError
from contrafed.report.runs import find

sys.path.insert(0, str(ROOT / "docs" / "generate"))
import blocks
import catalogue
import formulas
import results as made_of

# A command of Contrafed without a shell's signs.
OURS = re.compile(r"^(?:python main\.py|contrafed)\b(?P<arguments>[^|<>;&$]*)$")
LONG_NEEDS = ("minutes", "network")
FAST_PAGES = ("docs/own-parts.md",)
ALL_BLOCKS = [(page, list(blocks.blocks_of(page))) for page in blocks.pages()]
RUN_BLOCKS = {str(page.relative_to(ROOT)): found for page, found in ALL_BLOCKS if any(not b.needs for b in found)}
# What a page's commands leave in the reader's last folder: a picture, and what its last command compares, of rounds 0 to 3.
FILES_LEFT = {"docs/own-method.md": {"compare.png": 0, "zero/metrics.csv": 4, "fedavg/metrics.csv": 4}}
# Every command of a page: those of its blocks, and those within sentences.
COMMANDS = {
    str(page.relative_to(ROOT)): commands
    for page, found in ALL_BLOCKS
    if (commands := dict.fromkeys(blocks.shell_commands(found) + blocks.inline_commands(page.read_text(encoding="utf-8"))))
}
READ_BLOCKS = [block for _, found in ALL_BLOCKS for block in found if block.needs]
LONG = {
    str(page.relative_to(ROOT)): long for page, found in ALL_BLOCKS if (long := [b for b in found if b.needs in LONG_NEEDS])
}
# A path of the machine that executed a notebook.
MACHINE = re.compile(r"(?<![\w.:/<])/(?:tmp|home|root|work|opt|usr|var|Users)\b")
LINK = re.compile(r"\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")


class Reader:
    """A reader who follows a page from its top, in a separate folder with the commands as in a clone."""

    def __init__(self, folder, monkeypatch):
        self.cwd, self.monkeypatch, self.state = folder / "clone", monkeypatch, folder / "state"
        (folder / "bin").mkdir()
        self.cwd.mkdir()
        for name in ("main.py", "report.py", "conf"):
            (self.cwd / name).symlink_to(ROOT / name)
        for name, command in (("python", "exec {}"), ("contrafed", "exec {} " + shlex.quote(str(ROOT / "main.py")))):
            path = folder / "bin" / name
            path.write_text(f'#!/bin/sh\n{command.format(shlex.quote(sys.executable))} "$@"\n')
            path.chmod(0o755)
        self.env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.names = {"__name__": "__main__"}

    def follow(self, block):
        if block.title:
            path = self.cwd / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.language == "bash":
            for command in block.commands():
                self.command(command)
        elif block.language == "python":
            self.monkeypatch.chdir(self.cwd)
            exec(compile(block.text, block.name, "exec"), self.names)
        else:
            parse_block(block)

    def command(self, command):
        if ours := OURS.match(command):  # in this process, which saves it the imports
            self.monkeypatch.chdir(self.cwd)
            self.monkeypatch.setattr(sys, "argv", [str(ROOT / "main.py"), *shlex.split(ours["arguments"])])
            assert contrafed.command.main() == 0, command
            return
        script = f"set -e\n{command}\nenv -0 > {shlex.quote(str(self.state))}"
        done = subprocess.run(["bash", "-c", script], cwd=self.cwd, env=self.env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        self.env = dict(entry.split("=", 1) for entry in self.state.read_text().split("\0") if entry)
        self.cwd = Path(self.env["PWD"])
        for folder in reversed(self.env["PYTHONPATH"].split(os.pathsep)):
            if folder != str(ROOT):
                self.monkeypatch.syspath_prepend(folder)


@pytest.fixture
def reader(on_path, monkeypatch):
    """Return a reader in a fresh folder."""
    before = signal.getsignal(signal.SIGTERM)
    if (ray := sys.modules.get("contrafed.engines.ray")) is not None:  # the instance that later tests use
        monkeypatch.setattr(ray, "stop_ray", lambda: None)
    yield Reader(on_path, monkeypatch)
    signal.signal(signal.SIGTERM, before)


def parse_block(block):
    """Read a block without running it. What it imports of ours exists."""
    if block.language == "bash":
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    elif block.language == "python":
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "contrafed":
                exec(compile(ast.Module([node], []), block.name, "exec"), {})
    elif block.language in ("yaml", "toml"):
        assert {"yaml": yaml.safe_load, "toml": tomllib.loads}[block.language](block.text)
    else:
        assert block.language in ("", "bibtex", "math", "text"), f"{block.name}: {block.language} is no language of ours"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST_PAGES else pytest.mark.slow) for n in RUN_BLOCKS])
def test_a_page_does_what_it_says(name, reader):
    for block in RUN_BLOCKS[name]:
        if not block.needs:
            reader.follow(block)
    for file, rows in FILES_LEFT.get(name, {}).items():
        path = reader.cwd / file
        assert path.stat().st_size > 0
        assert not rows or path.read_text().count("global,test,accuracy,") == rows


ROWS = re.compile(r"^\| `(?P<name>[\w/]+)` \|.*\| (?P<jobs>\d+) \| [\w ]+ \|$", re.MULTILINE)


@pytest.mark.slow
def test_the_experiments_page_counts_every_grids_jobs():
    text = (ROOT / "docs" / "EXPERIMENTS.md").read_text(encoding="utf-8")
    counted = {row["name"]: int(row["jobs"]) for row in ROWS.finditer(text)}
    assert len(counted) > 40
    assert counted == {name: len(expand_jobs([f"experiment={name}"])) for name in counted}
    grids = {name for name in registry.choices("experiment") if "/" in name and not name.endswith("/base")}
    assert counted.keys() == grids


@pytest.mark.parametrize("block", READ_BLOCKS, ids=[block.name for block in READ_BLOCKS])
def test_what_is_not_run_is_parsed(block):
    parse_block(block)


@pytest.mark.parametrize("name", [slow(n) if "/results/" in n and not n.endswith("pmfl-table1.md") else n for n in COMMANDS])
def test_every_command_is_read_by_its_program(name):
    """Options, keys, values and files are valid, whether or not a test also runs the command."""
    for command in COMMANDS[name]:
        check_command(command)


@pytest.mark.slow
def test_the_commands_of_the_methods_pages_are_valid(monkeypatch):
    monkeypatch.setattr(made_of, "section", lambda name: [])
    for name in catalogue.names():
        for command in re.findall(r"(?m)^python main\.py .*", catalogue.page(name)):
            check_command(command)


@pytest.mark.parametrize(
    ("command", "error", "said"),
    [
        ("python main.py -m strategy=fedavg,pmfll", UserError, "did you mean 'pmfl'"),
        ("cd runs && python report.py --papr outputs/digits", AssertionError, "--papr"),
        ("flwr run . --run-config 'overrides=\"num_client=3\"'", UserError, "did you mean 'num_clients'"),
        ("sudo flower-superlink --hosst 127.0.0.1", AssertionError, "hosst"),
        ("ray start --hed", Exception, "--hed"),
        ("python benchmarks/long.py --engine lokal", AssertionError, "lokal"),
        ("sbatch docs/deploy/slurm.sh experiment=digits", AssertionError, "no such file"),
        ("pip install -e '.[doc]'", AssertionError, "doc"),
        ("contrafedd strategy=pmfl", AssertionError, "no parser reads"),
    ],
)
def test_a_wrong_command_is_noticed(command, error, said):
    with pytest.raises(error, match=said):
        check_command(command)


def test_a_wrong_need_is_noticed(tmp_path):
    wrong = tmp_path / "page.md"
    wrong.write_text("<!-- needs: luck -->\n```bash\ntrue\n```\n")
    with pytest.raises(ValueError, match="unknown need 'luck'"):
        list(blocks.blocks_of(wrong))


def shorten(command):
    """Return what a test runs of a command: a sweep with fewer rounds, a download's setting with drawn images, or nothing."""
    if re.search(r"dataset=hub|dataset\.path=|=(?:timm|transformers)\.|[=/]pmfl/table1", command):
        return ""
    if re.match(r"python report\.py", command) or "evaluate_only=" in command:
        return command
    if not OURS.match(command):
        return ""
    if "-m " in command and not re.search(r"experiment=(?!digits|search)", command):
        return command.replace("n_trials=20", "n_trials=2") + " num_rounds=3 eval_every=1"
    downloads = re.search(r"dataset=(?!digits)|experiment=(?!digits|search)", command) and "scale=" not in command
    return f"{command} scale=small" if downloads else command


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_what_takes_minutes_or_downloads_runs_small(name, reader):
    small = set()  # sweeps whose folder ends with -small
    for block in LONG[name]:
        if block.language == "python":
            reader.follow(block)
        for command in blocks.shell_commands([block]):
            for part in map(shorten, map(str.strip, command.split("&&"))):
                if part.endswith(" scale=small"):
                    small.update(re.findall(r"-m .*experiment=(\S+)", part))
                if part:
                    reader.command(re.sub(r"outputs/(\S+)", lambda m: m[0] + "-small" * (m[1] in small), part))


def test_links_lead_somewhere():
    made = {"method/index.md", *(f"method/{name}.md" for name in catalogue.names()), "changelog.md"}
    read = [*blocks.pages(), ROOT / "results" / "README.md"]
    texts = {page: page.read_text(encoding="utf-8") for page in read}
    missing = [
        f"{page.relative_to(ROOT)}: {link[1]}"
        for page, text in texts.items()
        for link in LINK.finditer(re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL))
        if not (page.parent / link[1]).exists() and link[1] not in made
    ]
    assert missing == []


def test_every_name_of_the_reference_exists():
    """The site is built only where its packages are installed; this reads the same names without them."""
    names = [name for page in (ROOT / "docs/api").glob("*.md") for name in re.findall(r"(?m)^::: (\S+)", page.read_text())]
    assert len(names) > 20
    for name in names:
        assert pydoc.locate(name) is not None, name


@pytest.mark.parametrize("names", [("pmfl", "fedproto", "local"), slow(tuple(catalogue.names()))], ids=["some", "all"])
def test_every_method_has_a_page_with_loss_paper_symbols_and_interpretations(monkeypatch, names):
    if len(names) < len(catalogue.names()):  # to load all results takes half a minute
        monkeypatch.setattr(made_of, "section", lambda name: [])
    index = catalogue.index()
    for name in names:
        text, m = catalogue.page(name), catalogue.method(name)
        assert f"({name}.md)" in index
        assert ("No paper." if m.paper is None else m.paper.title) in text
        assert f"python main.py strategy={name} " in text
        assert "\n## Loss and algorithm\n\n```math\n\\begin{aligned}\n\\text{client:}" in text, name
        for key in (*m.client_fields, *m.rule_fields):
            assert f"| `strategy.{key}` |" in text, (name, key)
    text = catalogue.page("pmfl")
    assert "| `strategy.contrast_weight` | `0.5` | lambda; 0: w/o MCT |" in text
    assert "| `strategy.local.lr` | `0.1` | eta\\_l |" in text
    assert "`threshold=literal\\|current\\|client\\|constant`" in text  # its interpretations
    assert "and the global one" in catalogue.page("ditto")
    assert "and the global one" not in catalogue.page("fedamp")
    assert "Theorem 1 then minimises" in text  # its errata


def test_formulas_become_mathml():
    pytest.importorskip("latex2mathml")
    text = formulas.convert_formulas((ROOT / "docs" / "METHODS.md").read_text(encoding="utf-8"))
    assert text.count('<div class="formula"><math') == text.count("</math></div>") > 40
    assert "```math" not in text
    with pytest.raises(ValueError, match="cannot be converted"):
        formulas.convert_formulas("a $`\\unheard x`$")


def test_every_partition_has_a_picture():
    text = (ROOT / "docs" / "heterogeneity.md").read_text(encoding="utf-8")
    for name in registry.choices("partition"):
        assert f"figures/partition_{name}.png" in text or name in ("natural", "file", "flwr", "own")


def test_the_experiment_of_ones_own_is_taken_as_it_stands(tmp_path):
    (block,) = [b for b in blocks.blocks_of(ROOT / "docs" / "running.md") if b.title]
    path = tmp_path / block.title
    path.parent.mkdir(parents=True)
    path.write_text(block.text)
    runs = checked_jobs(f"experiment={path.stem}", folder=tmp_path / "yamls")
    jobs_of = [(run.client.strategy.name, run.seed) for run in runs]
    assert jobs_of == [(name, seed) for name in ("fedavg", "fedprox", "moon") for seed in (0, 1, 2)]
    assert {run.client.dataset.name for run in runs} == {"cifar100"}
    assert {run.client.partition.config.alpha for run in runs} == {run.participation.config.select for run in runs} == {0.1}
    assert {run.client.strategy.config.local.epochs for run in runs} == {5}
    assert runs[3].client.strategy.config.proximal_weight == 0.001


@pytest.mark.slow
def test_the_site_builds_strictly_and_reads_offline(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("latex2mathml")
    asked = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|img|iframe)[^>]*src=\"(?:https?:)?//", text), page
        assert not re.search(r"<link[^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*href=\"(?:https?:)?//", text), page
    assert (tmp_path / "site" / "search" / "search_index.js").stat().st_size > 10000


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_has_outputs_and_a_sentence_below_each_figure(path):
    """``.ci/run`` executes them, and ``docs/generate/notebooks.py`` stores what they print."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    figures = [
        n for n, cell in enumerate(cells) if any("image/png" in output.get("data", {}) for output in cell.get("outputs", ()))
    ]
    assert figures
    assert all(cells[n + 1]["cell_type"] == "markdown" for n in figures)
    for cell in code:
        ast.parse("".join(line for line in cell["source"] if not line.startswith("%%")))
        assert not MACHINE.search(json.dumps(cell["outputs"]))
        assert "execution" not in cell["metadata"]


def test_the_readmes_table_is_what_results_hold():
    assert made_of.TABLE.search((ROOT / "README.md").read_text(encoding="utf-8"))[0] == made_of.readme_table()


def test_a_method_with_results_shows_them_beside_the_papers_and_others_show_nothing(tmp_path):
    from contrafed.report import results as kept

    cell = {"setting": "bernoulli", "metric": "test_accuracy", "value": "accuracy_final"}
    row = {"paper": "pmfl", "table": "I", "dataset": "SVHN", "cells": [cell], "method": "pmfl"}
    strategy = {"name": "pmfl", "server": "pmfl"}
    write_run(tmp_path / "runs" / "a", (0.1, 0.5, 0.8), **method("pmfl", published=row, strategy=strategy, settings="code"))
    write_run(tmp_path / "runs" / "b", (0.1, 0.6, 0.7), **method("fedavg", settings="code"))
    kept.keep(find([tmp_path / "runs"]), tmp_path / "results", "tried")
    page = "\n".join(made_of.section("pmfl", tmp_path))
    assert "| PMFL, Table I | SVHN, bernoulli, PMFL, test accuracy | 80.00 | 87.47 |" in page
    assert "80.00 | 1 |" not in page  # one number a run
    assert made_of.section("fedavgm", tmp_path) == []
    (file, png), *_ = made_of.pictures("pmfl", tmp_path)
    assert f"](../{file})" in "\n".join(made_of.section("pmfl", tmp_path))
    assert png.startswith(b"\x89PNG")


def test_the_readmes_methods_are_as_their_classes_say():
    """A method that is not listed yet does not fail: ``python docs/generate/catalogue.py`` updates the list."""
    rows, found = made_list((ROOT / "README.md").read_text(encoding="utf-8")), made_list(catalogue.readme_list())
    assert rows.keys() <= found.keys()
    listed = [(family, entry) for family, row in rows.items() for entry in row.split(", ")]
    assert len(listed) > 40
    assert all(entry in found[family].split(", ") for family, entry in listed), listed


def made_list(text):
    """Return the rows of the list of methods in a text: {family: its methods}."""
    rows = catalogue.LIST.search(text)[0].partition("| --- | --- |")[2]
    return dict(re.findall(r"^\| ([^|]+) \| (.+) \|$", rows, re.MULTILINE))


def test_the_papers_of_the_paper_methods_have_a_year():
    years = {name: m.paper.year for name in catalogue.names() if (m := catalogue.method(name)).paper is not None}
    assert len(years) > 40
    assert {name: years[name] for name in ("fedavg", "pmfl", "fedcrl", "fedcosr", "fedcl", "mpfedcon")} == {
        "fedavg": 2017, "pmfl": 2026, "fedcrl": 2024, "fedcosr": 2025, "fedcl": 2024, "mpfedcon": 2022,
    }  # fmt: skip
    assert catalogue.method("local").paper is None
