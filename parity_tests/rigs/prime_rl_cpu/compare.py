"""How far two runs ended from each other."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

Parameters = dict[str, Tensor]


class Run(NamedTuple):
    """What one run left behind."""

    before: Parameters
    after: Parameters
    metrics: list[dict[str, float]]  # one of each step


def read(out: Path) -> Run:
    """The run in this folder; of its metrics file the rows of each step, joined, that has a loss."""
    steps = dict[int, dict[str, float]]()
    for number, line in enumerate((out / "metrics.jsonl").read_text().splitlines()):
        row = json.loads(line)
        steps.setdefault(row.get("step", number), {}).update(row)  # before v0.8 a step has one row
    metrics = [row for row in steps.values() if "loss/mean" in row]
    return Run(torch.load(out / "before.pt"), torch.load(out / "after.pt"), metrics)


def largest(a: Parameters, b: Parameters) -> float:
    """The largest difference of an entry, relative to the largest entry of its tensor in `b`."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b)


def distance(a: Parameters, b: Parameters) -> float:
    """The Euclidean distance of all parameters together, relative to the length of `b`."""
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    return math.sqrt(apart / sum(float(b[name].double().square().sum()) for name in b))
