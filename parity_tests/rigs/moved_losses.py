"""Losses as their papers have them: what each framework makes of one, and what that trains on one batch.

`CAN` says what a framework can train, by its documentation. What `migrate` has to report follows from it for
every pair of frameworks. The formulas of the catalogue give the value and the gradient that each framework's
own code must have with the config that `migrate` writes for it, so any two of them are equal.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.calling import call_unchecked
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, of_kind
from composer_plugins.objective.objective import KL, NORM, Behaviour, Objective, behaviours
from composer_plugins.objective.resolve import Migrated, migrate, resolve
from composer_plugins.testing.assertions import assert_parity

MAX_LENGTH, GROUP_SIZE = 9, 8
# The losses that go from each framework to each other one, with the parameters that are not their defaults.
LOSSES: dict[str, dict[str, float]] = {
    **{name: {} for name in ("grpo", "dapo", "dr_grpo", "gspo", "sapo", "dppo_tv", "gmpo", "vespo", "luspo")},
    "cispo": {"clip_high": 4.0},
    "ppo": {"dual_clip": 3.0},
    "importance_sampling": {},
    "ipo": {"kl_tau": 1e-3},  # PRIME-RL's own loss, with a term that the advantages do not multiply
}
# Other parameters with which a loss keeps tokens of a batch whose policies are far from each other.
WIDE = {"flash_reinforce": {"delta": 1.0}}
OF_SEQUENCES = frozenset({"gspo", "gmpo", "vespo", "luspo"})
TOKENS, ROWS, ROW_SUMS, SUM = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "token-sum"


class Advantage(NamedTuple):
    """The name of an advantage, and the numbers of one that divides by a deviation."""

    name: str
    ddof: int | None = None
    eps: float | None = None


@dataclass(frozen=True)
class Can:
    """What one framework can train. The first of `modes` is what it does in the place of another one."""

    modes: tuple[str, ...] = (TOKENS, ROWS, ROW_SUMS, NORM)
    modes_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of losses with others
    deviation: Advantage | None = None  # its own numbers; None: any
    divides: bool = True  # whether an advantage may divide by the deviation
    old: tuple[Behaviour, ...] = ("trainer",)
    refuses: frozenset[str] = frozenset()
    has_group_size: bool = True


CAN = {
    # a loss without loss_type has its own reduction
    "trl": Can(
        modes_of={"importance_sampling": (TOKENS, ROWS, ROW_SUMS, NORM, SUM)},
        deviation=Advantage("grpo", 1, 1e-4),
    ),
    "verl": Can((TOKENS, ROWS, ROW_SUMS, NORM, SUM), old=("trainer", "rollout engine")),
    # divides by all tokens, keeps the log-probabilities of the engine alone, and subtracts a mean
    "prime-rl": Can((TOKENS,), old=("rollout engine",), divides=False),
    "skyrl": Can(refuses=frozenset({"ipo"})),  # divides the advantages, so each term has to have them
    # our loss is no option there, and its own has one of these forms
    "nemo-rl": Can(
        (TOKENS, ROWS),
        modes_of={"gspo": (ROWS,), "luspo": (ROWS,), "cispo": (TOKENS,)},
        deviation=Advantage("grpo", 1, 1e-6),
        refuses=frozenset({"sapo", "dppo_tv", "gmpo", "vespo", "importance_sampling", "ipo"}),
    ),
    "slime": Can(
        (ROWS, TOKENS, ROW_SUMS, NORM),
        deviation=Advantage("grpo", 1, 1e-6),
        old=("trainer", "rollout engine"),
    ),
    # packs sequences into rows, and counts tokens
    "torchtitan": Can(
        (TOKENS,),
        deviation=Advantage("grpo", 0, 1e-6),
        old=("rollout engine",),
        refuses=OF_SEQUENCES,
        has_group_size=False,
    ),
}
FRAMEWORKS = tuple(CAN)
PAPER = "the paper"
PAIRS = [(a, b) for a in (PAPER, *FRAMEWORKS) for b in FRAMEWORKS]


class Trained(NamedTuple):
    """The properties of a loss that the frameworks do not share."""

    mode: str
    advantage: Advantage
    old: Behaviour | None
    group_size: int | None

    def by(self, can: Can, name: str) -> "Trained":
        """What a framework makes of it."""
        modes = can.modes_of.get(name, can.modes)
        advantage = self.advantage
        if advantage.name == "grpo":
            advantage = (can.deviation or advantage) if can.divides else Advantage("dr_grpo")
        return Trained(
            self.mode if self.mode in modes else modes[0],
            advantage,
            self.old if self.old is None or self.old in can.old else can.old[0],
            self.group_size if can.has_group_size else None,
        )

    def differing(self, other: "Trained") -> set[str]:
        """The names, in `migrate`'s words, of what the other does otherwise."""
        found = {"denominator"} if self.mode != other.mode else set()
        found |= {"old_logprobs"} if self.old != other.old else set()
        found |= {"completions per prompt"} if self.group_size and not other.group_size else set()
        if self.advantage.name != other.advantage.name:
            return found | {"advantage"}
        numbers = zip(("ddof", "eps"), self.advantage[1:], other.advantage[1:], strict=True)
        return found | {f"advantage.{number}" for number, a, b in numbers if a != b}


