"""Time PRIME-RL's default loss and ours through compute_loss of one checkout: 64 sequences x 2048 tokens.

Forward and backward of a micro-batch, its metrics included, on one thread and on two. Run where the
checkout's loss can be imported: `nox -s prime_rl -- --source DIR` prints it after its tests.
"""

import sys
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.timing import best_seconds, load
from composer_plugins.conformance.prime_rl_claims import upstream as prime_rl_live
from composer_plugins.conformance.prime_rl_claims.claims import OURS
from composer_plugins.conformance.prime_rl_claims.packs import Pack
from composer_plugins.conformance.prime_rl_claims.upstream import Upstream
from composer_plugins.conformance.stubs import source, variable

SEQUENCES, TOKENS, ROUNDS = 64, 2048, 15


def pack() -> Pack:
    """Float32, four fifths of the tokens unmasked, no reference and no weights: PRIME-RL's usual run."""
    g = torch.Generator().manual_seed(0)
    logprobs = [-3 * torch.rand(TOKENS, generator=g) for _ in range(SEQUENCES)]
    rollout = [(x + 0.05 * torch.randn(TOKENS, generator=g)).clamp(max=0) for x in logprobs]
    advantages = [torch.randn(1, generator=g).expand(TOKENS).contiguous() for _ in logprobs]
    mask = [torch.rand(TOKENS, generator=g) < 0.8 for _ in logprobs]
    return Pack(logprobs, rollout, None, advantages, mask)


def step(upstream: Upstream, cut: Pack, **table: object) -> Callable[[], Tensor]:
    """One forward and backward of a micro-batch."""
    fn = upstream.loss_fn(**table)

    def run() -> Tensor:
        leaves = [x.detach().requires_grad_() for x in cut.trainer_logprobs]
        given = Pack(leaves, cut.inference_logprobs, None, cut.advantages, cut.loss_mask)
        loss = upstream.compute_loss(given, fn, 1000)[0]
        loss.backward()
        return loss

    return run


def main() -> None:
    """Print the table for the checkout that PRIME_RL_SOURCE names."""
    checkout = source("prime-rl")
    if checkout is None:
        sys.exit(f"{variable('prime-rl')} names no checkout of PRIME-RL")
    upstream, cut = prime_rl_live.load(checkout), pack()
    ours = {"type": "custom", "import_path": OURS}
    runs = {
        "PRIME-RL's default": step(upstream, cut, type="default"),
        "loss_fn, the same loss": step(upstream, cut, **ours),
        "loss_fn, cispo": step(upstream, cut, **ours, kwargs={"policy": "cispo", "old_policy": "rollout"}),
    }
    console = Console(width=100, highlight=False)
    table = Table(title=f"{checkout.name}: {SEQUENCES} x {TOKENS}, load average {load():.2f}")
    for column in ("loss", "1 thread", "ratio", "2 threads", "ratio"):
        table.add_column(column)
    cells: dict[str, list[str]] = {name: [name] for name in runs}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds = best_seconds(runs, ROUNDS)
        base = next(iter(seconds.values()))
        for name, took in seconds.items():
            cells[name] += [f"{1000 * took:.1f} ms", f"{took / base:.2f}"]
    for row in cells.values():
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
