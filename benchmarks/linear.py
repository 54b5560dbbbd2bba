"""Fused losses on hidden states and an output head, forward and backward, beside their peers.

Time is the best of the turns; memory is the highest point of one call above its inputs, with the gradients
that it returns, each implementation in a process of its own (`python -m benchmarks.linear --peak-of NAME`).
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import NamedTuple

import torch
from rich.table import Table
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from benchmarks.linear_peers import DIVERGENCE, LOG_PROBS, Inputs, Loss
from benchmarks.timing import THREADS, best_seconds, peak_bytes, peak_of
from composer_plugins.errors import in_a_line

KEPT = 0.4  # the part of the tokens that counts, in the rows with masked tokens and tokens without gradient
SLOW = 3.0  # who takes so many times longer than the fastest gets one turn only
# torch's documentation: half precision is emulated on a CPU unless the policy is "accurate". Minutes.
SLOW_IN_BF16 = {"torch, auto"}
COMPILED = {
    "ours, compiled tile",
    "ours, frozen shared head",
    *(n for n in DIVERGENCE if "Liger compiled" in n),
}
PEERS = {"log_probs": LOG_PROBS, "divergence": DIVERGENCE}

Seconds = Callable[[Mapping[str, Callable[[], object]]], dict[str, float]]
Peak = Callable[[str], int]


class Problem(NamedTuple):
    """The sizes and the device of a measurement."""

    tokens: int = 2048
    hidden: int = 512
    vocab: int = 32000
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def inputs(self, confidence: float = 0.0) -> Inputs:
        """Random inputs. With `confidence` it is most of the logit of each token's target."""
        g = torch.Generator().manual_seed(0)
        weight, teacher = torch.randn(2, self.vocab, self.hidden, generator=g) * 3 / math.sqrt(self.hidden)
        targets = torch.randint(0, self.vocab, (self.tokens,), generator=g)
        hidden, other = torch.randn(2, self.tokens, self.hidden, generator=g)
        if confidence:
            hidden = hidden / 2 + confidence / 9 * weight[targets]  # 9 is a squared length of a weight
        incoming = torch.randn(self.tokens, generator=g) / self.tokens
        floats = [x.to(self.device, self.dtype) for x in (hidden, weight, other, teacher)]
        mask = torch.ones(self.tokens, dtype=torch.bool, device=self.device)
        return Inputs(*floats, targets.to(self.device), mask, incoming.to(self.device))


CPU = Problem()


def step(loss: Loss, inputs: Inputs, frozen: bool = False) -> Callable[[], list[Tensor]]:
    """Forward and backward; the gradients of the hidden states and, unless it is frozen, of the head."""
    leaves = [x.detach().requires_grad_() for x in inputs[: 1 if frozen else 2]]
    given = Inputs(*leaves, *inputs[len(leaves) :])
    return lambda: list(torch.autograd.grad(loss(given), leaves))


def variants(kind: str, inputs: Inputs) -> Iterator[tuple[str, Inputs, bool]]:
    """Rows that only ours has: (name, inputs, whether the head is frozen)."""
    kept = torch.arange(len(inputs.mask), device=inputs.mask.device) % 5 < 5 * KEPT
    yield "ours, 60 % masked", inputs._replace(mask=kept), False
    if kind == "log_probs":
        yield "ours, 60 % without gradient", inputs._replace(incoming=inputs.incoming * kept), False
    else:
        yield "ours, frozen shared head", inputs._replace(teacher_weight=inputs.weight), True


def available(make: Callable[[], Loss], name: str) -> Loss | None:
    """The loss, or None with a line that says why it is not measured."""
    try:
        return make()
    except (ImportError, AttributeError) as error:
        print(f"not measured: {name} ({error})")
        return None


