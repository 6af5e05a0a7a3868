"""The command line's overrides, checked for every job of a sweep before the first starts."""

import itertools
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from contrafed.settings import EVALUATION_KEYS, GROUPS, Run, resolve
from core import registry
from core.errors import UserError, unknown

CHOICE_GROUPS = (*GROUPS, "strategy/server", "experiment")


def as_choices(arguments: list[str]) -> list[str]:
    """Return arguments in which ``strategy.server=NAME`` is the choice ``strategy/server=NAME`` that Hydra knows.

    The server rule is one key of the strategy to its user, and brings hyper-parameters of its own.
    """
    return [
        "strategy/server=" + a.removeprefix("strategy.server=") if a.startswith("strategy.server=") else a for a in arguments
    ]


def jobs(overrides: list[str], multirun: bool) -> list[list[str]]:
    """Expand the overrides of a command line into those of each job; raises ``UserError`` for one that cannot be read."""
    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise UserError(f"cannot read the command line: {_first_line(error)}") from error
    columns = []
    for override in parsed:
        values = _values(override)
        if len(values) > 1 and not multirun:
            raise UserError(f"{override.input_line} lists several values: add -m to run them all")
        columns.append(values)
    return [list(row) for row in itertools.product(*columns)]


def check_jobs(overrides: list[str], multirun: bool) -> list[Run]:
    """Check every job and return them as runs; raises ``UserError`` for the first fault, naming the job."""
    expanded, runs = jobs(overrides, multirun), list[Run]()
    for number, job in enumerate(expanded):
        try:
            composed: Any = OmegaConf.to_container(compose_job(job), resolve=True)
            runs.append(resolve(composed))
        except UserError as error:
            if len(expanded) == 1:
                raise
            raise UserError(f"job {number} ({' '.join(job)}): {error}") from error
    return runs


def compose_job(overrides: list[str]) -> DictConfig:
    """Compose one job's configuration, with one clear line for an unknown choice or key."""
    overrides = as_choices(overrides)
    parsed = OverridesParser.create().parse_overrides(overrides)
    choosing = [o for o in parsed if o.key_or_group in CHOICE_GROUPS]
    for override in choosing:
        names = registry.choices(override.key_or_group)
        value = override.value()
        if value is not None and value not in names:
            raise unknown(override.key_or_group.replace("/", "."), str(value), names)
    try:
        _check_server(choosing)
        chosen = _compose([str(o.input_line) for o in choosing])
        for override in parsed:
            if override not in choosing and not override.key_or_group.startswith("hydra"):
                _check_key(chosen, override)
        composed = _compose(overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"cannot compose the configuration: {_first_line(error)}") from error
    if composed.get("evaluate_only") is not None:
        others = [o.key_or_group for o in parsed if o.key_or_group.split(".")[0] not in (*EVALUATION_KEYS, "hydra")]
        if others:
            raise UserError(
                f"evaluate_only takes the run's own configuration, so that {', '.join(others)} cannot be set beside it; "
                f"what can: {', '.join(EVALUATION_KEYS[1:])}"
            )
    return composed


def help_text() -> str:
    """Return what ``--help`` prints: the top-level keys, then every group's choices with a line on each."""
    defaults = OmegaConf.load(registry.CONF / "config.yaml")
    chosen = {k: v for item in defaults["defaults"] if isinstance(item, DictConfig) for k, v in item.items()}  # type: ignore[index]
    lines = [
        "Contrafed: contrastive and personalised federated learning on Flower.",
        "",
        "  python main.py strategy=pmfl participation=markovian       one run",
        "  python main.py -m strategy=fedavg,moon,pmfl seed=0,1,2     a sweep: every combination",
        "  python main.py strategy=pmfl --cfg job                     show the composed configuration",
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
        lines += [f"  {name:<20} {text}" for name, text in registry.choices(group).items()] or ["  (none)"]
    lines += ["", "A choice's own keys and defaults are in conf/GROUP/CHOICE.yaml; set them as GROUP.KEY=VALUE."]
    return "\n".join(lines)


def _values(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _compose(overrides: list[str]) -> DictConfig:
    GlobalHydra.instance().clear()
    with initialize_config_dir(version_base="1.3", config_dir=str(Path(registry.CONF).resolve())):
        return compose("config", overrides=overrides)


def _check_server(choosing: list[Override]) -> None:
    """Raise for a server rule beside a method that has one of its own."""
    lines = [str(o.input_line) for o in choosing if o.key_or_group != "strategy/server"]
    if len(lines) == len(choosing):
        return
    strategy = _compose(lines).get("strategy")
    if strategy is not None and "server" not in strategy:
        free = [n for n in registry.choices("strategy") if "server" in _compose([f"strategy={n}"]).strategy]
        raise UserError(f"strategy={strategy.name} has a server rule of its own; strategy.server goes with {', '.join(free)}")


def _check_key(config: DictConfig, override: Override) -> None:
    """Raise for a key that no YAML declares, naming the nearest one beside it."""
    here: Any = config
    walked: list[str] = []
    for part in override.key_or_group.split("."):
        if not isinstance(here, DictConfig) or part not in here:
            where = ".".join(walked)
            names = [str(key) for key in here] if isinstance(here, DictConfig) else []
            raise unknown(f"{where} key" if where else "key", part, names)
        here = here._get_node(part)
        walked.append(part)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("See https://")[0].split())[:300]
