"""The losses of GMPO, RLOO, SDPO and IW-OPD: policies, and self-distillation on drawn logits."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from composer_plugins.conformance.claims import GRADIENT, Compared, with_gradients
from composer_plugins.conformance.reductions import kernel, trl_gmpo
from composer_plugins.conformance.trl_claims import upstream
from composer_plugins.conformance.trl_claims.divergences import (
    BETAS,
    draw_pair,
    inputs,
    parity,
    rounding,
    token_logprobs,
    tokens,
)
from composer_plugins.conformance.trl_claims.grpo_options import Options, draw_options
from composer_plugins.conformance.trl_claims.names import claim
from composer_plugins.conformance.trl_claims.policy import (
    ROWS,
    acts_on,
    draw_batch,
    penalty_terms,
    reduced,
    trl_loss,
)
from composer_plugins.conformance.trl_claims.policy import inputs as policy_inputs
from composer_plugins.kernels import kl
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.divergences import jsd
from composer_plugins.testing.draws import Draw, generator

over_rows = kernel("aggregation", "seq-mean-token-mean@trl")
SDPO_MODES = {  # the distillation_mode of each
    "sampled_token": "sampled_token",
    "full_logits": "full_logits",
    "renormalised": "topk_logits",
    "tail": "topk_logits",
}


def gmpo(draw: Draw) -> Iterator[Compared]:
    """Its entropy mask takes tokens out of the geometric mean; its KL is not corrected."""
    batch, o = draw_batch(draw), draw_options(draw)
    o = o.replace(use_bias_correction_kl=False, use_vllm=False, entropy_coef=0.0, epsilon_high=0.4)
    o = o.replace(off_policy_mask_threshold=None)
    logprobs, old, advantages, mask = policy_inputs(batch)
    theirs = trl_loss(batch, o, cls=upstream.load("GMPOTrainer"))
    subset = acts_on(batch, o)
    row = kernel("policy", "gmpo@trl", clip_low=o.epsilon_low, clip_high=o.epsilon_high)
    token = row(logprobs, old, advantages, subset)
    penalty = o.beta * kl.k3(logprobs, batch["ref_logprobs"], mask)
    ours = trl_gmpo(token.loss, subset, batch["advantages"])
    ours = (ours + aggregate(penalty, mask, "seq-mean-token-mean", num_sequences=len(mask))) / o.steps
    largest = float(token.loss.detach().abs().max()) + float(advantages.abs().max())
    largest += float(penalty_terms(batch, o).max())
    yield from with_gradients(ours, theirs, logprobs, terms=mask.numel(), magnitude=largest)


def rloo(draw: Draw) -> Iterator[Compared]:
    """TRL's RLOO clips the ratio of a whole completion, ours has none: at a ratio of 1 they agree."""
    batch = draw_batch(draw)
    logprobs, mask, advantages = batch["logprobs"], batch["mask"], batch["advantages"]
    whole = torch.where(mask, logprobs.detach(), 0.0).sum(-1)
    given = upstream.grpo_inputs(mask, advantages.squeeze(-1), old_logps=whole)
    trainer, cls = upstream.grpo_trainer(Options()), upstream.load("RLOOTrainer")
    theirs = upstream.policy_loss(trainer, logprobs, batch["entropies"], given, cls)
    token = kernel("policy", "rloo")(logprobs, advantages, mask)
    ours = aggregate(token.loss, mask, "seq-mean-token-sum", num_sequences=float(len(mask)))
    (mine,), (want,) = (torch.autograd.grad(x, logprobs) for x in (ours, theirs))
    yield Compared(mine, want, mask.shape[1], what=GRADIENT)


def sdpo_policy(loss_type: str, level: str, draw: Draw) -> Iterator[Compared]:
    """Its "dapo" is its "bnpo"; it reads log-probabilities out of logits: of two entries here, the first."""
    batch = draw_batch(draw)
    logprobs, old, advantages, mask = policy_inputs(batch)
    logits = torch.stack([logprobs, torch.log(-torch.expm1(logprobs.clamp(max=-1e-3)))], -1)
    options = Options(loss_type=loss_type, importance_sampling_level=level)
    given = upstream.grpo_inputs(mask, advantages, old_per_token_logps=old)
    loss = upstream.load("SDPOTrainer")._compute_policy_loss
    theirs = loss(upstream.grpo_trainer(options), given, logits)
    read = torch.log_softmax(logits, -1)[..., 0]
    token = kernel("policy", ROWS[loss_type, level])(read, old, advantages, mask)
    own = options.replace(loss_type="bnpo") if loss_type == "dapo" else options
    ours = reduced(token.loss, mask, own)
    largest = float(token.loss.detach().abs().max()) * 8  # logs of as much as 4
    yield from with_gradients(ours, theirs, logprobs, terms=mask.numel(), magnitude=largest)


