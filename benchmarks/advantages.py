"""Group-relative advantages in unsorted groups of 8 to 16, beside verl's and TRL's."""

import numpy as np
import torch
from rich.table import Table
from torch import Tensor
from trl.trainer.utils import nanstd
from verl.trainer.ppo import core_algos

from benchmarks.timing import THREADS, best_seconds
from composer_plugins.kernels import advantages

ROWS, GROUP = (4096, 65536), (8, 16)


def batch(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards per token with the outcome at the last, a mask, and the unsorted group of each row."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(GROUP[0], GROUP[1] + 1, (rows,), generator=g)
    ids = torch.repeat_interleave(torch.arange(rows), sizes)[:rows]
    ids[-GROUP[0] :] = ids[-GROUP[0]]  # the last group is cut off, and verl's pass@k refuses one of a row
    ids = ids[torch.randperm(rows, generator=g)]
    token_rewards = torch.zeros(rows, 1)  # one token: what is timed is the grouping
    token_rewards[:, 0] = torch.rand(rows, generator=g)
    return token_rewards, torch.ones(rows, 1), ids


def trl(rewards: Tensor, size: int) -> Tensor:
    """TRL's arithmetic, which needs sorted groups of one size."""
    grouped = rewards.view(-1, size)
    mean = grouped.nanmean(dim=1).repeat_interleave(size)
    std = nanstd(grouped, dim=1).repeat_interleave(size)
    return (rewards - mean) / (std + 1e-4)


def table(rows: int) -> Table:
    """Milliseconds of ours, and each peer's time as a multiple of it."""
    rewards, mask, ids = batch(rows)
    outcome, index = rewards[:, 0], np.array([str(i) for i in ids.tolist()], dtype=object)
    codes = ids.numpy()
    rounds = 5 if rows > ROWS[0] else 15
    numbered = int(ids.max()) + 1
    pairs = {
        "grpo": (lambda: advantages.grpo(outcome, ids), "grpo"),
        "grpo, num_groups given": (lambda: advantages.grpo(outcome, ids, num_groups=numbered), "grpo"),
        "dr_grpo": (lambda: advantages.dr_grpo(outcome, ids), None),
        "rloo": (lambda: advantages.rloo(outcome, ids), "rloo"),
        "rloo, num_groups given": (lambda: advantages.rloo(outcome, ids, num_groups=numbered), "rloo"),
        "opo": (lambda: advantages.opo(outcome, ids, mask.sum(-1)), "opo"),
        "pass_at_k": (lambda: advantages.pass_at_k(outcome, ids), "grpo_passk"),
    }
    made = Table(
        "estimator",
        "ms",
        title=f"{rows} rows in unsorted groups of {GROUP[0]} to {GROUP[1]}, {THREADS} threads",
    )
    peers = ("loop", "verl, integer ids", "verl, uids", "trl")
    for heading in ("verl's loop", "verl vectorised", "the same, uids", "TRL (sorted groups of 8)"):
        made.add_column(heading, justify="right")
    for name, (ours, theirs) in pairs.items():
        functions = {"ours": ours}
        if theirs:
            loop = core_algos.get_adv_estimator_fn(theirs)
            functions["loop"] = lambda loop=loop: loop(rewards, mask, index=index, config={})
        if theirs in ("grpo", "rloo"):
            fast = core_algos.get_adv_estimator_fn(f"{theirs}_vectorized")
            functions["verl, integer ids"] = lambda fast=fast: fast(rewards, mask, index=codes)
            functions["verl, uids"] = lambda fast=fast: fast(rewards, mask, index=index)
        if theirs == "grpo":
            functions["trl"] = lambda: trl(outcome, 8)
        best = best_seconds(functions, rounds)
        cells = [f"{best[k] / best['ours']:.2f}x" if k in best else "" for k in peers]
        made.add_row(name, f"{1000 * best['ours']:.2f}", *cells)
    return made
