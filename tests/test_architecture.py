"""The architecture of docs/ARCHITECTURE.md: imports only point down, and files and functions are short."""

import ast
import re
from functools import cache

from messages import ROOT

# The rooms of the framework, from the ground up: a file imports its own room and those above it in this list.
ROOMS = ("core", "data", "training", "client_app", "server", "engines", "config", "check", "runs", "report", "deploy")
# The folders of methods and choices, and the room up to which each may import.
LEAVES = {"models": "core", "partitions": "data", "clients": "training", "strategies": "engines"}
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 400, 60


def sources(*folders):
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


FRAMEWORK = sources("contrafed")
HOUSE = [*FRAMEWORK, *sources(*LEAVES), *sorted(ROOT.glob("*.py"))]
ALL_FILES = sorted({*HOUSE, *sources("benchmarks", "conf", "docs", "tests", "hydra_plugins")})
parse = cache(lambda path: ast.parse(path.read_text(encoding="utf-8")))


def module_of(path):
    """Return the name by which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "contrafed" or len(parts) == 1 else ("contrafed", *parts)).removesuffix(".__init__")


def room_of(module):
    """Return the room, or folder of choices, of a module, or None for other modules and those that may import all."""
    parts = module.split(".")
    return parts[1] if parts[0] == "contrafed" and len(parts) > 1 and parts[1] in (*ROOMS, *LEAVES) else None


def list_imports(path):
    """Return every import of a file with its line, also those in functions and for types."""
    for item in ast.walk(parse(path)):
        if isinstance(item, ast.Import):
            yield from ((alias.name, item.lineno) for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            assert item.level == 0, f"{path}: a relative import"
            yield from ((f"{item.module}.{alias.name}", item.lineno) for alias in item.names)


def runs_up(room, other):
    """Return whether a file of ``room`` may not import one of ``other``."""
    if room is None or other is None or room == other:
        return False
    if other in LEAVES:
        return room in ROOMS or room != "strategies" or other != "clients"
    return ROOMS.index(other) > ROOMS.index(LEAVES.get(room, room))


def test_no_import_runs_up():
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in HOUSE
        for name, line in list_imports(path)
        if runs_up(room_of(module_of(path)), room_of(name))
    ]
    assert found == []


def test_what_runs_up_is_noticed():
    assert runs_up("engines", "config")
    assert runs_up("engines", "strategies")
    assert runs_up("clients", "models")
    assert runs_up("core", "data")
    assert not runs_up("runs", "engines")
    assert not runs_up("clients", None)
    assert not runs_up("clients", "training")


def test_no_imports_go_round():
    modules = {module_of(path): path for path in HOUSE}
    # ``from contrafed.core import codec`` needs the module contrafed.core.codec.
    whole = [(module, name, name.rpartition(".")[0]) for module, path in modules.items() for name, _ in list_imports(path)]
    needs: dict = {module: set() for module in modules}
    for module, name, parent in whole:
        needs[module] |= {name if name in modules else parent} & modules.keys() - {module}
    while free := {module for module, others in needs.items() if not others & needs.keys()}:
        needs = {module: others for module, others in needs.items() if module not in free}
    assert needs == {}


def test_no_file_is_too_long():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL_FILES}
    assert {name: length for name, length in lengths.items() if length > LINES_OF_A_FILE} == {}


def test_no_function_is_too_long():
    found = {}
    for path in [*HOUSE, *sources("benchmarks", "docs")]:
        for item in ast.walk(parse(path)):
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (item.end_lineno or 0) - item.lineno + 1
                if length > LINES_OF_A_FUNCTION:
                    found[f"{path.relative_to(ROOT)}:{item.lineno} {item.name}"] = length
    assert found == {}


def functions_of(path):
    """Return the functions of a file, those of a class as CLASS.NAME."""
    found = set()
    for item in parse(path).body:
        inside = item.body if isinstance(item, ast.ClassDef) else [item]
        prefix = f"{item.name}." if isinstance(item, ast.ClassDef) else ""
        found |= {prefix + function.name for function in inside if isinstance(function, ast.FunctionDef)}
    return found


def test_the_path_of_a_key_to_the_loss_is_as_written_and_short():
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("## From a key to the loss")[2]
    steps = re.findall(r"^\d+\. `(\S+\.py)`: `(\S+)`", text.partition("\n## ")[0], re.MULTILINE)
    assert 5 <= len(steps) <= 8
    for file, function in steps:
        assert function in functions_of(ROOT / file), (file, function)


def documented_arguments(function):
    """Return the items below ``Args:`` in a function's docstring. A line that is no item counts as one."""
    section = re.search(r"(?ms)^Args:\n(.*?)(?=^\S|\Z)", ast.get_docstring(function) or "")
    return [item.partition(":")[0].lstrip("*") for item in re.findall(r"(?m)^ {4}(\S.*)", section[1])] if section else []


def test_documented_arguments_exist():
    unknown, count = [], 0
    for path in ALL_FILES:
        for function in ast.walk(parse(path)):
            if isinstance(function, ast.FunctionDef):
                found = function.args
                arguments = {
                    each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg) if each
                }
                items = documented_arguments(function)
                count += len(items)
                unknown += [f"{path.name}: {function.name}: {item}" for item in items if item not in arguments]
    assert unknown == []
    assert count > 100
