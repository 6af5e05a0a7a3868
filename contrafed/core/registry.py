"""Find the code behind a choice: ``conf/GROUP/NAME.yaml`` -> ``PACKAGE/NAME.py``.

A YAML may contain ``module: other`` if several choices share one file, or ``module: my_package.other`` for a file of another
package. Only chosen modules are imported.
"""

import contextlib
import importlib
import inspect
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from contrafed.core.errors import UserError, unknown

T = TypeVar("T")

_PACKAGE = Path(__file__).resolve().parent.parent
# A checkout has conf/ next to the package contrafed, a wheel inside it.
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())

# Keys that every choice may have in addition to its own settings.
COMMON_KEYS = frozenset({"name", "module"})


def yamls(folder: Path, *, deep: bool = True) -> list[Path]:
    """Return the YAML files of a folder, without hidden files.

    Args:
        folder: The folder.
        deep: Include its subfolders.
    """
    return sorted(path for path in folder.glob("**/*.yaml" if deep else "*.yaml") if not path.name.startswith("."))


def choices(group: str, own: Path | None = None) -> dict[str, str]:
    """Return {choice: its one-line description}, read from the first comment of each YAML of the group.

    Args:
        group: The group's name.
        own: A user's folder in addition to ``conf/``, with the same groups as subfolders.
    """
    found = dict(_read_shipped(group))
    if own is not None:
        found |= _read_choices(own / group, deep=group == "experiment")
    return dict(sorted(found.items()))


@lru_cache(maxsize=64)  # each job of a sweep asks for every group several times
def _read_shipped(group: str) -> dict[str, str]:
    return _read_choices(CONF / group, deep=group == "experiment")


def _read_choices(folder: Path, *, deep: bool) -> dict[str, str]:
    """Return {choice: its description} of a folder. A paper's experiments are in a subfolder, which ``deep`` includes."""
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
    """Import the module of ``settings['module']`` or ``settings['name']`` from ``package``.

    A name with a dot is the module's full name.

    Raises:
        UserError: If there is no such module, with the choices of ``group``, or if its import fails, with file and line.
    """
    name, choice = str(settings.get("module") or settings.get("name")), f"{group}={settings.get('name')}"
    target = name if "." in name else f"{package}.{name}"
    try:
        module = importlib.import_module(target)
    except ModuleNotFoundError as error:
        missing = str(error.name)
        if target != missing and not target.startswith(f"{missing}."):
            raise UserError(f"{choice} needs the Python package '{missing}' ({_locate_import_error(error)})") from error
        if "." in name:
            raise UserError(f"{choice}: there is no module {target}. Fix: install its package, or set PYTHONPATH") from error
        raise unknown(group, str(settings.get("name")), choices(group)) from None
    except Exception as error:
        what = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
        raise UserError(
            f"{choice} cannot be imported: {_locate_import_error(error)}: {type(error).__name__}: {what}"
        ) from error
    if not is_dataclass(getattr(module, "Config", None)):
        if "." in name:
            raise UserError(f"{choice}: {target} has no dataclass Config, which names its settings")
        raise unknown(group, str(settings.get("name")), choices(group))
    if inspect.get_annotations(module.Config) and "__dataclass_fields__" not in vars(module.Config):
        raise UserError(f"{choice}: {target}.Config only inherits from a dataclass: write @dataclass(frozen=True) above it")
    return module


def _locate_import_error(error: Exception) -> str:
    """Return the file and line where an import failed."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    return f"{own[-1].filename}, line {own[-1].lineno}"


def line_in(file: str, error: Exception) -> traceback.FrameSummary:
    """Return the last line of ``file`` that led to an error, or the line that raised it if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if frame.filename == file), frames[-1])


def short_place(file: str, line: int | None) -> str:
    """Return a place for messages: the file with its folder, and the line."""
    return f"{'/'.join(Path(file).parts[-2:])}, line {line}"


@contextlib.contextmanager
def report_author_errors(what: str, file: str) -> Iterator[None]:
    """Raise errors in an author's code as a ``UserError``, with ``what`` and the last line of the author's ``file``."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        where = line_in(file, error)
        said = f"{type(error).__name__}: {' '.join(str(error).split())} ({short_place(where.filename, where.lineno)})"
        raise UserError(f"{what}: {said}") from error


def check_functions(module: ModuleType, choice: str, wanted: Mapping[str, str]) -> None:
    """Check that ``module`` has one of the functions ``wanted``, and that it accepts their parameters.

    Args:
        module: The module.
        choice: The start of the error, such as ``model=small``.
        wanted: {function name: its parameters}.

    Raises:
        UserError: If it has none of them, or one with other parameters.
    """
    there = {name: parameters for name, parameters in wanted.items() if hasattr(module, name)}
    for name, parameters in (there or dict([next(iter(wanted.items()))])).items():
        if not _takes(getattr(module, name, None), parameters.split(", ")):
            raise UserError(f"{choice}: {module.__name__} must define {name}({parameters})")


def _takes(function: Any, arguments: Sequence[str], named: Sequence[str] = ()) -> bool:
    """Return whether ``function`` can be called with these positional arguments and these keyword arguments."""
    try:
        inspect.signature(function).bind(*arguments, **dict.fromkeys(named))
    except (TypeError, ValueError):
        return False
    return True


def only_subclass(module: ModuleType, base: type[T], wanted: str = "") -> type[T]:
    """Return the one subclass of ``base`` that ``module`` defines. A method's file needs no registration.

    Args:
        module: The module.
        base: The base class.
        wanted: The class that authors inherit, if it is not ``base``.

    Raises:
        UserError: If there is none or several, or if an override cannot be called as its original (``check_overrides``).
    """
    own = own_subclasses(module, base)
    if len(own) != 1:
        inheriting = f"class that inherits {wanted or f'{base.__module__}.{base.__name__}'}"
        raise UserError(f"{module.__name__} must define exactly one {inheriting}, found {len(own)}")
    check_overrides(own[0], base)  # type: ignore[arg-type]
    return own[0]


@cache
def check_overrides(found: type, base: type) -> None:
    """Check that each override of a function of ``base`` can be called like the original. Each class is checked once.

    Raises:
        UserError: For the first one that cannot.
    """
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
