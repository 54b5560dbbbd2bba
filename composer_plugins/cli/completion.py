"""Completion of names in a shell: installed losses and their dialects, without loading torch.

The losses of a plugin that imports torch beside its rows are left out.
"""

import ast
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from composer_plugins.cli.console import foreign_code
from composer_plugins.losses.row import KINDS

if TYPE_CHECKING:
    from composer_plugins.losses.registry import Registry


T = TypeVar("T")
TESTING = Path(__file__).parents[1] / "testing"
STEM = "_COMPOSER_PLUGINS_STEM"  # what stands before the word that bash completes: "cispo@"


def join_at_signs(environment: MutableMapping[str, str]) -> None:
    """Undo what bash does to `cispo@trl`: to it that is three words, of which it completes the last."""
    words, at = environment.get("COMP_WORDS", "").split(), int(environment.get("COMP_CWORD") or 0)
    if environment.get("_COMPOSER_PLUGINS_COMPLETE") != "complete_bash" or "@" not in words:
        return
    typed = words[at] if at < len(words) else ""
    before = " ".join(words[:at]).replace(" @ ", "@")
    if typed == "@":
        before, typed = before + "@", ""
    if before.endswith(" @"):
        before = before[:-2] + "@"
    if before.endswith("@"):
        before, _, environment[STEM] = before.rpartition(" ")
    environment["COMP_WORDS"] = f"{before} {typed}".rstrip()
    environment["COMP_CWORD"] = str(len(before.split()))


def complete_loss(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the losses that begin so, with what they are; the dialects of one once its name is typed."""
    stem = os.environ.get(STEM, "")
    incomplete = stem + incomplete
    name, rows = incomplete.partition("@")[0], _installed().losses
    for row in rows:
        if row.name.startswith(incomplete):
            yield row.name, row.summary
    for row in rows:
        if row.name == name:
            for dialect in row.dialects:
                if (full := f"{row.name}@{dialect.upstream}").startswith(incomplete):
                    yield full.removeprefix(stem), dialect.source


def complete_kind(incomplete: str) -> Iterator[str]:
    """Yield the kinds of losses that begin so."""
    yield from (kind for kind in KINDS if kind.startswith(incomplete))


KindOption = Annotated[
    str | None,
    typer.Option(
        help="The kind, where two kinds share the name: policy, advantage ...", autocompletion=complete_kind
    ),
]


def complete_input(incomplete: str) -> Iterator[str]:
    """Yield the inputs of losses that begin so."""
    from composer_plugins.cli.filters import inputs

    yield from (name for name in inputs(_installed()) if name.startswith(incomplete))


def complete_framework(incomplete: str) -> Iterator[str]:
    """Yield the frameworks that run losses of ours and that begin so."""
    from composer_plugins.frameworks.registry import running

    yield from (one.name for one in _quietly(running) if one.name.startswith(incomplete))


def complete_upstream(incomplete: str) -> Iterator[str]:
    """Yield the upstreams of dialects that begin so."""
    from composer_plugins.cli.filters import upstreams

    yield from (name for name in sorted(upstreams(_installed())) if name.startswith(incomplete))


def complete_compared(incomplete: str) -> Iterator[tuple[str, str]]:
    """Yield the frameworks that `conform` compares with and that begin so."""
    from composer_plugins.conformance.suites import compared

    yield from (
        (one.name, one.title) for one in _quietly(compared).values() if one.name.startswith(incomplete)
    )


# It reads the names in the sources: to import the modules would load torch.
def complete_law(incomplete: str) -> Iterator[str]:
    """Yield the laws of `check` that begin so."""
    for path in sorted((TESTING / "laws").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            marks = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            calls = [ast.unparse(mark.func) for mark in marks if isinstance(mark, ast.Call)]
            if isinstance(node, ast.FunctionDef) and "law" in calls:
                own = [one for mark in marks for one in ast.walk(mark) if isinstance(one, ast.keyword)]
                others = [ast.literal_eval(one.value) for one in own if one.arg == "name"]
                yield from (name for name in (node.name, *others) if name.startswith(incomplete))


def complete_convention(incomplete: str) -> Iterator[str]:
    """Yield the conventions of `check --as` that begin so."""
    from composer_plugins.frameworks.registry import conventions

    yield from (name for name in _quietly(conventions) if name.startswith(incomplete))


def _installed() -> "Registry":
    """Every installed loss whose row can be read without torch."""
    from composer_plugins.losses.registry import collect, get_plugin_manager

    return _quietly(lambda: collect(get_plugin_manager(), kernels=False))


def _quietly(read: Callable[[], T]) -> T:
    """What `read` returns, without torch, which takes seconds to load, and without what plugins print."""
    loaded: dict[str, Any] = sys.modules
    is_loaded = "torch" in loaded
    if not is_loaded:
        loaded["torch"] = None  # to import it is then an ImportError
    try:
        # What a plugin prints would stand in the line that the user types.
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), foreign_code():
            return read()
    finally:
        if not is_loaded:
            del loaded["torch"]
