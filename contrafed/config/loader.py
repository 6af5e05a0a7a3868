"""Load configurations with Hydra, and apply an experiment's conditional settings.

Hydra composes the YAMLs and the command line. An experiment's settings for some choices only (``where``), and the named cases
of its grid, come after the YAMLs and before the command line. So ``--cfg job``, every sweeper and every launcher show and run
the same. Only YAMLs are read here, so that a mistake is reported before torch is imported.
"""

import copy
import os
import pickle
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import hydra.version
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import setup_globals
from hydra.errors import CompactHydraException, HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, flag_override, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from contrafed.config import checks, conditions, sweep_grid
from contrafed.config.overrides import one_line, parse_overrides
from contrafed.core import registry
from contrafed.core.errors import UserError, nearest

NAME = "config"  # of the primary configuration


class CompositionError(UserError, CompactHydraException):
    """A mistake in a configuration, which Hydra also prints in one line."""


_read_header = ConfigSource._get_header_dict


def _read_marked_header(text: str) -> dict[str, str | None]:
    """Return a YAML's header, such as ``package``. Hydra would not see it behind a byte order mark."""
    return _read_header(text.removeprefix("\ufeff"))


ConfigSource._get_header_dict = staticmethod(_read_marked_header)  # type: ignore[method-assign, assignment]


_map_choices = defaults_list._create_interpolation_map


def _map_needed_choices(overrides: Any, defaults: list[Any], self_added: bool) -> DictConfig:
    """Return the choices that a YAML's defaults refer to. Hydra copies all for every YAML, which takes a third of its time."""
    return _map_choices(overrides, defaults, self_added) if any(d.is_interpolation() for d in defaults) else OmegaConf.create()


defaults_list._create_interpolation_map = _map_needed_choices  # type: ignore[assignment]


_LOADED: dict[tuple[str, str], bytes] = {}  # YAMLs of Contrafed and Hydra, pickled, by source and name