def sdpo(mode: str, draw: Draw) -> Iterator[Compared]:
    """A mean over all rows, empty ones too, of token means; weighted by a capped ratio, if there is a cap."""
    pair, alpha, cap = draw_pair(draw), draw.choose(BETAS, "alpha"), draw.choose([None, 0.5, 2.0], "cap")
    log_ratio = draw.number(-30, 30, "log ratio")
    student, teacher, mask = inputs(pair)
    s, t = (token_logprobs(x, tokens(pair)) for x in (student, teacher))
    old = s.detach() - log_ratio * torch.linspace(-1, 1, mask.shape[-1], dtype=torch.float64)
    weighted: dict[str, Any] = {} if cap is None else {"old_logprobs": old}
    largest = float(student.detach().abs().max().clamp(min=1))
    theirs_of: dict[str, Any] = {"distillation_mode": SDPO_MODES[mode], "distillation_is_clip": cap}
    if mode == "sampled_token":
        token_loss = kernel("divergence", "sampled_token@trl", ratio_cap=cap)(s, t, mask, **weighted).loss
        largest *= float((s - t).detach().abs().max())
        alpha = 1.0
    else:
        options: dict[str, Any] = {"alpha": alpha, "ratio_cap": cap, "top_k": None}
        if mode != "full_logits":
            largest = rounding(pair, mode)
            options |= {"top_k": (student.shape[-1] + 1) // 2, "rest": mode}
            theirs_of |= {"distillation_topk": options["top_k"], "distillation_add_tail": mode == "tail"}
        row = kernel("divergence", "sdpo@trl")
        token_loss = row(student, teacher, mask, student_logprobs=s.detach(), **options, **weighted).loss
    theirs_loss = upstream.method(
        "SDPOTrainer",
        "_compute_self_distillation_loss",
        args=SimpleNamespace(distillation_alpha=alpha, **theirs_of),
        accelerator=upstream.Accelerator(),
        _log_self_distillation_metric=lambda mode, value: None,
    )
    masks = (mask.long(), mask.long())
    logits = upstream.load("SDPOTrainer", "DistillationLogits")(tokens(pair), *masks, student, teacher)
    theirs = theirs_loss(upstream.TRAINED, {"old_per_token_logps": old}, logits)
    loss = over_rows(token_loss, mask, num_sequences=float(len(mask)))
    yield from parity(loss, theirs, pair, magnitude=largest * max(cap or 1, 1))


def sdpo_per_token(draw: Draw) -> Iterator[Compared]:
    """Its divergence alone."""
    pair, alpha = draw_pair(draw), draw.choose(BETAS, "alpha")
    student, teacher, mask = inputs(pair)
    function = upstream.load("experimental/sdpo/loss_utils.py", "compute_full_logit_self_distillation_loss")
    theirs = function(student, teacher, distillation_alpha=alpha)
    yield from parity(jsd(student, teacher, mask, beta=alpha).loss, theirs.where(mask, 0.0), pair)


def iw_opd(draw: Draw) -> Iterator[Compared]:
    """On-policy distillation with importance weights, in the student's logits."""
    g, gamma, eps = generator(draw), draw.choose([0.0, 0.5, 2.0], "gamma"), draw.choose([1e-8, 1.0], "eps")
    logits = torch.randn(3, 5, 7, generator=g, dtype=torch.float64).requires_grad_()
    ids = torch.randint(0, 7, (3, 5), generator=g)
    teacher, rollout = (-3 * torch.rand(3, 5, generator=g, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, 5, generator=g) < 0.7
    theirs_loss = upstream.method(
        "IWOPDTrainer",
        "_compute_iw_opd_loss",
        temperature=1.0,
        iw_opd_gamma=gamma,
        iw_opd_epsilon=eps,
        model=upstream.TRAINED,
        _metrics=upstream.metrics(),
    )
    theirs = theirs_loss(logits, ids, torch.where(mask, ids, -100), teacher, rollout)
    row = kernel("policy", "iw_opd@trl", gamma=gamma, eps=eps)
    token = row(token_logprobs(logits, ids), rollout, teacher, mask)
    ours = aggregate(token.loss, mask, "token-mean")
    yield Compared(ours, theirs, 15, float(token.loss.detach().abs().max()))
    (mine,), (want,) = (torch.autograd.grad(x, logits) for x in (ours, theirs))
    yield Compared(mine, want, 15, what=GRADIENT)


LEVELS: dict[str, dict[str, str]] = {
    "token": {},
    "sequence": {"importance_sampling_level": "sequence"},
}
CLAIMS = [
    claim("policy", "gmpo@trl", "GMPOTrainer", "", gmpo),
    claim("policy", "rloo", "RLOOTrainer", "on-policy", rloo, "its gradient; TRL clips a ratio of 1"),
    *(
        claim(
            "divergence",
            "sampled_token@trl" if mode == "sampled_token" else "sdpo@trl",
            "SDPOTrainer",
            option,
            partial(sdpo, mode),
            "" if mode == option else mode,
            distillation_mode=option,
        )
        for mode, option in SDPO_MODES.items()
    ),
    claim("divergence", "jsd", "SDPOTrainer", "full_logits, per token", sdpo_per_token),
    *(
        claim(
            "policy",
            ROWS[loss_type, level],
            "SDPOTrainer",
            loss_type + ", sequence" * bool(more),
            partial(sdpo_policy, loss_type, level),
            loss_type=loss_type,
            **more,
        )
        for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo")
        for level, more in LEVELS.items()
    ),
    claim("policy", "iw_opd@trl", "IWOPDTrainer", "", iw_opd),
]
