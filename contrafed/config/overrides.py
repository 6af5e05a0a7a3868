"""Parse the overrides of a command line, ``KEY=VALUE``, with Hydra's parser."""

import shlex

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from contrafed.config.sweep_grid import format_value
from contrafed.core import registry
from contrafed.core.errors import UserError

SERVER = "strategy/server"


def rename_arguments(arguments: list[str]) -> list[str]:
    """Return arguments with Hydra's keys: ``strategy.server=NAME`` is ``strategy/server=NAME``, ``shard=1/4`` is the sweeper's.

    For the user the strategy on the server is a key of the method. It has its own hyper-parameters.
    """
    parts = (argument.partition("=") for argument in arguments)
    return [
        argument if argument.startswith("-") or not sign else hydra_key(key) + sign + value
        for argument, (key, sign, value) in zip(arguments, parts, strict=True)
    ]


def hydra_key(key: str) -> str:
    """Return Hydra's key for the user's ``key``."""
    choice = {"strategy.server": SERVER, "shard": "hydra.sweeper.shard"}.get(key.removeprefix("+"), key)
    # Hydra's + adds a choice where there is none. Here all have a default.
    return choice.removeprefix("+") if (registry.CONF / choice.removeprefix("+")).is_dir() else choice


def quote_value(override: str) -> str:
    """Return an override with its value in quotes if Hydra can read it only so, such as a path that contains =."""
    key, sign, value = override.partition("=")
    if sign and value and not value.endswith(",") and not set(value) & set("[]{}'\"\\") and not _is_readable(override):
        # A list of values, of a sweep, or one value with a comma: each is quoted.
        return f"{key}={','.join(map(format_value, value.split(',')))}"
    return override


def _is_readable(override: str) -> bool:
    """Whether Hydra can read an override."""
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def suggest_quotes(override: str) -> str:
    """Return how a shell takes an override whose value has quotes or brackets in it, empty if that is not its mistake."""
    key, sign, value = override.partition("=")
    quoted = f"{key}={format_value(value)}"
    if not sign or not set(value) & set("[]{}'\"\\") or not _is_readable(quoted):
        return ""
    shown = shlex.quote(quoted) if set(quoted) & set('$`!"') or "\\\\" in quoted else f'"{quoted}"'
    return f" Fix: quote it, in most shells {shown}"


def parse_overrides(overrides: list[str], loader: ConfigLoader | None = None) -> list[Override]:
    """Return overrides as Hydra reads them. ``loader`` finds the choices of a ``glob()``. Raises ``UserError``."""
    parser, parsed = OverridesParser.create(config_loader=loader), []
    for override in overrides:
        try:
            try:
                parsed += parser.parse_overrides([override])
            except HydraException:
                parsed += parser.parse_overrides([quote_value(override)])
        except HydraException as error:
            if override.endswith(","):
                line = f"{override} ends with a comma: leave it out, or write the value that is missing after it"
            else:
                line = f"cannot read '{override}', which must be KEY=VALUE such as strategy=pmfl: {one_line(error)}"
                if quoted := suggest_quotes(override):
                    line = f"{override.partition('=')[0]}: Hydra reads quotes and brackets in a value as its own.{quoted}"
            raise UserError(line) from error
    return parsed


def list_values(override: Override) -> dict[str, str]:
    """Return the texts of an override's values, each with an override for it alone. Raises ``UserError`` for a random order."""
    if not override.is_sweep_override():
        line = str(override.input_line)
        return {line.partition("=")[2]: line}
    key = override.get_key_element()
    try:
        if getattr(override.value(), "shuffle", False):  # another order at every call
            raise HydraException
        return {value: f"{key}={value}" for value in map(str, override.sweep_string_iterator())}
    except HydraException as error:
        raise UserError(f"{override.input_line} cannot be listed here: write the values out, as {key}=a,b,c") from error


def one_line(error: Exception) -> str:
    """Return an error's text on one line, without a link."""
    return " ".join(str(error).split("See https://")[0].split())[:300]