def steps(kind: str, problem: Problem, only: str | None = None) -> dict[str, Callable[[], list[Tensor]]]:
    """What is measured: each peer that is installed, and the variants of ours; or one of them."""
    inputs, made, ours = problem.inputs(), {}, next(iter(PEERS[kind]))
    for name, make in PEERS[kind].items():
        slow = name in SLOW_IN_BF16 and problem.dtype != torch.float32 and problem.device == "cpu"
        if only in (None, name) and not slow and (loss := available(make, name)) is not None:
            made[name] = step(loss, inputs)
    for name, changed, frozen in variants(kind, inputs):
        if only in (None, name):
            made[name] = step(PEERS[kind][ours](), changed, frozen)
    return made


def cpu_seconds(functions: Mapping[str, Callable[[], object]], rounds: int = 3) -> dict[str, float]:
    """Seconds of each in turns. Those that their first call shows to be slow are not called again.

    What torch.compile cannot compile, as below a path with an apostrophe, is left out with the reason.
    """
    best = {}
    for name, function in functions.items():
        try:
            if name in COMPILED:
                function()
            start = time.perf_counter()
            function()
            best[name] = time.perf_counter() - start
        except BackendCompilerFailed as error:
            print(f"not measured: {name} (torch.compile: {in_a_line(error, most=60)})")
    limit = SLOW * min(best.values())
    fast = {name: functions[name] for name, seconds in best.items() if seconds < limit}
    return best | best_seconds(fast, rounds)


def cpu_peak(name: str) -> int:
    """Bytes of a measurement "kind/dtype/name" in a process of its own."""
    return peak_bytes("benchmarks.linear", name)


class Measured(NamedTuple):
    """Seconds and bytes by name."""

    seconds: dict[str, float]
    peaks: dict[str, int]


@cache
def measured(kind: str, problem: Problem, seconds: Seconds = cpu_seconds, peak: Peak = cpu_peak) -> Measured:
    """Time and memory of every peer and variant, measured once."""
    made = steps(kind, problem)
    found = seconds(made)
    return Measured(found, {name: peak(f"{kind}/{problem.dtype}/{name}") for name in found})


def errors(problem: Problem) -> dict[str, float]:
    """The relative error of the hidden states' gradient of confident tokens, against float64."""
    inputs = problem.inputs(confidence=30.0)
    exact = Inputs(*(x.double() if x.is_floating_point() else x for x in inputs))
    want = step(LOG_PROBS["naive"](), exact)()[0]
    found = {}
    for name in LOG_PROBS:
        if (loss := available(LOG_PROBS[name], name)) is not None:
            gradient = step(loss, inputs)()[0].double()
            found[name] = float((gradient - want).norm() / want.norm())
    return found


def table(kind: str, problem: Problem, seconds: Seconds = cpu_seconds, peak: Peak = cpu_peak) -> Table:
    """Milliseconds and megabytes of every peer and variant, and their ratios to ours."""
    found = measured(kind, problem, seconds, peak)
    ours = next(name for name in PEERS[kind] if name in found.seconds)
    sizes = f"[{problem.tokens}, {problem.hidden}] x [{problem.vocab}, {problem.hidden}]"
    made = Table(kind, title=f"{kind}, {sizes}, {problem.dtype}, {problem.device}, forward and backward")
    for heading in ("ms", "x ours", "peak MB", "x ours"):
        made.add_column(heading, justify="right")
    for name in found.seconds:
        time_, peak_ = found.seconds[name], found.peaks[name]
        ratios = time_ / found.seconds[ours], peak_ / found.peaks[ours]
        made.add_row(
            name, f"{1000 * time_:.0f}", f"{ratios[0]:.2f}", f"{peak_ / 1e6:.0f}", f"{ratios[1]:.2f}"
        )
    return made


def tables() -> list[Callable[[], Table]]:
    """The tables of both losses in float32 and bfloat16, each measured when it is called."""
    dtypes = torch.float32, torch.bfloat16
    return [partial(table, kind, Problem(dtype=dtype)) for kind in PEERS for dtype in dtypes]


