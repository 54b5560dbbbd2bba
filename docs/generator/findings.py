"""docs/findings.md: what `check --as` finds on the losses of verl, TRL and PRIME-RL themselves."""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from composer_plugins.conformance.prime_rl_claims.packs import Pack
from composer_plugins.testing.conventions import check_as, find_convention
from composer_plugins.testing.report import Outcome, Report, Status
from docs.generator.markdown import table

MASKED, CUT = (
    "masked_nan_and_infinities_have_no_influence",
    "micro_batches_and_ranks_leave_the_gradient_alone",
)
FAR, TWICE = "policies_far_apart_give_finite_numbers", "two_calls_give_the_same_result"
ORDER, HIDDEN = "rows_may_come_in_any_order", "nan_is_seen_in_its_row_and_in_no_other"
NO_GRADIENT = "nan_in_an_input_is_nan_in_the_gradient_of_its_token"
OPTION, INPUT = "every_parameter_has_an_effect", "every_input_has_an_effect"
EMPTY = "batch_without_an_unmasked_token_gives_zero_with_a_gradient"

# What the page says that every loss on it obeys.
EVERY_LOSS = (
    "masked_tokens_have_no_influence",
    "gradient_reaches_the_trained_inputs_only",
    "inputs_are_not_written_to",
    "more_padding_changes_nothing",
    "descent_raises_the_tokens_with_positive_advantages",
)


class Line(NamedTuple):
    """One line of upstream's source: a function of a module, and a text that only this line of it has."""

    module: str
    function: str  # "compute_policy_loss_gspo", "GRPOTrainer._compute_loss"
    text: str

    def found(self) -> str:
        """File and line."""
        module = import_module(self.module)
        function: Any = module
        for name in self.function.split("."):
            function = getattr(function, name)
        lines, first = inspect.getsourcelines(inspect.unwrap(function))
        (number,) = [first + i for i, line in enumerate(lines) if self.text in line][:1]
        return f"`{Path(str(module.__file__)).name}:{number}`"


class Finding(NamedTuple):
    """One law that some losses do not obey, and where."""

    law: str
    losses: tuple[str, ...]
    sentence: str
    lines: tuple[Line, ...]


class Upstream(NamedTuple):
    """One framework: its losses, and what was found."""

    title: Callable[[], str]
    reports: Callable[[], dict[str, Report]]
    findings: tuple[Finding, ...]
    more: Callable[[], list[str]] = list


CORE, ROLLOUT = "verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper"
CLAMPED, UNCLAMPED = "torch.clamp(negative_approx_kl, min", "ratio = torch.exp(negative_approx_kl)"
PREFIX = "compute_policy_loss_"
BY_SUM = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "clip_cov", "kl_cov", "dro", "cispo", "bypass_mode")

