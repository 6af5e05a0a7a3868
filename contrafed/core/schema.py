"""Check configurations: a dataclass states names, types and ranges. Every default is in a YAML file under conf/.

A method, model, data set, partition or participation pattern declares a dataclass next to its code:

    @dataclass(frozen=True)
    class Config:
        temperature: Annotated[float, Range(gt=0)]
        scope: Literal["across", "within"]
        max_clients: int | None

and ``build(Config, mapping, "strategy")`` turns the composed YAML into it or raises one clear ``UserError``.
"""

import contextlib
import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from contrafed.core.errors import UserError, unknown

T = TypeVar("T")
MAX_DIFFERENCES = 5  # that one error lists
KINDS = "which no key can be; int, float, bool, str, dict, Literal, list[...], tuple[...] can"


@dataclass(frozen=True)
class Range:
    """Bounds of a number, for ``Annotated[float, Range(gt=0, le=1)]``."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def check(self, value: float, where: str) -> None:
        """Raise ``UserError`` if ``value`` is outside."""
        inside = (
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )
        if not inside:
            raise UserError(f"{where}: {value} is not allowed. Fix: a number {self}")

    def __str__(self) -> str:
        signs = ((">=", self.ge), (">", self.gt), ("<=", self.le), ("<", self.lt))
        return " and ".join(f"{sign} {bound:g}" for sign, bound in signs if bound is not None)


@dataclass(frozen=True)
class OnlyWith:
    """Where a key counts, for ``Annotated[float, OnlyWith("scheme", "shards")]``.

    Another key of its group then has one of ``values``. Without any, it is set: neither null, 0, false nor empty.
    """

    key: str
    values: tuple[Any, ...]

    def __init__(self, key: str, *values: Any) -> None:
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "values", values)

    def holds(self, config: Any) -> bool:
        """Return whether the key counts in ``config``, its dataclass."""
        value = getattr(config, self.key)
        return value in self.values if self.values else bool(value)


def rules_of(hint: Any) -> list[OnlyWith]:
    """Return the rules ``OnlyWith`` of a type hint."""
    return [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, OnlyWith)]


def build(cls: type[T], values: Mapping[str, Any], where: str, ignore: frozenset[str] = frozenset()) -> T:
    """Return ``cls(**values)`` after checking names, types and ranges.

    Args:
        cls: The dataclass.
        values: The composed keys.
        where: Path that errors name: ``strategy`` gives ``strategy.temperature``. Empty at the top level.
        ignore: Keys that are not part of ``cls``.

    Raises:
        UserError: For an unknown or missing key, a wrong type, or a value out of range.
    """
    prefix = f"{where}." if where else ""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: hints[f.name] for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name, hint in fields.items():
        for rule in rules_of(hint):
            if rule.key not in fields:
                raise UserError(f"{prefix}{name}: OnlyWith names {rule.key}, which {cls.__name__} does not have")
    for key in values:
        if key not in fields and key not in ignore:
            raise unknown(f"{where} key" if where else "key", str(key), fields)
    missing = [name for name in fields if name not in values]
    if missing:
        raise UserError(f"{prefix}{missing[0]}: missing. Fix: add it to the YAML")
    return cls(**{name: convert(hint, values[name], f"{prefix}{name}") for name, hint in fields.items()})


def convert(hint: Any, value: Any, where: str) -> Any:
    """Return ``value`` as the type ``hint``. Raises ``UserError`` naming ``where`` if that is not possible."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        value = convert(args[0], value, where)
        for rule in args[1:]:
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(rule, Range) and isinstance(item, (int, float)):
                    rule.check(item, where)
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [option for option in args if option is not type(None)]
        failures: list[UserError] = []
        for option in options:
            try:
                return convert(option, value, where)
            except UserError as error:
                failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        kinds = [_base(option) for option in options]
        if type(value) is int and int in kinds:  # then it is out of range
            raise failures[kinds.index(int)]
        raise UserError(f"{where}: {value!r} is not allowed. Fix: {' or '.join(map(_describe_type, args))}")
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where}: {value!r} is not allowed. Fix: one of {', '.join(map(str, args))}")
        return value
    if origin in (tuple, list):
        if isinstance(value, str) or not isinstance(value, typing.Sequence):
            raise UserError(f"{where}: {value!r} is not a list. Fix: {where}=[{value}], several as {where}=[A,B]")
        hints = args[:1] * len(value) if origin is list or args[1:] == (...,) else args
        if len(hints) != len(value):
            raise UserError(f"{where}: {value!r} is not allowed. Fix: a list of {len(hints)}")
        return origin(convert(hints[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is not None:
        raise UserError(f"{where}: Config has {hint}, {KINDS}")
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: {value!r} is not allowed. Fix: set its keys, as {where}.KEY=VALUE")
        return build(hint, value, where)  # type: ignore[arg-type]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    # Scientific notation without a dot (1e-3) is a string in YAML 1.1.
    if hint is float and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if hint is Any:
        return value
    if hint not in (int, float, bool, str, dict):
        raise UserError(f"{where}: Config has {_name(hint)}, {KINDS}")
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where}: {value!r} is not allowed. Fix: {_name(hint)}")
    if hint is int and abs(value) >= 2**63:
        raise UserError(f"{where}: {value} is not allowed. Fix: a number below 2^63")
    if hint is float and not math.isfinite(value):
        raise UserError(f"{where}: {value} is not allowed. Fix: a finite number")
    return value


def _base(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else hint


def _describe_type(hint: Any) -> str:
    """Return the name of a type, with its bounds for a number."""
    rules = typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
    return " ".join([_name(hint), *(str(rule) for rule in rules if isinstance(rule, Range))])


def _name(hint: Any) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    if hint in words:
        return words[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _name(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(arg) for arg in args)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    return str(getattr(hint, "__name__", hint))


def flatten_keys(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return {dotted key: value} of nested mappings, in their order. An empty mapping gives no key."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flatten_keys(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def plain_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with whole floats as integers, because 1 and 1.0 on a command line are the same number."""
    return {key: int(v) if isinstance(v, float) and v.is_integer() else v for key, v in values.items()}


def describe_differences(old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return which settings differ, other choices first, and a fix.

    Args:
        old: {dotted key: value} of the stored configuration.
        new: The same of the configuration that is asked for.
        keys: The keys that differ.
    """
    groups = [key.removesuffix(".name") for key in keys if key.endswith(".name")]
    groups = [group for group in groups if f"{group}.name" in old and f"{group}.name" in new]
    left = [key for key in keys if not any(key.startswith(f"{group}.") for group in groups)]
    lines, fixes = [], []
    for name, key in [*((group, f"{group}.name") for group in groups), *((key, key) for key in left)]:
        now, before = (_show(values[key]) if key in values else "(none)" for values in (new, old))
        inside = sum(other.startswith(f"{name}.") for other in keys) - 1
        more = f" and {inside} of its keys" if inside > 0 else ""
        lines.append(f"{name}={now} (there: {before}){more}")
        fixes.append(f"{name}={before}" if key in old else "")
    if len(lines) > MAX_DIFFERENCES:
        lines = [*lines[:MAX_DIFFERENCES], f"{len(lines) - MAX_DIFFERENCES} more"]
    fix = fixes[0] if len(fixes) == 1 and fixes[0] else "the same settings"
    return f"{', '.join(lines)}. Fix: {fix}, or another output_dir"


def _show(value: Any) -> str:
    """Return a value as a command line has it."""
    return {None: "null", True: "true", False: "false"}[value] if value is None or isinstance(value, bool) else str(value)
