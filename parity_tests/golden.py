"""Numbers recorded from upstream code: `golden/NAME.json`, each with its provenance and its cases."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"

Case = dict[str, Any]


@cache
def load(name: str) -> tuple[Case, ...]:
    """The cases of one golden file."""
    return tuple(json.loads((GOLDEN / f"{name}.json").read_text())["cases"])


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
