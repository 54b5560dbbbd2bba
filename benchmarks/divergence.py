"""JSD from logits, forward and backward, beside TRL's GKD and the formula written down plainly.

Time is the best turn; memory is the highest resident point of one call above its inputs, each
implementation in a process of its own (`python -m benchmarks.divergence --peak-of NAME`).
"""

import argparse
import math
from collections.abc import Callable

import torch
from rich.table import Table
from torch import Tensor
from trl.experimental.gkd import GKDTrainer

from benchmarks.timing import THREADS, best_seconds, peak_bytes, peak_of
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.divergences import jsd

SHAPE, BETA = (1, 512, 32000), 0.5
TIME_GOAL, MEMORY_GOAL = 0.6, 0.35


def naive(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """The definition, left to autograd."""
    s, t = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    m = torch.logaddexp(s + math.log(1 - BETA), t + math.log(BETA))
    per_token = BETA * (t.exp() * (t - m)).sum(-1) + (1 - BETA) * (s.exp() * (s - m)).sum(-1)
    return (per_token * mask).sum() / mask.sum()


def trl(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """TRL 1.16's function, as its GKD trainer calls it."""
    labels = torch.where(mask, 0, -100)
    return GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=BETA)


def ours(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """The kernel, and a token mean."""
    return aggregate(jsd(student, teacher, mask, beta=BETA).loss, mask, "token-mean")


PEERS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"ours": ours, "naive": naive, "TRL": trl}


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a student and a teacher near it."""
    g = torch.Generator().manual_seed(0)
    student = 3 * torch.randn(SHAPE, generator=g)
    teacher = student + torch.randn(SHAPE, generator=g)
    return student.to(dtype), teacher.to(dtype), torch.ones(SHAPE[:2], dtype=torch.bool)


def step(name: str, given: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    """Forward and backward; the gradient."""

    def run() -> Tensor:
        leaf = given[0].detach().requires_grad_()
        PEERS[name](leaf, *given[1:]).backward()
        return leaf.grad

    return run


def table(rounds: int = 5) -> Table:
    """Milliseconds, megabytes and the error against float64, and what part of the naive's they are."""
    given = batch()
    best = best_seconds({name: step(name, given) for name in PEERS}, rounds)
    peaks = {name: peak_bytes("benchmarks.divergence", name) for name in PEERS}
    exact = step("naive", batch(torch.float64))()
    made = Table(
        "JSD", title=f"Generalized JSD on {list(SHAPE[1:])} float32, forward and backward, {THREADS} threads"
    )
    for heading in (
        "ms",
        f"x naive (goal {TIME_GOAL})",
        "peak MB",
        f"x naive (goal {MEMORY_GOAL})",
        "gradient error",
    ):
        made.add_column(heading, justify="right")
    for name in PEERS:
        error = float((step(name, given)().double() - exact).abs().max() / exact.abs().max())
        made.add_row(
            name,
            f"{1000 * best[name]:.0f}",
            f"{best[name] / best['naive']:.2f}",
            f"{peaks[name] / 1e6:.0f}",
            f"{peaks[name] / peaks['naive']:.2f}",
            f"{error:.1e}",
        )
    return made


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak-of", choices=list(PEERS), required=True)
    chosen = parser.parse_args().peak_of
    tensors = batch()
    step("naive", tuple(x[:, :8] for x in tensors))()  # warms the allocator and the threads
    print(peak_of(step(chosen, tensors)))
