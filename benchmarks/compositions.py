"""Compose every job of every experiment and every choice of a checkout, for the record that ``record.py`` writes.

``adapt_project`` is the only function that knows the project's interface.
"""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCALES = ("full", "small")
CHOICES = "(choices)"  # in place of the experiment of a choice that is composed alone
# Paper -> its settings before experiments had several.
RECORDED_SETTINGS = {"fedcrl": "printed", "fedcosr": "printed", "mpfedcon": "printed", "pmfl": "printed", "fedrcl": "code"}
LATER_METHODS = ("fedadagrad", "fedstale", "fedyogi")  # methods that came after the record
TIME = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")  # in output_dir


@dataclass(frozen=True)
class Project:
    """The functions of a checkout that a record needs. Only ``adapt_project`` knows the project's functions."""

    is_renamed: bool  # whether its keys have the new names of RENAMED
    has_settings: bool  # whether papers' experiments have several settings
    choices: dict[str, list[str]]  # group, as the user writes it -> its choices, where experiment and scale are groups
    server_methods: list[str]  # methods that take strategy.server
    expand: Callable[[list[str]], list[tuple[str, list[str]]]]  # overrides of a sweep -> (name, overrides) of each job
    compose: Callable[[list[str]], dict[str, Any]]  # overrides of one job -> its configuration, plain and resolved


def adapt_project() -> Project:
    """Return the interface of the imported checkout. Add a branch for each generation of the code.

    Its files are looked at, because an editable install finds the modules of another checkout that this one lacks.
    """
    import contrafed

    if (Path(str(contrafed.__file__)).parent / "config").is_dir():
        from contrafed.config import checks, compose
        from contrafed.core import registry

        return Project(
            is_renamed="num_clients:" in (registry.CONF / "config.yaml").read_text(encoding="utf-8"),
            has_settings="settings:" in (registry.CONF / "config.yaml").read_text(encoding="utf-8"),
            choices={group.replace("/", "."): list(registry.choices(group)) for group in checks.GROUPS},
            server_methods=[
                name
                for name in registry.choices("strategy")
                if name not in LATER_METHODS and checks.SERVER in compose.find_choices(f"strategy={name}")
            ],
            expand=lambda overrides: [(job.name, job.overrides) for job in compose.expand_jobs(overrides)],
            compose=lambda overrides: compose.to_plain(compose.compose_job(overrides)),
        )
    return adapt_first_design()


def adapt_first_design() -> Project:
    """Return the interface of a checkout from before the packages moved below contrafed."""
    composition, sweep, yamls = (importlib.import_module(f"contrafed.{name}") for name in ("composition", "sweep", "yamls"))
    registry = importlib.import_module("core.registry")
    return Project(
        is_renamed=False,
        has_settings=False,
        choices={group.replace("/", "."): list(registry.choices(group)) for group in composition.CHOICE_GROUPS},
        server_methods=[name for name in registry.choices("strategy") if yamls.rule_of(name, None) is not None],
        expand=lambda overrides: [(job.name, job.overrides) for job in sweep.expand(overrides)],
        compose=lambda overrides: composition.plain(composition.compose_job(overrides)),
    )


def enter_checkout(checkout: str) -> None:
    """Make this process import a checkout's code instead of an installed one."""
    os.chdir(checkout)
    sys.path.insert(0, checkout)
    import contrafed

    assert Path(str(contrafed.__file__)).is_relative_to(checkout), contrafed.__file__


def compose_experiment(project: Project, experiment: str, scale: str = "full") -> list[dict[str, Any]]:
    """Return a row of the record for every job of an experiment."""
    jobs = project.expand([f"experiment={experiment}", *([] if scale == "full" else [f"scale={scale}"])])
    return [
        compose_row(project, overrides, experiment=experiment, scale=scale, name=name, number=number)
        for number, (name, overrides) in enumerate(jobs)
    ]


def list_choices(project: Project) -> list[list[str]]:
    """Return the overrides that make each choice alone. A strategy is chosen with each method that accepts one."""
    out = [[f"{group}={name}"] for group, names in project.choices.items() if group != "strategy.server" for name in names]
    servers = project.choices["strategy.server"]
    return out + [[f"strategy.server={rule}", f"strategy={name}"] for rule in servers for name in project.server_methods]


def compose_choice(project: Project, overrides: list[str]) -> dict[str, Any]:
    """Return the row of the record for a single choice."""
    return compose_row(project, overrides, experiment=CHOICES, scale="full", name=" ".join(overrides), number=0)


def compose_row(project: Project, overrides: list[str], **identity: Any) -> dict[str, Any]:
    """Return a row: the job's identity, its overrides, and its configuration with masked times.

    A paper's experiment has the settings that were its only ones once.
    """
    paper = next((o for o in overrides if o.startswith("experiment=")), "").partition("=")[2].partition("/")[0]
    settings = [f"settings={RECORDED_SETTINGS[paper]}"] if project.has_settings and paper in RECORDED_SETTINGS else []
    with contextlib.redirect_stdout(io.StringIO()):  # a notice that a method needs plain SGD
        config = project.compose([*overrides, *settings])
    return {**identity, "overrides": overrides, "config": mask_times(config)}


def mask_times(value: Any) -> Any:
    """Return a plain value with texts as keys, and with every date and time replaced."""
    if isinstance(value, dict):
        return {str(key): mask_times(item) for key, item in value.items()}
    if isinstance(value, list):
        return [mask_times(item) for item in value]
    return TIME.sub("DATE/TIME", value) if isinstance(value, str) else value


def describe_project() -> tuple[bool, list[str], list[list[str]]]:
    """Return whether a checkout's keys are the new ones, its experiments, and its choices. Runs in a worker process."""
    project = adapt_project()
    return project.is_renamed, project.choices["experiment"], list_choices(project)


def compose_task(task: tuple[str, Any]) -> list[str]:
    """Return the lines of the record for an experiment or for a list of choices. Runs in a worker process."""
    project, (kind, what) = adapt_project(), task
    if kind == "experiment":
        rows = [row for scale in SCALES for row in compose_experiment(project, what, scale)]
    else:
        rows = [compose_choice(project, overrides) for overrides in what]
    return [json.dumps(row, sort_keys=True) for row in rows]
