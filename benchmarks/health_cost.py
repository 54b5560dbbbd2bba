"""The time that health takes, in CPU time on one thread, which other programs disturb little.

A loss runs with health on and off in turns, and the median of their ratios counts. A TRL step differs by more
than health takes from turn to turn, so that there the time within health's functions is added up.

python -m benchmarks.health_cost     (.nox/trl: TRL and PRIME-RL; .nox/verl: verl and PRIME-RL)
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # before TRL is imported
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch is: threads that spin measure one another

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.timing import load

Run = Callable[[], object]
SEQUENCES, TOKENS, ROWS, RESPONSE = 64, 2048, 16, 512


def logprobs(*shape: int) -> dict[str, Any]:
    """Log-probabilities of a policy and of a slightly different old one, advantages, and a mask."""
    g = torch.Generator().manual_seed(0)
    own = -3 * torch.rand(*shape, generator=g)
    old = (own + 0.05 * torch.randn(*shape, generator=g)).clamp(max=0)
    advantages = torch.randn(*shape[:-1], 1, generator=g).expand(*shape).contiguous()
    return {"own": own, "old": old, "advantages": advantages, "mask": torch.rand(*shape, generator=g) < 0.8}


def prime_rl(health: bool) -> Run:
    """Forward and backward of `loss_fn` for each sequence of a micro-batch."""
    from composer_plugins.adapters.prime_rl_plugin import loss_fn

    given = logprobs(SEQUENCES, TOKENS)

    def run() -> None:
        total: Any = 0.0
        for own, old, advantages, mask in zip(*given.values(), strict=True):
            names = {"ref_logprobs": None, "loss_weights": None, "loss_mask": mask, "advantages": advantages}
            leaf = own.clone().requires_grad_()
            inputs = SimpleNamespace(trainer_logprobs=leaf, inference_logprobs=old, **names)
            total = total + loss_fn(inputs, health=health).loss
        total.backward()

    return run


def verl(health: bool) -> Run:
    """Forward and backward of the policy loss of a micro-batch."""
    from composer_plugins.adapters.verl_plugin.loss import policy_loss

    loss, given = policy_loss("grpo@verl"), logprobs(ROWS, RESPONSE)
    config = SimpleNamespace(policy_loss={"composer": {"health": health}}, global_batch_info={})

    def run() -> None:
        own = given["own"].clone().requires_grad_()
        loss(given["old"], own, given["advantages"], given["mask"], config=config)[0].backward()

    return run


def trl(policy: str, turns: int = 12) -> tuple[float, float, float]:
    """Milliseconds of a step of `benchmarks.trainer_step` without health, the ratio, and its error."""
    from benchmarks import trainer_step
    from composer_plugins.adapters.trl_mixin.health import TrlHealth
    from composer_plugins.health.watch import Health

    inside, depth = 0.0, 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside, depth
            start, depth = time.process_time(), depth + 1
            found = function(*args, **kwargs)
            depth -= 1
            inside += 0.0 if depth else time.process_time() - start
            return found

        return call

    made = trainer_step.trainer({"policy": policy, "health": True}, trainer_step.make_tokenizer())
    for name in ("of_generation", "of_loss", "on_pre_optimizer_step", "on_optimizer_step"):
        setattr(TrlHealth, name, counted(getattr(TrlHealth, name)))
    Health._of_gradient = counted(Health._of_gradient)  # type: ignore[method-assign]
    rest, ratios = list[float](), list[float]()
    for turn in range(turns + 1):
        inside, start = 0.0, time.process_time()
        made.train()
        rest.append(time.process_time() - start - inside)
        ratios += [1 + inside / rest[-1]] if turn else []  # the first turn warms up
    error = statistics.stdev(ratios) / turns**0.5
    return 1000 * statistics.median(rest) / trainer_step.STEPS, statistics.median(ratios), error


def ratio(make: Callable[[bool], Run], least: float, turns: int) -> tuple[float, float, float]:
    """Milliseconds with health off, the median of on / off over the turns, and its standard error."""
    runs = {health: make(health) for health in (False, True)}
    repeats = 1
    for _ in range(2):  # the first calls warm up
        start = time.process_time()
        for run in runs.values():
            run()
        repeats = max(1, round(2 * least / (time.process_time() - start)))
    ratios, off = list[float](), list[float]()
    for turn in range(turns):
        took = {}
        for health in (False, True) if turn % 2 else (True, False):
            start = time.process_time()
            for _ in range(repeats):
                runs[health]()
            took[health] = (time.process_time() - start) / repeats
        ratios.append(took[True] / took[False])
        off.append(1000 * took[False])
    error = 1.2533 * statistics.stdev(ratios) / turns**0.5  # of a median
    return statistics.median(off), statistics.median(ratios), error


def main() -> None:
    """Print the table of what can be imported here."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = {f"PRIME-RL's loss_fn, {SEQUENCES} x {TOKENS}": ratio(prime_rl, 0.1, 101)}
    if find_spec("verl"):
        found[f"verl's policy loss, {ROWS} x {RESPONSE}"] = ratio(verl, 0.05, 101)
    if find_spec("trl"):
        found |= {f"a TRL step, policy='{name}'": trl(name) for name in ("trl", "grpo")}
    table = Table(title=f"1 thread, CPU time, load average at the start {load():.2f}")
    for column in ("", "ms with health off", "on / off", "standard error"):
        table.add_column(column)
    for name, (off, median, error) in found.items():
        table.add_row(name, f"{off:.2f}", f"{median:.4f}", f"{error:.4f}")
    Console(width=100, highlight=False).print(table)


if __name__ == "__main__":
    main()