def of_paper(name: str) -> tuple[Objective, Trained]:
    """A loss with the denominator, the advantage and the old policy of its paper."""
    loss = of_kind(losses(), "policy")[name]
    required = {key: loss.parameters[key].example for key, x in loss.defaults.items() if x is REQUIRED}
    policy = choose("policy", name, LOSSES.get(name) or required | WIDE.get(name, {}))
    own = Advantage(policy.loss.advantage) if policy.loss.advantage else Advantage("grpo", 1, 1e-6)
    old, rollout = behaviours(policy, "trainer", "rollout engine")
    objective = Objective(
        policy=policy,
        mode=policy.mode,
        length=MAX_LENGTH if policy.mode == NORM else None,
        old=old,
        rollout=rollout,
        advantage=choose("advantage", own.name),
        group_size=GROUP_SIZE,
    )
    return objective, Trained(policy.mode, own, old, GROUP_SIZE)


def trained(framework: str, table: Mapping[str, Any]) -> Objective:
    """What a framework trains with a config that was written for it, in which nothing may be wrong."""
    read = resolve(framework, table)
    assert not read.errors and not read.unread, (read.errors, read.unread)
    return read.required()


def of_source(source: str, name: str) -> Objective:
    """A loss as in its paper, or what a framework makes of that."""
    objective, _ = of_paper(name)
    return objective if source == PAPER else trained(source, migrate(objective, source).table)


def moved(framework: str, name: str) -> Iterator[tuple[Migrated, Objective]]:
    """Each config that `migrate` writes for a framework from another one's, and what it has to train.

    That is the source's objective, unless the denominator or the old policy is reported to differ. TRL's
    configs can be read where TRL is installed.
    """
    texts = set[str]()
    for source in (PAPER, *FRAMEWORKS) if name in LOSSES else (PAPER,):
        can = CAN.get(source)
        if (can and name in can.refuses) or (source == "trl" != framework):
            continue
        objective = of_source(source, name)
        found = migrate(objective, framework)
        if found.text not in texts:
            texts.add(found.text)
            differs = {one.what for one in found.differences} & {"denominator", "old_logprobs"}
            yield found, trained(framework, found.table) if differs else objective


def check_pair(source: str, target: str, name: str) -> None:
    """Assert that a migration reports the differences that follow from `CAN`, and nothing else."""
    objective, wanted = of_source(source, name), of_paper(name)[1]
    wanted = wanted if source == PAPER else wanted.by(CAN[source], name)
    if name in CAN[target].refuses:
        with pytest.raises(ConfigError, match=objective.policy.loss.name) as caught:
            migrate(objective, target)
        assert not caught.value.others and caught.value.remedy.startswith(("choose", "switch"))
        return
    found = migrate(objective, target)
    assert {one.what for one in found.differences} == wanted.differing(wanted.by(CAN[target], name))
    trained(target, found.table)


