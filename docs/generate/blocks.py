"""Find the commands and code blocks of the documentation, which tests/test_docs.py runs or parses.

Blocks run unchanged, in the order of their page. A comment ``<!-- needs: WHAT -->`` before a block exempts it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Reasons why ``pytest`` does not run a block, with their meaning. It reads their commands with the programs' own parsers.
NEEDS = {
    "minutes": "takes minutes; run by pytest -m slow, a sweep with three rounds",
    "hours": "a paper's table in full; its jobs are composed and checked",
    "network": "downloads data or packages; with data, pytest -m slow runs it small on drawn images",
    "devices": "needs a server and devices; tests/test_deployment.py starts the same on one machine",
    "machines": "needs several machines or SLURM; tests/test_many_machines.py runs the same on one machine",
    "reading": "a piece to read, no program by itself",
}
# The need of a page's blocks without a comment.
DEFAULT_NEEDS = {"DEPLOY.md": "devices", "ANALYSES.md": "minutes", "EXPERIMENTS.md": "hours"}
# What a command within a sentence begins with. A program's name alone is no command.
PROGRAM = re.compile(
    r"(?:contrafed(?:-report)?|docker|flower-super\w+|flwr|git|jupyter|mkdocs|pip|pytest|python|ray|ruff|sbatch|sudo) \S"
)
FENCE = re.compile(r"^```(?P<language>\w*)(?: +title=\"(?P<title>[^\"]+)\")?\s*$")
MARK = re.compile(r"^<!-- needs: (?P<needs>\w+) -->$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int  # line of its first fence, from 1
    language: str
    title: str  # of a file: the path for its text
    needs: str  # a key of NEEDS, or nothing
    text: str

    @property
    def name(self) -> str:
        """The block's page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """Return a shell block's commands without comments, with continued lines joined."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [line for line in (re.sub(r"(^|\s{2,})# .*$", "", line).strip() for line in joined.splitlines()) if line]


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield a page's fenced blocks.

    Raises:
        ValueError: If the comment before a block has an unknown need.
    """
    usual = DEFAULT_NEEDS.get(page.name, "")
    needs, begun, lines = usual, None, list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if begun is not None:
            if line.startswith("```"):
                yield Block(page, begun[0], begun[1]["language"], begun[1]["title"] or "", needs, "\n".join(lines) + "\n")
                needs, begun, lines = usual, None, []
            else:
                lines.append(line)
        elif fence := FENCE.match(line):
            begun = (number, fence)
        elif mark := MARK.match(line):
            needs = mark["needs"]
            if needs not in NEEDS:
                raise ValueError(f"{page}:{number}: unknown need {needs!r}")
        elif line.strip():
            needs = usual


def shell_commands(blocks: list[Block]) -> list[str]:
    """Return the commands of a page's shell blocks."""
    return [command for block in blocks if block.language == "bash" for command in block.commands()]


def inline_commands(text: str) -> list[str]:
    """Return the commands within the sentences and tables of a page, without the marks of what is optional."""
    sentences = re.sub(r"```.*?```", "", text, flags=re.DOTALL).replace("\\|", "|")
    codes = (" ".join(found.split()) for found in re.findall(r"`([^`]+)`", sentences))
    commands = dict.fromkeys(found for found in codes if PROGRAM.match(found))
    return [re.sub(r" \[([^\]]+)\]", r" \1", found).replace(" ...", "") for found in commands]


def pages() -> list[Path]:
    """Return the pages of the repository's root, and all manually written pages of the site."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
