"""The command line: its help, and its overrides checked for every job of a sweep before the first starts."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from contrafed.config.compose import CHOICE_GROUPS, Composed, compose_yaml, own_folder, plain, use_plain_sgd
from contrafed.config.run_config import Run, check_top, for_evaluation, resolve
from contrafed.core import registry
from contrafed.core.arguments import Parser, program
from contrafed.core.errors import UserError, unknown
from contrafed.runs.sweep import expand

SCRIPT = "contrafed"  # the command of an installed package
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")  # what Hydra's --info shows


def read(arguments: list[str]) -> argparse.Namespace:
    """Return what a command line asks for: its ``overrides`` and each option by its name. Raises ``UserError``."""
    parser = Parser(program(SCRIPT, "python main.py"), add_help=False)
    add = parser.add_argument
    add("overrides", nargs="*", default=[])
    options = [
        add("--multirun", "-m", action="store_true"),
        add("--help", "-h", action="store_true"),
        add("--version", action="store_true"),
        add("--resolve", action="store_true"),
        add("--config-dir", "-cd", metavar="DIR", action="append"),
        add("--cfg", "-c", choices=("job",)),
        add("--package", "-p", metavar="KEY"),
        add("--info", "-i", nargs="?", const="all", choices=INFO),
    ]
    asked, others = parser.parse_known_intermixed_args(arguments)
    if others and "=" in others[0]:
        raise UserError(f"{others[0]}: keys have no dashes, write {others[0].lstrip('-')}")
    if others:
        known = [option.option_strings[0] for option in options]
        raise UserError(f"{unknown('option', others[0], known)}; settings are KEY=VALUE, without dashes")
    if len(folders := asked.config_dir or [None]) > 1:
        raise UserError(f"--config-dir takes one folder, got {' and '.join(folders)}")
    (asked.config_dir,) = folders
    if asked.config_dir == "":
        raise UserError("--config-dir needs a folder")
    if asked.cfg is None and (asked.resolve or asked.package is not None):
        raise UserError(f"--{'resolve' if asked.resolve else 'package'} goes with --cfg job")
    if asked.multirun and (asked.cfg or asked.info):
        raise UserError("-m runs jobs, and --cfg and --info only show one: leave one of them out")
    return asked


def shown(config: DictConfig, package: str | None, resolve: bool) -> str:
    """Return a job's configuration as YAML, or the part of it that ``package`` names. Raises ``UserError``."""
    if resolve:
        plain(config)
    part = config if package is None else OmegaConf.select(config, package)
    if not isinstance(part, DictConfig):
        raise unknown("package", str(package), [str(key) for key in config if isinstance(config[key], DictConfig)])
    return OmegaConf.to_yaml(part, resolve=resolve)


def check_jobs(overrides: list[str], multirun: bool, config_dir: str | Path | None = None) -> list[Run]:
    """Check every job and return them as runs; raises ``UserError`` for the first fault, naming the job.

    First what the YAMLs alone tell, of every job; the code of any choice is imported after that.
    """
    expanded = [job.overrides for job in expand(overrides, config_dir)] if multirun else [overrides]
    composed, runs, said = list[tuple[Composed, dict[str, Any]]](), list[Run](), set[str]()
    for number, job in enumerate(expanded):
        with _named(number, expanded):
            ready = compose_yaml(job, config_dir)
            composed.append((ready, plain(ready.config)))
            check_top(for_evaluation(composed[-1][1]))
    for number, (ready, values) in enumerate(composed):
        with _named(number, expanded):
            if (line := use_plain_sgd(ready)) is not None:
                said.add(line)
                values = plain(ready.config)
            runs.append(resolve(values))
            if multirun:
                from contrafed.config.method import try_method  # after what the YAMLs alone tell: it imports torch

                try_method(runs[-1])
    for line in sorted(said):
        print(line, flush=True)
    return runs


@contextlib.contextmanager
def _named(number: int, expanded: list[list[str]]) -> Iterator[None]:
    """Name the job of a sweep in the errors of a block."""
    try:
        yield
    except UserError as error:
        if len(expanded) == 1:
            raise
        raise UserError(f"job {number} ({' '.join(expanded[number])}): {error}") from error


def help_text(config_dir: str | None = None) -> str:
    """Return what ``--help`` prints: the top-level keys, then every group's choices with a line on each."""
    own = own_folder(config_dir)
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
        f"  {f'{called} strategy=pmfl --cfg job':<58} show the composed configuration (--package KEY: a part of it)",
        f"  {f'{called} -m experiment=pmfl/table1 shard=2/4':<58} every fourth of a sweep's jobs, from the second",
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
    for group in CHOICE_GROUPS:
        default = chosen.get(group) or ("the method's own" if group == "strategy/server" else "none")
        lines += ["", f"{group.replace('/', '.')}= (default: {default})"]
        lines += [f"  {name:<20} {text}" for name, text in registry.choices(group, own).items()] or ["  (none)"]
    lines += ["", "--config-dir DIR adds the choices of a folder of your own, with the same groups as folders."]
    lines += [f"A choice's own keys and defaults are in {conf}/GROUP/CHOICE.yaml; set them as GROUP.KEY=VALUE."]
    return "\n".join(lines)
