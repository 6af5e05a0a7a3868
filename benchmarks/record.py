"""Record what a checkout composes and computes, and compare two records: the proof that a refactoring changed nothing.

    python benchmarks/record.py make CHECKOUT OUT        write the record of a checkout into the folder OUT
    python benchmarks/record.py compare OLD NEW          compare two records, with exit status 1 if they differ
    python benchmarks/record.py digest RECORD            print the digests of a record, for tests/compositions.json

A record has four parts. ``--only PART ...`` makes or compares some of them.

jobs     jobs.jsonl.gz: the configuration of every job of every experiment, at full scale and small, and of every choice alone
help     help.txt: what ``python main.py --help`` prints (differences are reported, but do not fail the comparison)
runs     runs/METHOD-ENGINE.csv: metrics.csv of ten short runs
golden   golden.json: the float literals of the tests with six significant digits or more

The tables below are applied to every record of a checkout whose keys have the old names.
"""

import argparse
import ast
import gzip
import hashlib
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from compositions import CHOICES, compose_task, describe_project, enter_checkout
from renamed import RENAMED, RENAMED_CELLS, RENAMED_VALUES

# New dotted keys whose values are dotted keys themselves, which RENAMED renames.
KEY_VALUES = ("published.plot.x", "published.plot.line", "published.plot.panel")

# New dotted keys that the comparison ignores, with all keys below them: bookkeeping, and keys that came later.
BOOKKEEPING = (
    *("output_dir", "changed", "objective", "federation_seed", "engine.max_norm_ratio", "partition.max_examples"),
    *("model.image_size", "model.pretrained", "model.freeze"),
    *("model.buffers", "strategy.local.last_batch", "strategy.history_step", "strategy.history_share"),
    *("select_on", "partition.validation_fraction", "dataset.validation_fraction", "partition.feature_shift", "dataset.kind"),
    *("settings", "clock", "schedule", "participation.deadline", "participation.over_select", "participation.late"),
    "participation.staleness_a",
)
# A method -> keys that it got later, which are not compared.
LATER = {"fedbabu": ("strategy.tune_lr", "strategy.tune_momentum")}

PARTS = ("jobs", "help", "runs", "golden")
MIN_DIGITS = 6  # significant digits of a golden value
MAX_SHOWN = 20  # differences that are printed
MAX_ATTEMPTS = 3  # on a busy machine Ray may need more than its own limit of 30 seconds to start
ABSENT = "(absent)"

