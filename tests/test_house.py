"""The house as docs/ARCHITECTURE.md draws it: imports only run down, files and functions stay short."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Who may import whom: a file imports its own package and those of lower floors.
FLOORS = {
    "core": 0, "partitions": 1, "models": 1, "clients": 2, "strategies": 3, "simulation": 3, "contrafed": 4, "main": 5,
    "report": 5,
}  # fmt: skip
LINES_OF_A_FILE, LINES_OF_A_FUNCTION = 400, 60


def sources(*folders):
    names = [folder for folder in folders if (ROOT / folder).is_dir()]
    files = [path for folder in names for path in sorted((ROOT / folder).rglob("*.py"))]
    return [*files, *sorted(ROOT.glob("*.py"))]


HOUSE = sources(*FLOORS)
ALL = sorted({*HOUSE, *sources("benchmarks", "conf", "docs", "tests")})


def package_of(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    """Every import of a file with its line, also those in functions and for types alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def runs_up(package, other):
    """Whether a file of ``package`` may not import ``other``."""
    if other not in FLOORS or package == other:
        return False
    return FLOORS[other] >= FLOORS[package]


def test_no_import_runs_up():
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in HOUSE
        for name, line in imported(path)
        if runs_up(package_of(path), name.partition(".")[0])
    ]
    assert found == []
    assert {package_of(path) for path in HOUSE} >= set(FLOORS)


def test_what_runs_up_is_noticed():
    assert runs_up("simulation", "contrafed")
    assert runs_up("simulation", "strategies")
    assert runs_up("strategies", "simulation")
    assert runs_up("core", "partitions")
    assert not runs_up("contrafed", "simulation")
    assert not runs_up("clients", "torch")


def test_no_imports_go_round():
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in HOUSE}
    # ``from contrafed.core import codec`` needs the module contrafed.core.codec.
    whole = [(module, name, name.rpartition(".")[0]) for module, path in modules.items() for name, _ in imported(path)]
    needs: dict = {module: set() for module in modules}
    for module, name, parent in whole:
        needs[module] |= {name if name in modules else parent} & modules.keys() - {module}
    while free := {module for module, others in needs.items() if not others & needs.keys()}:
        needs = {module: others for module, others in needs.items() if module not in free}
    assert needs == {}


def test_no_file_is_too_long():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL}
    assert {name: length for name, length in lengths.items() if length > LINES_OF_A_FILE} == {}


def test_no_function_is_too_long():
    found = {}
    for path in [*HOUSE, *sources("benchmarks", "docs")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > LINES_OF_A_FUNCTION:
                    found[f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"] = length
    assert found == {}
