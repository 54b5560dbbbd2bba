"""One drawn batch through each framework's real loss path, with the configs that `migrate` reads and writes.

It prints the table of docs/migrate.md, or with --json the rows too. It needs verl and, on PYTHONPATH, TRL.
PRIME-RL's own losses are compared by adapters/prime_rl_plugin/test_live.py, which needs a checkout of it.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from composer_plugins.adapters import prime_rl_plugin
from composer_plugins.adapters.prime_rl_plugin.convention import PRIME_RL
from composer_plugins.calling_convention import Counts
from composer_plugins.frameworks.registry import frameworks
from composer_plugins.frameworks.trl import LOSS_TYPES
from composer_plugins.frameworks.verl import LOSSES
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, Loss
from composer_plugins.objective.objective import NORM, Objective, of_choice
from composer_plugins.objective.resolve import configs_of, migrate, resolve
from docs.generator import path_of_trl, path_of_verl
from docs.generator.drawn import LENGTHS, WIDTH, Batch, drawn
from docs.generator.markdown import table as as_table

MAX_LENGTH = 9  # the constant of the mode that divides by one
FRAMEWORKS = ("trl", "verl", "prime-rl")
# Parameters with which a loss keeps some of these batches, whose policies are far from each other.
WIDE: dict[str, dict[str, float]] = {"flash_reinforce": {"delta": 1.0}}
# Differences that leave the gradient the same up to its denominator, on a batch in which the rollout engine's
# log-probabilities are the trainer's.
SAME_GRADIENT = ("denominator", "old_logprobs", "rollout_logprobs")


class Case(NamedTuple):
    """A config to migrate, and what it is called in the table."""

    name: str
    framework: str
    table: dict[str, Any]


def gradient_of_prime_rl(table: Mapping[str, Any], batch: Batch) -> Tensor:
    """The gradient that this file gives, with the function called as PRIME-RL calls it."""
    loss = dict(table["trainer"]["loss"])
    function = partial(getattr(prime_rl_plugin, loss["import_path"].rpartition(".")[2]), **loss["kwargs"])
    logprobs = batch.logprobs.clone().requires_grad_()
    streams = (logprobs, batch.rollout, batch.advantages, batch.mask)
    counts = Counts(sum(LENGTHS), len(LENGTHS), parts=1, ranks=1, width=WIDTH)
    value = PRIME_RL.call(function, dict(zip(PRIME_RL.needs, streams, strict=True)), counts, {}).loss
    return torch.autograd.grad(value, logprobs)[0]


GRADIENTS: dict[str, Callable[[Mapping[str, Any], Batch], Tensor]] = {
    "trl": lambda table, batch: path_of_trl.value_and_gradient(table, batch)[1],
    "verl": lambda table, batch: path_of_verl.value_and_gradient(table, batch)[1],
    "prime-rl": gradient_of_prime_rl,
}


def without_denominator(gradient: Tensor, objective: Objective) -> Tensor:
    """A gradient times what the framework divided each token's share by."""
    lengths = torch.tensor(LENGTHS, dtype=torch.float64).unsqueeze(1)
    rows, tokens = len(LENGTHS), sum(LENGTHS)
    divisors: dict[str, Any] = {
        "token-mean": tokens,
        "bnpo": tokens,  # of one micro-batch, which is the whole batch here
        "token-sum": 1,
        "seq-mean-token-sum": rows,
        "seq-mean-token-mean": rows * lengths,
        "seq-mean-token-sum-norm": rows * (objective.length or WIDTH),
    }
    return gradient * divisors[objective.mode]


def policies() -> Iterator[Loss]:
    """The policy losses that all three adapters run."""
    for loss in losses():
        if loss.kind == "policy" and all(frameworks()[name].runs(loss) for name in FRAMEWORKS):
            yield loss


def own_tables() -> Iterator[Case]:
    """Configs of the frameworks' own losses, at their defaults and with a changed clip."""
    for kind, (*levels, _) in LOSS_TYPES.items():
        for level, row in zip(("token", "sequence"), levels, strict=True):
            if row is not None:
                table: dict[str, Any] = {
                    "loss_type": kind,
                    "importance_sampling_level": level,
                    "scale_rewards": "none",
                }
                if kind == "dr_grpo":
                    table["max_completion_length"] = MAX_LENGTH
                yield Case(f"TRL's {kind}" + (" by sequence" if level == "sequence" else ""), "trl", table)
    yield Case(
        "TRL's dapo, epsilon_high 0.28, beta 0.04",
        "trl",
        {"epsilon_high": 0.28, "beta": 0.04, "use_bias_correction_kl": False, "scale_rewards": "none"},
    )
    for mode in (name for name in LOSSES if name not in ("geo_mean", "dro", *NEED_THE_WHOLE_BATCH)):
        yield Case(f"verl's {mode}", "verl", verl_table(mode))
    yield Case("verl's dro, dro_beta 0.1", "verl", verl_table("dro", policy_loss={"dro_beta": 0.1}))
    yield Case("verl's geo_mean", "verl", verl_table("geo_mean"))
    yield Case(
        "verl's vanilla, DAPO's clips, KL loss 0.001",
        "verl",
        verl_table("vanilla", clip_ratio_high=0.28, clip_ratio_c=10.0, use_kl_loss=True, kl_loss_coef=0.001),
    )


