"""The losses that this distribution brings, through the hook that a third party uses."""

import tomllib
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from composer_plugins.hookspecs import hookimpl
from composer_plugins.losses.bundled import (
    advantages,
    divergences,
    off_policy,
    policy,
    preference,
    reduction,
    regions,
)
from composer_plugins.losses.row import Loss

FAMILIES = (policy, regions, off_policy, advantages, divergences, preference, reduction)


@hookimpl(tryfirst=True)
def register_losses(register: Callable[[Loss], None]) -> None:
    """Register every bundled loss."""
    formulas = tomllib.loads(Path(__file__).with_name("formulas.toml").read_text())
    for loss in chain.from_iterable(family.LOSSES for family in FAMILIES):
        register(loss if loss.tex else replace(loss, tex=_formula(formulas[loss.kind], loss.name)))


def _formula(formulas: dict[str, Any], name: str) -> str:
    """The displays of a formula, with each shared one in the place of its name."""
    found = formulas.get(name, "")
    displays = found.strip().splitlines() if isinstance(found, str) else found
    return "\n".join(formulas.get("shared", {}).get(display, display) for display in displays)
