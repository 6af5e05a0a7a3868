"""From overrides to a composed configuration, with one clear line for whatever is wrong with names, keys and files.

Up to here only YAMLs are read, so that a mistake on the command line is answered before torch, Flower or Ray are imported.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import AnyNode, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from contrafed.config import grid
from contrafed.config.run_config import EVALUATION_KEYS, GROUPS, HOW_IT_RUNS, SCORING_KEYS, counts, read_config
from contrafed.config.yamls import composed, first_line, parse, rule_of, stamp
from contrafed.core import registry
from contrafed.core.client_run import PACKAGES as HOMES
from contrafed.core.errors import UserError, unknown
from contrafed.core.schema import dotted

CHOICE_GROUPS = (*GROUPS, "strategy/server", "experiment", "scale")

# What a command line may set beside an experiment and still have its setting.
FREE = ("experiment", "scale", "seed", "log", "metrics", *HOW_IT_RUNS)

# What is an experiment's file's to say; its methods and where can be set beside it, its grid is read from the file alone.
OWN_KEYS = ("grid", "methods", "where", "published", "changed")

# Whose YAMLs set keys of other groups too, by Hydra's directive.
PACKAGES = {"experiment": "_global_", "scale": "_global_", "strategy/server": "strategy"}


def as_choices(arguments: list[str]) -> list[str]:
    """Return arguments in which ``strategy.server=NAME`` is the choice ``strategy/server=NAME`` that Hydra knows.

    The server rule is one key of the strategy to its user, and brings hyper-parameters of its own.
    """
    parts = (argument.partition("=") for argument in arguments)
    return [(choice_key(key) if sign else key) + sign + value for key, sign, value in parts]


def choice_key(key: str) -> str:
    """Return the key by which Hydra knows what its user calls ``key``."""
    return "strategy/server" if key == "strategy.server" else key


def own_folder(config_dir: str | Path | None) -> Path | None:
    """Return the folder of YAMLs that ``--config-dir`` names. Raises ``UserError`` where it is none, or hides one of ours."""
    if not config_dir:
        return None
    own = Path(config_dir).expanduser().resolve()
    if not own.is_dir():
        raise UserError(f"--config-dir: there is no folder {own}")
    for path in registry.yamls(own):
        if (registry.CONF / path.relative_to(own)).exists():
            raise UserError(f"--config-dir: {path} has the name of one of Contrafed's own; give it another")
        for group, package in PACKAGES.items():
            line = f"# @package {package}"
            if path.is_relative_to(own / group) and line not in path.read_text(encoding="utf-8", errors="replace").splitlines():
                raise UserError(f"--config-dir: {path} must begin with the line {line}, or what it sets goes nowhere")
    return own


@dataclass(frozen=True)
class Composed:
    """A job's configuration, and where its values come from."""

    config: DictConfig
    overrides: list[Override]
    own: Path | None  # the user's folder of YAMLs
    named: frozenset[str]  # keys of the strategy that the experiment sets for this method alone

    def is_set(self, key: str) -> bool:
        """Whether the command line sets a key, or the group of keys that it is in."""
        return _is_set(key, self.overrides)


def compose_job(overrides: list[str], config_dir: str | Path | None = None) -> DictConfig:
    """Compose one job's configuration. Raises ``UserError`` with one clear line for an unknown choice or key."""
    job = compose_yaml(overrides, config_dir)
    if (line := use_plain_sgd(job)) is not None:
        print(line, flush=True)
    return job.config


def compose_yaml(overrides: list[str], config_dir: str | Path | None = None) -> Composed:
    """Compose one job's configuration from the YAMLs alone: nothing of any choice's code is imported. Raises ``UserError``."""
    own, overrides = own_folder(config_dir), as_choices(overrides)
    # experiment=null and scale=null are the defaults, which Hydra does not know as choices.
    parsed = asked = [
        o for o in parse(overrides) if o.is_delete() or o.value() is not None or o.key_or_group not in ("experiment", "scale")
    ]
    if several := next((o.input_line for o in parsed if o.is_sweep_override()), None):
        raise UserError(f"{several} lists several values: add -m to run them all, or brackets where they are one list")
    _check_hydra(parsed)
    _check_names([o for o in parsed if o.key_or_group in CHOICE_GROUPS], own)
    try:
        cases, parsed = _take_cases(parsed, own)
        choosing = [o for o in parsed if o.key_or_group in CHOICE_GROUPS]
        _check_names(choosing, own)
        _check_server(choosing, own)
        config = composed([str(o.input_line) for o in choosing], own)
        setting = [o for o in parsed if o not in choosing]
        for override in setting:
            _check_key(config, override)
        if all(o.type == OverrideType.CHANGE for o in setting):
            for override in setting:
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
        else:
            config = composed([str(o.input_line) for o in parsed], own)
        named = _merge(config, asked, parsed, cases, own)
        _check_modules(config, own)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"cannot compose the configuration: {first_line(error)}") from error
    if config.get("evaluate_only") is not None:
        others = [o.key_or_group for o in parsed if o.key_or_group.split(".")[0] not in EVALUATION_KEYS]
        if others:
            raise UserError(
                f"evaluate_only takes the run's own configuration, so that {', '.join(others)} cannot be set beside it; "
                f"what can: {', '.join(EVALUATION_KEYS[1:])}"
            )
        _score_alike(config, {o.key_or_group.split(".")[0] for o in parsed})
    return Composed(config, parsed, own, named)


