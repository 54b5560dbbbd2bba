"""How far two runs ended from each other.

`python -m parity_tests.rigs.prime_rl_cpu.compare OUT_A OUT_B`.
"""

import json
import math
import sys
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
    """The run in this folder; the rows of its metrics file that the loss is in."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss/mean" in row]
    return Run(torch.load(out / "before.pt"), torch.load(out / "after.pt"), steps)


def largest(a: Parameters, b: Parameters) -> float:
    """The largest difference of an entry, relative to the largest entry of its tensor in `b`."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in b)


def distance(a: Parameters, b: Parameters) -> float:
    """The Euclidean distance of all parameters together, relative to the length of `b`."""
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in b)
    return math.sqrt(apart / sum(float(b[name].double().square().sum()) for name in b))


def main() -> None:
    """Print the differences, and how far training moved."""
    one, other = (read(Path(folder)) for folder in sys.argv[1:3])
    unequal = sum(int((one.after[name] != other.after[name]).sum()) for name in other.after)
    count = sum(value.numel() for value in other.after.values())
    print(f"steps: {len(one.metrics)} and {len(other.metrics)}")
    print(f"entries that differ: {unequal} of {count}")
    print(
        f"largest difference, relative to its tensor's largest entry: {largest(one.after, other.after):.1e}"
    )
    print(f"distance, relative to the length of all parameters: {distance(one.after, other.after):.1e}")
    print(f"the second run moved by: {distance(other.before, other.after):.1e}")


if __name__ == "__main__":
    main()
