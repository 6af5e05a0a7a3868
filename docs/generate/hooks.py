"""Hooks of MkDocs that add the pages generated from the code."""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of libraries, which a strict build would count
    import catalogue
    import results
from blocks import ROOT
from formulas import convert_formulas

CHANGELOG = ROOT / "CHANGELOG.md"
# In a table's code GitHub needs "\|" and Python-Markdown "|".
ROW, CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")
# "<g_k, w>" is an inner product, not an HTML element.
PRODUCT = re.compile(r"<(?=[A-Z]?\w*, |[A-Z]?\w*,[A-Z])")


def on_config(config: Any) -> Any:
    """Remove missing pages from the menu."""
    config["nav"] = [entry for entry in map(_there, config["nav"]) if entry]
    return config


def _there(entry: Any) -> Any:
    """Return an entry of the menu without missing pages, or nothing if none is left."""
    if isinstance(entry, dict):
        kept = {title: _there(below) for title, below in entry.items()}
        return {title: below for title, below in kept.items() if below}
    if isinstance(entry, list):
        return [below for below in map(_there, entry) if below]
    made = entry.startswith("method/") or (entry == "changelog.md" and CHANGELOG.exists())
    return entry if made or (ROOT / "docs" / entry).exists() else None


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every method, their catalogue, and the changelog at the root of the repository."""
    made: dict[str, str | bytes] = {"method/index.md": catalogue.index()}
    made |= {f"method/{name}.md": catalogue.page(name) for name in catalogue.names()}
    made |= {file: png for name in catalogue.names() for file, png in results.pictures(name)}
    if CHANGELOG.exists():
        made["changelog.md"] = CHANGELOG.read_text(encoding="utf-8")
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Convert formulas, escape inner products, which HTML would misread, and insert content that a page requests."""
    for word, made in (("BLOCKS", catalogue.not_run), ("CHOICES", catalogue.choices)):
        if (mark := f"<!-- {word} -->\n") in markdown:
            markdown = markdown.replace(mark, f"{made()}\n")
    markdown = ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)
    return convert_formulas(PRODUCT.sub("&lt;", markdown))


def on_page_content(html: str, page: Page, config: Any, files: Files) -> str:
    """Escape inner products in docstrings, which mkdocstrings inserts."""
    return PRODUCT.sub("&lt;", html)


@event_priority(-100)
def on_post_build(config: Any) -> None:
    """Write the search index also as a script, which a page opened from disk can load."""
    folder = Path(config["site_dir"]) / "search"
    index = (folder / "search_index.json").read_text(encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