class _Repository(ConfigRepository):
    """Hydra's repository, which reads the YAMLs of Contrafed and Hydra once. A composition needs about thirty of them."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        if source is None or source.provider not in ("main", "hydra"):  # a user's own file may change
            return super().load_config(config_path)
        key = (source.path, config_path)
        if key not in _LOADED:
            _LOADED[key] = pickle.dumps(super().load_config(config_path))
        found: ConfigResult = pickle.loads(_LOADED[key])
        return found


class ConfigLoader(ConfigLoaderImpl):
    """Hydra's loader for Contrafed's primary configuration. Other configurations are loaded as in Hydra."""

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = _Repository(config_search_path)

    @property
    def own(self) -> Path | None:
        """The folder that ``--config-dir`` names."""
        paths = (each for each in self.config_search_path.get_path() if each.provider == "command-line")
        return next((Path(str(each.path).removeprefix("file://")) for each in paths), None)

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        """Return the choices of a group, without the YAMLs that others inherit."""
        found = super().get_group_options(group_name, results_filter, config_name, overrides)
        return [name for name in found if not name.startswith("_")]

    def _load_configuration_impl(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        if config_name != NAME:
            return super()._load_configuration_impl(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        try:
            parsed = parse_overrides(overrides)
            config = self._compose_sweep(parsed) if run_mode == RunMode.MULTIRUN else self._compose_job(parsed, hydra=True)
        except UserError as error:
            raise CompositionError(str(error), error.key) from error
        except (HydraException, OmegaConfBaseException, YAMLError, AssertionError) as error:  # the last is OmegaConf's, too
            raise CompositionError(f"cannot compose the configuration: {explain(error)}") from error
        self._record_overrides(config, parsed)
        return config

    def compose_job(self, overrides: list[str]) -> DictConfig:
        """Return one job's configuration without Hydra's part. Raises ``UserError``."""
        try:
            return self._compose_job(parse_overrides(overrides), hydra=False)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise CompositionError(f"cannot compose the configuration: {explain(error)}") from error

    def _compose_sweep(self, parsed: list[Override]) -> DictConfig:
        """Return the settings of a sweep's sweeper and launcher. Each of its jobs is composed separately."""
        axes = self.read_grid(experiment := conditions.find_experiment(parsed))
        if experiment is not None:
            checks.check_axes(parsed, axes, experiment)
        checks.refuse_two_folders(parsed, "hydra.sweep.dir")
        used = [o for o in parsed if not o.is_sweep_override() and o.key_or_group not in axes]
        lines = [f"++{o.input_line}" if checks.sets_key(o) else str(o.input_line) for o in used]
        config: DictConfig = pickle.loads(_compose_sweep_cached(_Key(self), tuple(lines), stamp(self.own)))
        own = "contrafed_sweeper" in str(config.hydra.sweeper.get("_target_"))
        if own and any(o.key_or_group == "hydra.sweep.subdir" for o in parsed):
            raise UserError(
                "hydra.sweep.subdir: this sweeper names the jobs' folders. Fix: leave it out, or add hydra/sweeper=basic"
            )
        conditions.remove_sections(config)
        return config

    def _compose_job(self, parsed: list[Override], hydra: bool) -> DictConfig:
        """Return one job's configuration. Raises ``UserError`` for an unknown choice or key, and Hydra's own errors."""
        if several := next((o.input_line for o in parsed if o.is_sweep_override()), None):
            raise UserError(f"{several}: several values. Fix: add -m to run them all, or brackets if they are one list")
        checks.refuse_two_folders(parsed, "hydra.run.dir")
        # experiment=null and scale=null are the defaults, but not choices of Hydra's.
        asked = [o for o in parsed if o.is_delete() or o.value() is not None or o.key_or_group not in checks.OPTIONAL_GROUPS]
        task = [o for o in asked if not o.is_hydra_override()]
        checks.check_names(task, self.own)
        axes = self.read_grid(experiment := conditions.find_experiment(task))
        if experiment is not None:
            checks.check_axes(task, axes, experiment)
        cases, task = conditions.take_cases(task, axes, experiment)
        checks.check_names(task, self.own)
        choosing = [o for o in task if o.key_or_group in checks.GROUPS]
        setting = [o for o in task if o not in choosing]
        lines = tuple(str(o.input_line) for o in [*choosing, *filter(checks.chooses_hydra, asked)])
        checks.check_server(choosing, self.find_choices)
        config = self.compose_choices(lines)
        for override in setting:
            checks.check_key(config, override)
        for override in setting:
            if override.type == OverrideType.CHANGE:  # also for a mapping without keys
                OmegaConf.update(config, override.key_or_group, override.value(), merge=True, force_add=True)
            else:
                self._apply_overrides_to_config([override], config)
        conditions.merge(config, asked=asked, task=task, cases=cases, axes=axes, own=self.own)
        checks.check_modules(config, self.own)
        if hydra:
            with flag_override(config, "struct", False):
                config.hydra = copy.deepcopy(_compose_cached(_Key(self), lines, stamp(self.own)).hydra)
            self._apply_overrides_to_config(
                [o for o in parsed if o.is_hydra_override() and not checks.chooses_hydra(o)], config
            )
        return config

    def compose_choices(self, lines: tuple[str, ...]) -> DictConfig:
        """Return Hydra's composition of choices alone, a copy for each caller, with the sections ``grid`` and ``where``."""
        config: DictConfig = pickle.loads(_compose_cached(_Key(self), lines, stamp(self.own)).job)
        return config

    def find_choices(self, lines: tuple[str, ...]) -> dict[str, str]:
        """Return group -> choice after overrides that choose. It includes ``strategy/server`` if the method has one."""
        return _compose_cached(_Key(self), lines, stamp(self.own)).choices

    def read_grid(self, experiment: str | None) -> sweep_grid.SweepGrid:
        """Return the grid in an experiment's file, empty if it has none. Raises ``UserError``."""
        if experiment is None:
            return {}
        checks.check_names(parse_overrides([f"experiment={experiment}"]), self.own)
        try:
            return sweep_grid.read_grid(experiment, self.compose_choices((f"experiment={experiment}",)).get("grid"))
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise UserError(f"experiment={experiment}: {explain(error)}") from error

    def check_output_dir(self, experiment: str) -> None:
        """Raise ``UserError`` for an experiment's file that names the folder of a run, which its sweep does not take."""
        lines: tuple[tuple[str, ...], ...] = ((f"experiment={experiment}",), ())
        chosen, default = (OmegaConf.to_yaml(OmegaConf.masked_copy(self.compose_choices(line), "output_dir")) for line in lines)
        if chosen != default:
            raise UserError(f"output_dir: experiment={experiment} sets it for single runs. Fix: give it on the command line")

    @staticmethod
    def _record_overrides(config: DictConfig, parsed: list[Override]) -> None:
        """Store the command line where Hydra keeps it, and set Contrafed's defaults for Hydra's own settings."""
        task = [o for o in parsed if not o.is_hydra_override()]
        names = config.hydra.job.config.override_dirname
        with open_dict(config.hydra):
            config.hydra.runtime.cwd = os.getcwd()
            config.hydra.overrides.task = [str(o.input_line) for o in task]
            config.hydra.overrides.hydra = [str(o.input_line) for o in parsed if o.is_hydra_override()]
            config.hydra.job.override_dirname = get_overrides_dirname(task, names.exclude_keys, names.item_sep, names.kv_sep)
        keys = {o.key_or_group for o in parsed}
        for node, key in ((config, "output_dir"), (config.hydra.run, "dir"), (config.hydra.sweep, "dir")):
            raw: Any = node._get_node(key)._value()  # type: ignore[union-attr]  # it may have references
            if str(raw).startswith("~"):
                node[key] = os.path.expanduser(raw)
        if "hydra.run.dir" in keys:  # Hydra's name of output_dir
            config.output_dir = OmegaConf.to_container(config.hydra.run)["dir"]  # type: ignore[index, call-overload]
        if "Optuna" in str(config.hydra.sweeper.get("_target_")) and "hydra.sweeper.direction" not in keys:
            config.hydra.sweeper.direction = "maximize"