def check_terms(framework: str) -> None:
    """Assert that what a framework makes of each KL and each correction is a config that it takes."""
    objective, _ = of_paper("grpo")
    for row in losses():
        if row.kind in ("kl", "correction"):
            params = {name: one.example for name, one in row.parameters.items() if one.example is not None}
            one = choose(row.kind, row.name, params)
            for place in ("loss", "reward"):
                term: Any = {"kl": KL(one, 0.1, place)} if row.kind == "kl" else {"correction": one}
                found = migrate(replace(objective, **term), framework)
                assert not migrate(trained(framework, found.table), framework).differences, row.name


def pairs(frameworks: Collection[str]) -> list[Any]:
    """The parameters `source`, `target` and `name` of a test, for these frameworks as source or target."""
    return [
        pytest.param(a, b, name, id=f"{name}: {a} to {b}")
        for a, b in PAIRS
        for name in LOSSES
        if {a, b} - {PAPER} <= {*frameworks} and not (a in CAN and name in CAN[a].refuses)
    ]


def runs(framework: str) -> list[str]:
    """The losses that a framework trains."""
    return [name for name in LOSSES if name not in CAN[framework].refuses]


def every(framework: str) -> list[str]:
    """The losses that a framework trains, and all others that TRL, verl and PRIME-RL run."""
    tables = [frameworks()[name] for name in ("trl", "verl", "prime-rl")]
    shared = [one.name for one in losses() if one.kind == "policy" and all(x.runs(one) for x in tables)]
    return [*runs(framework), *(name for name in shared if name not in LOSSES)]


LENGTHS = (7, 3, 5, 1, 6, 4)  # tokens of each completion


class Batch(NamedTuple):
    """A padded batch of completions, [rows, width] each; one advantage per row."""

    logprobs: Tensor
    old: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor


class Expected(NamedTuple):
    """What a loss is on the batch by its formula."""

    value: Tensor
    gradient: Tensor  # in the log-probabilities [rows, width]; 0 where masked
    largest: float  # term of the sum behind the value


def batch(*, nan: bool = False) -> Batch:
    """A batch whose ratios reach the clips, with padding and two masked tokens inside of completions.

    With `nan`, NaN wherever masked.
    """
    g = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))

    def near(x: Tensor, spread: float) -> Tensor:
        return (x + spread * torch.randn(shape, generator=g, dtype=torch.float64)).clamp(max=-1e-3)

    logprobs = -0.05 - 3 * torch.rand(shape, generator=g, dtype=torch.float64)
    old = near(logprobs, 0.3)
    rollout = near(old, 0.1)
    advantages = torch.randn(shape[0], 1, generator=g, dtype=torch.float64).expand(shape)
    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
    mask[0, 2] = mask[4, 3] = False
    streams = (logprobs, old, rollout, advantages)
    return Batch(*(torch.where(mask, x, torch.nan) if nan else x for x in streams), mask)


def expected(objective: Objective, given: Batch) -> Expected:
    """Value and gradient by the formula of the catalogue, with the denominator of the objective."""
    logprobs, mask = given.logprobs.clone().requires_grad_(), given.mask
    streams = {"trainer": given.old, "rollout engine": given.rollout, None: None}
    tensors: dict[str, Any] = {"logprobs": logprobs, "advantages": given.advantages, "mask": mask}
    tensors |= {"old_logprobs": streams[objective.old], "rollout_logprobs": streams[objective.rollout]}  # type: ignore[index]
    token = call_unchecked(objective.policy, tensors).loss
    mode: Any = objective.mode
    value = aggregate(token, mask, mode, num_sequences=len(mask), max_length=objective.length)
    share, gradient = torch.autograd.grad(value, [token, logprobs])
    assert value.isfinite() and gradient.isfinite().all() and gradient.any() and not gradient[~mask].any()
    return Expected(value.detach(), gradient, float((share * token.detach()).abs().max()))


def assert_trains(
    value: Tensor, gradient: Tensor, wanted: Expected, dtype: torch.dtype = torch.float64
) -> None:
    """Assert that a framework's own code has the value and the gradient of the formula."""
    terms = wanted.gradient.numel()
    assert_parity(value, wanted.value, terms=terms, magnitude=wanted.largest, dtype=dtype)
    assert_parity(gradient, wanted.gradient, terms=terms, dtype=dtype, what="gradient")