OF_VERL = (
    Finding(
        CUT,
        ("geo_mean",),
        "The loss is the mean over the rows of the micro-batch. verl adds up the micro-batches, so the "
        "gradient grows with their number. `loss_agg_mode` and the counts of the whole batch are not read.",
        (Line(CORE, f"{PREFIX}geo_mean", "torch.mean(pg_losses)"),),
    ),
    Finding(
        CUT,
        ("clip_cov", "kl_cov"),
        "Tokens are chosen by their covariance, which is taken from the means of the micro-batch. Another "
        "cut chooses other tokens.",
        (
            Line(CORE, f"{PREFIX}clip_cov", "verl_F.masked_mean(advantages"),
            Line(CORE, f"{PREFIX}kl_cov", "all_valid_adv.mean()"),
        ),
    ),
    Finding(
        TWICE,
        ("clip_cov",),
        "The clipped tokens are chosen by torch's global random numbers. Two calls with the same inputs "
        "differ.",
        (Line(CORE, f"{PREFIX}clip_cov", "torch.randperm"),),
    ),
    Finding(
        ORDER,
        ("clip_cov",),
        "The random choice is of places in the batch, so it changes with the order of the rows.",
        (Line(CORE, f"{PREFIX}clip_cov", "torch.randperm"),),
    ),
    Finding(
        FAR,
        ("clip_cov", "kl_cov", "geo_mean"),
        "The log ratio is not clamped before exp, as it is in `vanilla`. In float32 a token whose old "
        "policy is 90 nats lower gives infinity or NaN (`geo_mean`: 10,000 nats).",
        (
            Line(CORE, f"{PREFIX}clip_cov", UNCLAMPED),
            Line(CORE, f"{PREFIX}kl_cov", UNCLAMPED),
            Line(CORE, f"{PREFIX}geo_mean", "ratio = torch.exp("),
        ),
    ),
    Finding(
        MASKED,
        ("gspo", "geo_mean"),
        "The log ratios are multiplied with the mask. NaN or an infinity at a masked token makes the loss "
        "NaN.",
        (
            Line(CORE, f"{PREFIX}gspo", "negative_approx_kl * response_mask"),
            Line(CORE, f"{PREFIX}geo_mean", "negative_approx_kl_min * response_mask"),
        ),
    ),
    Finding(
        MASKED,
        ("sapo",),
        "The three modes `seq-mean-*` multiply the loss with the mask, and this loss always uses one of "
        "them. NaN or an infinity at a masked token makes the loss NaN. The same happens to every loss that "
        "uses one of these modes.",
        (
            Line(CORE, "agg_loss", "torch.sum(loss_mat * loss_mask, dim=-1)  # token-sum"),
            Line(CORE, "agg_loss", "torch.sum(loss_mat * loss_mask, dim=-1) / "),
        ),
    ),
    Finding(
        MASKED,
        BY_SUM,
        "The loss is masked after it is computed. With NaN or an infinity at a masked token, the loss stays "
        "finite in the modes `token-*`, and the gradient at that token is NaN.",
        (Line("verl.utils.torch_functional", "masked_sum", "torch.where(mask.bool()"),),
    ),
    Finding(
        NO_GRADIENT,
        ("vanilla", "gspo", "sapo", "bypass_mode"),
        "torch.clamp has the gradient 0 at NaN. NaN in `old_log_prob` gives a loss of NaN, and a gradient "
        "of 0 at that token. (`bypass_mode` calls `vanilla`.)",
        (
            Line(CORE, f"{PREFIX}vanilla", CLAMPED),
            Line(CORE, f"{PREFIX}gspo", "torch.clamp(log_seq_importance_ratio"),
            Line(CORE, f"{PREFIX}sapo", CLAMPED),
        ),
    ),
    Finding(
        OPTION,
        ("sapo", "geo_mean"),
        "`loss_agg_mode` is not read. `sapo` is always reduced by `seq-mean-token-mean`.",
        (
            Line(CORE, f"{PREFIX}sapo", 'loss_agg_mode="seq-mean-token-mean", **'),
            Line(CORE, f"{PREFIX}geo_mean", "torch.mean(pg_losses)"),
        ),
    ),
    Finding(
        INPUT,
        ("bypass_mode",),
        "`rollout_is_weights` is not used, as the docstring says. The function computes weights of its own.",
        (Line(CORE, f"{PREFIX}bypass_mode", "rollout_is_weights: Pre-computed"),),
    ),
    Finding(
        EMPTY,
        ("bypass_mode",),
        "A micro-batch without an unmasked token raises ValueError.",
        (Line(ROLLOUT, "compute_rollout_correction_and_rejection_mask", "at least one valid token"),),
    ),
    Finding(
        CUT,
        ("vanilla, seq-mean-token-sum-norm, loss_scale_factor null",),
        "With `loss_scale_factor` null, which is the default, `seq-mean-token-sum-norm` divides by the "
        "width of the micro-batch's padding. With a number, the gradient does not depend on the cut.",
        (Line(CORE, "agg_loss", "horizon = loss_mask.shape[-1]"),),
    ),
)

