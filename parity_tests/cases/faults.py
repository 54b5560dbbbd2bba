"""Losses as third parties write them, each with one fault, and the law that it breaks."""

import math
from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from composer_plugins.kernels.types import Metric, PairLoss, TokenLoss
from composer_plugins.losses.row import Kind

Loss = Callable[..., Any]
POLICY_INPUTS = "logprobs old_logprobs advantages mask"
LIMIT = 50.0  # nats, where exp is far from overflowing


def ratio_of(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(log pi - log pi_old), masked before exp; NaN stays, also in the gradient."""
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    log_ratio = torch.where(mask, logprobs.to(wide) - old_logprobs.detach().to(wide), 0.0)
    far = log_ratio.detach() - log_ratio.detach().clamp(-LIMIT, LIMIT)
    return (log_ratio - far).exp()


def log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """The log ratio in the precision of its inputs, 0 where masked."""
    return torch.where(mask, logprobs - old_logprobs, 0.0)


def token_loss(loss: Tensor, mask: Tensor, **metrics: Tensor) -> TokenLoss:
    """The loss where unmasked, and metrics that count there."""
    found = {name: Metric(value.detach(), mask) for name, value in metrics.items()}
    return TokenLoss(torch.where(mask, loss, 0.0), found)


def sound(logprobs, old_logprobs, advantages, mask):
    """REINFORCE with an importance ratio: the loss which the others get wrong."""
    ratio = ratio_of(logprobs, old_logprobs, mask)
    return token_loss(-advantages.detach() * ratio, mask, ratio=torch.where(mask, ratio, 0.0))


# Published losses of an unusual form, which are right, and which the catalogue has not


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


def high_entropy(logprobs, old_logprobs, advantages, entropies, mask):
    """Only tokens of high entropy count, so a row may have none."""
    counts = torch.where(entropies.isnan(), torch.nan, (entropies > 1.2).to(entropies.dtype)).detach()
    return sound(logprobs, old_logprobs, advantages * counts, mask)


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


# Ways to get a loss wrong. `p` and `q` are the log-probabilities of the policy and of the old one, `a` are
# the advantages and `m` is the mask.


def named(inputs: str, result: Callable[..., Any]) -> Loss:
    """A loss that takes inputs of these names by position, and gives them to `result`."""

    def loss(*given: Any) -> Any:
        return result(*given)

    loss.__signature__ = Signature([Parameter(one, Parameter.POSITIONAL_ONLY) for one in inputs.split()])
    return loss


def wrong_inputs(change: Callable[..., tuple[Tensor, ...]]) -> Loss:
    """The sound loss of other inputs: `change(p, q, a, m)`."""
    return named(POLICY_INPUTS, lambda *given: sound(*change(*given)))


def wrong_result(change: Callable[[Tensor, Tensor], Any]) -> Loss:
    """`change(loss, m)` of the sound loss per token."""
    return named(POLICY_INPUTS, lambda *given: change(sound(*given).loss, given[-1]))


def of_tokens(inputs: str, formula: Callable[..., Tensor]) -> Loss:
    """A formula of these inputs, of which the mask is the last, where unmasked."""
    return named(inputs, lambda *given: token_loss(formula(*given), given[-1]))


def wrong_formula(formula: Callable[..., Tensor]) -> Loss:
    """`formula(p, q, a, m)` where unmasked. The old policy and the advantages have no gradient."""
    return of_tokens(POLICY_INPUTS, lambda p, q, a, m: formula(p, q.detach(), a.detach(), m))


def not_masked(formula: Callable[..., Tensor]) -> Loss:
    """`formula(p, q, a, m)` at every token."""
    return named(POLICY_INPUTS, lambda *given: TokenLoss(formula(*given), {}))


def of_pairs(inputs: str, margin: Callable[..., Tensor]) -> Loss:
    """DPO's loss of a margin of these inputs."""
    return named(inputs, lambda *given: PairLoss(-F.logsigmoid(margin(*given)), {}))


def declares(policy: Loss, **attributes: Any) -> Loss:
    """A copy of a policy loss, with attributes."""
    loss = named(POLICY_INPUTS, policy)
    vars(loss).update(attributes)
    return loss


def drops_tokens_at_random(logprobs, old_logprobs, advantages, mask):
    return TokenLoss(F.dropout(sound(logprobs, old_logprobs, advantages, mask).loss, 0.5), {})


def takes_no_mask(logprobs, old_logprobs, advantages):
    return sound(logprobs, old_logprobs, advantages, torch.ones_like(logprobs, dtype=torch.bool))


def does_nothing_with_a_parameter(logprobs, old_logprobs, advantages, mask, *, clip_high=0.2):
    return sound(logprobs, old_logprobs, advantages, mask)


def logs_a_clip_that_it_does_not_apply(logprobs, old_logprobs, advantages, mask, *, clip_high=0.2):
    loss = sound(logprobs, old_logprobs, advantages, mask)
    clipped = ((logprobs - old_logprobs).detach().exp() > 1 + clip_high).to(logprobs.dtype)
    return TokenLoss(loss.loss, {"clip_frac_high": Metric(clipped, mask)})


def does_nothing_with_an_input(logprobs, old_logprobs, rollout_logprobs, advantages, mask):
    return sound(logprobs, old_logprobs, advantages, mask)


def branches_on_a_tensor(logprobs, old_logprobs, advantages, mask):
    if not mask.any():
        return TokenLoss(logprobs * 0, {})
    return sound(logprobs, old_logprobs, advantages, mask)


def mean_of_unmasked(advantages: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, advantages, 0.0).sum() / mask.sum().clamp(min=1)


def last_token_dropped(mask: Tensor) -> Tensor:
    """The mask without the last token of each row, where a row has two."""
    seen = mask.cumsum(-1)
    return mask & ((seen < seen[..., -1:]) | (seen == 1))


def place_of_row(mask: Tensor) -> Tensor:
    """1 at the tokens of the first row, 2 at those of the second; a packed batch is one row."""
    return torch.ones_like(mask).cumsum(0) if mask.dim() > 1 else torch.ones_like(mask)


def at_most_1(advantages: Tensor) -> Tensor:
    return advantages / advantages.detach().abs().max(-1, keepdim=True).values.clamp(min=1)


def far_from_the_reference(p: Tensor, ref: Tensor, a: Tensor, m: Tensor) -> Tensor:
    return -a.detach() * p - 0.1 * ratio_of(p, ref, m).log() ** 2


calls = torch.zeros((), dtype=torch.float64)

# By law. One fault is one line, where it fits.
# fmt: off
POLICY: dict[str, dict[str, Loss]] = {
    "masked_tokens_have_no_influence": {
        "multiplies_with_the_mask": not_masked(lambda p, q, a, m: -a * (p - q).clamp(-50, 50).exp() * m),
        "masks_after_exp": wrong_formula(lambda p, q, a, m: -a * (p - q).exp())},
    "result_has_one_value_per_token": {
        "returns_a_scalar": wrong_result(lambda loss, m: loss.sum() / m.sum()),
        "returns_a_tensor": wrong_result(lambda loss, m: loss),
        "returns_the_mean_as_its_loss": wrong_result(lambda loss, m: TokenLoss(loss.mean(), {})),
        "has_a_tensor_as_metric": wrong_result(lambda loss, m: TokenLoss(loss, {"x": loss.mean().detach()})),
        "has_a_metric_with_a_gradient": wrong_result(lambda loss, m: TokenLoss(loss, {"x": Metric(loss, m)})),
        "has_a_metric_that_counts_padding": wrong_result(
            lambda loss, m: TokenLoss(loss, {"x": Metric(loss.detach(), torch.ones_like(m))})),
        "takes_a_mask_of_floats": not_masked(lambda p, q, a, m: -a * (p - q - 1e4 * (1 - m)).exp()),
        "exchanges_the_policies": wrong_formula(lambda p, q, a, m: -a / ratio_of(q, p, m)),
        "takes_no_mask": takes_no_mask},
    "inputs_are_not_written_to": {
        "writes_what_is_there_already": wrong_inputs(lambda p, q, a, m: (p, q, a.detach().mul_(1.0), m)),
        "scales_its_advantages_in_place": wrong_inputs(lambda p, q, a, m: (p, q, a.detach().mul_(0.5), m))},
    "two_calls_give_the_same_result": {
        "drops_gradients_at_random": wrong_result(
            lambda loss, m: TokenLoss(torch.where(torch.rand(loss.shape) < 0.5, loss, loss.detach()), {})),
        "drops_tokens_at_random": drops_tokens_at_random,
        "keeps_a_running_baseline": wrong_inputs(lambda p, q, a, m: (p, q, a - calls.add_(1.0), m))},
    "gradient_reaches_the_trained_inputs_only": {
        "forgets_to_detach_the_old_policy": of_tokens(
            POLICY_INPUTS, lambda p, q, a, m: -a * log_ratio(p, q, m).clamp(-LIMIT, LIMIT).exp())},
    "gradient_is_that_of_the_value": {
        "detaches_the_ratio_and_does_not_say_so": wrong_formula(
            lambda p, q, a, m: -a * ratio_of(p, q, m).detach() * torch.where(m, p, 0.0))},
    "declared_gradient_is_the_one_that_it_has": {"declares_a_score": declares(sound, gradient="score")},
    "declared_statistic_of_the_batch_is_one": {"declares_a_statistic": declares(sound, over_batch=True)},
    "micro_batches_and_ranks_leave_the_gradient_alone": {
        "subtracts_the_mean_of_the_micro_batch": wrong_inputs(
            lambda p, q, a, m: (p, q, a - mean_of_unmasked(a, m), m)),
        "divides_by_the_tokens_of_the_micro_batch": wrong_result(
            lambda loss, m: TokenLoss(loss / m.sum().clamp(min=1), {}))},
    "more_padding_changes_nothing": {
        "divides_by_the_padded_length": wrong_result(
            lambda loss, m: TokenLoss(loss / max(m.shape[-1], 1), {}))},
    "rows_may_come_in_any_order": {
        "adds_up_over_rows": wrong_inputs(lambda p, q, a, m: (p, q, torch.where(m, a, 0.0).cumsum(0), m))},
    "packed_tokens_equal_a_padded_row": {
        "names_the_axis_of_tokens_by_its_number": wrong_formula(
            lambda p, q, a, m: -a * ratio_of(p, q, m) / m.sum(1, keepdim=True).clamp(min=1))},
    "policies_far_apart_give_finite_numbers": {
        "lets_the_ratio_overflow": wrong_formula(lambda p, q, a, m: -a * log_ratio(p, q, m).exp())},
    "nan_in_an_input_is_nan_in_the_gradient_of_its_token": {
        "drops_the_last_token_of_a_row": wrong_inputs(lambda p, q, a, m: (p, q, a, last_token_dropped(m))),
        "drops_tokens_after_the_eighth": wrong_inputs(lambda p, q, a, m: (p, q, a, m & (m.cumsum(-1) <= 8))),
        "drops_rows_after_the_eighth": wrong_inputs(lambda p, q, a, m: (p, q, a, m & (place_of_row(m) <= 8))),
        "clamps_the_log_ratio": wrong_formula(
            lambda p, q, a, m: -a * log_ratio(p, q, m).clamp(-LIMIT, LIMIT).exp())},
    "nan_is_seen_in_its_row_and_in_no_other": {
        "replaces_nan_after_the_first_row": wrong_result(
            lambda loss, m: TokenLoss(torch.cat([loss[:1], loss[1:].nan_to_num(1.0)]), {})),
        "replaces_nan": wrong_formula(lambda p, q, a, m: -a * ratio_of(p, q, m).nan_to_num(1.0))},
    "half_precision_is_upcast_before_anything_else": {
        "computes_in_half_precision": wrong_formula(
            lambda p, q, a, m: -a * log_ratio(p, q, m).clamp(-5, 5).exp())},
    "result_keeps_the_precision_of_its_inputs": {
        "rounds_to_float32": wrong_formula(lambda p, q, a, m: (-a * ratio_of(p, q, m)).float())},
    "batch_without_an_unmasked_token_gives_zero_with_a_gradient": {
        "divides_by_no_token": wrong_result(lambda loss, m: TokenLoss(loss / m.sum(-1, keepdim=True), {}))},
    "batch_of_no_rows_or_no_tokens_gives_as_many_losses": {
        "takes_the_largest_advantage": wrong_inputs(lambda p, q, a, m: (p, q, at_most_1(a), m))},
    "every_parameter_has_an_effect": {
        "does_nothing_with_a_parameter": does_nothing_with_a_parameter,
        "logs_a_clip_that_it_does_not_apply": logs_a_clip_that_it_does_not_apply},
    "every_input_has_an_effect": {"does_nothing_with_an_input": does_nothing_with_an_input},
    "rows_under_vmap_give_the_gradients_of_the_batch": {
        "multiplies_with_the_number_of_rows": wrong_result(lambda loss, m: TokenLoss(loss * m.shape[0], {}))},
    "advantages_of_any_size_give_finite_numbers": {
        "squares_its_advantages": wrong_inputs(lambda p, q, a, m: (p, q, (a**2).sqrt() * a.sign(), m))},
    "float32_is_close_to_float64": {
        "subtracts_large_numbers": wrong_inputs(lambda p, q, a, m: (p + 1e4, q + 1e4, a, m))},
    "descent_raises_the_tokens_with_positive_advantages": {
        "has_the_wrong_sign": wrong_inputs(lambda p, q, a, m: (p, q, -a, m)),
        "lowers_good_answers_less_than_bad_ones": wrong_inputs(lambda p, q, a, m: (p, q, a - 2, m)),
        "learns_from_the_size_of_an_advantage": wrong_inputs(lambda p, q, a, m: (p, q, a.abs(), m)),
        "pushes_the_policy_from_the_reference": of_tokens(
            "logprobs ref_logprobs advantages mask", far_from_the_reference),
        "pushes_the_policy_from_the_old_one": wrong_formula(
            lambda p, q, a, m: -a * (ratio := ratio_of(p, q, m)) - 0.1 * ratio.log() ** 2)},
    "it_runs_on_tensors_without_numbers": {
        "asks_for_a_number": wrong_inputs(lambda p, q, a, m: (p, q, a / max(1.0, a.abs().max().item()), m))},
    "torch_fx_traces_it": {"branches_on_a_tensor": branches_on_a_tensor},
    "torch_compile_takes_it_in_one_graph": {"branches_on_a_tensor": branches_on_a_tensor},
}
# fmt: on


def same_group(group_ids: Tensor) -> Tensor:
    """Which rows belong to the same group, [rows, rows]."""
    return group_ids[:, None] == group_ids


def runs(group_ids: Tensor) -> Tensor:
    """The group ids of a batch in which each run of equal ids is taken for a group."""
    starts = torch.cat([torch.ones_like(group_ids[:1], dtype=torch.bool), group_ids[1:] != group_ids[:-1]])
    return starts.cumsum(0)


def centred(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The rewards minus the mean of their group, with the gradient of the rewards."""
    same = same_group(group_ids)
    return rewards - (same * rewards).sum(-1) / same.sum(-1)


def has_the_ddof_of_a_sample_in_a_group_of_one(rewards, group_ids):
    same, gap = same_group(group_ids), centred(rewards, group_ids)
    return gap / ((same * gap**2).sum(-1) / (same.sum(-1) - 1)).sqrt()


def counts_masked_rows(rewards, group_ids, *, mask=None):
    advantages = centred(rewards, group_ids)
    return advantages if mask is None else torch.where(mask, advantages, 0.0)


def looks_sixteen_tokens_ahead(token_rewards, mask):
    kept = torch.where(mask, token_rewards, 0.0).detach()
    return torch.where(mask, F.pad(kept, (0, 15)).unfold(-1, 16, 1).sum(-1), 0.0)


def has_the_wrong_sign_of_a_return(token_rewards, values, mask):
    rewards = torch.where(mask, token_rewards, 0.0).detach()
    return torch.where(mask, values.detach() - rewards.flip(-1).cumsum(-1).flip(-1), 0.0)


def of_groups(formula: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    return named("rewards group_ids", formula)


# fmt: off
ADVANTAGE: dict[str, dict[str, Loss]] = {
    "groups_may_have_any_ids_and_rows_any_order": {
        "takes_neighbours_for_a_group": of_groups(lambda r, ids: centred(r, runs(ids)))},
    "groups_have_no_influence_on_each_other": {
        "normalises_over_the_batch": of_groups(lambda r, ids: (r - r.mean()) / (r.std(correction=0) + 1e-6))},
    "masked_batches_and_groups_of_one_are_finite": {
        "has_the_ddof_of_a_sample_in_a_group_of_one": has_the_ddof_of_a_sample_in_a_group_of_one},
    "masked_rows_and_tokens_have_no_influence": {"counts_masked_rows": counts_masked_rows},
    "result_has_no_gradient": {"keeps_the_gradient_of_its_rewards": of_groups(centred)},
    "last_reward_is_seen_from_every_token": {"looks_sixteen_tokens_ahead": looks_sixteen_tokens_ahead},
    "higher_reward_has_no_smaller_advantage": {
        "has_the_wrong_sign_in_a_group": of_groups(lambda r, ids: -centred(r, ids).detach()),
        "has_the_wrong_sign_of_a_return": has_the_wrong_sign_of_a_return,
        "squares_the_components_of_its_reward": named(
            "reward_components", lambda components: (components.detach() ** 2).sum(-1)),
        "has_no_baseline": of_groups(lambda r, ids: r.detach() * torch.ones_like(ids)),
        "adds_its_baseline": named("rewards baselines", lambda r, baselines: (r + baselines).detach())},
    "unmasked_rewards_that_are_not_finite_are_seen_in_their_row": {
        "replaces_nan_in_rewards": of_groups(lambda r, ids: centred(r.detach().nan_to_num(0, 1, -1), ids))},
}
KL: dict[str, dict[str, Loss]] = {
    "expectation_over_the_policy_is_not_negative": {
        "has_the_wrong_sign_of_a_kl": of_tokens(
            "logprobs ref_logprobs mask", lambda p, ref, m: log_ratio(ref.detach(), p, m))},
}
# `c` and `r` are the scores of the chosen and of the rejected response.
BOTH, ALL_FOUR = "chosen rejected", "chosen rejected ref_chosen ref_rejected"
SINGLE = "scores ref_scores desirable"
PREFERENCE: dict[str, dict[str, Loss]] = {
    "descent_raises_the_chosen_over_the_rejected": {
        "exchanges_chosen_and_rejected": of_pairs(BOTH, lambda c, r: r - c),
        "adds_the_margin_of_the_reference": of_pairs(
            ALL_FOUR, lambda c, r, ref_c, ref_r: c - r + (ref_c - ref_r).detach()),
        "adds_the_rejected_score_of_the_reference": of_pairs(
            ALL_FOUR, lambda c, r, ref_c, ref_r: c - ref_c.detach() - r - ref_r.detach()),
        "subtracts_the_nll_of_the_chosen": named(
            "chosen rejected chosen_nll", lambda c, r, nll: PairLoss(-F.logsigmoid(c - r) - nll, {}))},
    "pairs_may_come_in_any_order": {
        "adds_up_over_pairs": named(BOTH, lambda c, r: PairLoss(-F.logsigmoid(c - r).cumsum(0), {}))},
    "nan_in_a_score_is_nan_in_a_gradient": {
        "bounds_the_margin": of_pairs(BOTH, lambda c, r: (c - r).clamp(-10, 10))},
    "parts_of_a_batch_are_the_batch": {
        "drops_the_pairs_after_the_eighth": named(
            BOTH, lambda c, r: PairLoss(-F.logsigmoid(c - r) * (torch.arange(len(c)) < 8), {})),
        "subtracts_the_mean_margin": of_pairs(BOTH, lambda c, r: c - r - (c - r).detach().mean())},
    "descent_raises_the_desirable_over_the_undesirable": {
        "exchanges_desirable_and_undesirable": of_pairs(
            SINGLE, lambda score, ref, good: (score - ref.detach()) * torch.where(good, -1, 1)),
        "adds_the_score_of_the_reference": of_pairs(
            SINGLE, lambda score, ref, good: (score + ref.detach()) * torch.where(good, 1, -1)),
        "adds_the_reference_point": of_pairs(
            f"{SINGLE} reference_kl",
            lambda score, ref, good, kl: (score - ref.detach() + kl.detach()) * torch.where(good, 1, -1)),
        "forgets_what_is_desirable": of_pairs(SINGLE, lambda score, ref, _: score - ref.detach())},
    "scores_far_apart_give_finite_numbers": {
        "takes_the_logarithm_of_a_sigmoid": named(BOTH, lambda c, r: PairLoss(-(c - r).sigmoid().log(), {}))},
    "nan_is_seen_in_its_pair_and_in_no_other": {
        "replaces_nan_in_a_score": of_pairs(BOTH, lambda c, r: (c - r).nan_to_num(0.0))},
    "gradient_reaches_the_trained_inputs_only": {
        "forgets_to_detach_the_reference": of_pairs(
            ALL_FOUR, lambda c, r, ref_c, ref_r: c - r - (ref_c - ref_r))},
}
# fmt: on


def negative_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Minus the KL of the teacher to the student, of log-probabilities."""
    return (teacher.exp() * (student - teacher)).sum(-1)


def takes_the_logarithm_of_a_softmax(student_logits, teacher_logits, mask):
    student, teacher = student_logits.softmax(-1), teacher_logits.detach().softmax(-1)
    return token_loss((teacher * (teacher.log() - student.log())).sum(-1), mask)


def multiplies_zero_with_infinity(student_logits, teacher_logits, mask):
    student, teacher = student_logits.log_softmax(-1), teacher_logits.detach().log_softmax(-1)
    return token_loss(-negative_kl(student, teacher), mask)


def does_not_normalise_its_logits(student_logits, teacher_logits, mask):
    teacher = teacher_logits.detach()
    return token_loss((teacher.softmax(-1) * (teacher - student_logits)).sum(-1), mask)


# `s` is the student and `t` is the teacher.
LOGITS, LOGPROBS = "student_logits teacher_logits mask", "student_logprobs teacher_logprobs mask"
# fmt: off
DIVERGENCE: dict[str, dict[str, Loss]] = {
    "descent_moves_the_student_to_the_teacher": {
        "has_the_wrong_sign_of_a_divergence": of_tokens(
            LOGITS, lambda s, t, m: negative_kl(s.log_softmax(-1), t.detach().log_softmax(-1))),
        "has_the_wrong_sign_of_a_top_k_divergence": of_tokens(
            "student_logits teacher_topk_logprobs teacher_topk_ids mask",
            lambda s, top, ids, m: negative_kl(s.log_softmax(-1).gather(-1, ids), top.detach()))},
    "descent_raises_the_tokens_that_the_teacher_prefers": {
        "raises_the_gap_to_the_teacher": of_tokens(
            LOGPROBS, lambda s, t, m: -0.5 * log_ratio(s, t.detach(), m) ** 2),
        "takes_the_derivative_of_k1": of_tokens(LOGPROBS, lambda s, t, m: log_ratio(s, t.detach(), m))},
    "logits_of_any_size_give_finite_numbers": {
        "takes_the_logarithm_of_a_softmax": takes_the_logarithm_of_a_softmax},
    "entry_that_is_impossible_on_one_side_is_never_nan": {
        "multiplies_zero_with_infinity": multiplies_zero_with_infinity},
    "entry_that_is_impossible_on_both_sides_contributes_nothing": {
        "multiplies_zero_with_infinity": multiplies_zero_with_infinity},
    "vocabulary_of_one_token_gives_zero": {"does_not_normalise_its_logits": does_not_normalise_its_logits},
}
# fmt: on


class Fault(NamedTuple):
    """A loss with one fault, and the law that it breaks."""

    name: str
    loss: Loss
    kind: Kind
    law: str


TABLES: dict[Kind, dict[str, dict[str, Loss]]] = {
    "policy": POLICY,
    "advantage": ADVANTAGE,
    "kl": KL,
    "preference": PREFERENCE,
    "divergence": DIVERGENCE,
}
FAULTS = [
    Fault(name, loss, kind, law)
    for kind, table in TABLES.items()
    for law, losses in table.items()
    for name, loss in losses.items()
]
WITH = {fault.name: fault.loss for fault in FAULTS}  # the loss that has the fault of this name
