"""Find the commands and code blocks of the documentation, which tests/test_docs.py runs or parses.

Blocks run unchanged, in the order of their page. A comment ``<!-- needs: WHAT -->`` before a block exempts it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Reasons why ``pytest`` does not run a block, with their meaning.
NEEDS = {
    "minutes": "takes minutes; run by pytest -m slow",
    "hours": "a paper's table in full",
    "network": "downloads data or packages",
    "devices": "needs a server and devices; tests/test_deployment.py starts the same on one machine",
    "machines": "needs several machines or SLURM; tests/test_many_machines.py runs the same on one machine",
    "reading": "a piece to read, no program by itself",
}
# The need of a page's blocks without a comment.
DEFAULT_NEEDS = {"DEPLOY.md": "devices", "ANALYSES.md": "minutes", "EXPERIMENTS.md": "hours"}
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


def pages() -> list[Path]:
    """Return the README and all manually written pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