def _score_alike(config: DictConfig, asked: set[str]) -> None:
    """Have an evaluation of saved models score all that their run did, but for the keys that were ``asked`` for."""
    folder = Path(str(config.evaluate_only)).expanduser()
    stored = read_config(folder) if (folder / "config.yaml").is_file() else {}
    for key in set(SCORING_KEYS) - asked:
        if stored.get(key):  # not a "no": then nothing might be scored
            OmegaConf.update(config, key, stored[key])


def plain(config: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain Python, resolved. Raises ``UserError`` for what refers to nothing."""
    try:
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {first_line(error)}") from error


def grid_of(experiment: str, config_dir: str | Path | None = None) -> grid.Grid:
    """Return the grid in an experiment's file, empty where it has none. Raises ``UserError``."""
    own = own_folder(config_dir)
    return _grid_of(experiment, own, stamp(own))


@lru_cache(maxsize=64)
def _grid_of(experiment: str, own: Path | None, stamp: object) -> grid.Grid:
    _check_names(parse([f"experiment={experiment}"]), own)
    try:
        return grid.read(experiment, composed([f"experiment={experiment}"], own).get("grid"))
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"experiment={experiment}: {first_line(error)}") from error


def _check_hydra(parsed: list[Override]) -> None:
    """Raise for Hydra's own keys: it composes, and what runs where is decided here."""
    named = next((o.key_or_group for o in parsed if o.key_or_group.split(".")[0].split("/")[0] == "hydra"), None)
    if named is not None:
        raise UserError(f"{named} is Hydra's own and does nothing here; a run's folder, or a sweep's, is output_dir=FOLDER")


def _take_cases(parsed: list[Override], own: Path | None) -> tuple[dict[str, Any], list[Override]]:
    """Return what the experiment's named cases on the command line set, and the other overrides with the cases' choices.

    A choice that the command line makes itself stays. Raises ``UserError`` for a case that does not exist.
    """
    experiment = next((o.value() for o in parsed if o.key_or_group == "experiment"), None)
    if experiment is None:
        return {}, parsed
    table = grid_of(str(experiment), own)
    axes = {name: axis for name, axis in table.items() if isinstance(axis, dict)}
    values: dict[str, Any] = {}
    rest = [_spelled(o, table) for o in parsed if o.key_or_group not in axes]
    taken = {o.key_or_group for o in rest}
    choices = []
    for override in parsed:
        if override.key_or_group not in axes:
            continue
        name, cases = str(override.value()), axes[override.key_or_group]
        if name not in cases:
            raise unknown(f"{override.key_or_group} of experiment={experiment}", name, cases)
        for line in as_choices([f"{key}={grid.text(value)}" for key, value in cases[name].items()]):
            key = line.partition("=")[0]
            if key in CHOICE_GROUPS and key not in taken:
                choices.append(line)
        values |= {key: value for key, value in cases[name].items() if choice_key(key) not in CHOICE_GROUPS}
    return values, [*rest, *parse(choices)]


def _spelled(override: Override, table: grid.Grid) -> Override:
    """Return an override with its number as a listed axis of the grid writes it, by which published cells are found."""
    key, _, value = str(override.input_line).partition("=")
    axis = table.get(key, {})
    return override if (own := grid.spelled(value, axis)) == value else parse([f"{key}={own}"])[0]


def _check_names(choosing: list[Override], own: Path | None) -> None:
    """Raise for a choice that has no YAML, or whose YAML says another name."""
    for override in (each for each in choosing if not each.is_delete()):  # a missing choice is named later
        group, name = override.key_or_group, override.value()
        names = registry.choices(group, own)
        if not isinstance(name, str | int | float):
            found = str(override.input_line).partition("=")[2]
            raise UserError(f"{group.replace('/', '.')} must be one name, got {found}; choices: {', '.join(names)}")
        if name not in names:
            raise _misplaced(group, str(name), own) or unknown(group.replace("/", "."), str(name), names)
        file = None if own is None else own / group / f"{name}.yaml"
        if file is not None and group in GROUPS and file.exists() and _name_in(file) != name:
            raise UserError(f"{file} must say name: {name}")


