"""docs/get_started.ipynb: the text and the commands of docs/get_started.md as the cells of a notebook."""

import json
import re

from docs.generator.written import ROOT

PAGE = "docs/get_started.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
ITSELF = " [The same as a notebook](get_started.ipynb)."
PROMPT = "$ "  # before a command in a block `console`; the lines after it are its output


def cells(page: str) -> list[tuple[str, str]]:
    """Return the cells of a page: text, files that are written, and commands."""
    found, end = [], 0
    for block in BLOCK.finditer(page):
        found.append(("markdown", page[end : block.start()].strip()))
        language, text = block.groups()
        if language == "console":
            lines = [line for line in text.splitlines() if line.startswith(PROMPT)]
            found.append(("code", "\n".join("!" + line.removeprefix(PROMPT) for line in lines)))
        else:  # its first line is a comment with the name of the file
            name, _, content = text.partition("\n")
            found.append(("code", f"%%writefile {name.removeprefix('# ')}\n{content}".rstrip()))
        end = block.end()
    found.append(("markdown", page[end:].strip()))
    return [(kind, text.replace(ITSELF, "")) for kind, text in found if text]


def made() -> str:
    """Return the notebook as JSON, in nbformat 4."""
    made = [
        {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, text) in enumerate(cells((ROOT / PAGE).read_text()))
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False)
