"""`make bench`: every table, ratios within this one run, on the CPU with two threads.

Seconds are not comparable across machines; ratios are, and only where nothing else runs.
"""

import os
import sys
import warnings
from importlib.metadata import version

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # before TRL is imported
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch is: threads that spin measure one another

import torch
from rich.console import Console

from benchmarks import advantages, divergence, linear, linear_trl, policy, trainer_step
from benchmarks.timing import THREADS, load

TABLES = {
    "advantages": [lambda rows=rows: advantages.table(rows) for rows in advantages.ROWS],
    "policy": [policy.table],
    "divergence": [divergence.table],
    "linear": [*linear.tables(), linear.goals],
    "linear_trl": [linear_trl.table],
    "imports": [trainer_step.imports],
    "trainer": [trainer_step.table],
}


def main() -> None:
    """Print the tables named on the command line, or all."""
    torch.set_num_threads(THREADS)
    warnings.filterwarnings("ignore", module="verl|trl|transformers")
    console = Console(width=120, highlight=False)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "verl", "trl"))
    console.print(f"{versions}; load average at the start {load():.2f}, 2 cores")
    for name in sys.argv[1:] or TABLES:
        for table in TABLES[name]:
            console.print(table())


if __name__ == "__main__":
    main()
