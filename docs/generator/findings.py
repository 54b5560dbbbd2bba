"""docs/writing_a_loss.md: how many laws of `check --as` the losses of verl, TRL and PRIME-RL obey.

What was found, with the lines of their source, is written by hand beside these counts.
"""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from composer_plugins.conformance.stubs import source
from composer_plugins.frameworks.trl import LOSS_TYPES
from composer_plugins.testing.conventions import check_as
from composer_plugins.testing.report import Report, Status
from docs.generator.markdown import table

STATUSES: tuple[Status, ...] = ("passed", "failed", "unsafe", "not applicable")


def of_verl() -> dict[str, Any]:
    """Every loss that verl itself registers."""
    registry = import_module("verl.trainer.ppo.core_algos").POLICY_LOSS_REGISTRY
    return {name: name for name, one in registry.items() if one.__module__.startswith("verl.")}


def of_trl() -> dict[str, Any]:
    """The values of loss_type."""
    return {name: name for name in LOSS_TYPES}


def of_prime_rl() -> dict[str, Any]:
    """PRIME-RL's default loss and its ipo."""
    from composer_plugins.conformance.prime_rl_claims import upstream

    checkout = source("prime-rl")
    assert checkout is not None, "set PRIME_RL_SOURCE to a checkout"
    loaded = upstream.load(checkout)
    return {kind: loaded.loss_fn(type=kind) for kind in ("default", "ipo")}


LOSSES: dict[str, Callable[[], dict[str, Any]]] = {"verl": of_verl, "trl": of_trl, "prime-rl": of_prime_rl}


def section(framework: str) -> str:
    """The counts of one framework, from a new run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reports: dict[str, Report] = {
            name: check_as(one, framework) for name, one in LOSSES[framework]().items()
        }
    counts = [(name, *(len(one.having(status)) for status in STATUSES)) for name, one in reports.items()]
    return table(("loss", "laws that hold", *STATUSES[1:]), counts)
