"""`make bench`: every table, ratios within this one run, on the CPU with two threads.

Numbers are not comparable across machines; ratios are, and only where nothing else runs.
"""

import warnings
from importlib.metadata import version

import torch
from rich.console import Console

from benchmarks import advantages, divergence, policy
from benchmarks.timing import THREADS, load


def main() -> None:
    """Print the tables of the plain kernels."""
    torch.set_num_threads(THREADS)
    warnings.filterwarnings("ignore")  # verl's and TRL's own at import
    console = Console(width=120, highlight=False)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "verl", "trl"))
    console.print(f"{versions}; load average at the start {load():.2f}")
    for rows in advantages.ROWS:
        console.print(advantages.table(rows))
    console.print(policy.table())
    console.print(divergence.table())


if __name__ == "__main__":
    main()