GRPO, COMPUTE = "trl.trainer.grpo_trainer", "GRPOTrainer._compute_loss"
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
OF_TRL = (
    Finding(
        CUT,
        ("bnpo",),
        "The loss is the mean over the tokens of the micro-batch, as the documentation of `loss_type` says.",
        (Line(GRPO, COMPUTE, "loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)"),),
    ),
    Finding(
        FAR,
        ("grpo", "bnpo", "dr_grpo", "dapo", "sapo", "luspo"),
        "The log ratio is not clamped before exp. In float32 a token whose old policy is 90 nats lower, "
        "with a negative advantage, gives an infinite loss (`sapo`: a gradient of NaN).",
        (Line(GRPO, COMPUTE, "coef_1 = torch.exp(log_importance_weights)"),),
    ),
    Finding(
        MASKED,
        LOSS_TYPES,
        "The loss is multiplied with the mask. NaN or an infinity at a masked token makes the loss NaN.",
        (
            Line(GRPO, COMPUTE, "loss = ((per_token_loss * mask).sum(-1)"),
            Line(GRPO, COMPUTE, "loss = (per_token_loss * mask).sum() / mask"),
            Line(GRPO, COMPUTE, "loss = (per_token_loss * mask).sum() / normalizer"),
        ),
    ),
    Finding(
        HIDDEN,
        ("vespo",),
        "nan_to_num makes the weight of a sequence with NaN in `old_per_token_logps` 0. The loss is finite.",
        (Line(GRPO, "GRPOTrainer.get_gamma_weights", "nan_to_num"),),
    ),
    Finding(
        NO_GRADIENT,
        ("vespo",),
        "For the same reason the gradient of that sequence is 0.",
        (Line(GRPO, "GRPOTrainer.get_gamma_weights", "nan_to_num"),),
    ),
)

LOSS = "prime_rl.trainer.rl.loss"
OF_PRIME_RL = (
    Finding(
        MASKED,
        ("default", "ipo"),
        "The loss is multiplied with the mask. NaN or an infinity at a masked token makes the loss NaN.",
        (
            Line(LOSS, "default_loss_fn", "pg_loss = keep_mask *"),
            Line(LOSS, "ipo_loss_fn", "pg_loss = keep_mask *"),
        ),
    ),
    Finding(
        FAR,
        ("default", "ipo"),
        "The log ratio is not clamped before exp, and its result is multiplied with the trust region's "
        "mask. In float32 a token whose rollout policy is 90 nats lower gives NaN.",
        (
            Line(
                LOSS,
                "compute_importance_ratio_and_mismatch_kl",
                "importance_ratio = torch.exp(log_importance_ratio)",
            ),
        ),
    ),
)


def verl_reports() -> dict[str, Report]:
    """Every loss that verl itself registers, and one with verl's default of loss_scale_factor."""
    registry = import_module(CORE).POLICY_LOSS_REGISTRY
    names = [name for name, function in registry.items() if function.__module__.startswith("verl.")]
    found = {name: check_as(name, "verl") for name in names}
    own = find_convention("verl")

    def unscaled(function: Any, tensors: Any, counts: Any, options: Mapping[str, Any]) -> Any:
        return own.call(function, tensors, counts._replace(width=None), options)

    norm = replace(
        own, of_version=None, call=unscaled, options={"loss_agg_mode": ("seq-mean-token-sum-norm",)}
    )
    (name,) = OF_VERL[-1].losses
    found[name] = check_as("vanilla", norm, [CUT])
    return found