def goals(problem: Problem = CPU, seconds: Seconds = cpu_seconds, peak: Peak = cpu_peak) -> Table:
    """Each goal of the issue beside the ratio of this run."""
    made = Table("goal", "ratio", "bound", "reached", title=f"Goals, {problem.device}")

    def row(name: str, value: float, bound: float) -> None:
        reached = "not measured" if math.isnan(value) else "yes" if value <= bound else "NO"
        made.add_row(name, f"{value:.2g}", f"{bound:g}", reached)

    def least(of: dict[str, float], *prefixes: str) -> float:
        found = [
            x for name, x in of.items() if not name.startswith("ours") and name.startswith(prefixes or "")
        ]
        return min(found, default=math.nan)

    for dtype in (torch.float32, torch.bfloat16):
        log_probs = measured("log_probs", problem._replace(dtype=dtype), seconds, peak)
        jsd = measured("divergence", problem._replace(dtype=dtype), seconds, peak)
        single, short = dtype == torch.float32, "fp32" if dtype == torch.float32 else "bf16"
        time_, peak_ = log_probs.seconds["ours"], log_probs.peaks["ours"]
        if single:
            row("log_probs, memory fp32 / the best peer's", peak_ / least(log_probs.peaks), 0.40)
            row("log_probs, memory fp32 / naive", peak_ / least(log_probs.peaks, "naive"), 0.12)
            row("log_probs, time fp32 / Liger", time_ / least(log_probs.seconds, "Liger"), 0.95)
            row("log_probs, time fp32 / naive", time_ / least(log_probs.seconds, "naive"), 1.05)
        else:
            row("log_probs, time bf16 / the best peer's", time_ / least(log_probs.seconds), 1.0)
        for tile in ("compiled", "eager"):
            mine = f"ours, {tile} tile"
            if mine not in jsd.seconds:
                continue
            if single:
                default = jsd.peaks.get("Liger compiled, chunk 1024", math.nan)
                row(f"divergence, {tile} tile, memory / Liger compiled", jsd.peaks[mine] / default, 0.25)
                row(f"divergence, {tile} tile, memory / TRL", jsd.peaks[mine] / least(jsd.peaks, "TRL"), 0.06)
            ratio = jsd.seconds[mine] / least(jsd.seconds, "Liger compiled")
            row(f"divergence, {tile} tile, time {short} / Liger compiled", ratio, 0.90 if single else 1.0)
        own = jsd.seconds.get("ours, compiled tile", math.nan)
        frozen = jsd.seconds.get("ours, frozen shared head", math.nan)
        row(f"frozen shared head {short} / our 4 products", frozen / own, 0.75)
        row(f"log_probs, 60 % masked {short}", log_probs.seconds["ours, 60 % masked"] / time_, 0.55)
        part = log_probs.seconds["ours, 60 % without gradient"] / time_
        row(f"log_probs, 60 % without gradient {short}", part, 0.55)
        masked = jsd.seconds.get("ours, 60 % masked", math.nan)
        row(f"divergence, 60 % masked {short}", masked / own, 0.55)
    small = problem._replace(tokens=min(problem.tokens, 1024), hidden=256, vocab=8192, dtype=torch.bfloat16)
    found = errors(small)
    row("bf16, confident tokens: error of the hidden gradient", found["ours"], 2.5e-3)
    for name, error in found.items():
        if name != "ours":
            made.add_row(f"  the same of {name}", f"{error:.2g}", "", "")
    return made


def main() -> None:
    """Print the peak of one measurement, "kind/dtype/name"."""
    torch.set_num_threads(THREADS)
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak-of", required=True)
    kind, dtype, name = parser.parse_args().peak_of.split("/")
    problem = Problem(dtype=getattr(torch, dtype.removeprefix("torch.")))
    (function,) = steps(kind, problem, only=name).values()
    function()  # what it loads and compiles at its first call is not counted
    print(peak_of(function))


if __name__ == "__main__":
    main()
