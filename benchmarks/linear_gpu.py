"""The tables of `benchmarks.linear` on a GPU: `python -m benchmarks.linear_gpu [--device cpu]`.

Time is the best of 20 turns between CUDA events; memory is `torch.cuda.max_memory_allocated` of one call
above what was allocated before. A peer that is not installed or lacks memory is left out, with a line that
says so. It was never run on a GPU.
With `--device cpu` it runs at small sizes, to see that it runs.
"""

import argparse
from collections.abc import Callable, Mapping

import torch
from rich.console import Console

from benchmarks.linear import PEERS, Problem, cpu_seconds, goals, steps, table
from benchmarks.timing import peak_of

ROUNDS = 20
SIZES = {"cuda": (16384, 4096, 151936), "cpu": (64, 32, 500)}


def cuda_seconds(functions: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of each in turns, after one call that is not counted."""
    best: dict[str, float] = {}
    for name, function in functions.items():
        try:
            function()
            best[name] = float("inf")
        except torch.OutOfMemoryError as error:
            print(f"not measured: {name} ({error})")
    for _ in range(ROUNDS):
        for name in best:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            functions[name]()
            end.record()
            torch.cuda.synchronize()
            best[name] = min(best[name], start.elapsed_time(end) / 1000)
    return best


def cuda_peak(function: Callable[[], object]) -> int:
    """Bytes at the highest point of one call, above those before it."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    device = parser.parse_args().device
    on_gpu = device == "cuda"
    base = Problem(*SIZES[device], device=device)

    def peak(name: str) -> int:
        kind, dtype, name = name.split("/")
        problem = base._replace(dtype=getattr(torch, dtype.removeprefix("torch.")))
        (function,) = steps(kind, problem, only=name).values()
        return (cuda_peak if on_gpu else peak_of)(function)

    console = Console(width=120, highlight=False)
    name = torch.cuda.get_device_name() if on_gpu else "the CPU, at sizes that say nothing about speed"
    console.print(f"torch {torch.__version__} on {name}")
    seconds = cuda_seconds if on_gpu else cpu_seconds
    for kind in PEERS:
        for dtype in (torch.float32, torch.bfloat16):
            console.print(table(kind, base._replace(dtype=dtype), seconds, peak))
    console.print(goals(base, seconds, peak))


if __name__ == "__main__":
    main()
