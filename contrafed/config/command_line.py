"""Read the command line: Hydra's options, ``--help`` and ``--version``. Mistakes are found before anything is loaded."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from contrafed.config.checks import GROUPS, find_own_folder
from contrafed.config.compose import Job, compose_job, make_own_loader
from contrafed.config.loader import NAME, to_plain
from contrafed.config.overrides import hydra_key, parse_overrides, quote_value, rename_arguments
from contrafed.config.run_config import Run, check_top, for_evaluation, resolve
from contrafed.core import registry
from contrafed.core.arguments import program
from contrafed.core.errors import UserError, unknown

SCRIPT = "contrafed"  # the command of an installed package


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """Return what a command line asks for, as Hydra's own parser reads it. Raises ``UserError``."""
    if unread := next((each for each in arguments if any("\ud800" <= mark <= "\udfff" for mark in each)), None):
        shown = unread.encode("ascii", "backslashreplace").decode()
        raise UserError(f"{shown}: not UTF-8. Fix: write it in a terminal and a locale of UTF-8")
    parser = get_args_parser()

    def fail(message: str) -> NoReturn:
        raise UserError(f"{message} ({program(SCRIPT, 'python main.py')} --help)")

    parser.error = fail  # type: ignore[method-assign]
    asked, others = parser.parse_known_intermixed_args(arguments)
    if others and "=" in others[0]:
        raise UserError(f"{others[0]}: keys have no dashes. Fix: {others[0].lstrip('-')}")
    if others:
        options = [option for action in parser._actions for option in action.option_strings]
        fault = str(unknown("option", others[0], options))
        end = "" if fault.endswith("?") else "."
        raise UserError(f"{fault}{end} Fix: settings are KEY=VALUE, without dashes")
    if sum(argument.partition("=")[0] in ("--config-dir", "-cd") for argument in arguments) > 1:
        raise UserError("--config-dir: given twice. Fix: one folder")
    if asked.config_path is not None or asked.config_name is not None:
        raise UserError("--config-path and --config-name: Contrafed's own configuration is fixed. Fix: --config-dir FOLDER")
    if any(override.lstrip("+~").startswith("hydra.searchpath") for override in asked.overrides):
        raise UserError("hydra.searchpath: Contrafed finds its own YAMLs. Fix: --config-dir FOLDER for yours")
    if asked.config_dir == "":
        raise UserError("--config-dir: empty. Fix: a folder")
    if asked.cfg is None and (asked.resolve or asked.package is not None):
        raise UserError(f"--{'resolve' if asked.resolve else 'package'}: it goes with --cfg. Fix: --cfg job")
    if asked.multirun and (asked.resolve or asked.package is not None):
        raise UserError(f"--{'resolve' if asked.resolve else 'package'}: with -m only --cfg job does. Fix: leave one out")
    kinds = (asked.run, asked.multirun and asked.cfg != "job", asked.shell_completion, asked.cfg is not None)
    if sum((*kinds, asked.info is not None)) > 1:
        raise UserError("--run, --multirun, --cfg, --info and --shell-completion: they exclude each other. Fix: one of them")
    return asked


def order_arguments(arguments: list[str], asked: argparse.Namespace) -> list[str]:
    """Return a command line in Hydra's order: options first, then overrides with Hydra's keys."""
    overrides = list(map(quote_value, rename_arguments(asked.overrides)))
    if asked.multirun and asked.cfg == "job":  # the sweeper lists its jobs
        return [
            "-m",
            *(["--config-dir", os.path.expanduser(asked.config_dir)] if asked.config_dir else []),
            *overrides,
            "hydra.sweeper.only_list=true",
        ]
    options = [argument for argument in arguments if argument not in asked.overrides]
    if asked.config_dir:  # a shell does not expand ~ after --config-dir=
        expanded = os.path.expanduser(asked.config_dir)
        options = [each.replace(asked.config_dir, expanded) if each.endswith(asked.config_dir) else each for each in options]
    return [*options, *overrides]


def check_arguments(asked: argparse.Namespace) -> dict[str, Any]:
    """Return a run's configuration, empty for a sweep, checked as far as possible with the YAMLs alone. Raises
    ``UserError``.
    """
    overrides = rename_arguments(asked.overrides)
    if not asked.multirun:
        values = check_yaml(overrides, asked.config_dir)
        package = asked.package if asked.cfg == "job" else None
        if package not in (None, "_global_") and OmegaConf.select(OmegaConf.create(values), package) is None:
            raise unknown("package", package, [key for key, value in values.items() if isinstance(value, dict)])
        return values
    parsed = parse_overrides(overrides)
    chosen = {o.key_or_group: str(o.input_line) for o in parsed}
    sweeper = chosen.get("hydra/sweeper", "hydra/sweeper=contrafed")
    if hydra_key("shard") in chosen and sweeper != "hydra/sweeper=contrafed":
        raise UserError(f"shard: the jobs of {sweeper} cannot be divided. Fix: leave shard out, or {sweeper}")
    if asked.cfg == "job" and sweeper != "hydra/sweeper=contrafed":
        raise UserError(f"--cfg job with -m: {sweeper} has no list of jobs. Fix: leave {sweeper} out")
    if several := next((o for o in parsed if o.is_hydra_override() and o.is_sweep_override()), None):
        raise UserError(f"{several.input_line}: Hydra's own keys take one value")
    make_own_loader(asked.config_dir).load_configuration(NAME, overrides, RunMode.MULTIRUN)
    return {}


