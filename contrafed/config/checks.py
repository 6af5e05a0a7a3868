"""Check names, keys and files of a configuration before any choice's code is imported."""

from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import AnyNode, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from contrafed.config.overrides import SERVER, one_line
from contrafed.config.run_config import GROUPS as TYPED_GROUPS
from contrafed.core import registry
from contrafed.core.arguments import program
from contrafed.core.client_run import PACKAGES
from contrafed.core.errors import UserError, unknown
from contrafed.core.schema import flatten_keys

OPTIONAL_GROUPS = ("experiment", "scale")  # groups with null for no choice
GROUPS = (*TYPED_GROUPS, SERVER, *OPTIONAL_GROUPS)

# Sections of an experiment's file that are not settings.
SECTIONS = ("grid", "where", "published", "changed")

# Axes of experiments' grids that are no keys of a run. Others, such as "clients", are close to a key.
CASE_AXES = ("variant", "column", "skew", "defence", "buffer", "way", "speed")

# Groups whose YAMLs set keys outside their group, by Hydra's directive.
DIRECTIVES = {"experiment": "_global_", "scale": "_global_", SERVER: "strategy"}


def find_own_folder(config_dir: str | Path | None) -> Path | None:
    """Return the folder of YAMLs that ``--config-dir`` names.

    Raises:
        UserError: If there is none, or if one of its files hides one of Contrafed's.
    """
    if not config_dir:
        return None
    own = Path(config_dir).expanduser().resolve()
    if not own.is_dir():
        raise UserError(f"--config-dir: there is no folder {own}. Fix: check the path")
    for path in registry.yamls(own):
        if (registry.CONF / path.relative_to(own)).exists():
            raise UserError(f"--config-dir: {path} has the name of one of Contrafed's own. Fix: another name")
        lines = _read_lines(path)
        for group, package in DIRECTIVES.items():
            line = f"# @package {package}"
            if path.is_relative_to(own / group) and line not in lines:
                raise UserError(f"--config-dir: {path} must begin with the line {line}, or what it sets goes nowhere")
    return own


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a YAML, with or without a byte order mark. Raises ``UserError`` if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"--config-dir: {path}: not UTF-8 (byte {error.start + 1}). Fix: save it as UTF-8") from error
    except OSError as error:
        raise UserError(f"--config-dir: cannot read {path} ({error.strerror})") from error


def chooses_hydra(override: Override) -> bool:
    """Return whether an override changes which of Hydra's own YAMLs are composed, such as ``hydra/launcher=joblib``."""
    return override.is_hydra_override() and "/" in override.key_or_group


def check_names(overrides: Sequence[Override], own: Path | None) -> None:
    """Raise ``UserError`` for a choice without a YAML, or with another name in its YAML."""
    for override in overrides:
        group, name = override.key_or_group, override.value()
        if group not in GROUPS or override.is_delete():  # a missing group is reported later
            continue
        names = registry.choices(group, own)
        if not isinstance(name, str | int | float):
            found = str(override.input_line).partition("=")[2]
            raise UserError(f"{group.replace('/', '.')}: {found} is not one name. Fix: one of {', '.join(names)}")
        if name not in names:
            raise _find_misplaced(group, str(name), own) or _explain_choice(group, str(name), names, own)
        file = None if own is None else own / group / f"{name}.yaml"
        if file is not None and group in TYPED_GROUPS and file.exists() and _read_name(file) != name:
            raise UserError(f"{file}: its name is not that of the file. Fix: name: {name}")


def check_axes(overrides: Sequence[Override], axes: Collection[str], experiment: str) -> None:
    """Raise ``UserError`` for an axis of other experiments that this one's grid does not have."""
    for override in overrides:
        name = override.key_or_group
        if name in CASE_AXES and name not in axes and override.type == OverrideType.CHANGE:
            fix = f"choose among {', '.join(axis.replace('/', '.') for axis in axes)}" if axes else f"leave {name} out"
            raise UserError(f"{name}: experiment={experiment} has no such axis. Fix: {fix}")


def _help_command() -> str:
    return f"{program('contrafed', 'python main.py')} --help"


def _explain_choice(group: str, name: str, names: Collection[str], own: Path | None) -> UserError:
    """Return the error for a choice that does not exist."""
    error = unknown(group.replace("/", "."), name, names, _help_command())
    if own is not None or group not in (*PACKAGES, SERVER, "experiment"):
        return error
    return UserError(f"{error}. Fix: for one of your own, --config-dir=FOLDER", error.key)


