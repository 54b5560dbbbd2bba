"""`check --as`: functions of each framework's convention, sound ones and ones with a planted fault."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from composer_plugins.calling_convention import Counts
from composer_plugins.cli import app
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.registry import conventions
from composer_plugins.kernels.policy import ppo
from composer_plugins.testing.conventions import check_as, find_convention
from composer_plugins.testing.conventions.sums import SKYRL
from composer_plugins.testing.laws import FUNCTION, LAWS, laws_for
from composer_plugins.testing.laws import NOT_RUN as NOT_RUN_ON
from composer_plugins.testing.laws.results import result_is_what_the_framework_takes

Loss = Callable[..., Any]
FIRST = result_is_what_the_framework_takes.__name__
OF_A_FUNCTION, NOT_RUN = laws_for(FUNCTION), NOT_RUN_ON[FUNCTION]
MASKED = "masked_tokens_have_no_influence"
NAN_MASKED = "masked_nan_and_infinities_have_no_influence"
CUT = "micro_batches_and_ranks_leave_the_gradient_alone"
PADDING = "more_padding_changes_nothing"
WRITTEN = "inputs_are_not_written_to"
GRADIENT = "gradient_reaches_the_trained_inputs_only"
FAR = "policies_far_apart_give_finite_numbers"
SIGN = "descent_raises_the_tokens_with_positive_advantages"
TWICE = "two_calls_give_the_same_result"
NAN_SEEN = "nan_is_seen_in_its_row_and_in_no_other"
NAN_GRADIENT = "nan_in_an_input_is_nan_in_the_gradient_of_its_token"
OPTION, INPUT = "every_parameter_has_an_effect", "every_input_has_an_effect"
ORDER, PRECISION = "rows_may_come_in_any_order", "float32_is_close_to_float64"
REDUCTIONS = "reductions_are_those_of_the_unmasked_tokens"
EMPTY = "batch_without_an_unmasked_token_gives_zero_with_a_gradient"
DIVIDED = "every_term_is_divided_as_the_advantages_are"


def policy_gradient(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A loss per token that obeys every law."""
    return ppo(logprobs, old, advantages, mask).loss


# verl