def check_yaml(overrides: list[str], config_dir: str | Path | None = None) -> dict[str, Any]:
    """Return a job's configuration as plain Python, checked as far as possible with the YAMLs alone. Raises ``UserError``."""
    values = to_plain(compose_job(overrides, config_dir))
    check_top(for_evaluation(values))
    return values


def check_jobs(jobs: list[Job], config_dir: str | Path | None = None) -> list[Run]:
    """Check every job of a sweep and return them as runs.

    The YAMLs of every job are checked first. The code of any choice is imported after that.

    Raises:
        UserError: For the first mistake, naming the job.
    """
    composed, runs = [], []
    for job in jobs:
        with _name_job(job, len(jobs)):
            composed.append(check_yaml(job.overrides, config_dir))
    from contrafed.config.method import try_method  # which imports torch

    for job, values in zip(jobs, composed, strict=True):
        with _name_job(job, len(jobs)):
            runs.append(resolve(values))
            try_method(runs[-1])
    return runs


@contextlib.contextmanager
def _name_job(job: Job, count: int) -> Iterator[None]:
    """Name the job of a sweep in the errors of a block."""
    try:
        yield
    except UserError as error:
        if count == 1:
            raise
        raise UserError(f"job {job.number} ({' '.join(job.overrides)}): {error}") from error


def help_text(config_dir: str | None = None) -> str:
    """Return the text of ``--help``: the top-level keys, then every group's choices with a line about each."""
    own = find_own_folder(config_dir)
    called = program(SCRIPT, "python main.py")
    conf = registry.CONF if called == SCRIPT else Path("conf")
    defaults = OmegaConf.load(registry.CONF / "config.yaml")
    chosen = {k: v for item in defaults["defaults"] if isinstance(item, DictConfig) for k, v in item.items()}  # type: ignore[index]
    lines = [
        "Contrafed: contrastive and personalised federated learning on Flower.",
        "",
        f"  {f'{called} strategy=pmfl participation=markovian':<58} one run",
        f"  {f'{called} -m strategy=fedavg,moon,pmfl seed=0,1,2':<58} a sweep: every combination",
        f"  {f'{called} -m experiment=pmfl/table1':<58} a paper's table",
        f"  {f'{called} check strategy=pmfl model=mlp':<58} tests of a method, a network and data, such as your own",
        f"  {f'{called} strategy=pmfl --cfg job':<58} show the composed configuration (--package KEY: a part of it)",
        f"  {f'{called} -m experiment=pmfl/table1 --cfg job':<58} list the jobs of a sweep, without running them",
        f"  {f'{called} -m experiment=pmfl/table1 shard=2/4':<58} every fourth of a sweep's jobs, from the second",
        f"  {f'{called} -m hydra/launcher=joblib seed=0,1':<58} Hydra's launchers and sweepers (--hydra-help: its options)",
        "",
        "Keys (key=value):",
    ]
    for line in (registry.CONF / "config.yaml").read_text(encoding="utf-8").splitlines():
        key, _, comment = line.partition("#")
        if comment and key and not key.startswith(" ") and key.split(":")[0] not in ("hydra", "defaults"):
            assignment = key.strip().replace(": ", "=")
            lines += (
                [f"  {assignment}", f"  {'':<20} {comment.strip()}"]
                if len(assignment) > 20
                else [f"  {assignment:<20} {comment.strip()}"]
            )
    for group in GROUPS:
        default = chosen.get(group) or ("the method's own" if group == "strategy/server" else "none")
        lines += ["", f"{group.replace('/', '.')}= (default: {default})"]
        lines += [f"  {name:<20} {text}" for name, text in registry.choices(group, own).items()] or ["  (none)"]
    lines += ["", "--config-dir DIR adds the choices of a folder of your own, with the same groups as folders."]
    lines += [f"A choice's own keys and defaults are in {conf}/GROUP/CHOICE.yaml; set them as GROUP.KEY=VALUE."]
    lines += [f"Keys that all models or all participation patterns have are in {conf}/config.yaml."]
    return "\n".join(lines)
