"""Run the notebooks of docs/tutorials and write their output into them.

python tools/tutorials.py

Needs the extra "docs". ATTNFLOW_DATA: the folder with stories260k, which answer.ipynb reads.
"""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"


def main() -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONWARNINGS": "ignore"}
    for path in sorted(TUTORIALS.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        place = {"metadata": {"path": str(TUTORIALS)}}
        NotebookClient(notebook, record_timing=False, resources=place).execute()
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
