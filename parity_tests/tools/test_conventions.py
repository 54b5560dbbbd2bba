"""`check --as`: functions of each framework's convention, sound ones and ones with a planted fault."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.nemo_rl_loss.loss import ComposerLoss
from composer_plugins.adapters.slime_loss import loss_fn as slime_loss
from composer_plugins.calling_convention import Counts
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.registry import conventions
from composer_plugins.kernels.policy import ppo
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing.conventions import check_as
from composer_plugins.testing.conventions.sums import SKYRL
from composer_plugins.testing.laws import FUNCTION, LAWS, NOT_RUN, laws_for
from composer_plugins.testing.laws.results import result_is_what_the_framework_takes
from parity_tests.cases.faults import (
    WITH,
    Loss,
    log_ratio,
    not_masked,
    raft,
    sound,
    wrong_formula,
    wrong_inputs,
    wrong_result,
)
from parity_tests.rigs.commands import invoke

pytestmark = pytest.mark.thorough

FIRST = result_is_what_the_framework_takes.__name__
OF_A_FUNCTION = laws_for(FUNCTION)
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
KEPT = "result_keeps_the_precision_of_its_inputs"
EMPTY = "batch_without_an_unmasked_token_gives_zero_with_a_gradient"
DIVIDED = "every_term_is_divided_as_the_advantages_are"


# A function of each convention, made of a loss per token, a reduction and a result


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
    token: Loss = ppo,
    reduce: Loss = verl_mean,
    result: Loss = lambda loss, ratio: (loss, {"actor/ratio": float(ratio.mean())}),
) -> Loss:
    def function(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights=None
    ):
        loss = token(log_prob, old_log_prob, advantages, response_mask).loss
        if rollout_is_weights is not None:
            loss = loss * torch.where(response_mask, rollout_is_weights, 0.0)
        reduced = reduce(loss, response_mask, loss_agg_mode, config.global_batch_info)
        return result(reduced, log_ratio(log_prob, old_log_prob, response_mask).detach().exp())

    return function


def without_weights(rollout_is_weights: Tensor | None = None, **given: Any) -> Any:
    return verl()(**given)


def prime_rl(
    token: Loss = ppo,
    reduce: Loss = Tensor.sum,
    result: Loss = lambda loss, ratio: SimpleNamespace(loss=loss, metrics={"ratio": ratio.mean()}),
) -> Loss:
    """One sequence, and a sum."""

    def function(inputs: Any, **kwargs: Any) -> Any:
        new, old, mask = inputs.trainer_logprobs, inputs.inference_logprobs, inputs.loss_mask
        loss = token(new, old, inputs.advantages, mask).loss
        if inputs.loss_weights is not None:
            loss = loss * torch.where(mask, inputs.loss_weights, 0.0)
        return result(reduce(loss), log_ratio(new, old, mask).detach().exp())

    return function


def skyrl(token: Loss = ppo, reduce: Loss = lambda loss, mask: loss.sum()) -> Loss:
    """A sum, with a float as each metric."""

    def function(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
        mask = loss_mask.bool()
        loss = token(log_probs, old_log_probs, advantages, mask).loss
        if rollout_logprobs is not None:
            loss = loss * log_ratio(old_log_probs, rollout_logprobs, mask).clamp(-20, 1).exp()
        return reduce(loss, mask), {"clip_ratio": float(config.eps_clip_low)}

    return function


def skyrl_of_an_old_release(log_probs, old_log_probs, advantages, config, loss_mask):
    return ppo(log_probs, old_log_probs, advantages, loss_mask.bool()).loss.sum(), {}


def torchtitan(token: Loss = ppo, reduce: Loss = lambda loss, tokens: loss.sum() / tokens) -> Loss:
    def function(logits, labels, tokens, *, generator_logprobs, advantages, loss_mask):
        logprobs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        found = token(logprobs, generator_logprobs, advantages, loss_mask)
        loss = reduce(getattr(found, "loss", found), tokens)
        return loss, {"loss/mean": loss.detach()}

    return function


def tinker(token: Loss = ppo, reduce: Loss = lambda losses: torch.cat(losses).sum()) -> Loss:
    """A list of sequences."""

    def function(data: list[Any], logprobs_list: list[Tensor]) -> Any:
        losses = []
        for datum, logprobs in zip(data, logprobs_list, strict=True):
            fields = {name: entry.to_torch() for name, entry in datum.loss_fn_inputs.items()}
            mask = fields["mask"].bool()
            losses.append(token(logprobs, fields["logprobs"], fields["advantages"], mask).loss)
        return reduce(losses), {"sequences:sum": float(len(data))}

    return function


def nemo_rl(
    token: Loss = ppo,
    reduce: Loss = lambda loss, mask, seqs, toks: loss.sum() / toks,
    metrics: tuple[str, ...] = ("loss", "num_valid_samples", "gen_kl_error", "token_mult_prob_error"),
) -> Loss:
    """A mean over the tokens of the global batch, with numbers as metrics."""

    def function(next_token_logprobs, data, global_valid_seqs, global_valid_toks):
        mask = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).bool()
        loss = token(next_token_logprobs, data["prev_logprobs"][:, 1:], data["advantages"][:, 1:], mask).loss
        return reduce(loss, mask, global_valid_seqs, global_valid_toks), dict.fromkeys(metrics, 0.0)

    return function


def slime(
    token: Loss = ppo,
    reduce: Loss = lambda loss, mean: mean(loss),
    result: Loss = lambda loss: (loss, {}),
) -> Loss:
    """slime's log-probabilities of all responses one after the other, and its reducer."""

    def function(args, batch, logits, sum_of_sample_mean):
        from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

        sizes = {name: batch[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")}
        _, found = get_log_probs_and_entropy(logits, args=args, **sizes)
        rows = [torch.stack(x) for x in (found["log_probs"], batch["log_probs"], batch["advantages"])]
        loss = token(*rows, torch.stack(batch["loss_masks"]).bool()).loss
        return result(reduce(loss.flatten(), sum_of_sample_mean))

    return function


def functional(logprobs, old_logprobs, advantages, mask, reduction="mean"):
    """As the losses of torch.nn.functional."""
    loss = ppo(logprobs, old_logprobs, advantages, mask).loss
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / mask.sum().clamp(min=1)


def functional_with(**reductions: Loss) -> Loss:
    """The same, with other reductions of these names."""

    def function(logprobs, old_logprobs, advantages, mask, reduction="mean"):
        given = (logprobs, old_logprobs, advantages, mask)
        return reductions[reduction](*given) if reduction in reductions else functional(*given, reduction)

    return function


def with_mean(reduce: Loss) -> Loss:
    """One number, by a reduction of a user's."""

    def function(log_probs, old_log_probs, adv, response_mask, scale=1.0):
        return scale * reduce(ppo(log_probs, old_log_probs, adv, response_mask).loss, response_mask)

    return function


def per_token(token: Loss) -> Loss:
    """One loss per token, of a function without `reduction`."""

    def function(logp, old_logp, advantages, mask):
        return token(logp, old_logp, advantages, mask).loss

    return function


def dead_parameter_of_a_sum(logprobs, old_logprobs, advantages, mask, clip=True, beta=0.1):
    return (1 + clip) * ppo(logprobs, old_logprobs, advantages, mask).loss.sum()


def parameters(
    logprobs, old_logprobs, advantages, mask, low=0.2, high=0.28, name="", delta: "float | None" = None
):
    return ppo(logprobs, old_logprobs, advantages, mask, clip_low=low, clip_high=high, dual_clip=delta).loss


def without_a_mask(logprobs: Tensor, advantages: Tensor) -> Tensor:
    return -(advantages * logprobs).sum()


def without_advantages(logprobs: Tensor, mask: Tensor) -> Tensor:
    return -(torch.where(mask, logprobs, 0.0) ** 2).sum()


class WithCall:
    """A function without a name."""

    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        return ppo(logprobs, old_logprobs, advantages, mask).loss


class Module(torch.nn.Module):
    """A function that is a module."""

    forward = WithCall.__call__


# Faults of a loss per token


def of_tokens(some: Callable[[Tensor], Tensor]) -> Loss:
    """A loss of some of the unmasked tokens alone."""
    return wrong_inputs(lambda p, q, a, m: (p, q, a, m & some(m)))


def of_rows(rows: int) -> Loss:
    """A loss that leaves out every row after this many."""
    return of_tokens(lambda mask: torch.arange(len(mask))[:, None] < rows)


def hides_nan_of_the_last(loss: Tensor, mask: Tensor) -> TokenLoss:
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    return TokenLoss(torch.where(last, loss.nan_to_num(0.0), loss), {})


def clamped_in_the_third_row(p: Tensor, q: Tensor, a: Tensor, m: Tensor) -> Tensor:
    """The gradient of torch.clamp at NaN is 0."""
    ratio = log_ratio(p, q, m)
    return -a * torch.where((torch.arange(len(m)) == 2)[:, None], ratio.clamp(-20, 20), ratio).exp()


def with_a_gradient_where_empty(logprobs: Tensor, *rest: Tensor) -> TokenLoss:
    loss = sound(logprobs, *rest).loss
    return TokenLoss(loss if rest[-1].any() else loss + logprobs - logprobs.detach(), {})


unmasked = not_masked(lambda p, q, a, m: -a * (p - q).clamp(-20, 20).exp())
detached = wrong_formula(lambda p, q, a, m: -a * log_ratio(p.detach(), q, m).exp() + 0 * p)
with_kl = wrong_formula(lambda p, q, a, m: -a * log_ratio(p, q, m).exp() + 0.1 * log_ratio(p, q, m) ** 2)
centred = wrong_inputs(lambda p, q, a, m: (p, q, a - a.mean(-1, keepdim=True), m))  # over the padded row
with_a_mean_of_the_batch = wrong_inputs(lambda p, q, a, m: (p, q, a + 0 * torch.where(m, a, 0).sum(), m))
boom = wrong_inputs(lambda *_: int("boom"))


# Faults of a reduction


def local_mean(loss: Tensor, mask: Tensor, *_: Any) -> Tensor:
    return loss.sum() / mask.sum().clamp(min=1)


def padded_mean(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    return loss.mean(-1).sum() / info["global_batch_size"] * info["dp_size"]


def times(factor: Callable[[Tensor, Tensor], Any]) -> Loss:
    """verl's mean times a factor of the losses and the mask."""
    return lambda loss, mask, *rest: verl_mean(loss, mask, *rest) * factor(loss, mask)


def plus(term: Callable[[Tensor], Any]) -> Loss:
    """verl's mean plus a term, which is added once for each micro-batch."""
    return lambda loss, *rest: verl_mean(loss, *rest) + term(loss)


def with_the_gradient_of(wrong: Loss) -> Loss:
    """verl's denominators in the value, and others in the gradient alone."""
    return lambda *given: verl_mean(*given).detach() + (other := wrong(*given)) - other.detach()


def one_mode(loss: Tensor, mask: Tensor, mode: str, info: dict[str, Any]) -> Tensor:
    return verl_mean(loss, mask, "token-mean", info)


def without_a_gradient_where_empty(loss: Tensor, mask: Tensor, *rest: Any) -> Tensor:
    return verl_mean(loss, mask, *rest) if mask.any() else torch.zeros(())


def one_row_as_it_is(loss: Tensor, *rest: Any) -> Tensor:
    return verl_mean(loss, *rest) if len(loss) > 1 else loss.sum(-1)


SOUND: dict[str, list[Loss]] = {
    "verl": [verl(), verl(raft)],
    "prime-rl": [prime_rl()],
    "skyrl": [skyrl()],
    "tinker": [tinker()],
    "nemo-rl": [nemo_rl()],
    "slime": [slime()],
    "torchtitan": [torchtitan()],
    "torch": [
        functional,
        per_token(ppo),
        with_mean(lambda loss, mask: loss.sum()),
        with_mean(local_mean),
        with_mean(lambda loss, mask: (loss.sum(-1) / mask.sum(-1).clamp(min=1)).mean()),
        without_a_mask,
        without_advantages,
        parameters,
        WithCall(),
        Module(),
        partial(functional, reduction="none"),
    ],
}
# A function, the law that it breaks, and what is said of it.
# fmt: off
PLANTED: dict[str, list[tuple[Loss, str, str]]] = {
    "verl": [
        (verl(reduce=local_mean), CUT, "micro-batches of 4 rows"),
        (verl(reduce=padded_mean), PADDING, "with 3 more columns, the loss"),
        (verl(reduce=one_mode), OPTION, "'loss_agg_mode': ['token-mean', 'token-sum'"),
        (without_weights, INPUT, "other numbers in rollout_is_weights change nothing"),
        (verl(unmasked), MASKED, "not 0 where masked"),
        (verl(WITH["multiplies_with_the_mask"]), NAN_MASKED, "masked tokens of old_log_prob"),
        (verl(WITH["scales_its_advantages_in_place"]), WRITTEN, "writes to advantages"),
        (verl(detached), GRADIENT, "no gradient reaches"),
        (verl(of_tokens(lambda m: m.cumsum(-1) == 1)), GRADIENT, "gradient of 10 of 13 unmasked tokens is 0"),
        (verl(WITH["drops_tokens_after_the_eighth"]), GRADIENT, "of 43 unmasked tokens"),
        (verl(of_rows(8)), GRADIENT, "in rows 8, at tokens 0, 1"),
        (verl(WITH["drops_tokens_at_random"]), TWICE, "in a second call with the same inputs, the loss is"),
        (verl(WITH["lets_the_ratio_overflow"]), FAR, "90 nats"),
        (verl(WITH["has_the_wrong_sign"]), SIGN, "and with its negative by"),
        (verl(WITH["replaces_nan"]), NAN_SEEN, "NaN in log_prob at row 0, token 5 is hidden"),
        (verl(wrong_result(hides_nan_of_the_last)), NAN_SEEN, "is hidden"),
        (verl(wrong_formula(clamped_in_the_third_row)), NAN_GRADIENT, "at row 2, token"),
        (verl(reduce=times(lambda loss, mask: mask.sum() / mask.sum())), EMPTY, "the loss is nan"),
        (verl(reduce=lambda loss, *_: loss), FIRST, "the shape [4, 6], and not one number"),
        (verl(result=lambda loss, ratio: loss), FIRST, "returned Tensor, and not (loss, metrics)"),
        (verl(result=lambda loss, r: (loss, {"r": r})), FIRST, "the metric 'r' is of the shape [4, 6]"),
        (verl(result=lambda loss, r: (loss.detach(), {})), FIRST, "has no gradient"),
        (verl(result=lambda loss, r: (loss, {"l": 2 * loss})), FIRST, "'l' is of the shape [] with a grad"),
        (verl(reduce=one_row_as_it_is), FIRST, "the shape [1], and not one number"),
        (verl(reduce=plus(lambda loss: 1.0)), CUT, "the loss of 2 micro-batches"),
        (verl(reduce=plus(lambda loss: 0.1 * (loss**2).sum())), CUT, "2 ranks of 4 rows"),
        (verl(reduce=times(lambda loss, _: 1 + 1e-6 * len(loss))), CUT, "micro-batches of 4 rows"),
        (verl(reduce=with_the_gradient_of(local_mean)), CUT, "the gradient of 2 micro-batches"),
        (verl(reduce=with_the_gradient_of(padded_mean)), PADDING, "with 3 more columns, the gradient"),
        (verl(reduce=times(lambda x, _: 1 + (x.shape[1] > 20))), PADDING, "with 34 more columns, the loss"),
        (verl(WITH["adds_up_over_rows"]), ORDER, "another order of the rows"),
        (verl(with_a_mean_of_the_batch), NAN_SEEN, "reaches the gradient of other rows"),
        (verl(reduce=without_a_gradient_where_empty), EMPTY, "DDP waits for one"),
        (verl(with_a_gradient_where_empty), EMPTY, "the gradient of log_prob is ["),
        (verl(wrong_inputs(lambda p, q, a, m: (p, q, a + 1e6 - 1e6, m))), PRECISION, "the loss is"),
    ],
    "prime-rl": [
        (prime_rl(reduce=Tensor.mean), CUT, "micro-batches of 4 rows"),
        (prime_rl(centred), MASKED, "masked tokens of advantages"),
        (prime_rl(result=lambda loss, _: loss), FIRST, "returned Tensor, and not LossOutputs"),
        (prime_rl(result=lambda loss, _: SimpleNamespace(loss=loss, metrics={"kl": 0.1})), FIRST,
         "the metric 'kl' is float, and not a tensor of floating point"),
    ],
    "skyrl": [
        (skyrl(of_rows(6)), GRADIENT, "in rows 6, 7, 8, at tokens"),
        (skyrl(reduce=lambda loss, mask: loss.mean()), CUT, "micro-batches of 4 rows"),
        (skyrl(reduce=lambda loss, mask: loss.sum() / mask.sum()), EMPTY, "the loss is nan"),
        (skyrl(with_kl), DIVIDED, "in a batch of twice the size, the loss is"),
        (skyrl_of_an_old_release, FIRST, "unexpected keyword argument 'rollout_logprobs'"),
        (lambda p, q, a, config, **_: config.eps_clip_hihg, FIRST,
         "the check's config of SkyRL has no 'eps_clip_hihg': did you mean 'eps_clip_high'?"),
    ],
    "nemo-rl": [
        (nemo_rl(reduce=lambda loss, mask, *_: local_mean(loss, mask)), CUT, "micro-batches of 4 rows"),
        (nemo_rl(reduce=lambda loss, *_: loss.mean()), PADDING, "with 3 more columns"),
        (nemo_rl(WITH["multiplies_with_the_mask"]), NAN_MASKED, "masked tokens of data['prev_logprobs']"),
        (nemo_rl(metrics=("loss",)), FIRST, "no 'num_valid_samples', 'gen_kl_error'"),
        (nemo_rl(reduce=lambda loss, *_: float(loss.detach().sum())), FIRST, "its loss is float"),
    ],
    "slime": [
        (slime(reduce=lambda loss, mean: loss.mean()), CUT, "micro-batches of 4 rows"),
        (slime(WITH["lets_the_ratio_overflow"]), FAR, "90 nats"),
        (slime(result=lambda loss: loss), FIRST, "returned Tensor, and not (loss, metrics)"),
        (slime(result=lambda loss: (loss, {"loss": loss})), FIRST, "the metric 'loss' is of the shape"),
    ],
    "torchtitan": [
        (torchtitan(reduce=lambda loss, tokens: loss.mean()), CUT, "micro-batches of 4 rows"),
        (torchtitan(unmasked), MASKED, "with other numbers at masked tokens of generator_logprobs"),
        (torchtitan(detached), GRADIENT, "no gradient reaches"),
        (torchtitan(reduce=lambda loss, tokens: loss), FIRST, "its loss has the shape"),
    ],
    "tinker": [
        (tinker(with_kl), DIVIDED, "in a batch of twice the size, the loss is"),
        (tinker(reduce=lambda losses: torch.cat(losses).mean()), CUT, "micro-batches of 4 rows"),
        (tinker(unmasked), MASKED, "not 0 where masked"),
        (tinker(detached), GRADIENT, "no gradient reaches"),
    ],
    "torch": [
        (with_mean(lambda loss, mask: loss.mean()), PADDING, "with 3 more columns"),
        (with_mean(lambda loss, mask: loss.sum() ** 2), CUT, "micro-batches of 4 rows"),
        (per_token(WITH["multiplies_with_the_mask"]), MASKED, "masked tokens of 'logprobs', the loss at row"),
        (per_token(WITH["lets_the_ratio_overflow"]), FAR, "90 nats"),
        (per_token(wrong_result(lambda loss, mask: TokenLoss(loss.double(), {}))), KEPT, ""),
        (dead_parameter_of_a_sum, OPTION, "'beta': [0.1, "),
        (functional_with(mean=lambda *given: ppo(*given).loss.mean()), REDUCTIONS, "reduction='mean'"),
        (functional_with(sum=lambda *given: 2 * ppo(*given).loss.sum()), REDUCTIONS, "reduction='sum'"),
        (lambda logprobs, advantages, mask: torch.tensor(3), FIRST, "is of torch.int64, and not of a float"),
        (lambda logprobs, advantages, mask: ppo(logprobs, logprobs.detach(), advantages, mask).loss.sum(-1),
         FIRST, "the shape [4], and not one number"),
    ],
}
# fmt: on


@pytest.mark.parametrize(
    ("framework", "function"),
    [
        ("nemo-rl", ComposerLoss({"reference_policy_kl_penalty": 0.0}, policy="grpo@nemo-rl")),
        ("slime", slime_loss),
    ],
)
def test_our_losses_pass_but_that_nan_is_an_error(framework: str, function: Loss) -> None:
    """An error that names the input, where the laws of NaN expect a loss of NaN."""
    report = check_as(function, framework)
    broken = [one for one in report.outcomes if one.status not in ("passed", "not applicable")]
    assert NAN_SEEN in {one.check for one in broken} <= {NAN_SEEN, NAN_GRADIENT}, str(report)
    assert all("DataError: policy" in one.detail for one in broken) and len(report.having("passed")) >= 13


@pytest.mark.parametrize(
    ("framework", "function"), [(name, function) for name, several in SOUND.items() for function in several]
)
def test_a_sound_function_passes(framework: str, function: Loss) -> None:
    report = check_as(function, framework)
    assert report.passed, str(report)
    assert len(report.having("passed")) >= 13
    laws = sorted({*laws_for(FUNCTION, framework), *NOT_RUN})
    assert framework == "torch" or sorted(outcome.check for outcome in report.outcomes) == laws


@pytest.mark.parametrize(
    ("framework", "function", "law", "words"),
    [
        pytest.param(name, *case, id=f"{name}-{i}-{case[1]}")
        for name, cases in PLANTED.items()
        for i, case in enumerate(cases)
    ],
)
def test_a_planted_fault_is_named(framework: str, function: Loss, law: str, words: str) -> None:
    # Random numbers break the law of two calls, and no law of masking.
    report = check_as(function, framework, [law, MASKED] if law == TWICE else [law])
    failed = {outcome.check: outcome for outcome in report.findings}
    assert [*failed] == [law], str(report)
    assert words in failed[law].detail
    assert failed[law].cause


def test_every_convention_has_three_planted_faults_of_different_laws() -> None:
    names = set(conventions()) - {"trl"}  # adapters/trl_mixin/test_check_as.py
    assert names == set(SOUND) == set(PLANTED)
    assert all(len({law for _, law, _ in cases}) >= 3 for cases in PLANTED.values())


def test_every_law_of_policy_losses_is_run_or_has_a_reason() -> None:
    of_policies = {name for name, law in LAWS.items() if "policy" in law.kinds}
    assert not of_policies & set(OF_A_FUNCTION) & set(NOT_RUN)
    assert of_policies <= {*OF_A_FUNCTION, *NOT_RUN}
    assert set(NOT_RUN) <= of_policies
    assert next(iter(OF_A_FUNCTION)) == FIRST
    assert {*OF_A_FUNCTION} - {*laws_for(FUNCTION, "verl")} == {DIVIDED}


def test_the_cause_of_a_result_of_another_type_says_what_the_framework_takes() -> None:
    function, *_ = PLANTED["torch"][-1]
    (outcome,) = check_as(function, "torch", [FIRST]).outcomes
    assert outcome.cause.startswith("torch takes a tensor: one loss per token, or one number")


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda *_, **__: 0, "takes no log-probabilities of the policy; give it a parameter with the name"),
        (lambda logprobs, ref_logprob=None: 0, "nothing passes 'ref_logprob' .* did you mean 'ref_logprobs'"),
        (lambda logprobs, region=None: 0, "give a parameter of your own a value"),
    ],
)
def test_parameters_that_cannot_be_passed_by_name_are_an_error(function: Loss, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_as(function, "torch")


def test_a_gradient_that_is_declared_the_derivative_must_be_it() -> None:
    def score(logprobs: Tensor, *rest: Tensor) -> TokenLoss:
        loss, at_1 = sound(logprobs, *rest).loss, log_ratio(logprobs, logprobs.detach(), rest[-1])
        return TokenLoss(loss.detach() * (1 + at_1) ** 2, {})

    for attributes, status in (({}, "not applicable"), ({"gradient": "derivative"}, "failed")):
        function = verl(score)
        vars(function).update(attributes)
        (outcome,) = check_as(function, "verl", ["gradient_is_that_of_the_value"]).outcomes
        assert outcome.status == status, outcome


@pytest.mark.parametrize(
    ("reduction", "total"), [("token_mean", 1.0), ("sequence_mean", 1.0), ("seq_mean_token_sum_norm", 5 / 20)]
)
def test_the_advantages_of_skyrl_hold_the_denominator(reduction: str, total: float) -> None:
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    tensors = dict.fromkeys(("logprobs", "old_logprobs"), -1.0 * mask)
    tensors |= {"advantages": torch.ones(2, 4), "mask": mask}

    def function(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs):
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
    wrong = verl(reduce=local_mean, result=lambda loss, ratio: (loss, {"ratio": ratio}))
    report = check_as(wrong, "verl", [FIRST, CUT])
    assert [outcome.check for outcome in report.findings] == [FIRST, CUT]
    unusable = check_as(verl(result=lambda loss, ratio: None), "verl", [FIRST, CUT])
    assert [outcome.status for outcome in unusable.outcomes] == ["failed", "not applicable"]


@pytest.mark.parametrize(("framework", "function"), [("torch", per_token(boom)), ("verl", verl(boom))])
def test_a_function_that_raises_fails_the_first_law_with_its_error(framework: str, function: Loss) -> None:
    report = check_as(function, framework)
    (outcome,) = report.findings
    assert (outcome.check, outcome.cause) == (FIRST, "the loss itself raises this error")
    assert "ValueError: invalid literal" in outcome.detail
    assert not report.having("passed")


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ("over_batch", True, "declares over_batch, and verl cuts the batch all the same"),
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
    function.exceptions = {CUT: "a mean over the micro-batch", "cuts": "misspelt"}
    report = check_as(function, "verl", [CUT])
    assert {one.check: one.status for one in report.outcomes} == {"cuts": "failed", CUT: "not applicable"}
    assert "no law of --as verl has that name" in report.findings[0].detail


# Losses as users write them, with what the framework alone has


def three_modes(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **weights):
    """A loss of verl that does not know the mode token-sum, and reads an option of its own."""
    if loss_agg_mode == "token-sum":
        raise KeyError(loss_agg_mode)
    token = partial(ppo, clip_high=config.policy_loss.get("region", 0.2))
    return verl(token)(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **weights)


def negative_sum(inputs: Any, reward: Tensor) -> Any:
    return SimpleNamespace(loss=-torch.where(inputs.loss_mask, reward, 0.0).sum(), metrics={})


def with_teacher(inputs, weight=0.1):
    a, t = inputs.advantages, inputs.ref_logprobs
    if t is not None:
        a = a + weight * (t - inputs.trainer_logprobs).detach()
    return negative_sum(inputs, a * inputs.trainer_logprobs)


def distilled(inputs):
    away = inputs.trainer_logprobs - inputs.inference_logprobs
    clipped = torch.where(inputs.advantages > 0, away > 0.2, away < -0.2)
    signal = (inputs.ref_logprobs - inputs.trainer_logprobs).detach()
    return negative_sum(inputs, torch.where(clipped, 0.0, signal * away.exp()))


@dataclass
class LossInputs:
    """PRIME-RL's, with a field of a later release."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    advantages: Tensor
    loss_mask: Tensor
    later: Any


def replaced(inputs: LossInputs):
    assert isinstance(inputs, LossInputs) and inputs.later is None
    inputs = replace(inputs, advantages=inputs.advantages * 2)
    return negative_sum(inputs, inputs.advantages * inputs.trainer_logprobs)


def cispo(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    assert config.off_policy_correction.tis_ratio_type is None and rollout_logprobs is not None
    low, high = 1 - config.cispo.cispo_eps_clip_low, 1 + config.cispo.cispo_eps_clip_high
    mask = loss_mask.bool()
    ratio = log_ratio(log_probs, rollout_logprobs, mask).clamp(-20, 20).exp().clamp(low, high)
    loss = -torch.where(mask, ratio.detach() * advantages * log_probs, 0.0)
    return loss.sum(), {"kl": config.kl_cov.ppo_kl_coef}


def sft(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):
    return -torch.where(loss_mask.bool(), log_probs, 0.0).sum(), {}


def with_kwargs(logprobs, old_logprobs, advantages, mask, *, c_clip: float | None = None, **kwargs):
    return ppo(logprobs, old_logprobs, advantages, mask, dual_clip=c_clip).loss


def inert(logprobs, old_logprobs, advantages, mask, *, c_clip: Optional[float] = None):  # noqa: UP045
    return ppo(logprobs, old_logprobs, advantages, mask).loss


def inert_sum(logprobs, old_logprobs, advantages, mask, *, c_clip: "float | None" = None):
    return ppo(logprobs, old_logprobs, advantages, mask).loss.sum()


# The function, its framework with options, the exit status, and what is said.
IN_THE_WILD = f"""
three_modes | verl --version 0.9.1 | 0 | token-sum'): KeyError: 'token-sum'
three_modes | verl --only it_runs_on_tensors_without_numbers | 0 | the framework does not compile it
three_modes | verl --version 0.8.0 | 0 | as verl 0.8.0 calls it): 19 passed, 0 failed
three_modes | verl --option policy_loss.region=0.3 | 0 | 0 failed
three_modes | verl --option policy_loss.regoin=0.3 | 2 | did you mean 'region'?
three_modes | verl --version 0.7.1 | 2 | it is verl 0.7.1, and composer-plugins runs in
three_modes | tinker --version 0.5.0 | 2 | one version of tinker alone
with_teacher | prime-rl --version 0.8.0 --option weight=0.2 | 0 | in loss_weights change
with_teacher | prime-rl --option wieght=0.2 | 2 | did you mean 'weight'?
with_teacher | prime-rl --version 0.7.0 | 2 | 0.7.0 is older than 0.8.0, the oldest
distilled | prime-rl | 0 | nothing where the policies are equal
replaced | prime-rl | 0 | as prime-rl calls it): 16 passed, 0 failed
cispo | skyrl | 0 | without rollout_logprobs: AssertionError
cispo | skyrl --option cispo.cispo_eps_clip_high=9 | 0 | 0 failed
sft | skyrl | 0 | other advantages change nothing
with_kwargs | torch --only {OPTION} -v | 0 | passed: {OPTION}
with_kwargs | torch --only {OPTION} --option c_clip=2.0 | 0 | 1 passed
with_kwargs | torch --option clip_ratio_c=3.0 | 2 | name one of c_clip
inert | torch --only {OPTION} | 1 | 'c_clip': [None, 1.5] all give the same
inert_sum | torch --only {OPTION} | 0 | 'c_clip': [None, 1.5] all give the same
"""


@pytest.mark.slow
@pytest.mark.parametrize("line", IN_THE_WILD.strip().splitlines())
def test_a_loss_in_the_wild(line: str) -> None:
    function, options, status, words = line.split(" | ")
    found = invoke("check", f"{__name__}:{function}", "--as", *options.split())
    is_error = isinstance(found.exception, ConfigError)
    assert words in (str(found.exception) if is_error else found.output)
    assert (2 if is_error else found.exit_code) == int(status)


@pytest.mark.parametrize(("applies", "status"), [(True, "passed"), (False, "failed")])
def test_an_option_whose_clip_or_penalty_is_only_logged_fails(applies: bool, status: str) -> None:
    """Half and twice the value of an option give the same gradient; a user names the option."""

    def function(*, config: Any, **given: Any) -> Any:
        def token(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
            with nullcontext() if applies else torch.no_grad():
                penalty = config.my_beta * log_ratio(logprobs, old, mask) ** 2
            return TokenLoss(ppo(logprobs, old, advantages, mask).loss + penalty, {})

        return verl(token)(**given, config=config)

    (outcome,) = check_as(function, "verl", [OPTION], options={"my_beta": 0.5}).outcomes
    assert outcome.status == status
    assert applies or outcome.detail == "'my_beta': [0.5, 0.25, 1.0] all give the same gradient"