def verl_mean(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    """verl's denominators, for the counts of the whole batch."""
    rows = loss.sum(-1)
    if mode == "token-mean":
        return rows.sum() / info["batch_num_tokens"] * info["dp_size"]
    if mode == "token-sum":
        return rows.sum() * info["dp_size"]
    if mode == "seq-mean-token-mean":
        rows = rows / mask.sum(-1).clamp(min=1)
    if mode == "seq-mean-token-sum-norm":
        rows = rows / info["loss_scale_factor"]
    return rows.sum() / info["global_batch_size"] * info["dp_size"]


def verl(
    token: Loss = policy_gradient,
    reduce: Loss = verl_mean,
    result: Loss = lambda loss, ratio: (loss, {"actor/ratio": float(ratio.mean())}),
) -> Loss:
    """A function of verl's convention, made of a loss per token, a reduction and a result."""

    def function(  # type: ignore[no-untyped-def]
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
    ):
        loss = token(log_prob, old_log_prob, advantages, response_mask)
        if rollout_is_weights is not None:
            loss = loss * torch.where(response_mask, rollout_is_weights, 0.0)
        reduced = reduce(loss, response_mask, loss_agg_mode, config.global_batch_info)
        ratio = torch.where(response_mask, log_prob - old_log_prob, 0.0).detach().exp()
        return result(reduced, ratio)

    return function


def write(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    advantages.sub_(advantages[mask].mean() if mask.any() else 0.0)
    return policy_gradient(logprobs, old, advantages, mask)


def dropped(logprobs: Tensor, *rest: Tensor) -> Tensor:
    loss = policy_gradient(logprobs, *rest)
    return loss * (torch.rand(loss.shape) < 0.5)


def of_first_tokens(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """The first unmasked token of each row alone."""
    return policy_gradient(logprobs, old, advantages, mask & (mask.cumsum(-1) == 1))


def without_last_tokens(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A mask that is shifted by one."""
    shifted = torch.cat([mask[..., 1:], torch.zeros_like(mask[..., :1])], -1)
    return policy_gradient(logprobs, old, advantages, mask & shifted)


def up_to_eight_tokens(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return policy_gradient(logprobs, old, advantages, mask & (mask.cumsum(-1) <= 8))


def of_rows(rows: int) -> Loss:
    """A loss that leaves out every row after this many."""

    def token(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        first = torch.arange(len(mask))[:, None] < rows
        return policy_gradient(logprobs, old, advantages, mask & first)

    return token


def local_mean(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    return loss.sum() / mask.sum().clamp(min=1)


def padded_mean(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    return loss.mean(-1).sum() / info["global_batch_size"] * info["dp_size"]


def of_no_token(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    return verl_mean(loss, mask, mode, info) * mask.sum() / mask.sum()


def unmasked(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -advantages * (logprobs - old).clamp(-20, 20).exp()


def multiplied(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -advantages * (logprobs - old).clamp(-20, 20).exp() * mask


def unbounded(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -torch.where(mask, advantages, 0.0) * torch.where(mask, logprobs - old, 0.0).exp()


def ascending(*given: Tensor) -> Tensor:
    return -policy_gradient(*given)


def detached(logprobs: Tensor, *rest: Tensor) -> Tensor:
    return policy_gradient(logprobs.detach(), *rest) + 0 * torch.where(rest[-1], logprobs, 0.0)


def hidden_nan(*given: Tensor) -> Tensor:
    return policy_gradient(*given).nan_to_num(0.0)


def with_kl(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A KL term that is added as a sum, whatever divides the advantages."""
    log_ratio = torch.where(mask, logprobs - old, 0.0)
    return policy_gradient(logprobs, old, advantages, mask) + 0.1 * log_ratio**2


def plus_kl(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    return verl_mean(loss, mask, mode, info) + 0.1 * (loss**2).sum()


def of_good_tokens(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """RAFT: a token counts with a positive advantage only."""
    return policy_gradient(logprobs, old, advantages.clamp(min=0), mask)


def weighted_by_place(*given: Tensor) -> Tensor:
    loss = policy_gradient(*given)
    return loss * torch.arange(1, len(loss) + 1)[:, None]


def with_a_mean_of_the_batch(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """NaN in one advantage is NaN in the gradient of every row."""
    return policy_gradient(logprobs, old, advantages, mask) * (1 + 0 * torch.where(mask, advantages, 0).sum())


def with_a_gradient_where_empty(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    loss = policy_gradient(logprobs, old, advantages, mask)
    return loss if mask.any() else loss + logprobs - logprobs.detach()


def cancelled(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Digits of float32 are lost."""
    return policy_gradient(logprobs, old, advantages + 1e6 - 1e6, mask)


def with_the_gradient_of(wrong: Loss) -> Loss:
    """verl's denominators in the value, and others in the gradient alone."""

    def reduce(*given: Any) -> Tensor:
        other = wrong(*given)
        return verl_mean(*given).detach() + other - other.detach()

    return reduce


def plus_one(*given: Any) -> Tensor:
    """A constant is added once for each micro-batch."""
    return verl_mean(*given) + 1.0


def nearly_divided(loss: Tensor, *rest: Any) -> Tensor:
    return verl_mean(loss, *rest) * (1 + 1e-6 * len(loss))


def twice_where_wide(loss: Tensor, *rest: Any) -> Tensor:
    return verl_mean(loss, *rest) * (2 if loss.shape[1] > 20 else 1)


def without_a_gradient_where_empty(loss: Tensor, mask: Tensor, *rest: Any) -> Tensor:
    return verl_mean(loss, mask, *rest) if mask.any() else torch.zeros(())


def one_row_as_it_is(loss: Tensor, *rest: Any) -> Tensor:
    return verl_mean(loss, *rest) if len(loss) > 1 else loss.sum(-1)


def last_tokens(mask: Tensor) -> Tensor:
    return mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)


def third_row(mask: Tensor) -> Tensor:
    return (torch.arange(len(mask)) == 2)[:, None].expand_as(mask)


def hidden_nan_at(some: Callable[[Tensor], Tensor]) -> Loss:
    """A loss that hides NaN at some tokens alone."""

    def token(*given: Tensor) -> Tensor:
        loss = policy_gradient(*given)
        return torch.where(some(given[-1]), loss.nan_to_num(0.0), loss)

    return token


def clamped_at(some: Callable[[Tensor], Tensor]) -> Loss:
    """A loss whose log ratio is clamped at some tokens alone: the gradient of torch.clamp at NaN is 0."""

    def token(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        here = mask & some(mask)
        ratio = torch.where(here, logprobs - old, 0.0).clamp(-20, 20).exp()
        elsewhere = policy_gradient(logprobs, old, advantages, mask & ~here)
        return elsewhere - torch.where(here, advantages, 0.0) * ratio

    return token


def one_mode(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    return verl_mean(loss, mask, "token-mean", info)


def without_weights(rollout_is_weights: Tensor | None = None, **given: Any) -> Any:
    return verl()(**given)


# PRIME-RL: one sequence, a sum


def prime_rl(token: Loss = policy_gradient, reduce: Loss = Tensor.sum, result: Loss | None = None) -> Loss:
    """A function of PRIME-RL's convention."""

    def function(inputs: Any, **kwargs: Any) -> Any:
        given = (inputs.trainer_logprobs, inputs.inference_logprobs, inputs.advantages, inputs.loss_mask)
        loss = token(*given)
        if inputs.loss_weights is not None:
            loss = loss * torch.where(inputs.loss_mask, inputs.loss_weights, 0.0)
        metrics = {"ratio": torch.where(given[-1], given[0] - given[1], 0.0).detach().exp().mean()}
        made = result or (lambda loss: SimpleNamespace(loss=loss, metrics=metrics))
        return made(reduce(loss))

    return function


def centred(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A baseline over the padded row."""
    return policy_gradient(logprobs, old, advantages - advantages.mean(-1, keepdim=True), mask)


# SkyRL: a sum, with a float as each metric


def skyrl(token: Loss = policy_gradient, reduce: Loss = lambda loss, mask: loss.sum()) -> Loss:
    """A function of SkyRL's convention."""

    def function(  # type: ignore[no-untyped-def]
        log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None
    ):
        mask = loss_mask.bool()
        loss = token(log_probs, old_log_probs, advantages, mask)
        if rollout_logprobs is not None:
            weight = torch.where(mask, old_log_probs - rollout_logprobs, 0.0).clamp(-20, 1).exp()
            loss = loss * weight
        return reduce(loss, mask), {"clip_ratio": float(config.eps_clip_low)}

    return function


def skyrl_of_an_old_release(log_probs, old_log_probs, advantages, config, loss_mask):  # type: ignore[no-untyped-def]
    return policy_gradient(log_probs, old_log_probs, advantages, loss_mask.bool()).sum(), {}


# Tinker: a list of sequences


def tinker(
    token: Loss = policy_gradient, reduce: Loss = lambda losses: torch.stack([x.sum() for x in losses]).sum()
) -> Loss:
    """A function of Tinker's convention."""

    def function(data: list[Any], logprobs_list: list[Tensor]) -> Any:
        losses = []
        for datum, logprobs in zip(data, logprobs_list, strict=True):
            fields = {name: entry.to_torch() for name, entry in datum.loss_fn_inputs.items()}
            losses.append(token(logprobs, fields["logprobs"], fields["advantages"], fields["mask"].bool()))
        return reduce(losses), {"sequences:sum": float(len(data))}

    return function


# torch.nn.functional


def with_another_keyword(logprobs, old_logprobs, advantages, mask, region=None):  # type: ignore[no-untyped-def]
    return policy_gradient(logprobs, old_logprobs, advantages, mask)


def functional(logprobs, old_logprobs, advantages, mask, reduction="mean"):  # type: ignore[no-untyped-def]
    loss = policy_gradient(logprobs, old_logprobs, advantages, mask)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / mask.sum().clamp(min=1)


def functional_of_all(logprobs, old_logprobs, advantages, mask, reduction="mean"):  # type: ignore[no-untyped-def]
    loss = policy_gradient(logprobs, old_logprobs, advantages, mask)
    return loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()


def functional_with_sum(reduce: Loss) -> Loss:
    """A function whose "sum" is another number."""

    def function(logprobs, old_logprobs, advantages, mask, reduction="mean"):  # type: ignore[no-untyped-def]
        loss = functional(logprobs, old_logprobs, advantages, mask, reduction)
        return reduce(loss) if reduction == "sum" else loss

    return function


def with_mean(reduce: Loss) -> Loss:
    """One number, by a reduction of a user's."""

    def function(log_probs, old_log_probs, adv, response_mask, scale=1.0):  # type: ignore[no-untyped-def]
        return scale * reduce(policy_gradient(log_probs, old_log_probs, adv, response_mask), response_mask)

    return function


def dead_parameter(logprobs, old_logprobs, advantages, mask, beta=0.1):  # type: ignore[no-untyped-def]
    return policy_gradient(logprobs, old_logprobs, advantages, mask)


def dead_parameter_of_a_sum(logprobs, old_logprobs, advantages, mask, clip=True, beta=0.1):  # type: ignore[no-untyped-def]
    return (1 + clip) * dead_parameter(logprobs, old_logprobs, advantages, mask).sum()


def parameters(  # type: ignore[no-untyped-def]
    logprobs, old_logprobs, advantages, mask, low=0.2, high=0.28, name="", delta: "float | None" = None
):
    return ppo(logprobs, old_logprobs, advantages, mask, clip_low=low, clip_high=high).loss


def with_a_keyword(logprobs, old_logprobs, advantages, mask, ref_logprob=None):  # type: ignore[no-untyped-def]
    return policy_gradient(logprobs, old_logprobs, advantages, mask)


def per_token(token: Loss) -> Loss:
    """One loss per token, of a function without `reduction`."""

    def function(logp, old_logp, advantages, mask):  # type: ignore[no-untyped-def]
        return token(logp, old_logp, advantages, mask)

    return function


def without_a_mask(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -(advantages * logprobs).sum()


def without_advantages(logprobs: Tensor, mask: Tensor) -> Tensor:
    return -(torch.where(mask, logprobs, 0.0) ** 2).sum()


SOUND: dict[str, list[Loss]] = {
    "verl": [verl(), verl(of_good_tokens)],
    "prime-rl": [prime_rl()],
    "skyrl": [skyrl()],
    "tinker": [tinker()],
    "torch": [
        functional,
        per_token(policy_gradient),
        with_mean(lambda loss, mask: loss.sum()),
        with_mean(lambda loss, mask: loss.sum() / mask.sum().clamp(min=1)),
        with_mean(lambda loss, mask: (loss.sum(-1) / mask.sum(-1).clamp(min=1)).mean()),
        without_a_mask,
        without_advantages,
        parameters,
    ],
}
PLANTED: list[tuple[str, Loss, str, str]] = [
    ("verl", verl(reduce=local_mean), CUT, "micro-batches of 4 rows"),
    ("verl", verl(reduce=padded_mean), PADDING, "with 3 more columns, the loss"),
    ("verl", verl(reduce=one_mode), OPTION, "'loss_agg_mode': ['token-mean', 'token-sum'"),
    ("verl", without_weights, INPUT, "other numbers in rollout_is_weights change nothing"),
    ("verl", verl(unmasked), MASKED, "not 0 where masked"),
    ("verl", verl(multiplied), NAN_MASKED, "masked tokens of old_log_prob"),
    ("verl", verl(write), WRITTEN, "writes to advantages"),
    ("verl", verl(detached), GRADIENT, "no gradient reaches"),
    ("verl", verl(of_first_tokens), GRADIENT, "the gradient of 10 of 13 unmasked tokens is 0"),
    ("verl", verl(without_last_tokens), GRADIENT, "5 of 13 unmasked tokens is 0"),
    ("verl", verl(up_to_eight_tokens), GRADIENT, "of 43 unmasked tokens"),
    ("verl", verl(of_rows(8)), GRADIENT, "in rows 8, at tokens 0, 1"),
    ("skyrl", skyrl(of_rows(6)), GRADIENT, "in rows 6, 7, 8, at tokens"),
    ("prime-rl", prime_rl(up_to_eight_tokens), GRADIENT, "unmasked tokens"),
    ("verl", verl(dropped), TWICE, "in a second call with the same inputs, the loss is"),
    ("verl", verl(unbounded), FAR, "90 nats"),
    ("verl", verl(ascending), SIGN, "and with its negative by"),
    ("verl", verl(hidden_nan), NAN_SEEN, "NaN in log_prob at row 0, token 5 is hidden"),
    ("verl", verl(hidden_nan_at(last_tokens)), NAN_SEEN, "is hidden"),
    ("verl", verl(hidden_nan_at(third_row)), NAN_SEEN, "at row 2, token"),
    ("verl", verl(clamped_at(last_tokens)), NAN_GRADIENT, "the gradient there is 0"),
    ("verl", verl(clamped_at(third_row)), NAN_GRADIENT, "at row 2, token"),
    ("verl", verl(reduce=of_no_token), EMPTY, "the loss is nan"),
    ("verl", verl(reduce=lambda loss, *_: loss), FIRST, "the shape [4, 6], and not one number"),
    ("verl", verl(result=lambda loss, ratio: loss), FIRST, "returned Tensor, and not (loss, metrics)"),
    ("verl", verl(result=lambda loss, r: (loss, {"r": r})), FIRST, "the metric 'r' is of the shape [4, 6]"),
    ("verl", verl(result=lambda loss, r: (loss.detach(), {})), FIRST, "has no gradient"),
    (
        "verl",
        verl(result=lambda loss, r: (loss, {"l": 2 * loss})),
        FIRST,
        "'l' is of the shape [] with a grad",
    ),
    ("verl", verl(reduce=one_row_as_it_is), FIRST, "the shape [1], and not one number"),
    ("verl", verl(reduce=plus_one), CUT, "the loss of 2 micro-batches"),
    ("verl", verl(reduce=nearly_divided), CUT, "micro-batches of 4 rows"),
    ("verl", verl(reduce=with_the_gradient_of(local_mean)), CUT, "the gradient of 2 micro-batches"),
    ("verl", verl(reduce=with_the_gradient_of(padded_mean)), PADDING, "with 3 more columns, the gradient"),
    ("verl", verl(reduce=twice_where_wide), PADDING, "with 34 more columns, the loss"),
    ("verl", verl(weighted_by_place), ORDER, "another order of the rows"),
    ("verl", verl(with_a_mean_of_the_batch), NAN_SEEN, "reaches the gradient of other rows"),
    ("verl", verl(reduce=without_a_gradient_where_empty), EMPTY, "DDP waits for one"),
    ("verl", verl(with_a_gradient_where_empty), EMPTY, "the gradient of log_prob is ["),
    ("verl", verl(cancelled), PRECISION, "the loss is"),
    ("prime-rl", prime_rl(reduce=Tensor.mean), CUT, "micro-batches of 4 rows"),
    ("prime-rl", prime_rl(reduce=Tensor.mean), PADDING, "with 3 more columns"),
    ("prime-rl", prime_rl(centred), MASKED, "masked tokens of advantages"),
    ("prime-rl", prime_rl(multiplied), NAN_MASKED, "masked tokens of inference_logprobs"),
    ("prime-rl", prime_rl(write), WRITTEN, "writes to advantages"),
    ("prime-rl", prime_rl(unbounded), FAR, "90 nats"),
    ("prime-rl", prime_rl(result=lambda loss: loss), FIRST, "returned Tensor, and not LossOutputs"),
    (
        "prime-rl",
        prime_rl(result=lambda loss: SimpleNamespace(loss=loss, metrics={"kl": 0.1})),
        FIRST,
        "the metric 'kl' is float, and not a tensor of floating point",
    ),
    ("skyrl", skyrl(reduce=lambda loss, mask: loss.mean()), CUT, "micro-batches of 4 rows"),
    ("skyrl", skyrl(reduce=lambda loss, mask: loss.sum() / mask.sum()), EMPTY, "the loss is nan"),
    ("skyrl", skyrl(multiplied), NAN_MASKED, "masked tokens of log_probs"),
    ("skyrl", skyrl(ascending), SIGN, "and with its negative by"),
    ("skyrl", skyrl(with_kl), DIVIDED, "in a batch of twice the size, the loss is"),
    ("tinker", tinker(with_kl), DIVIDED, "in a batch of twice the size, the loss is"),
    ("verl", verl(reduce=plus_kl), CUT, "2 ranks of 4 rows"),
    ("skyrl", skyrl_of_an_old_release, FIRST, "unexpected keyword argument 'rollout_logprobs'"),
    ("tinker", tinker(reduce=lambda losses: torch.cat(losses).mean()), CUT, "micro-batches of 4 rows"),
    ("tinker", tinker(unmasked), MASKED, "not 0 where masked"),
    ("tinker", tinker(detached), GRADIENT, "no gradient reaches"),
    ("tinker", tinker(dropped), TWICE, "in a second call with the same inputs, the loss is"),
    ("torch", with_mean(lambda loss, mask: loss.mean()), PADDING, "with 3 more columns"),
    ("torch", with_mean(lambda loss, mask: loss.sum() ** 2), CUT, "micro-batches of 4 rows"),
    ("torch", per_token(multiplied), MASKED, "masked tokens of 'logprobs', the loss at row"),
    ("torch", per_token(unbounded), FAR, "90 nats"),
    (
        "torch",
        per_token(lambda *given: policy_gradient(*given).double()),
        "result_keeps_the_precision_of_its_inputs",
        "",
    ),
    ("torch", dead_parameter, OPTION, "'beta': [0.1, "),
    ("torch", dead_parameter_of_a_sum, OPTION, "'beta': [0.1, "),
    ("torch", functional_of_all, REDUCTIONS, "reduction='mean'"),
    ("torch", functional_with_sum(lambda loss: 2 * loss), REDUCTIONS, "reduction='sum'"),
    ("torch", functional_with_sum(lambda loss: loss[None]), REDUCTIONS, "reduction='sum'"),
]


@pytest.mark.parametrize(
    ("framework", "function"), [(name, function) for name, several in SOUND.items() for function in several]
)
def test_a_sound_function_passes(framework: str, function: Loss) -> None:
    report = check_as(function, framework)
    assert report.passed, str(report)
    assert len(report.having("passed")) >= 13


@pytest.mark.parametrize(
    ("framework", "function", "law", "words"),
    [pytest.param(*one, id=f"{one[0]}-{i}-{one[2]}") for i, one in enumerate(PLANTED)],
)
def test_a_planted_fault_is_named(framework: str, function: Loss, law: str, words: str) -> None:
    report = check_as(function, framework, [law])
    failed = {outcome.check: outcome for outcome in report.having("failed")}
    assert law in failed, str(report)
    assert words in failed[law].detail
    assert failed[law].cause


@pytest.mark.parametrize(
    "framework", sorted(set(conventions()) - {"trl"})
)  # adapters/trl_mixin/test_check_as.py
def test_every_convention_has_three_planted_faults_of_different_laws(framework: str) -> None:
    assert framework in SOUND
    assert len({law for name, _, law, _ in PLANTED if name == framework}) >= 3


def test_every_law_of_policy_losses_is_run_or_has_a_reason() -> None:
    of_policies = {name for name, law in LAWS.items() if "policy" in law.kinds}
    assert not of_policies & set(OF_A_FUNCTION) & set(NOT_RUN)
    assert of_policies <= {*OF_A_FUNCTION, *NOT_RUN}
    assert set(NOT_RUN) <= of_policies
    assert next(iter(OF_A_FUNCTION)) == FIRST
    for framework, function in (("verl", verl()), ("tinker", tinker())):
        checks = [outcome.check for outcome in check_as(function, framework).outcomes]
        assert sorted(checks) == sorted({*laws_for(FUNCTION, framework), *NOT_RUN})
    assert {*OF_A_FUNCTION} - {*laws_for(FUNCTION, "verl")} == {DIVIDED}
    with pytest.raises(ConfigError, match=f"the law {DIVIDED} is for --as skyrl and tinker alone"):
        check_as(verl(), "verl", [DIVIDED])


def of_int(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return torch.tensor(3)


def of_rows_alone(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return policy_gradient(logprobs, logprobs.detach(), advantages, mask).sum(-1)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (of_int, "is of torch.int64, and not of a floating-point"),
        (of_rows_alone, "the shape [4], and not one number"),
    ],
)
def test_a_result_of_another_type_or_shape_is_a_broken_law(function: Loss, words: str) -> None:
    outcome = check_as(function, "torch", [FIRST]).outcomes[0]
    assert (outcome.check, outcome.status) == (FIRST, "failed")
    assert words in outcome.detail
    assert outcome.cause.startswith("torch takes a tensor: one loss per token, or one number")


def of_any(*given: Any, **named: Any) -> None: ...


def by_position(logprobs, advantages, mask, /):  # type: ignore[no-untyped-def]
    ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (of_any, "takes no log-probabilities of the policy; give it a parameter with the name logprobs or"),
        (by_position, "takes 'logprobs' by position alone; remove the / from its parameters"),
    ],
)
def test_parameters_that_cannot_be_passed_by_name_are_an_error(function: Loss, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_as(function, "torch")


class Module(torch.nn.Module):
    def forward(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return policy_gradient(logprobs, old_logprobs, advantages, mask)


def test_a_key_that_the_config_of_skyrl_lacks_is_named() -> None:
    def function(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):  # type: ignore[no-untyped-def]
        return config.eps_clip_hihg

    outcome = check_as(function, "skyrl").outcomes[0]
    assert (
        "the check's config of SkyRL has no 'eps_clip_hihg': did you mean 'eps_clip_high'?" in outcome.detail
    )


def test_random_numbers_break_the_law_of_two_calls_and_no_law_of_masking() -> None:
    report = check_as(verl(dropped), "verl", [TWICE, MASKED])
    assert [outcome.check for outcome in report.having("failed")] == [TWICE]


def test_a_gradient_that_is_declared_the_derivative_must_be_it() -> None:
    def score(logprobs: Tensor, *rest: Tensor) -> Tensor:
        loss = policy_gradient(logprobs, *rest)
        return loss.detach() * (1 + torch.where(rest[-1], logprobs - logprobs.detach(), 0.0)) ** 2

    for attributes, status in (({}, "not applicable"), ({"gradient": "derivative"}, "failed")):
        function = verl(score)
        vars(function).update(attributes)
        (outcome,) = check_as(function, "verl", ["gradient_is_that_of_the_value"]).outcomes
        assert outcome.status == status, outcome


@pytest.mark.parametrize(
    ("reduction", "total"),
    [("token_mean", 1.0), ("sequence_mean", 1.0), ("seq_mean_token_sum_norm", 5 / 20)],
)
def test_the_advantages_of_skyrl_hold_the_denominator(reduction: str, total: float) -> None:
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    tensors = {
        "logprobs": -1.0 * mask,
        "old_logprobs": -1.0 * mask,
        "advantages": torch.ones(2, 4),
        "mask": mask,
    }

    def function(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs):  # type: ignore[no-untyped-def]
        assert loss_mask.dtype == torch.long
        return (advantages * loss_mask).sum(), {}

    found = SKYRL.call(function, tensors, Counts(5, 2, 1, 1, 10), {"loss_reduction": reduction})
    assert float(found.loss) == pytest.approx(total)


def test_the_mask_of_tinker_has_two_names() -> None:
    def function(data: list[Any], logprobs_list: list[Tensor]) -> Any:
        for datum in data:
            fields = {name: entry.tolist() for name, entry in datum.loss_fn_inputs.items()}
            assert fields["weights"] == fields["mask"] and set(fields["mask"]) <= {0.0, 1.0}
        return tinker()(data, logprobs_list)

    assert check_as(function, "tinker", [FIRST]).passed


def test_a_wrong_metric_does_not_hide_the_other_laws() -> None:
    def result(loss: Tensor, ratio: Tensor) -> Any:
        return loss, {"ratio": ratio}

    report = check_as(verl(reduce=local_mean, result=result), "verl", [FIRST, CUT])
    assert [outcome.check for outcome in report.having("failed")] == [FIRST, CUT]
    unusable = check_as(verl(result=lambda loss, ratio: None), "verl", [FIRST, CUT])
    assert [outcome.status for outcome in unusable.outcomes] == ["failed", "not applicable"]


def boom(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    raise ValueError("boom")


def boom_of_verl(  # type: ignore[no-untyped-def]
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
):
    raise ValueError("boom")


@pytest.mark.parametrize(("framework", "function"), [("torch", boom), ("verl", boom_of_verl)])
def test_a_function_that_raises_fails_the_first_law_with_its_error(framework: str, function: Loss) -> None:
    report = check_as(function, framework)
    (outcome,) = report.having("failed")
    assert (outcome.check, outcome.cause) == (FIRST, "the loss itself raises this error")
    assert "ValueError: boom" in outcome.detail
    assert not report.having("passed")


class WithCall:
    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return policy_gradient(logprobs, old_logprobs, advantages, mask)


@pytest.mark.parametrize("function", [WithCall(), Module(), partial(functional, reduction="none")])
def test_a_callable_without_a_name_is_checked(function: Loss) -> None:
    report = check_as(function, "torch")
    assert report.passed, str(report)


def test_only_runs_the_named_laws_and_knows_them() -> None:
    assert [one.check for one in check_as(verl(), "verl", [CUT]).outcomes] == [CUT]
    with pytest.raises(ConfigError, match="unknown law 'cuts'"):
        check_as(verl(), "verl", ["cuts"])


def test_errors_say_what_could_not_be_found() -> None:
    with pytest.raises(ConfigError, match="--as: unknown convention 'vrl'"):
        find_convention("vrl")
    with pytest.raises(ConfigError, match="has no function"):
        check_as("composer_plugins.errors:nothing", "verl")
    with pytest.raises(ConfigError, match="pass a function"):
        check_as(3, "verl")  # type: ignore[arg-type]


def test_a_keyword_that_nothing_passes_is_an_error() -> None:
    with pytest.raises(ConfigError, match="nothing passes 'ref_logprob' .* did you mean 'ref_logprobs'"):
        check_as(with_a_keyword, "torch")
    with pytest.raises(ConfigError, match="give a parameter of your own a value"):
        check_as(with_another_keyword, "torch")


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("over_batch", True, "declares over_batch, and verl cuts the batch all the same"),
        ("exceptions", [CUT], "set a mapping of laws to reasons"),
        ("gradient", "derivate", "did you mean 'derivative'"),
    ],
)
def test_an_attribute_without_effect_is_an_error(attribute: str, value: Any, words: str) -> None:
    function = verl()
    setattr(function, attribute, value)
    with pytest.raises(ConfigError, match=words):
        check_as(function, "verl", [CUT])


def test_exceptions_excuse_a_law_and_must_name_one() -> None:
    function = verl(reduce=local_mean)
    function.exceptions = {CUT: "a mean over the micro-batch", "cuts": "misspelt"}  # type: ignore[attr-defined]
    report = check_as(function, "verl", [CUT])
    assert {one.check: one.status for one in report.outcomes} == {"cuts": "failed", CUT: "not applicable"}
    assert "no law of --as verl has that name" in report.having("failed")[0].detail


def test_the_command_exits_with_0_1_and_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        __import__("sys").modules,
        "losses_of_a_user",
        SimpleNamespace(sound=verl(), wrong=verl(reduce=local_mean)),  # type: ignore[arg-type]
    )

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["check", *arguments, "--as", "verl"])

    sound = run("losses_of_a_user:sound", "--only", CUT)
    assert sound.exit_code == 0, sound.output
    assert "1 passed, 0 failed" in sound.output
    wrong = run("losses_of_a_user:wrong", "--only", CUT)
    assert wrong.exit_code == 1
    assert f"failed: {CUT}" in wrong.output
    assert "the counts of the whole batch" in wrong.output
    for arguments in (["losses_of_a_user:absent"], ["losses_of_a_user:sound", "--kind", "policy"]):
        assert isinstance(run(*arguments).exception, ConfigError)  # `main` makes of it a line and status 2
