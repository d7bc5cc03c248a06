"""Notebooks as pages of the site: they are executed, and their outputs become text and pictures."""

import base64
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

SECONDS = 300  # that a cell may take; on a busy machine a cell of ten seconds takes a minute


def read(notebook: Path) -> nbformat.NotebookNode:
    """The cells of a notebook, not executed."""
    return nbformat.read(notebook, as_version=4)


def executed(content: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook with its outputs. Raises CellExecutionError, which shows the cell and its error, if a cell fails."""
    environment = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}  # whatever the caller's is
    return NotebookClient(content, timeout=SECONDS, kernel_name="python3").execute(env=environment)


def as_markdown(notebook: Path, pictures: Path) -> str:
    """Execute a notebook and return its page; its pictures are written to the folder `pictures`."""
    parts = []
    for place, cell in enumerate(executed(read(notebook)).cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        printed = ""
        for number, output in enumerate(cell.outputs):
            picture = output.get("data", {}).get("image/png")
            if picture:
                name = f"{notebook.stem}_{place}_{number}.png"
                pictures.mkdir(parents=True, exist_ok=True)
                (pictures / name).write_bytes(base64.b64decode(picture))
                parts.append(f"![drawn by the lines above]({name})")
            else:
                printed += text_of(output)
        if printed.strip():
            parts.append(f"``` {{.text .output}}\n{printed.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def text_of(output: dict[str, Any]) -> str:
    """What a cell printed, or the value of its last line. Warnings, which go to stderr, are left out."""
    if output["output_type"] == "stream":
        return output["text"] if output["name"] == "stdout" else ""
    return output.get("data", {}).get("text/plain", "")


def main() -> None:
    """Run all notebooks and print the name of each."""
    for notebook in sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb")):
        print(notebook.name, flush=True)
        executed(read(notebook))


if __name__ == "__main__":
    main()