METHODS = ("fedavg", "pmfl", "moon", "fedcrl", "scaffold")
ENGINES = {"local": ["engine=local"], "ray": ["engine=ray", "engine.workers=2"]}
SHORT_RUN = (
    "num_nodes=8", "num_rounds=4", "eval_every=2", "eval_nodes=true", "model=mlp", "tracker=none", "partition.min_node_size=16",
    "partition.test_fraction=0.2", "participation=bernoulli", "participation.beta=null", "participation.mean_probability=0.5",
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------- make


def build_environment(checkout: Path) -> dict[str, str]:
    """Return the environment of a process that runs a checkout's code: its packages first, one thread, no GPU."""
    fixed = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100"}
    return os.environ | fixed


def run_python(checkout: Path, *arguments: str) -> str:
    """Run Python in a checkout and return its output. Raises ``SystemExit`` with its last lines if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=build_environment(checkout), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"record: {' '.join(arguments)} failed:\n{(done.stdout + done.stderr)[-5000:]}")
    return done.stdout


def make_record(checkout: Path, out: Path, parts: Iterable[str], processes: int) -> None:
    """Write the record of a checkout."""
    out.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("spawn")  # the workers import another checkout's code than this process
    with ProcessPoolExecutor(processes, context, initializer=enter_checkout, initargs=(str(checkout),)) as pool:
        is_renamed, experiments, choices = pool.submit(describe_project).result()
        write_about(checkout, out, is_renamed)
        if "jobs" in parts:
            tasks: list[tuple[str, Any]] = [("experiment", name) for name in experiments]
            tasks += [("choices", choices[start : start + 20]) for start in range(0, len(choices), 20)]
            lines = list[str]()
            for number, found in enumerate(pool.map(compose_task, tasks), 1):
                lines += found
                print(f"{number} of {len(tasks)} experiments and parts of the choices", file=sys.stderr, flush=True)
            content = "".join(f"{line}\n" for line in lines).encode()
            (out / "jobs.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    imported = run_python(checkout, "-c", "import contrafed; print(contrafed.__file__)").strip()
    assert Path(imported).is_relative_to(checkout), imported
    if "help" in parts:
        (out / "help.txt").write_text(run_python(checkout, "main.py", "--help"), encoding="utf-8")
    if "golden" in parts:
        (out / "golden.json").write_text(json.dumps(find_golden(checkout / "tests"), indent=1) + "\n", encoding="utf-8")
    if "runs" in parts:
        (out / "runs").mkdir(exist_ok=True)
        for engine in ENGINES:
            for method, content in run_shortly(checkout, engine, is_renamed).items():
                (out / "runs" / f"{method}-{engine}.csv").write_bytes(content)


def write_about(checkout: Path, out: Path, is_renamed: bool) -> None:
    """Write the commit of the record, and whether its keys have the new names."""
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    about = {"commit": head, "is_renamed": is_renamed, "python": platform.python_version()}
    (out / "about.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def run_shortly(checkout: Path, engine: str, is_renamed: bool) -> dict[str, bytes]:
    """Return metrics.csv, which holds no time, of a short run of each method. All are one sweep, which starts faster."""
    overrides = [override.partition("=") for override in (f"strategy={','.join(METHODS)}", *ENGINES[engine], *SHORT_RUN)]
    lines = [f"{rename_key(key) if is_renamed else key}={value}" for key, _, value in overrides]
    for attempts_left in range(MAX_ATTEMPTS - 1, -1, -1):
        with tempfile.TemporaryDirectory() as folder:
            try:
                run_python(checkout, "main.py", "-m", *lines, f"output_dir={folder}")
            except SystemExit as error:
                if "timed out during startup" in str(error) and attempts_left:
                    continue
                raise
            files = {read_strategy(file.parent): file for file in sorted(Path(folder).glob("**/metrics.csv"))}
            assert sorted(files) == sorted(METHODS), files
            return {name: file.read_bytes() for name, file in files.items()}
    raise AssertionError("an attempt returns or raises")


def read_strategy(folder: Path) -> str:
    """Return the name of the method of a run's folder."""
    return str(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["strategy"]["name"])


def find_golden(folder: Path) -> dict[str, list[str]]:
    """Return {value of a float literal with six significant digits: the files that contain it, once per occurrence}."""
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        lines = source.split("\n")
        for literal in ast.walk(ast.parse(source)):
            if isinstance(literal, ast.Constant) and isinstance(literal.value, float):
                # Offsets count bytes, and a literal is on one line.
                text = lines[literal.lineno - 1].encode()[literal.col_offset : literal.end_col_offset].decode()
                digits = re.sub(r"e.*|[._]", "", text.lower()).strip("0")
                if len(digits) >= MIN_DIGITS:
                    found.setdefault(repr(literal.value), []).append(path.relative_to(folder.parent).as_posix())
    return {value: found[value] for value in sorted(found, key=float)}


# ---------------------------------------------------------------------------------------------------------------- renaming


def rename_key(key: str) -> str:
    """Return the new name of an old dotted key."""
    for old in sorted(RENAMED, key=len, reverse=True):
        if is_below(key, old):
            return RENAMED[old] + key[len(old) :]
    return key


def is_below(key: str, prefix: str) -> bool:
    """Return whether a dotted key is ``prefix`` or below it."""
    return key == prefix or key.startswith((f"{prefix}.", f"{prefix}["))


def rename_value(key: str, value: Any) -> Any:
    """Return the new value of a new dotted key."""
    bare = re.sub(r"\[\d+\]", "", key)
    if isinstance(value, list):
        return [rename_value(key, item) for item in value]
    if not isinstance(value, str):
        return value
    return rename_key(value) if bare in KEY_VALUES else RENAMED_VALUES.get(bare, {}).get(value, value)


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key of a configuration with its value. Mappings in a list have the list's key and an index."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from flatten(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{key}[{index}]")
    else:
        yield key, value


def flatten_config(config: dict[str, Any], rename: bool) -> dict[str, str]:
    """Return {dotted key: value as JSON} without bookkeeping, with new names if ``rename``. JSON distinguishes 1 and 1.0."""
    out: dict[str, str] = {}
    aside = (*BOOKKEEPING, *LATER.get(config.get("strategy", {}).get("name"), ()))
    for old, old_value in flatten(config):
        key = rename_key(old) if rename else old
        value = rename_value(key, old_value) if rename else old_value
        if not any(is_below(key, name) for name in aside):
            assert key not in out, f"two keys are renamed to {key}"
            out[sys.intern(key)] = sys.intern(json.dumps(value, sort_keys=True))  # thousands of jobs share them
    return out


# ----------------------------------------------------------------------------------------------------------------- compare


class Differences:
    """Counts differences. The same difference of many jobs is counted as one, with an example."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.examples: dict[tuple[str, str, str], str] = {}

    def add(self, key: str, old: str, new: str, where: str) -> None:
        """Count a difference: the key, the old value, the new value, and the job or file."""
        self.counts[key, old, new] += 1
        self.examples.setdefault((key, old, new), where)

    def show(self) -> None:
        """Print the first differences, the most frequent first."""
        for difference, count in self.counts.most_common(MAX_SHOWN):
            key, old, new = (text if len(text) <= 200 else f"{text[:200]}..." for text in difference)
            print(f"{key}: {old} -> {new}  in {count}, such as {self.examples[difference]}")
        if len(self.counts) > MAX_SHOWN:
            print(f"and {len(self.counts) - MAX_SHOWN} more differences")


def read_about(record: Path) -> dict[str, Any]:
    """Return a record's commit, and whether its keys have the new names."""
    about: dict[str, Any] = json.loads((record / "about.json").read_text(encoding="utf-8"))
    return about


def read_rows(record: Path) -> list[dict[str, Any]]:
    """Return the rows of a record's jobs and choices."""
    with gzip.open(record / "jobs.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def read_groups(record: Path) -> dict[tuple[str, str], list[tuple[str, int, dict[str, str]]]]:
    """Return (experiment, scale) -> (name, number, flat configuration) of each job."""
    groups: dict[tuple[str, str], list[tuple[str, int, dict[str, str]]]] = {}
    rename = not read_about(record)["is_renamed"]
    for row in read_rows(record):
        job = row["name"], row["number"], flatten_config(row["config"], rename)
        groups.setdefault((row["experiment"], row["scale"]), []).append(job)
    return groups


def pair_jobs(old: list[Any], new: list[Any]) -> list[tuple[Any, Any]]:
    """Return pairs of the jobs of an experiment. ``None`` stands for a job that the other side does not have.

    Jobs are paired by the parts of the name in any order, which finds exchanged values. Then equal configurations are paired,
    which finds jobs with a new name. Last come the fewest differences.
    """
    pairs, left = list[tuple[Any, Any]](), list(new)
    for identify in (lambda job: tuple(sorted(re.split("[- ]", job[0]))), lambda job: tuple(sorted(job[2].items()))):
        waiting: dict[Any, list[Any]] = {}
        for job in left:
            waiting.setdefault(identify(job), []).append(job)
        found = [(job, waiting[identify(job)].pop(0) if waiting.get(identify(job)) else None) for job in old]
        pairs += [pair for pair in found if pair[1] is not None]
        old = [job for job, other in found if other is None]
        left = [job for jobs in waiting.values() for job in jobs]
    items = {id(job): set(job[2].items()) for job in (*old, *left)}
    for job in old:
        nearest = min(left, key=lambda other: len(items[id(job)] ^ items[id(other)]), default=None)
        pairs.append((job, nearest))
        left = [other for other in left if other is not nearest]
    return pairs + [(None, job) for job in left]


def compare_jobs(old: Path, new: Path, out: Differences) -> None:
    """Compare the configurations of all jobs and choices."""
    groups, others = read_groups(old), read_groups(new)
    compared, moved, named = Counter[str](), 0, 0
    for group in sorted(groups.keys() | others.keys()):
        for one, two in pair_jobs(groups.get(group, []), others.get(group, [])):
            where = f"{' '.join(group)} {(one or two)[0]} (job {(one or two)[1]})"
            if one is None or two is None:
                out.add(f"job of {group[0]}", ABSENT if one is None else "job", ABSENT if two is None else "job", where)
                continue
            compared["choices" if group[0] == CHOICES else group[1]] += 1
            named, moved = named + (one[0] != two[0]), moved + (one[1] != two[1])
            for key in sorted(one[2].keys() | two[2].keys()):
                before, after = one[2].get(key, ABSENT), two[2].get(key, ABSENT)
                if before != after:
                    out.add(key, before, after, where)
    print(f"jobs: {compared['full']} at full scale, {compared['small']} small; choices: {compared['choices']}")
    if named or moved:
        print(f"note: {named} jobs have another name, {moved} another number")


def read_run(record: Path, name: str) -> list[str]:
    """Return the lines of a run's metrics.csv, with the new texts of its cells."""
    file, names = record / "runs" / name, {} if read_about(record)["is_renamed"] else RENAMED_CELLS
    lines = file.read_bytes().decode().split("\n") if file.exists() else []
    return [",".join(names.get(cell, cell) for cell in line.split(",")) for line in lines]


def compare_runs(old: Path, new: Path, out: Differences) -> None:
    """Compare metrics.csv of the short runs byte for byte, and report the first different line."""
    names = sorted({path.name for folder in (old, new) for path in (folder / "runs").glob("*.csv")})
    for name in names:
        one, two = read_run(old, name), read_run(new, name)
        if one != two:
            ends = [*one, ABSENT], [*two, ABSENT]
            line, (before, after) = next((n, pair) for n, pair in enumerate(zip(*ends, strict=False), 1) if pair[0] != pair[1])
            out.add(f"metrics.csv, line {line}", before, after, f"runs/{name}")
    print(f"runs: {len(names)}")


def compare_golden(old: Path, new: Path, out: Differences) -> None:
    """Compare how often each golden value is in the tests."""
    one, two = (json.loads((folder / "golden.json").read_text(encoding="utf-8")) for folder in (old, new))
    for value in sorted(one.keys() | two.keys(), key=float):
        before, after = one.get(value, []), two.get(value, [])
        if len(before) != len(after):
            out.add(f"golden value {value}", f"{len(before)} times", f"{len(after)} times", " ".join(sorted({*before, *after})))
    print(f"golden values: {sum(map(len, one.values()))}")


def compare_help(old: Path, new: Path, out: Differences) -> None:
    """Report how many lines of the help differ. That is not a failure, because a key's new name is in the help."""
    one, two = (Counter((folder / "help.txt").read_text(encoding="utf-8").splitlines()) for folder in (old, new))
    print(f"help: {(one - two).total()} lines only in the old one, {(two - one).total()} only in the new one")


# ------------------------------------------------------------------------------------------------------------------ digest


def digest_rows(rows: Iterable[dict[str, Any]], rename: bool) -> list[Any]:
    """Return the number of rows and one SHA-256 of their configurations, in any order, without bookkeeping."""
    texts = sorted(json.dumps(flatten_config(row["config"], rename), sort_keys=True) for row in rows)
    return [len(texts), hashlib.sha256("\n".join(texts).encode()).hexdigest()]


def digest_record(rows: Iterable[dict[str, Any]], rename: bool) -> dict[str, dict[str, list[Any]]]:
    """Return the digest of each experiment at full scale, and of each choice. A strategy's digest covers all methods with
    it.
    """
    groups: dict[str, dict[str, list[Any]]] = {"experiments": {}, "choices": {}}
    for row in rows:
        if row["experiment"] == CHOICES:
            groups["choices"].setdefault(row["overrides"][0], []).append(row)
        elif row["scale"] == "full":
            groups["experiments"].setdefault(row["experiment"], []).append(row)
    return {kind: {name: digest_rows(part, rename) for name, part in sorted(found.items())} for kind, found in groups.items()}


def show_digests(digests: dict[str, dict[str, list[Any]]]) -> str:
    """Return digests as JSON with a line per experiment or choice."""
    parts = [
        f" {json.dumps(kind)}: {{\n"
        + ",\n".join(f"  {json.dumps(name)}: {json.dumps(v)}" for name, v in found.items())
        + "\n }"
        for kind, found in digests.items()
    ]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    """Read the command line, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, folders in {"make": ("checkout", "out"), "compare": ("old", "new"), "digest": ("record",)}.items():
        command = commands.add_parser(name)
        for folder in folders:
            command.add_argument(folder, type=lambda text: Path(text).resolve())
        if name != "digest":
            command.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    commands.choices["make"].add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    if asked.command == "make":
        make_record(asked.checkout, asked.out, asked.only, asked.processes)
    elif asked.command == "digest":
        print(show_digests(digest_record(read_rows(asked.record), not read_about(asked.record)["is_renamed"])), end="")
    else:
        differences = Differences()
        compare = {"jobs": compare_jobs, "help": compare_help, "runs": compare_runs, "golden": compare_golden}
        for part in asked.only:
            compare[part](asked.old, asked.new, differences)
        differences.show()
        print(f"differences: {differences.counts.total()}")
        return 1 if differences.counts else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
