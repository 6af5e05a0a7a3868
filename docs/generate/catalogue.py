"""Generate a page for every method from its docstrings, paper, YAMLs and the sections of docs/METHODS.md.

``python docs/generate/catalogue.py`` updates the README's list of methods.
"""

import inspect
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import results
import yaml
from blocks import NEEDS, ROOT, blocks_of, pages

from contrafed.config.compose import compose_job
from contrafed.config.run_config import server_of
from contrafed.core import registry
from contrafed.core.client_run import choose
from contrafed.core.paper import Paper
from contrafed.server.base import FederatedStrategy
from contrafed.training.base import PARTS
from contrafed.training.workspace import client_class_of

BEGIN, END = "<!-- methods: written by docs/generate/catalogue.py -->", "<!-- end of methods -->"
LIST = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
KEY = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value>[^#]*)(?:# ?(?P<comment>.*))?$")


@dataclass(frozen=True)
class Method:
    """The facts of a method on the pages."""

    name: str
    title: str  # the paper's spelling
    line: str  # a description in one line
    values: dict[str, Any]  # the composed ``strategy`` group
    client: type
    client_fields: list[str]
    rule: type
    rule_name: str
    rule_fields: list[str]
    free: bool  # whether strategy.server= offers other strategies
    family: str
    paper: Paper | None


@cache
def names() -> tuple[str, ...]:
    """Return the names of all methods, which are the choices of ``strategy``."""
    return tuple(registry.choices("strategy"))


@cache
def method(name: str) -> Method:
    """Return a method's facts."""
    from omegaconf import OmegaConf

    text = registry.choices("strategy")[name]
    title, _, line = text.partition(": ")
    values: Any = OmegaConf.to_container(compose_job([f"strategy={name}"]).strategy, resolve=True)
    client_choice, rule = choose("strategy", values), server_of(values)
    fields = [[f for f in choice.config.__dataclass_fields__ if f != "local"] for choice in (client_choice, rule)]
    client, server = client_class_of(client_choice), registry.only_subclass(rule.module, FederatedStrategy)
    # The class whose file has the method's name, or the client for a client's variants.
    own = server if server.__module__.endswith(f".{name}") and not client.__module__.endswith(f".{name}") else client
    paper = client.papers_of_variants.get(name, vars(own).get("paper"))
    return Method(
        name, title.removesuffix(" (SOLO)"), line, values, client, fields[0], server, rule.name, fields[1],
        values.get("server") in registry.choices("strategy/server"), own.family, paper,
    )  # fmt: skip


def cite(paper: Paper | None) -> str:
    """Return a paper as a line of Markdown."""
    if paper is None:
        return "No paper."
    title = f"[{paper.title}]({paper.url})" if paper.url else paper.title
    return f"{paper.authors}: {title}. {paper.where}."


def link(m: Method) -> str:
    """Return a method's name, with a link to its paper if there is one."""
    return f"[{m.title}]({m.paper.url})" if m.paper is not None and m.paper.url else m.title


def readme_list() -> str:
    """Return the README's list of methods, with a row for each family."""
    families: dict[str, list[str]] = {}
    for m in map(method, names()):
        families.setdefault(m.family or "others", []).append(link(m))
    rows = [f"| {family} | {', '.join(families[family])} |" for family in sorted(families)]
    return "\n".join([BEGIN, "| | methods, with their papers |", "| --- | --- |", *rows, END])


def write_readme() -> None:
    """Update the README's list of methods."""
    path = ROOT / "README.md"
    path.write_text(LIST.sub(lambda _: readme_list(), path.read_text(encoding="utf-8")), encoding="utf-8")


def evaluated_by(client: type, rule: type, values: dict[str, Any]) -> str:
    """Return which models a method is evaluated by."""
    config = choose("strategy", values).config
    whole = set(client.shared_parts(config)) == set(PARTS)  # type: ignore[attr-defined]
    if client.own_model and whole and rule.has_global_model:  # type: ignore[attr-defined]
        return "each client's own model, and the global one"
    return "the global model" if whole and not client.own_model else "each client's own model"  # type: ignore[attr-defined]


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown, with formulas escaped and ``code`` unchanged."""
    pieces = re.split(r"(``[^`]+``)", inspect.cleandoc(docstring or ""))
    return "".join(p if p.startswith("``") else escape_markdown(p) for p in pieces)


def escape_markdown(text: str) -> str:
    """Escape plain text for Markdown."""
    return re.sub(r"([\\*_|\[\]])", r"\\\1", text).replace("<", "&lt;")


def keys_of(files: list[str]) -> dict[str, str]:
    """Return {key: comment} of YAMLs below conf/strategy, with ``local.`` before keys under ``local``.

    The first file with a key is used.
    """
    found: dict[str, str] = {}
    for file in files:
        inside, last = "local." if file.startswith("_") else "", ""
        for line in (registry.CONF / "strategy" / f"{file}.yaml").read_text(encoding="utf-8").splitlines():
            if read := KEY.match(line):
                prefix = inside if read["indent"] or file.startswith("_") else ""
                last = prefix + read["key"]
                found.setdefault(last, (read["comment"] or "").strip())
                inside = f"{read['key']}." if not read["indent"] and not read["value"].strip() else inside
            elif line.startswith("#   ") and last:
                found[last] += " " + line.lstrip("# ")
    return found


@cache
def comments(name: str) -> dict[str, str]:
    """Return the YAMLs' comments on a method's keys."""
    text = (registry.CONF / "strategy" / f"{name}.yaml").read_text(encoding="utf-8")
    defaults = yaml.safe_load(text).get("defaults", [])
    parents = [entry for entry in defaults if isinstance(entry, str) and "@" not in entry and not entry.startswith("_")]
    rule = method(name).rule_name
    servers = [f"server/{rule}"] if method(name).free else []
    return keys_of([name, *parents, *servers, "_local", "_local_training"])


def table(name: str, keys: list[str]) -> list[str]:
    """Return the table of some keys: default, and the YAML's comment, which starts with the paper's symbol."""
    rows = ["| key | default | symbol and meaning |", "| --- | --- | --- |"]
    for key in keys:
        value: Any = method(name).values
        for part in key.split("."):
            value = value[part]
        shown = {True: "true", False: "false", None: "null"}.get(value, value) if isinstance(value, bool | None) else value
        said = escape_markdown(comments(name).get(key, ""))
        rows.append(f"| `strategy.{key}` | `{shown}` | {said} |")
    return rows


def sources_of_values(m: Method) -> str:
    """Return where a method's defaults are from, as the comments ``# Values:`` of its YAML and of its strategy's say."""
    found = {}
    for file in (m.name, f"server/{m.rule_name}"):
        path = registry.CONF / "strategy" / f"{file}.yaml"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        found |= {line.removeprefix("# Values: "): None for line in lines if line.startswith("# Values: ")}
    return escape_markdown(". ".join(text[:1].upper() + text[1:] for text in found))


def sections() -> list[tuple[str, str]]:
    """Return the sections of docs/METHODS.md as (heading, text)."""
    text = (ROOT / "docs" / "METHODS.md").read_text(encoding="utf-8")
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def parts_of(title: str) -> dict[str, str]:
    """Return the parts of a method's section of docs/METHODS.md as {label: Markdown}."""
    for heading, text in sections():
        if title in re.split(r", | and ", heading):
            # The pages are one folder below docs/METHODS.md.
            moved = re.sub(r"\]\((?=[\w/-]+\.md)", "](../", re.sub(r"\]\((?=#)", "](../METHODS.md", text))
            pieces = re.split(r"^\*\*(Algorithm|Keys|Interpretation|Results)\.\*\* *", moved, flags=re.MULTILINE)
            return {label: part.strip() for label, part in zip(pieces[1::2], pieces[2::2], strict=True)}
    return {}


def errata(title: str) -> str:
    """Return the errata of a method's paper in docs/METHODS.md, or nothing."""
    pieces = re.split(r"^### (.+)$", dict(sections())["Errata of the papers"], flags=re.MULTILINE)
    found = [part for names, part in zip(pieces[1::2], pieces[2::2], strict=True) if title in names.split(" and ")]
    return "".join(found).strip()


def page(name: str) -> str:
    """Return a method's page."""
    m = method(name)
    local = [f"local.{key}" for key in ("epochs", "iterations", "batch_size", "optimizer", "lr") if key in m.values["local"]]
    local += sorted(key for key in keys_of([name]) if key.startswith("local.") and key not in local)
    local = [key for key in local if m.values["local"][key.removeprefix("local.")] is not None]
    lines = [f"# {m.title}", "", f"{m.line[:1].upper()}{m.line[1:]}.", "", f"**Paper.** {cite(m.paper)}", ""]
    lines += [f"**Evaluated by** {evaluated_by(m.client, m.rule, m.values)}.", ""]
    lines += ["```bash", f"python main.py strategy={name} participation=markovian", "```", ""]
    parts = parts_of(m.title)
    lines += ["## Loss and algorithm", "", parts["Algorithm"], ""] if "Algorithm" in parts else []
    client, rule = m.client.__module__.replace(".", "/"), m.rule.__module__.replace(".", "/")
    lines += ["## Client", "", prose(m.client.__doc__), "", f"`{m.client.__name__}` in `{client}.py`.", ""]
    lines += table(name, m.client_fields) if m.client_fields else ["It has no keys of its own."]
    lines += ["", "## Server", "", prose(m.rule.__doc__), "", f"`{m.rule.__name__}` in `{rule}.py`."]
    if m.free:
        lines[-1] += f" This is `strategy.server={m.rule_name}`. Any other strategy for plain models can replace it."
    lines += ["", *table(name, m.rule_fields)] if m.rule_fields else []
    lines += ["", "## Local training", "", "Defaults of the method. An experiment has its own training settings instead.", ""]
    lines += table(name, local)
    if sources := sources_of_values(m):
        lines += ["", "## Source of the defaults", "", f"{sources}."]
    if "Interpretation" in parts:
        lines += ["", "## Interpretation", "", parts["Interpretation"]]
    if wrong := errata(m.title):
        lines += ["", "## Errata of the paper", "", wrong]
    lines += ["", *results.section(name)]
    if "Results" in parts:
        lines += ["## Remarks on results", "", parts["Results"], ""]
    lines += ["The sections of all methods on one page: [Methods in detail](../METHODS.md).", ""]
    return "\n".join(lines)


def index() -> str:
    """Return the catalogue: every method by family, with its paper and the models by which it is evaluated."""
    lines = ["# Methods", "", f"There are {len(names())} methods. Each is a choice of `strategy=`. The last column marks"]
    lines += ["methods for plain models. These also work with any strategy of the last table, as `strategy.server=`.", ""]
    families: dict[str, list[Method]] = {}
    for m in sorted(map(method, names()), key=lambda m: m.title.lower()):
        families.setdefault(m.family or "others", []).append(m)
    for family in sorted(families):
        lines += [f"## {family[:1].upper()}{family[1:]}", ""]
        lines += ["| method | what it does | evaluated by | paper | other strategies |", "| --- | --- | --- | --- | --- |"]
        lines += [*map(index_row, families[family]), ""]
    lines += ["## Strategies", "", "Choices of `strategy.server=`:", "", "| strategy | what it does |", "| --- | --- |"]
    lines += [f"| `{name}` | {text} |" for name, text in registry.choices("strategy/server").items()]
    return "\n".join([*lines, ""])


def index_row(m: Method) -> str:
    """Return a method's row of the catalogue."""
    where = "" if m.paper is None else m.paper.where.split(", as ")[0]
    where = f"[{where}]({m.paper.url})" if m.paper is not None and m.paper.url else where
    line = re.sub(r" \([A-Z][^()]* \d{4}\)$", "", m.line)
    evaluated, free = evaluated_by(m.client, m.rule, m.values), "yes" if m.free else ""
    return f"| [{m.title}]({m.name}.md) `{m.name}` | {line} | {evaluated} | {where} | {free} |"


def not_run() -> str:
    """Return the table of the documentation's blocks that no fast test runs, with the reasons."""
    rows = ["| where | begins with | why not |", "| --- | --- | --- |"]
    for block in (block for page in pages() for block in blocks_of(page) if block.needs):
        first = block.text.strip().splitlines()[0][:70].replace("|", "\\|").rstrip("\\ ")
        rows.append(f"| {block.name} | `{first}` | {NEEDS[block.needs]} |")
    return "\n".join(rows)


def choices() -> str:
    """Return every group of the configuration with its choices and their descriptions."""
    lines = []
    for group in ("dataset", "partition", "participation", "model", "engine", "experiment", *sorted(other_groups())):
        lines += [f"### {group}", "", "| choice | what it is |", "| --- | --- |"]
        lines += [f"| `{name}` | {escape_markdown(text)} |" for name, text in registry.choices(group).items()] + [""]
    return "\n".join(["`strategy` and `strategy.server`: [Methods](method/index.md).", "", *lines])


def other_groups() -> set[str]:
    """Return the groups below conf/ that no other page covers."""
    known = {"strategy", "dataset", "partition", "participation", "model", "engine", "experiment"}
    return {path.name for path in registry.CONF.iterdir() if path.is_dir() and registry.choices(path.name)} - known


if __name__ == "__main__":
    write_readme()
