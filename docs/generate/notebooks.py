"""Execute the notebooks and store them with their outputs: python docs/generate/notebooks.py [NAME] ..."""

import re
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
# Absolute paths, which are of the machine that executed a notebook.
PLACE = re.compile(r"(?<![\w.:/<])/(?:tmp|home|root|work|opt|usr|var|Users)\b")


def execute_notebook(path: Path) -> None:
    """Execute one notebook in its folder, and write it. Raises ``ValueError`` if an output has a path of this machine."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, kernel_name="python3", record_timing=False, resources={"metadata": {"path": path.parent}}
    ).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # else the version of this Python
    for cell in notebook.cells:
        if cell.cell_type == "code" and PLACE.search(str(cell.outputs)):
            raise ValueError(f"{path.name}: an output has a path of this machine. Fix: begin its cell with %%capture")
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for each in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if each.stem in sys.argv[1:] or len(sys.argv) == 1:
            execute_notebook(each)
            print(f"executed {each.name}")
