"""Losses as third parties write them, each with one fault, and the law that it breaks."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_plugins.kernels.types import Metric, PairLoss, TokenLoss

LIMIT = 50.0  # nats, where exp is far from overflowing


class Fault(NamedTuple):
    """A loss with one fault."""

    loss: Callable[..., Any]
    kind: str
    law: str


FAULTS: list[Fault] = []


def breaks(law: str, kind: str = "policy") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a loss to FAULTS."""

    def add(loss: Callable[..., Any]) -> Callable[..., Any]:
        FAULTS.append(Fault(loss, kind, law))
        return loss

    return add


def ratio_of(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(log pi - log pi_old), masked before exp; NaN stays, also in the gradient."""
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    log_ratio = torch.where(mask, logprobs.to(wide) - old_logprobs.detach().to(wide), 0.0)
    far = log_ratio.detach() - log_ratio.detach().clamp(-LIMIT, LIMIT)
    return (log_ratio - far).exp()


def token_loss(loss: Tensor, mask: Tensor, **metrics: Tensor) -> TokenLoss:
    """The loss where unmasked, and metrics that count there."""
    found = {name: Metric(value.detach(), mask) for name, value in metrics.items()}
    return TokenLoss(torch.where(mask, loss, 0.0), found)


def sound(logprobs, old_logprobs, advantages, mask):
    """REINFORCE with an importance ratio: the loss which the others get wrong."""
    ratio = ratio_of(logprobs, old_logprobs, mask)
    return token_loss(-advantages.detach() * ratio, mask, ratio=torch.where(mask, ratio, 0.0))


def raft(logprobs, old_logprobs, advantages, mask):
    """RAFT: only good answers count."""
    return sound(logprobs, old_logprobs, advantages.clamp(min=0), mask)


def nsr(logprobs, old_logprobs, advantages, mask):
    """NSR: only bad answers count."""
    return sound(logprobs, old_logprobs, advantages.clamp(max=0), mask)


def awr(logprobs, advantages, mask):
    """AWR: every answer is raised, and good ones more."""
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    weight = torch.where(mask, advantages.detach().to(wide), 0.0).clamp(max=3).exp()
    return token_loss(-weight * torch.where(mask, logprobs.to(wide), 0.0), mask)


def kimi(logprobs, old_logprobs, advantages, mask):
    """Kimi k1.5: a regression of the log ratio to the advantage."""
    gap = ratio_of(logprobs, old_logprobs, mask).log()
    return token_loss((torch.where(mask, advantages.detach(), 0.0) - gap) ** 2 / 2, mask)


def high_entropy(logprobs, old_logprobs, advantages, entropies, mask):
    """Only tokens of high entropy count, so a row may have none."""
    counts = torch.where(entropies.isnan(), torch.nan, (entropies > 1.2).to(entropies.dtype)).detach()
    return sound(logprobs, old_logprobs, advantages * counts, mask)


def topr(logprobs, old_logprobs, advantages, mask):
    """TOPR: a weight, of at most 1, for bad answers alone."""
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    gap = torch.where(mask, logprobs.to(wide) - old_logprobs.to(wide), 0.0).detach()
    weight = gap.sum(-1, keepdim=True).clamp(max=0).exp()
    weight = torch.where(advantages > 0, 1 + 0 * weight, weight) * advantages.detach()
    return token_loss(-torch.where(mask, weight, 0.0) * torch.where(mask, logprobs.to(wide), 0.0), mask)


topr.gradient = "score"


def rrhf(chosen, rejected):
    """RRHF: a hinge at 0."""
    gap = rejected.float() - chosen.float() if rejected.dtype.itemsize < 4 else rejected - chosen
    return PairLoss(torch.where(gap <= 0, 0.0 * gap, gap), {})


def skew_kl(logprobs, ref_logprobs, mask):
    """An estimate of KL(pi || 0.1 pi + 0.9 ref), of two equal policies 0 but for rounding."""
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    back = torch.where(mask, ref_logprobs.detach().to(wide) - logprobs.to(wide), 0.0)
    return token_loss(-torch.logaddexp(torch.full_like(back, math.log(0.1)), back + math.log(0.9)), mask)


def sequence_kl(logprobs, ref_logprobs, mask):
    """The k1 estimate of the KL of whole sequences, at each token."""
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    gap = torch.where(mask, logprobs.to(wide) - ref_logprobs.detach().to(wide), 0.0).sum(-1, keepdim=True)
    return token_loss(gap.expand(mask.shape), mask)


def brier(student_logits, teacher_logits, mask):
    """The squared distance of the probabilities."""
    wide = torch.promote_types(student_logits.dtype, torch.float32)
    student, teacher = student_logits.to(wide).softmax(-1), teacher_logits.detach().to(wide).softmax(-1)
    return token_loss((student - teacher).square().sum(-1), mask)


@breaks("masked_tokens_have_no_influence")
def multiplies_with_the_mask(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs.detach()).clamp(-LIMIT, LIMIT).exp()
    return TokenLoss(-advantages * ratio * mask, {})


@breaks("masked_tokens_have_no_influence")
def masks_after_exp(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs.detach()).exp()
    return token_loss(-advantages * ratio, mask)


@breaks("result_has_one_value_per_token")
def returns_a_scalar(logprobs, old_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, advantages, mask).loss.sum() / mask.sum()


@breaks("result_has_one_value_per_token")
def returns_a_tensor(logprobs, old_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, advantages, mask).loss


@breaks("result_has_one_value_per_token")
def returns_the_mean_as_its_loss(logprobs, old_logprobs, advantages, mask):
    return TokenLoss(sound(logprobs, old_logprobs, advantages, mask).loss.mean(), {})


@breaks("result_has_one_value_per_token")
def has_a_tensor_as_a_metric(logprobs, old_logprobs, advantages, mask):
    loss = sound(logprobs, old_logprobs, advantages, mask).loss
    return TokenLoss(loss, {"loss": loss.detach().mean()})


@breaks("result_has_one_value_per_token")
def has_a_metric_with_a_gradient(logprobs, old_logprobs, advantages, mask):
    loss = sound(logprobs, old_logprobs, advantages, mask).loss
    return TokenLoss(loss, {"loss": Metric(loss, mask)})


@breaks("result_has_one_value_per_token")
def has_a_metric_that_counts_padding(logprobs, old_logprobs, advantages, mask):
    loss = sound(logprobs, old_logprobs, advantages, mask).loss
    return TokenLoss(loss, {"loss": Metric(loss.detach(), torch.ones_like(mask))})


@breaks("result_has_one_value_per_token")
def takes_a_mask_of_floats(logprobs, old_logprobs, advantages, mask):
    ratio = (logprobs - old_logprobs - 1e4 * (1 - mask)).exp()
    return TokenLoss(-advantages * ratio, {})


@breaks("inputs_are_not_written_to")
def writes_what_is_there_already(logprobs, old_logprobs, advantages, mask):
    with torch.no_grad():
        advantages.mul_(1.0)
    return sound(logprobs, old_logprobs, advantages, mask)


@breaks("inputs_are_not_written_to")
def scales_its_advantages_in_place(logprobs, old_logprobs, advantages, mask):
    with torch.no_grad():
        advantages.mul_(0.5)
    return sound(logprobs, old_logprobs, advantages, mask)


@breaks("two_calls_give_the_same_result")
def drops_gradients_at_random(logprobs, old_logprobs, advantages, mask):
    loss = sound(logprobs, old_logprobs, advantages, mask).loss
    return TokenLoss(torch.where(torch.rand(loss.shape) < 0.5, loss, loss.detach()), {})


@breaks("two_calls_give_the_same_result")
def drops_tokens_at_random(logprobs, old_logprobs, advantages, mask):
    token = sound(logprobs, old_logprobs, advantages, mask)
    return TokenLoss(F.dropout(token.loss, 0.5), {})


_seen = torch.zeros((), dtype=torch.float64)


@breaks("two_calls_give_the_same_result")
def keeps_a_running_baseline(logprobs, old_logprobs, advantages, mask):
    _seen.add_(1.0)
    return sound(logprobs, old_logprobs, advantages - _seen, mask)


@breaks("result_has_one_value_per_token")
def detaches_the_policy(logprobs, old_logprobs, advantages, mask):
    ratio = ratio_of(old_logprobs, logprobs, mask)  # the arguments are exchanged
    return token_loss(-advantages / ratio, mask)


@breaks("gradient_reaches_the_trained_inputs_only")
def forgets_to_detach_the_old_policy(logprobs, old_logprobs, advantages, mask):
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-LIMIT, LIMIT)
    return token_loss(-advantages * log_ratio.exp(), mask)


@breaks("gradient_is_that_of_the_value")
def detaches_the_ratio_and_does_not_say_so(logprobs, old_logprobs, advantages, mask):
    ratio = ratio_of(logprobs, old_logprobs, mask).detach()
    return token_loss(-advantages * ratio * torch.where(mask, logprobs, 0.0), mask)


@breaks("declared_gradient_is_the_one_that_it_has")
def declares_a_score_and_is_none(logprobs, old_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, advantages, mask)


declares_a_score_and_is_none.gradient = "score"


@breaks("micro_batches_and_ranks_leave_the_gradient_alone")
def subtracts_the_mean_advantage_of_the_micro_batch(logprobs, old_logprobs, advantages, mask):
    shared = torch.where(mask, advantages, 0.0).sum() / mask.sum().clamp(min=1)
    return sound(logprobs, old_logprobs, advantages - shared, mask)


@breaks("micro_batches_and_ranks_leave_the_gradient_alone")
def divides_by_the_tokens_of_the_micro_batch(logprobs, old_logprobs, advantages, mask):
    token = sound(logprobs, old_logprobs, advantages, mask)
    return TokenLoss(token.loss / mask.sum().clamp(min=1), {})


@breaks("more_padding_changes_nothing")
def divides_by_the_padded_length(logprobs, old_logprobs, advantages, mask):
    token = sound(logprobs, old_logprobs, advantages, mask)
    return TokenLoss(token.loss / max(mask.shape[-1], 1), {})


@breaks("rows_may_come_in_any_order")
def adds_up_over_rows(logprobs, old_logprobs, advantages, mask):
    weight = torch.where(mask, advantages, 0.0).cumsum(0)
    return sound(logprobs, old_logprobs, weight, mask)


@breaks("packed_tokens_equal_a_padded_row")
def names_the_axis_of_tokens_by_its_number(logprobs, old_logprobs, advantages, mask):
    ratio = ratio_of(logprobs, old_logprobs, mask)
    share = mask.sum(1, keepdim=True).clamp(min=1)
    return token_loss(-advantages * ratio / share, mask)


@breaks("policies_far_apart_give_finite_numbers")
def lets_the_ratio_overflow(logprobs, old_logprobs, advantages, mask):
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)
    return token_loss(-advantages * log_ratio.exp(), mask)


@breaks("nan_in_an_input_is_nan_in_the_gradient_of_its_token")
def drops_the_last_token_of_a_row(logprobs, old_logprobs, advantages, mask):
    seen = mask.cumsum(-1)
    return sound(logprobs, old_logprobs, advantages, mask & ((seen < seen[..., -1:]) | (seen == 1)))


@breaks("nan_in_an_input_is_nan_in_the_gradient_of_its_token")
def drops_the_tokens_after_the_eighth(logprobs, old_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, advantages, mask & (mask.cumsum(-1) <= 8))


@breaks("nan_in_an_input_is_nan_in_the_gradient_of_its_token")
def drops_the_rows_after_the_eighth(logprobs, old_logprobs, advantages, mask):
    rows = torch.ones_like(mask).cumsum(0) if mask.dim() > 1 else torch.ones_like(mask)
    return sound(logprobs, old_logprobs, advantages, mask & (rows <= 8))


@breaks("nan_is_seen_in_its_row_and_in_no_other")
def replaces_nan_after_the_first_row(logprobs, old_logprobs, advantages, mask):
    later = torch.arange(mask.shape[0])[:, None] > 0
    loss = sound(logprobs, old_logprobs, advantages, mask).loss
    return TokenLoss(torch.where(later, loss.nan_to_num(1.0), loss), {})


@breaks("nan_is_seen_in_its_row_and_in_no_other")
def replaces_nan(logprobs, old_logprobs, advantages, mask):
    ratio = ratio_of(logprobs, old_logprobs, mask).nan_to_num(1.0)
    return token_loss(-advantages * ratio, mask)


@breaks("nan_in_an_input_is_nan_in_the_gradient_of_its_token")
def clamps_the_log_ratio(logprobs, old_logprobs, advantages, mask):
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0).clamp(-LIMIT, LIMIT)
    return token_loss(-advantages * log_ratio.exp(), mask)


@breaks("half_precision_is_upcast_before_anything_else")
def computes_in_half_precision(logprobs, old_logprobs, advantages, mask):
    log_ratio = torch.where(mask, logprobs - old_logprobs.detach(), 0.0)
    return token_loss(-advantages * log_ratio.clamp(-5, 5).exp(), mask)


@breaks("result_keeps_the_precision_of_its_inputs")
def rounds_to_float32(logprobs, old_logprobs, advantages, mask):
    return token_loss((-advantages * ratio_of(logprobs, old_logprobs, mask)).float(), mask)


@breaks("batch_without_an_unmasked_token_gives_zero_with_a_gradient")
def divides_by_no_token(logprobs, old_logprobs, advantages, mask):
    return TokenLoss(sound(logprobs, old_logprobs, advantages, mask).loss / mask.sum(-1, keepdim=True), {})


@breaks("batch_of_no_rows_or_no_tokens_gives_as_many_losses")
def takes_the_largest_advantage(logprobs, old_logprobs, advantages, mask):
    largest = advantages.detach().abs().max(-1, keepdim=True).values
    return sound(logprobs, old_logprobs, advantages / largest.clamp(min=1), mask)


@breaks("every_parameter_has_an_effect")
def does_nothing_with_a_parameter(logprobs, old_logprobs, advantages, mask, *, clip_high=0.2):
    return sound(logprobs, old_logprobs, advantages, mask)


@breaks("every_input_has_an_effect")
def does_nothing_with_an_input(logprobs, old_logprobs, rollout_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, advantages, mask)


@breaks("rows_under_vmap_give_the_gradients_of_the_batch")
def multiplies_with_the_number_of_rows(logprobs, old_logprobs, advantages, mask):
    return TokenLoss(sound(logprobs, old_logprobs, advantages, mask).loss * mask.shape[0], {})


@breaks("advantages_of_any_size_give_finite_numbers")
def squares_its_advantages(logprobs, old_logprobs, advantages, mask):
    size = (advantages.detach() ** 2).sqrt()
    return sound(logprobs, old_logprobs, size * advantages.detach().sign(), mask)


@breaks("float32_is_close_to_float64")
def subtracts_large_numbers(logprobs, old_logprobs, advantages, mask):
    return sound(logprobs + 1e4, old_logprobs + 1e4, advantages, mask)


@breaks("declared_statistic_of_the_batch_is_one")
def declares_a_statistic_and_has_none(logprobs, old_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, advantages, mask)


declares_a_statistic_and_has_none.over_batch = True


@breaks("result_has_one_value_per_token")
def takes_no_mask(logprobs, old_logprobs, advantages):
    return sound(logprobs, old_logprobs, advantages, torch.ones_like(logprobs, dtype=torch.bool))


@breaks("descent_raises_the_tokens_with_positive_advantages")
def has_the_wrong_sign(logprobs, old_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, -advantages, mask)


@breaks("descent_raises_the_tokens_with_positive_advantages")
def lowers_good_answers_less_than_bad_ones(logprobs, old_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, advantages - 2, mask)


@breaks("descent_raises_the_tokens_with_positive_advantages")
def learns_from_the_size_of_an_advantage(logprobs, old_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, advantages.abs(), mask)


@breaks("descent_raises_the_tokens_with_positive_advantages")
def pushes_the_policy_from_the_reference(logprobs, ref_logprobs, advantages, mask):
    ratio = ratio_of(logprobs, ref_logprobs, mask)
    return token_loss(-advantages.detach() * logprobs - 0.1 * ratio.log() ** 2, mask)


@breaks("descent_raises_the_tokens_with_positive_advantages")
def pushes_the_policy_from_the_old_one(logprobs, old_logprobs, advantages, mask):
    ratio = ratio_of(logprobs, old_logprobs, mask)
    return token_loss(-advantages.detach() * ratio - 0.1 * ratio.log() ** 2, mask)


@breaks("it_runs_on_tensors_without_numbers")
def asks_for_a_number(logprobs, old_logprobs, advantages, mask):
    scale = max(1.0, advantages.abs().max().item())
    return sound(logprobs, old_logprobs, advantages / scale, mask)


@breaks("torch_fx_traces_it")
@breaks("torch_compile_takes_it_in_one_graph")
def branches_on_a_tensor(logprobs, old_logprobs, advantages, mask):
    if not mask.any():
        return TokenLoss(logprobs * 0, {})
    return sound(logprobs, old_logprobs, advantages, mask)


@breaks("groups_may_have_any_ids_and_rows_any_order", "advantage")
def takes_neighbours_for_a_group(rewards, group_ids):
    starts = torch.cat([torch.ones_like(group_ids[:1], dtype=torch.bool), group_ids[1:] != group_ids[:-1]])
    runs = starts.cumsum(0) - 1
    same = runs[:, None] == runs
    return rewards - (same * rewards).sum(-1) / same.sum(-1)


@breaks("groups_have_no_influence_on_each_other", "advantage")
def normalises_over_the_batch(rewards, group_ids):
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-6)


def same_group(group_ids: Tensor) -> Tensor:
    """Which rows belong to the same group, [rows, rows]."""
    return group_ids[:, None] == group_ids


@breaks("masked_batches_and_groups_of_one_are_finite", "advantage")
def has_the_ddof_of_a_sample_in_a_group_of_one(rewards, group_ids):
    same = same_group(group_ids)
    mean = (same * rewards).sum(-1) / same.sum(-1)
    squares = (same * (rewards - mean[:, None]) ** 2).sum(-1)
    return (rewards - mean) / (squares / (same.sum(-1) - 1)).sqrt()


@breaks("masked_rows_and_tokens_have_no_influence", "advantage")
def counts_masked_rows(rewards, group_ids, *, mask=None):
    same = same_group(group_ids)
    centred = rewards - (same * rewards).sum(-1) / same.sum(-1)
    return centred if mask is None else torch.where(mask, centred, 0.0)


@breaks("result_has_no_gradient", "advantage")
def keeps_the_gradient_of_its_rewards(rewards, group_ids):
    same = same_group(group_ids)
    return rewards - (same * rewards).sum(-1) / same.sum(-1)


@breaks("last_reward_is_seen_from_every_token", "advantage")
def looks_sixteen_tokens_ahead(token_rewards, mask):
    kept = torch.where(mask, token_rewards, 0.0).detach()
    ahead = F.pad(kept, (0, 15)).unfold(-1, 16, 1).sum(-1)
    return torch.where(mask, ahead, 0.0)


@breaks("higher_reward_has_no_smaller_advantage", "advantage")
def has_the_wrong_sign_in_a_group(rewards, group_ids):
    same = same_group(group_ids)
    return ((same * rewards).sum(-1) / same.sum(-1) - rewards).detach()


@breaks("higher_reward_has_no_smaller_advantage", "advantage")
def has_the_wrong_sign_of_a_return(token_rewards, values, mask):
    rewards = torch.where(mask, token_rewards, 0.0).detach()
    ahead = rewards.flip(-1).cumsum(-1).flip(-1)
    return torch.where(mask, values.detach() - ahead, 0.0)


@breaks("higher_reward_has_no_smaller_advantage", "advantage")
def squares_the_components_of_its_reward(reward_components):
    return (reward_components.detach() ** 2).sum(-1)


@breaks("higher_reward_has_no_smaller_advantage", "advantage")
def has_no_baseline(rewards, group_ids):
    return rewards.detach() * torch.ones_like(group_ids)


@breaks("higher_reward_has_no_smaller_advantage", "advantage")
def adds_its_baseline(rewards, baselines):
    return (rewards + baselines).detach()


@breaks("unmasked_rewards_that_are_not_finite_are_seen_in_their_row", "advantage")
def replaces_nan_in_a_reward(rewards, group_ids):
    same, kept = same_group(group_ids), rewards.detach().nan_to_num(0.0, 1.0, -1.0)
    return kept - (same * kept).sum(-1) / same.sum(-1)


@breaks("expectation_over_the_policy_is_not_negative", "kl")
def has_the_wrong_sign_of_a_kl(logprobs, ref_logprobs, mask):
    gap = torch.where(mask, logprobs - ref_logprobs.detach(), 0.0)
    return TokenLoss(-gap, {})


@breaks("descent_raises_the_chosen_over_the_rejected", "preference")
def adds_the_margin_of_the_reference(chosen, rejected, ref_chosen, ref_rejected):
    reference = (ref_chosen - ref_rejected).detach()
    return PairLoss(-F.logsigmoid(chosen - rejected + reference), {})


@breaks("descent_raises_the_chosen_over_the_rejected", "preference")
def adds_the_rejected_score_of_the_reference(chosen, rejected, ref_chosen, ref_rejected):
    return PairLoss(-F.logsigmoid(chosen - ref_chosen.detach() - rejected - ref_rejected.detach()), {})


@breaks("descent_raises_the_chosen_over_the_rejected", "preference")
def subtracts_the_nll_of_the_chosen(chosen, rejected, chosen_nll):
    return PairLoss(-F.logsigmoid(chosen - rejected) - chosen_nll, {})


@breaks("pairs_may_come_in_any_order", "preference")
def adds_up_over_pairs(chosen, rejected):
    return PairLoss(-F.logsigmoid(chosen - rejected).cumsum(0), {})


@breaks("nan_in_a_score_is_nan_in_a_gradient", "preference")
def bounds_the_margin(chosen, rejected):
    return PairLoss(-F.logsigmoid((chosen - rejected).clamp(-10, 10)), {})


@breaks("parts_of_a_batch_are_the_batch", "preference")
def drops_the_pairs_after_the_eighth(chosen, rejected):
    loss = -F.logsigmoid(chosen - rejected)
    return PairLoss(torch.where(torch.arange(len(loss)) < 8, loss, 0.0), {})


@breaks("descent_raises_the_chosen_over_the_rejected", "preference")
def exchanges_chosen_and_rejected(chosen, rejected):
    return PairLoss(-F.logsigmoid(rejected - chosen), {})


@breaks("descent_raises_the_desirable_over_the_undesirable", "preference")
def exchanges_desirable_and_undesirable(scores, ref_scores, desirable):
    reward = scores - ref_scores.detach()
    return PairLoss(-F.logsigmoid(torch.where(desirable, -reward, reward)), {})


@breaks("descent_raises_the_desirable_over_the_undesirable", "preference")
def adds_the_score_of_the_reference(scores, ref_scores, desirable):
    reward = scores + ref_scores.detach()
    return PairLoss(-F.logsigmoid(torch.where(desirable, reward, -reward)), {})


@breaks("descent_raises_the_desirable_over_the_undesirable", "preference")
def adds_the_reference_point(scores, ref_scores, desirable, reference_kl):
    reward = scores - ref_scores.detach() + reference_kl.detach()
    return PairLoss(-F.logsigmoid(torch.where(desirable, reward, -reward)), {})


@breaks("descent_raises_the_desirable_over_the_undesirable", "preference")
def forgets_what_is_desirable(scores, ref_scores, desirable):
    return PairLoss(-F.logsigmoid(scores - ref_scores.detach()) * torch.ones_like(desirable), {})


@breaks("parts_of_a_batch_are_the_batch", "preference")
def subtracts_the_mean_margin(chosen, rejected):
    margin = chosen - rejected
    return PairLoss(-F.logsigmoid(margin - margin.detach().mean()), {})


@breaks("scores_far_apart_give_finite_numbers", "preference")
def takes_the_logarithm_of_a_sigmoid(chosen, rejected):
    return PairLoss(-(chosen - rejected).sigmoid().log(), {})


@breaks("nan_is_seen_in_its_pair_and_in_no_other", "preference")
def replaces_nan_in_a_score(chosen, rejected):
    return PairLoss(-F.logsigmoid((chosen - rejected).nan_to_num(0.0)), {})


@breaks("gradient_reaches_the_trained_inputs_only", "preference")
def forgets_to_detach_the_reference(chosen, rejected, ref_chosen, ref_rejected):
    return PairLoss(-F.logsigmoid(chosen - rejected - (ref_chosen - ref_rejected)), {})


@breaks("descent_moves_the_student_to_the_teacher", "divergence")
def has_the_wrong_sign_of_a_divergence(student_logits, teacher_logits, mask):
    student, teacher = student_logits.log_softmax(-1), teacher_logits.detach().log_softmax(-1)
    return token_loss((teacher.exp() * (student - teacher)).sum(-1), mask)


@breaks("descent_moves_the_student_to_the_teacher", "divergence")
def has_the_wrong_sign_of_a_top_k_divergence(student_logits, teacher_topk_logprobs, teacher_topk_ids, mask):
    student = student_logits.log_softmax(-1).gather(-1, teacher_topk_ids)
    teacher = teacher_topk_logprobs.detach()
    return token_loss((teacher.exp() * (student - teacher)).sum(-1), mask)


@breaks("descent_raises_the_tokens_that_the_teacher_prefers", "divergence")
def raises_the_gap_to_the_teacher(student_logprobs, teacher_logprobs, mask):
    gap = torch.where(mask, student_logprobs - teacher_logprobs.detach(), 0.0)
    return token_loss(-0.5 * gap**2, mask)


@breaks("descent_raises_the_tokens_that_the_teacher_prefers", "divergence")
def takes_the_derivative_of_k1(student_logprobs, teacher_logprobs, mask):
    return token_loss(torch.where(mask, student_logprobs - teacher_logprobs.detach(), 0.0), mask)


@breaks("logits_of_any_size_give_finite_numbers", "divergence")
def takes_the_logarithm_of_a_softmax(student_logits, teacher_logits, mask):
    student, teacher = student_logits.softmax(-1), teacher_logits.detach().softmax(-1)
    return token_loss((teacher * (teacher.log() - student.log())).sum(-1), mask)


@breaks("entry_that_is_impossible_on_one_side_is_never_nan", "divergence")
@breaks("entry_that_is_impossible_on_both_sides_contributes_nothing", "divergence")
def multiplies_zero_with_infinity(student_logits, teacher_logits, mask):
    student, teacher = student_logits.log_softmax(-1), teacher_logits.detach().log_softmax(-1)
    return token_loss((teacher.exp() * (teacher - student)).sum(-1), mask)


@breaks("vocabulary_of_one_token_gives_zero", "divergence")
def does_not_normalise_its_logits(student_logits, teacher_logits, mask):
    teacher = teacher_logits.detach()
    return token_loss((teacher.softmax(-1) * (teacher - student_logits)).sum(-1), mask)