def prime_rl_lines() -> list[str]:
    """What PRIME-RL's compute_loss does around a loss."""
    upstream = _prime_rl()
    x = -torch.ones(2, dtype=torch.float64)
    poisoned = torch.tensor([-1.0, torch.nan], dtype=torch.float64).requires_grad_()
    mask = torch.tensor([True, False])
    pack = Pack([poisoned], [x], None, [x], [mask])

    def loss(inputs: Any) -> Any:
        return SimpleNamespace(loss=-inputs.trainer_logprobs[inputs.loss_mask].sum(), metrics={})

    alone = float(loss(SimpleNamespace(trainer_logprobs=poisoned, loss_mask=mask)).loss.detach())
    found = float(upstream.compute_loss(pack, loss, 1)[0].detach())
    assert alone == 1.0 and math.isnan(found)
    line = Line(LOSS, "compute_loss", "trainer_logprobs[0].sum() * 0.0").found()
    return [
        "",
        f"`compute_loss` begins with the sum of the first sequence's log-probabilities times 0 ({line}). NaN "
        "at a masked token of that sequence makes the loss NaN with every custom loss, also with one that "
        "masks it.",
    ]


def prime_rl_reports() -> dict[str, Report]:
    """PRIME-RL's default loss and its ipo."""
    upstream = _prime_rl()
    return {kind: check_as(upstream.loss_fn(type=kind), "prime-rl") for kind in ("default", "ipo")}


def _prime_rl() -> Any:
    from composer_plugins.conformance.prime_rl_claims import upstream as prime_rl_live
    from composer_plugins.conformance.stubs import source

    checkout = source("prime-rl")
    assert checkout is not None, "set PRIME_RL_SOURCE to a checkout"
    return prime_rl_live.load(checkout)


UPSTREAMS = {
    "verl": Upstream(lambda: f"verl {version('verl')}", verl_reports, OF_VERL),
    "trl": Upstream(
        lambda: f"TRL {version('trl')}",
        lambda: {name: check_as(name, "trl") for name in LOSS_TYPES},
        OF_TRL,
    ),
    "prime-rl": Upstream(lambda: "PRIME-RL at 559b447", prime_rl_reports, OF_PRIME_RL, prime_rl_lines),
}


def unexplained(upstream: Upstream, reports: Mapping[str, Report]) -> tuple[set[Any], set[Any]]:
    """The (loss, law) that failed and that no finding names, and those that a finding names and that hold."""
    failed = {(loss, one.check) for loss, report in reports.items() for one in report.findings}
    named = {(loss, finding.law) for finding in upstream.findings for loss in finding.losses}
    return failed - named, named - failed


def section(framework: str) -> str:
    """The section of one framework, from a new run."""
    upstream = UPSTREAMS[framework]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reports = upstream.reports()
        more = upstream.more()
    for loss, report in reports.items():
        held = {one.check for one in report.having("passed")}
        assert len(report.outcomes) == 1 or held >= set(EVERY_LOSS), f"{loss}: {set(EVERY_LOSS) - held}"
    missing, stale = unexplained(upstream, reports)
    assert not missing, f"found, and not in the table: {sorted(missing)}"
    assert not stale, f"in the table, and not found: {sorted(stale)}"
    rows = [
        (
            ", ".join(finding.losses),
            outcome.status,
            finding.sentence,
            numbers(outcome),
            ", ".join(line.found() for line in finding.lines),
        )
        for finding in upstream.findings
        for outcome in [of(reports[finding.losses[0]], finding.law)]
    ]
    statuses: tuple[Status, ...] = ("passed", "failed", "unsafe", "not applicable")
    counts = [
        (loss, *(len(report.having(status)) for status in statuses))
        for loss, report in reports.items()
        if len(report.outcomes) > 1
    ]
    found = table(("loss", "law", "what was found", "numbers", "line"), rows)
    laws = table(("loss", "laws that hold", *statuses[1:]), counts)
    return "\n".join([f"## {upstream.title()}", "", found, laws.rstrip(), *more])


def of(report: Report, law: str) -> Outcome:
    """What was found of a law."""
    (outcome,) = [one for one in report.findings if one.check == law]
    return outcome


def numbers(outcome: Outcome) -> str:
    """The first line of what a law found, without the name of the loss."""
    return outcome.detail.splitlines()[0].partition(": ")[2].partition("; ")[0]