class _Composed(NamedTuple):
    """Hydra's composition of choices alone."""

    job: bytes  # the pickled configuration of a job
    choices: dict[str, str]  # group -> choice
    hydra: DictConfig  # Hydra's own configuration


class _Key:
    """A loader as the key of a cache. Two loaders are equal if they search the same places."""

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader, self.paths = loader, tuple((e.provider, e.path) for e in loader.config_search_path.get_path())

    def __hash__(self) -> int:
        return hash(self.paths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.paths == other.paths


# The jobs of a grid share most choices. Hydra takes 60 ms for each combination, a copy 1 ms.
@lru_cache(maxsize=512)
def _compose_cached(key: _Key, lines: tuple[str, ...], files: object) -> _Composed:
    config = ConfigLoaderImpl._load_configuration_impl(key.loader, NAME, list(lines), RunMode.RUN, True, False)
    with flag_override(config, ["struct", "readonly"], [False, False]):
        hydra = config.pop("hydra")
    return _Composed(pickle.dumps(config), {str(key): str(name) for key, name in hydra.runtime.choices.items()}, hydra)


# Hydra asks twice for each command line.
@lru_cache(maxsize=16)
def _compose_sweep_cached(key: _Key, lines: tuple[str, ...], files: object) -> bytes:
    return pickle.dumps(ConfigLoaderImpl._load_configuration_impl(key.loader, NAME, list(lines), RunMode.MULTIRUN, True, False))


def stamp(own: Path | None) -> tuple[tuple[str, int], ...]:
    """Return the paths and times of the files in a folder of YAMLs, by which a change is found."""
    return () if own is None else tuple((str(path), path.stat().st_mtime_ns) for path in registry.yamls(own))


def explain(error: Exception) -> str:
    """Return an error of Hydra or OmegaConf in one line. For a missing YAML it names the nearest one."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        folder, _, name = error.missing_cfg_file.removesuffix(".yaml").rpartition("/")
        there = [*(error.options or ()), *(path.stem for path in registry.yamls(registry.CONF / folder, deep=False))]
        return " ".join(str(error).split("\n")[0].rstrip(".").split()) + nearest(name, there)
    cause = error.__cause__
    return one_line(error) if one_line(error) or cause is None else one_line(Exception(str(cause)))


def make_loader(own: Path | None = None) -> ConfigLoader:
    """Return a loader of Contrafed's configuration. ``own`` is the user's folder of YAMLs."""
    hydra.version.setbase("1.3")
    setup_globals()
    path = create_config_search_path(f"file://{registry.CONF}")
    if own is not None:
        path.prepend(provider="command-line", path=f"file://{own}", anchor=SearchPathQuery(provider="schema"))
    return ConfigLoader(path)


def to_plain(config: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain Python, with references resolved. Raises ``UserError`` for a broken reference."""
    try:
        return OmegaConf.to_container(config, resolve=True)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {one_line(error)}") from error
