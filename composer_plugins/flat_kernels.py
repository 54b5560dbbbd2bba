"""The names of `composer_plugins.kernels` itself: every kernel of the catalogue, loaded when it is asked for.

The folder `kernels/` has no `__init__.py`, because a package of that name would hide Hugging Face's. So
`composer_plugins/__init__.py` gives the module these two functions. `kernels/__init__.pyi`, which Python
does not read and which `setup.py` makes, has the names for editors and type checkers.
"""

import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

KERNELS = "composer_plugins.kernels"

# What a user of kernels needs that is not a loss of the catalogue.
NOT_IN_CATALOGUE = {
    "Metric": "types",
    "PairLoss": "types",
    "TokenLoss": "types",
    "aggregate": "aggregation",
    "sequence_logprobs": "preference",
}


@cache
def paths() -> dict[str, str]:
    """The path "module:function" of each name, in the order of the catalogue.

    Where two kernels share a name, the first kind has it: grpo is the policy loss, and the other is
    grpo_advantage. A module keeps its name: taid is the module, and taid_divergence the function.
    """
    from composer_plugins.losses import bundled
    from composer_plugins.losses.row import KINDS

    rows = [row for family in bundled.FAMILIES for row in family.LOSSES]
    found: dict[str, str] = {}
    modules = {row.path.partition(":")[0].split(".")[2] for row in rows}
    for kind in KINDS:
        for row in rows:
            function = row.path.partition(":")[2]
            if row.kind == kind and row.path not in found.values():
                taken = function in found or function in modules
                found[f"{function}_{kind}" if taken else function] = row.path
    return found | {name: f"{KERNELS}.{module}:{name}" for name, module in NOT_IN_CATALOGUE.items()}


def find(name: str) -> Any:
    """The kernel of that name: the module's `__getattr__`."""
    if name.startswith("_") or (path := paths().get(name)) is None:
        raise AttributeError(f"module {KERNELS!r} has no attribute {name!r}")
    module, _, function = path.partition(":")
    return getattr(import_module(module), function)


def names() -> list[str]:
    """Every name: the module's `__dir__`. The modules in it are those that are loaded."""
    return sorted({*vars(sys.modules[KERNELS]), *paths()})


def stub() -> str:
    """The text of `kernels/__init__.pyi`."""
    lines = ["# composer_plugins/flat_kernels.py writes this file.", ""]
    for name, path in sorted(paths().items(), key=lambda pair: (pair[1].partition(":")[0], pair[0])):
        module, _, function = path.partition(":")
        alias = f" as {name}" if name != function else ""
        lines.append(f"from {module} import {function}{alias}")
    listed = "".join(f"    {name!r},\n" for name in sorted(paths())).replace("'", '"')
    lines += ["", f"__all__ = [\n{listed}]"]
    return "\n".join([*lines, ""])


def write_stub() -> None:
    """Write `kernels/__init__.pyi`."""
    (Path(__file__).parent / "kernels" / "__init__.pyi").write_text(stub())
