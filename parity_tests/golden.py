"""Numbers recorded from upstream code: `golden/NAME.json`, each with its provenance and its cases.

A claim is a test over the cases of one file: `@claim("verl_policy_gspo")`. `pytest -m golden --golden-dir
DIR` runs the same claims on another directory of the same layout: a new upstream release, or more cases.
"""

import json
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"
directory = GOLDEN  # conftest.py sets it from --golden-dir, before any test module is imported

Case = dict[str, Any]
CLAIMS: dict[str, list[Callable[[Case], bool]]] = defaultdict(list)


@cache
def load(name: str) -> tuple[Case, ...]:
    """The cases of one golden file; none where another directory does not have it."""
    path = directory / f"{name}.json"
    if directory != GOLDEN and not path.exists():
        return ()
    try:
        record = json.loads(path.read_text())
        return tuple(record["cases"] if "cases" in record else _without_inputs(record))
    except (ValueError, KeyError, TypeError) as error:
        raise pytest.UsageError(f"{path} is no golden file: {type(error).__name__}: {error}") from None


def beside(name: str, key: str) -> tuple[Case, ...]:
    """What a golden file holds beside its cases; nothing where another directory does not have it."""
    return tuple(json.loads((directory / f"{name}.json").read_text())[key]) if load(name) else ()


def _without_inputs(record: Case) -> list[Case]:
    """PRIME-RL's files: results of sequences and of packs, whose inputs are in a file of their own."""
    single = [{"id": f"{r['case']}-{r['fn']}", **r} for r in record["per_sequence"]]
    return single + [{"id": f"pack{r['pack']}-{r['mode']}", **r} for r in record["packed"]]


def claim(name: str, where: Callable[[Case], bool] = lambda case: True) -> Callable[..., Any]:
    """Run a test, as `case`, on the cases of `golden/NAME.json` that `where` selects by their parameters."""
    CLAIMS[name].append(where)
    cases = [pytest.param(case, id=f"{name}-{case_id(case)}") for case in load(name) if where(case)]
    if not cases and directory != GOLDEN:
        cases = [pytest.param(None, id=name, marks=pytest.mark.skip(f"{directory} has no such case"))]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        return pytest.mark.golden(pytest.mark.parametrize("case", cases)(test))

    return decorate


def names(where: Path) -> set[str]:
    """Every golden file below a directory, as `claim` names it."""
    return {path.relative_to(where).with_suffix("").as_posix() for path in where.rglob("*.json")}


def unclaimed(name: str) -> list[Case]:
    """The cases of a file that no claim reads."""
    return [case for case in load(name) if not any(where(case) for where in CLAIMS[name])]


def dtype(case: Case) -> torch.dtype:
    """The precision of the recording: float64 where the case does not name one."""
    return getattr(torch, case.get("dtype", "torch.float64").removeprefix("torch."))


def tensor(values: Any, dtype: torch.dtype = torch.float64) -> Tensor:
    """Nested lists as a tensor; the files write non-finite numbers as "nan", "inf", "-inf"."""
    return torch.tensor(_numbers(values), dtype=dtype)


def _numbers(values: Any) -> Any:
    if isinstance(values, list):
        return [_numbers(v) for v in values]
    return float(values) if isinstance(values, str) else values


def case_id(case: Case) -> str:
    """A test id that says which record failed."""
    return f"{case['id']}" + (f"-{case['edge']}" if case.get("edge") else "")
