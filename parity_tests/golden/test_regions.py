"""Losses that mask tokens out, and on-policy distillation: Stable-RL and Tinker's cookbook as recorded."""

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.trust_regions import rest_bucket_kl, rest_bucket_tv
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import dialects, golden
from parity_tests.rigs.golden import Case, claim
from parity_tests.rigs.recorded import assert_equals, batch


def stable_rl(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """The loss per token of one of its modes, what it is a function of, and the mask.

    Its ratio is always the rollout policy's; a mode ending in `_recompute` measures the region from the
    old policy. It clamps the log ratio at 20 from above, beyond what any of its caps leaves of a ratio.
    """
    mode, recomputes = case["loss_mode"].removesuffix("_recompute"), "_recompute" in case["loss_mode"]
    inputs = logprobs, rollout, advantages, mask = batch(case, "rollout_log_prob")
    cap, low, high = case["clip_ratio_c"], case["clip_low"], case["clip_high"]
    assert cap < 1e8
    region = golden.tensor(case["old_log_prob"]) if recomputes else rollout
    if mode == "pg_no_mask":
        return reductions.kernel("policy", "cispo")(*inputs, clip_high=cap - 1).loss, logprobs, mask
    if mode == "ppo":
        kernel = reductions.kernel("policy", "minirl@stable-rl")
        ours = {"clip_low": low, "clip_high": high, "ratio_cap": cap}
        return kernel(logprobs, region, rollout, advantages, mask, **ours).loss, logprobs, mask
    name = {"dppo_binary_tv": "tv", "dppo_binary_kl": "kl"}[mode]
    ours = {"ratio_cap": cap, "region_logprobs": region}
    if name == "kl" or (low, high) != (0.2, 0.2):  # the bounds of the row
        ours |= {f"{name}_low": low, f"{name}_high": high}
    return reductions.kernel("policy", f"dppo_{name}@stable-rl")(*inputs, **ours).loss, logprobs, mask


@claim("dppo_stable_rl")
def test_losses_equal_stable_rl(case: Case) -> None:
    token_loss, logprobs, mask = stable_rl(case)
    loss = dialects.stable_rl(token_loss, mask, case["loss_agg_mode"])
    assert_equals(case, loss, token_loss, logprobs)


@claim("dppo_topk_divergence")
def test_the_rest_bucket_equals_stable_rl(case: Case) -> None:
    """The distances of dppo_topk_tv@stable-rl and dppo_topk_kl@stable-rl, in the record's precision."""
    dtype = golden.dtype(case)
    logits, rollout = (golden.tensor(case[k], dtype) for k in ("logits", "rollout_topk_logprobs"))
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(case["rollout_topk_ids"]))
    terms = case["k"] + 1
    for name, distance in (("topk_kl", rest_bucket_kl), ("topk_tv", rest_bucket_tv)):
        recorded = golden.tensor(case[name])
        # A term of the KL is a probability times a difference of logarithms, each down to log 1e-12.
        magnitude = max(1.0, float(recorded.max()))
        assert_parity(
            distance(logprobs, rollout), recorded, terms=terms, dtype=dtype, magnitude=magnitude, what=name
        )


@claim("dppo_topk_stable_rl")
def test_topk_losses_equal_stable_rl(case: Case) -> None:
    """`dppo_topk_tv@stable-rl` and `dppo_topk_kl@stable-rl`, with what is logged of the masked tokens.

    The distance is a float32 upstream; no recorded one is within 1e-4 of a bound. With the numbers of
    Stable-RL, the row alone reproduces the recording.
    """
    ids, region = torch.tensor(case["rollout_topk_ids"]), case["loss_mode"].removeprefix("dppo_topk_")
    topk = golden.tensor(case["logits"]).log_softmax(-1).gather(-1, ids)
    inputs = *batch(case, "rollout_log_prob"), topk, golden.tensor(case["rollout_topk_logprobs"])
    options = {f"{region}_low": "clip_low", f"{region}_high": "clip_high", "ratio_cap": "clip_ratio_c"}
    given = {ours: case[theirs] for ours, theirs in options.items()}
    given = {} if [*given.values()] == [0.2, 0.2, 3.0] else given
    token = reductions.kernel("policy", f"dppo_topk_{region}@stable-rl")(*inputs, **given)
    loss = dialects.stable_rl(token.loss, inputs[3], case["loss_agg_mode"])
    assert_equals(case, loss, token.loss, inputs[0])
    counted = inputs[3] & (inputs[2] != 0)
    low, high = (token.metrics[name].value.bool() for name in ("mask_frac_low", "mask_frac_high"))
    for key, where in (("pg_clipfrac", low | high), ("pg_clipfrac_lower", low)):
        fraction, recorded = aggregate(where.double(), counted, "token-mean"), case["metrics"][key]
        # Upstream counts in float32.
        scale = {"terms": counted.numel(), "dtype": torch.float32, "magnitude": 1.0}
        assert_parity(fraction, golden.tensor(recorded), **scale, what=key)


@claim("tinker_opd")
def test_opd_equals_tinkers_cookbook(case: Case) -> None:
    """`opd@tinker`: the advantages that the cookbook sends, under the loss that Tinker's service has.

    That loss, importance_sampling, is not recorded; a policy that has moved gives each token another ratio.
    """
    rollout, teacher = (golden.tensor(case[key]) for key in ("sampled_logprobs", "teacher_logprobs"))
    mask, task = torch.tensor(case["mask"]).bool(), golden.tensor(case["task_advantages"])
    logprobs = (rollout - 0.3 * torch.linspace(-1, 1, rollout.shape[1])).requires_grad_()
    options = {} if case["kl_penalty_coef"] == 1 else {"kl_coef": case["kl_penalty_coef"]}
    token = reductions.kernel("policy", "opd@tinker")(
        logprobs, rollout, teacher, mask, advantages=task, **options
    )
    (gradient,) = torch.autograd.grad(token.loss.sum(), logprobs)
    ratio = (logprobs.detach() - rollout).exp()
    recorded = golden.tensor(case["advantages"])
    largest = float(teacher.abs().max() + rollout.abs().max()) * max(1.0, case["kl_penalty_coef"])
    scale = {"terms": 3, "magnitude": largest}
    assert_parity(-token.loss / ratio, recorded, **scale)
    assert_parity(-gradient / ratio, recorded, **scale, what="gradient")
    gap = aggregate(token.metrics["teacher_gap"].value, mask, "token-mean")
    theirs = golden.tensor(case["teacher_kl"])
    assert_parity(-gap, theirs, terms=mask.numel(), dtype=torch.float32, magnitude=8.0, what="teacher_kl")
