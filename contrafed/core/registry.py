"""Finding the code that stands behind a choice: ``conf/GROUP/NAME.yaml`` -> ``PACKAGE/NAME.py``.

A YAML may say ``module: other`` when several choices share one file, or ``module: my_package.other`` for a file of somebody
else's package. Nothing is imported before it is chosen.
"""

import contextlib
import importlib
import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from contrafed.core.errors import UserError, unknown

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parent.parent
# A checkout has conf/ beside the package contrafed, a wheel inside it.
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())

# The keys every choice may carry beside its own settings.
COMMON_KEYS = frozenset({"name", "module"})


def yamls(folder: Path, *, deep: bool = True) -> list[Path]:
    """Return the YAMLs in a folder, with ``deep`` also below it, without those that editors and systems hide."""
    return sorted(path for path in folder.glob("**/*.yaml" if deep else "*.yaml") if not path.name.startswith("."))


def choices(group: str, own: Path | None = None) -> dict[str, str]:
    """Return {choice: its one-line description}, read from the first comment of each YAML of the group.

    ``own`` is a folder of the user's beside ``conf/``, with the same groups as folders.
    """
    found = dict(_read_shipped(group))
    if own is not None:
        found |= _read_choices(own / group, deep=group == "experiment")
    return dict(sorted(found.items()))


@lru_cache(maxsize=64)  # each job of a sweep asks for every group several times
def _read_shipped(group: str) -> dict[str, str]:
    return _read_choices(CONF / group, deep=group == "experiment")


def _read_choices(folder: Path, *, deep: bool) -> dict[str, str]:
    """Return {choice: its description} of a folder. The experiments of a paper are a folder of their own, hence ``deep``."""
    found = {}
    for path in yamls(folder, deep=deep):
        if not path.stem.startswith("_"):
            lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
            # Hydra wants its own "@package" comment first in an experiment.
            first = next((line for line in lines if not line.startswith("# @package")), "")
            name = path.relative_to(folder).with_suffix("").as_posix()
            found[name] = first.removeprefix("#").strip() if first.startswith("#") else ""
    return found


def find(package: str, group: str, settings: Mapping[str, Any]) -> ModuleType:
    """Import the module of ``settings['module']`` or ``settings['name']`` from ``package``; a dotted name says all itself.

    Raises ``UserError`` naming the choices of ``group`` when there is none, or file and line where its import fails.
    """
    name, choice = str(settings.get("module") or settings.get("name")), f"{group}={settings.get('name')}"
    target = name if "." in name else f"{package}.{name}"
    try:
        module = importlib.import_module(target)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if target != missing and not target.startswith(f"{missing}."):
            raise UserError(f"{choice} needs the Python package '{missing}' ({_place(error)})") from error
        if "." in name:
            raise UserError(f"{choice}: there is no module {target}; is its package installed, or on PYTHONPATH?") from error
        raise unknown(group, str(settings.get("name")), choices(group)) from None
    except Exception as error:
        what = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise UserError(f"{choice} cannot be imported: {_place(error)}: {type(error).__name__}: {what}") from error
    if not is_dataclass(getattr(module, "Config", None)):
        if "." in name:
            raise UserError(f"{choice}: {target} has no dataclass Config, which names its settings")
        raise unknown(group, str(settings.get("name")), choices(group))
    if inspect.get_annotations(module.Config) and "__dataclass_fields__" not in vars(module.Config):
        raise UserError(f"{choice}: {target}.Config only inherits from a dataclass: write @dataclass(frozen=True) above it")
    return module


def _place(error: Exception) -> str:
    """Return the file and line that an import failed at."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"{own[-1].filename}, line {own[-1].lineno}"


def line_in(file: str, error: Exception) -> traceback.FrameSummary:
    """Return the last line of a file that led to an error, or, where none did, the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])


def short_place(file: str, line: int | None) -> str:
    """Return a place as it is said: the file with its folder, and the line."""
    return f"{'/'.join(Path(file).parts[-2:])}, line {line}"


@contextlib.contextmanager
def blamed(what: str, file: str) -> Iterator[None]:
    """Raise what goes wrong in an author's code as a ``UserError`` that says ``what``, and the last line of their ``file``."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        where = line_in(file, error)
        said = f"{type(error).__name__}: {' '.join(str(error).split())} ({short_place(where.filename, where.lineno)})"
        raise UserError(f"{what}: {said}") from error


def check_functions(module: ModuleType, choice: str, wanted: Mapping[str, str]) -> None:
    """Raise ``UserError`` unless ``module`` has one of the functions ``wanted`` {name: its parameters}, and it takes these.

    ``choice`` is what the error begins with: ``model=small``.
    """
    there = {name: parameters for name, parameters in wanted.items() if hasattr(module, name)}
    for name, parameters in (there or dict([next(iter(wanted.items()))])).items():
        if not _takes(getattr(module, name, None), parameters.split(", ")):
            raise UserError(f"{choice}: {module.__name__} must define {name}({parameters})")


def _takes(function: Any, arguments: Sequence[str], named: Sequence[str] = ()) -> bool:
    """Whether something can be called with so many arguments, and with others by these names."""
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys(named))
    except (TypeError, ValueError):
        return False
    return True


def only_subclass(module: ModuleType, base: type[T], wanted: str = "") -> type[T]:
    """Return the one subclass of ``base`` that ``module`` itself defines; a method's file needs no registration.

    ``wanted``: what authors inherit, where that is not ``base`` itself. Raises ``UserError`` for none or several, and as
    ``check_overrides``.
    """
    own = own_subclasses(module, base)
    if len(own) != 1:
        inheriting = f"class that inherits {wanted or f'{base.__module__}.{base.__name__}'}"
        raise UserError(f"{module.__name__} must define exactly one {inheriting}, found {len(own)}")
    check_overrides(own[0], base)
    return own[0]


def check_overrides(found: type, base: type) -> None:
    """Raise ``UserError`` for what a class puts in the place of a function of ``base``, but cannot be called as that one is."""
    for name, inherited in vars(base).items():
        if not inspect.isfunction(getattr(base, name)) and not isinstance(inherited, classmethod):
            continue
        needed = [p for p in inspect.signature(getattr(base, name)).parameters.values() if p.default is p.empty]
        positional = [p.name for p in needed if p.kind is p.POSITIONAL_OR_KEYWORD]
        named = [p.name for p in needed if p.kind is p.KEYWORD_ONLY]
        if not _takes(getattr(found, name), positional, named):
            must = f"{found.__name__}.{name} must take ({', '.join((*positional, *(['*'] if named else []), *named))})"
            kind = ", a classmethod" if isinstance(inherited, classmethod) else ""
            raise UserError(f"{found.__module__}: {must}, as {base.__name__}.{name} does{kind}")


def own_subclasses(module: ModuleType, base: type[T]) -> list[type[T]]:
    """Return the subclasses of ``base`` that ``module`` itself defines, not those that it imports."""
    classes = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base))
    return [found for found in classes if found.__module__ == module.__name__]