NEED_THE_WHOLE_BATCH = ("clip_cov", "kl_cov")


def verl_table(mode: str, **actor: Any) -> dict[str, Any]:
    """A config of verl's own loss, with advantages that every framework has."""
    policy_loss = {"loss_mode": mode} | actor.pop("policy_loss", {})
    tree = {"actor": {"policy_loss": policy_loss, **actor}, "rollout": {"n": 8}}
    algorithm = {"adv_estimator": "grpo", "norm_adv_by_std_in_grpo": False}
    return {"algorithm": algorithm, "actor_rollout_ref": tree}


def catalogue_tables() -> Iterator[Case]:
    """Every loss that all three adapters run, in each framework's config."""
    for loss in policies():
        required = {name: loss.parameters[name].example for name, d in loss.defaults.items() if d is REQUIRED}
        required |= WIDE.get(loss.name, {})
        choice = choose("policy", loss.name, required)
        # Advantages that every framework computes, and a constant for the mode that needs one.
        advantage = choose("advantage", "dr_grpo")
        length = MAX_LENGTH if choice.mode == NORM else None
        objective = replace(
            of_choice(choice), advantage=advantage, group_size=8, length=length, has_terms=True
        )
        for framework in FRAMEWORKS:
            yield Case(loss.name, framework, configs_of(framework).write(objective))


class Row(NamedTuple):
    """A migration: what differs, and how far apart the gradients are; None where they must differ."""

    case: str
    source: str
    target: str
    differences: list[str]
    gradient: float | None


def row(case: Case, target: str, seeds: int = 3) -> Row:
    """Migrate a case, and compare the two real loss paths on drawn batches."""
    source = resolve(case.framework, case.table).required()
    found = migrate(source, target)
    differences = [str(one) for one in found.differences]
    if not differences:
        back = migrate(resolve(target, found.table).required(), case.framework)
        assert back.differences == (), (case, target)
    allowed = all(one.what.partition(".")[0] in SAME_GRADIENT for one in found.differences)
    largest = None
    if allowed:
        same_behaviour = any(one.what.endswith("_logprobs") for one in found.differences)
        written = resolve(target, found.table).required()
        largest = 0.0
        for seed in range(seeds):
            batch = drawn(seed, same_behaviour=same_behaviour)
            ours = without_denominator(GRADIENTS[target](found.table, batch), written)
            theirs = without_denominator(GRADIENTS[case.framework](case.table, batch), source)
            assert theirs.abs().max() > 0, case
            largest = max(largest, float((ours - theirs).abs().max() / theirs.abs().max()))
    return Row(case.name, case.framework, target, differences, largest)


def rows() -> Iterator[Row]:
    """Every case to every framework."""
    for case in (*own_tables(), *catalogue_tables()):
        for target in FRAMEWORKS:
            if target != case.framework or "'s " in case.name:
                yield row(case, target)


PAIRS = [(source, target) for source in FRAMEWORKS for target in FRAMEWORKS if source != target]


def shown(found: list[Row]) -> str:
    """The rows as a table: a line for each loss, a column for each pair of frameworks."""
    by_case: dict[str, dict[tuple[str, str], str]] = {}
    for one in found:
        gap = "" if one.gradient is None else f"{one.gradient:.1e}"
        names = dict.fromkeys(difference.partition(":")[0] for difference in one.differences)
        by_case.setdefault(one.case, {})[one.source, one.target] = "; ".join(filter(None, (gap, *names)))
    head = ("loss", *(f"{source} to {target}" for source, target in PAIRS))
    return as_table(head, ((case, *(cells.get(p, "") for p in PAIRS)) for case, cells in by_case.items()))


if __name__ == "__main__":
    every = list(rows())
    found = {"rows": [one._asdict() for one in every], "table": shown(every)}
    print(json.dumps(found) if "--json" in sys.argv else found["table"])