def _misplaced(group: str, name: str, own: Path | None) -> UserError | None:
    """Return the error for a choice whose YAML is in the user's folder, but where its group is not looked for."""
    if own is None:
        return None
    others = [own / other for other in CHOICE_GROUPS if other != group]
    named = (path for path in own.rglob("*.y*ml") if path.stem == Path(name).name and path.parent not in others)
    if not (here := sorted(named)):
        return None
    if here[0].parent == own and own.as_posix().endswith(f"/{group}"):
        return UserError(f"--config-dir must be the folder in which {group} is, not {own}")
    return UserError(f"{group.replace('/', '.')}={name} is looked for in {own / group / name}.yaml, but it is {here[0]}")


def _name_in(file: Path) -> Any:
    try:
        content = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}") from error
    return content.get("name") if isinstance(content, DictConfig) else None


def _check_server(choosing: list[Override], own: Path | None) -> None:
    """Raise for a server rule beside a method whose replies are more, or less, than models to average."""
    lines = [str(o.input_line) for o in choosing if o.key_or_group != "strategy/server"]
    if len(lines) == len(choosing):
        return
    chosen = composed(lines, own, return_hydra_config=True)
    if "strategy/server" in chosen.hydra.runtime.choices:
        return
    free = [name for name in registry.choices("strategy", own) if rule_of(name, own) is not None]
    raise UserError(
        f"strategy={chosen.strategy.name} has a server rule of its own, made for what its nodes send; "
        f"strategy.server goes with {', '.join(free)}"
    )


def _check_modules(config: DictConfig, own: Path | None) -> None:
    """Raise for a YAML of the user's own whose code is none of ours and not said to be in another package."""
    for group, package in HOMES.items() if own is not None else ():
        values = config.get(group)
        if not isinstance(values, DictConfig) or "name" not in values:
            continue
        modules = {
            "module": (package, values.get("module") or values.name),
            "server": ("contrafed.strategies", values.get("server")),
        }
        for key, (home, module) in modules.items():
            there = module is None or "." in str(module) or find_spec(f"{home}.{module}") is not None
            if not there:
                missing = f"there is no module {home}.{module}"
                raise UserError(f"{group}={values.name}: {missing}; a file of your own package is {key}: PACKAGE.FILE")


def _check_key(config: DictConfig, override: Override) -> None:
    """Raise for a key that no YAML declares, naming the nearest one beside it, and for the name of what a group has chosen."""
    group, _, key = override.key_or_group.partition(".")
    if key == "name" and group in GROUPS:
        raise UserError(f"{override.input_line}: what a group chooses is {group}=NAME, without .name")
    here: Any = config
    parts = override.key_or_group.split(".")
    for depth, part in enumerate(parts):
        if isinstance(here, AnyNode) and here._is_none():  # a mapping without a key yet, as partition.arguments
            return
        if not isinstance(here, DictConfig) or part not in here or (not depth and part == "grid"):
            raise _unknown_key(".".join(parts[:depth]), part, here)
        here = here._get_node(part)


def _unknown_key(where: str, name: str, here: Any) -> UserError:
    """Return the error for a key that ``where``, with the configuration ``here``, does not have: it may be one further down."""
    values: Any = OmegaConf.to_container(here) if isinstance(here, DictConfig) else {}
    values = {str(key): value for key, value in values.items() if where or key not in OWN_KEYS}
    above = f"{where}." if where else ""
    same = [above + key for key in dotted(values) if key.endswith(f".{name}")]
    if same and name != "name":
        return UserError(f"unknown key '{above}{name}', did you mean {' or '.join(same[:3])}?")
    return unknown(f"{where} key" if where else "key", name, values if where else [*values, "experiment", "scale", "shard"])