def _find_misplaced(group: str, name: str, own: Path | None) -> UserError | None:
    """Return the error for a choice whose YAML is in the user's folder, but not in its group's subfolder."""
    if own is None:
        return None
    others = [own / other for other in GROUPS if other != group]
    found = sorted(p for p in own.rglob("*.y*ml") if p.stem == Path(name).name and p.parent not in others)
    if not found:
        return None
    if found[0].parent == own and own.as_posix().endswith(f"/{group}"):
        return UserError(f"--config-dir must be the folder in which {group} is, not {own}")
    return UserError(f"{group.replace('/', '.')}={name} is looked for in {own / group / name}.yaml, but it is {found[0]}")


def _read_name(file: Path) -> Any:
    try:
        content = OmegaConf.load(file)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"cannot read {file}: {one_line(error)}") from error
    return content.get("name") if isinstance(content, DictConfig) else None


def check_server(choosing: Sequence[Override], find_choices: Callable[[tuple[str, ...]], dict[str, str]]) -> None:
    """Raise ``UserError`` for ``strategy.server`` with a method whose replies are not models to average.

    Args:
        choosing: Overrides that choose.
        find_choices: Returns group -> choice after such overrides.
    """
    lines = tuple(str(o.input_line) for o in choosing if o.key_or_group != SERVER)
    if len(lines) < len(choosing) and SERVER not in (chosen := find_choices(lines)):
        raise UserError(
            f"strategy.server: strategy={chosen['strategy']} aggregates other things than models, in a way of its own. "
            "Fix: leave strategy.server out"
        )


def refuse_two_folders(overrides: Sequence[Override], other: str) -> None:
    """Raise ``UserError`` if a command line names its folder twice, as ``output_dir`` and by Hydra's key ``other``."""
    if {"output_dir", other} <= {o.key_or_group for o in overrides}:
        raise UserError(f"output_dir: {other} names the folder too. Fix: leave one out")


def sets_key(override: Override) -> bool:
    """Return whether an override sets a key of Contrafed's, which ``check_key`` checks. It may be new in an open mapping."""
    return override.type == OverrideType.CHANGE and not override.is_hydra_override() and override.key_or_group not in GROUPS


def check_key(config: DictConfig, override: Override) -> None:
    """Raise ``UserError`` for a key that no YAML declares, with the nearest one, and for ``GROUP.name``."""
    group, _, key = override.key_or_group.partition(".")
    if key == "name" and group in TYPED_GROUPS:
        raise UserError(f"{override.input_line}: not a key. Fix: {group}=NAME, without .name")
    if override.type != OverrideType.CHANGE:
        return
    here: Any = config
    parts = override.key_or_group.split(".")
    for depth, part in enumerate(parts):
        if isinstance(here, AnyNode) and here._is_none():  # a mapping without keys so far, such as partition.arguments
            return
        if not isinstance(here, DictConfig) or part not in here or (not depth and part in ("grid", "where")):
            raise _explain_key(".".join(parts[:depth]), ".".join(parts[depth:]), here)
        here = here._get_node(part)


def _explain_key(where: str, rest: str, here: Any) -> UserError:
    """Return the error for a key that ``where``, with the configuration ``here``, does not have. It may exist further below,
    as ``local.lr`` does in ``strategy``.
    """
    values: Any = OmegaConf.to_container(here) if isinstance(here, DictConfig) else {}
    values = {str(key): value for key, value in values.items() if where or key not in (*SECTIONS, "hydra")}
    above = f"{where}." if where else ""
    name = rest.partition(".")[0]
    for part in dict.fromkeys((rest, name)):
        found = [f"{key}.".partition(f".{part}.") for key in flatten_keys(values)]
        same = list(dict.fromkeys(f"{above}{head}.{part}" for head, sign, _ in found if sign))
        if same and name != "name":
            return UserError(f"unknown key '{above}{part}', did you mean {' or '.join(same[:3])}?", f"{above}{part}")
    if where:
        return unknown(f"{where} key", name, values)
    return unknown("key", name, [*values, *OPTIONAL_GROUPS, "shard"], _help_command())


def check_modules(config: DictConfig, own: Path | None) -> None:
    """Raise ``UserError`` for a user's YAML without code in Contrafed and without the name of another package."""
    for group, package in PACKAGES.items() if own is not None else ():
        values = config.get(group)
        if not isinstance(values, DictConfig) or "name" not in values:
            continue
        modules = {"module": (package, values.get("module") or values.name)}
        modules["server"] = ("contrafed.strategies", values.get("server"))
        for key, (home, module) in modules.items():
            if module is not None and "." not in str(module) and find_spec(f"{home}.{module}") is None:
                missing = f"there is no module {home}.{module}"
                raise UserError(f"{group}={values.name}: {missing}; a file of your own package is {key}: PACKAGE.FILE")