def _merge(
    config: DictConfig, asked: list[Override], parsed: list[Override], cases: dict[str, Any], own: Path | None
) -> frozenset[str]:
    """Put in place what an experiment and a scale set for these choices alone; returns the strategy's keys that are so.

    In this order: the experiment's ``where``, its ``methods``, the chosen cases of its grid, and ``where`` of a scale, which
    leaves out keys that the choices do not have. What was set on the command line stays. Raises ``UserError`` for other keys.
    """
    choices = {o.key_or_group: o.value() for o in asked if o.key_or_group in ("experiment", "scale")}
    with open_dict(config):
        where, methods = (grid.cases(key, config.pop(key, None)) for key in ("where", "methods"))
        axes = config.pop("grid", None) or {}
        if choices:
            config.experiment, config.scale = choices.get("experiment"), choices.get("scale")
            free = {choice_key(key) for key, axis in axes.items() if axis is not None}  # null: this file does without it
            config.changed = [o.input_line for o in asked if o.key_or_group not in free and counts(o.key_or_group, FREE)]
    known = registry.choices("strategy", own) if methods else {}
    if stray := [method for method in methods if method not in known]:
        raise unknown("method in the experiment's methods", stray[0], known)
    holding = {condition: values for condition, values in where.items() if grid.holds(condition, config, own)}
    for condition, values in holding.items():
        if "scale=" not in condition:
            _put(config, values, parsed, f"key in the experiment's where '{condition}'")
    named = _merge_methods(config, methods, parsed)
    kept = {key: OmegaConf.select(config, key) for key in cases if _is_set(key, parsed)}
    _put(config, cases, [], "key in the experiment's grid")
    if config.get("published") is not None:  # a small run, and one with a case's key set, are beside the full one's number
        OmegaConf.update(config, "published", grid.resolved("published", config.published))
    for key, value in kept.items():
        OmegaConf.update(config, key, value)
    for condition, values in holding.items():
        if "scale=" in condition:
            _put(config, values, parsed, None)
    return named


def _put(config: DictConfig, values: Any, parsed: list[Override], what: str | None, at: str = "") -> None:
    """Set dotted keys below ``at`` that the command line does not set.

    Raises ``UserError`` for one that is not there, saying ``what`` it is; where that is None such a key is left out.
    """
    root = config[at] if at else config
    for key, value in ((str(key), value) for key, value in values.items()):
        *above, last = key.split(".")
        group = OmegaConf.select(root, ".".join(above)) if above else root
        if not isinstance(group, DictConfig) or last not in group:
            if what is not None:
                raise unknown(what, key, map(str, group if isinstance(group, DictConfig) else root))
        elif not _is_set(f"{at}.{key}" if at else key, parsed):
            OmegaConf.update(root, key, value)


def _merge_methods(config: DictConfig, methods: Any, parsed: list[Override]) -> frozenset[str]:
    """Put what the experiment sets for the chosen method alone (``methods: {NAME: {...}}``) into its group; returns its keys.

    What was set on the command line stays. Raises ``UserError`` for a key that the method does not have, but for those of a
    rule that the command line put another in the place of.
    """
    strategy = config.get("strategy")
    if not isinstance(strategy, DictConfig) or strategy.name not in methods:
        return frozenset()
    named = dotted(methods[strategy.name])
    other_rule = any(o.key_or_group == "strategy/server" for o in parsed)
    _put(config, named, parsed, None if other_rule else f"strategy key in the experiment's methods.{strategy.name}", "strategy")
    return frozenset(named)


def _is_set(key: str, parsed: list[Override]) -> bool:
    """Whether the command line sets a key, or a group that it is in; a mapping, which is merged, sets the keys that it has."""
    asked = {o.key_or_group: o.value() for o in parsed if o.key_or_group not in CHOICE_GROUPS}
    return any(f"{key}.".startswith(f"{name}.") for name in dotted(asked))


def use_plain_sgd(job: Composed) -> str | None:
    """Take momentum or Adam of an experiment's recipe away from a method that needs plain SGD; returns a line that says so.

    Its learning rate is then the one that the experiment names for the method, or, where Adam goes, the method's own.
    What the command line sets stays, and is refused with the rest of the configuration. Imports the method's code.
    """
    experiment = next((o.value() for o in job.overrides if o.key_or_group == "experiment"), None)
    strategy = job.config.get("strategy")
    local = strategy.get("local") if isinstance(strategy, DictConfig) else None
    if experiment is None or not isinstance(local, DictConfig) or not {"optimizer", "momentum", "lr"} <= set(local):
        return None
    if local.optimizer == "sgd" and not local.momentum:
        return None
    from contrafed.core.client_run import choose
    from contrafed.training.workspace import client_class_of

    values: Any = OmegaConf.to_container(strategy, resolve=True)
    if not (reason := client_class_of(choose("strategy", values)).plain_sgd):
        return None
    dropped = []
    if local.momentum and not job.is_set("strategy.local.momentum"):
        dropped.append(f"momentum {local.momentum:g}")
        local.momentum = 0.0
    if local.optimizer != "sgd" and not job.is_set("strategy.local.optimizer"):
        dropped.append(str(local.optimizer))
        local.optimizer = "sgd"
        if "local.lr" not in job.named and not job.is_set("strategy.local.lr"):
            local.lr = composed([f"strategy={strategy.name}"], job.own).strategy.local.lr
    if not dropped:
        return None
    without = f"without the {' and '.join(dropped)} of experiment={experiment}, at a learning rate of {local.lr:g}"
    return f"strategy={strategy.name} needs plain SGD ({reason}): {without}"
