"""verl's distillation losses, through the functions that its engine calls, on drawn logits."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.distillation.losses import compute_topk_loss, distillation_loss, get_distillation_loss_fn
from verl.workers.config import DistillationConfig, DistillationLossConfig

from composer_plugins.conformance import reductions
from composer_plugins.conformance.batches import FLOAT64, draw_mask, rows_and_tokens
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.conformance.verl_claims.reduction import kl_compared
from composer_plugins.frameworks.verl import KL_ESTIMATORS
from composer_plugins.testing.draws import Draw, flag, generator
from composer_plugins.testing.inputs import with_junk

DISTILLATION = "distillation losses"  # the registry
FLOAT32 = torch.float32
PROMPT = 1  # tokens of prompt; verl reads the logits one position before each response token
FLOORS = (-10.0, -2.0)  # of both log-probabilities: verl's default, and one that many entries reach

# verl's distillation has its KL estimators, without those whose gradient is another one's ("k1+").
ESTIMATORS = {name: row for name, row in KL_ESTIMATORS.items() if not name.endswith("+")}


def draw_teacher(draw: Draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student logits, the teacher's k largest log-probabilities and their ids, and a mask."""
    g = generator(draw)
    rows, tokens = rows_and_tokens(draw, max_rows=3, max_tokens=4)
    vocab = draw.integer(2, 9, "vocabulary")
    k, scale = draw.integer(1, vocab, "k"), draw.choose([0.1, 1.0, 10.0], "logit scale")
    student = scale * torch.randn(rows, tokens, vocab, generator=g, dtype=FLOAT64)
    teacher = (scale * torch.randn(rows, tokens, vocab, generator=g, dtype=FLOAT64)).log_softmax(-1)
    top = teacher.topk(k)
    return student, top.values, top.indices, draw_mask(draw, g, rows, tokens)


def engine_batch(mask: Tensor, counts: dict[str, int], **more: Tensor) -> Any:
    """What verl's engine passes: one prompt token per row, responses as wide as the mask."""
    rows, tokens = mask.shape
    columns = {
        "prompts": torch.ones(rows, PROMPT, dtype=torch.int64),
        "responses": torch.ones(rows, tokens, dtype=torch.int64),
        "attention_mask": torch.ones(rows, PROMPT + tokens, dtype=torch.int64),
        "response_mask": mask.long(),
    }
    data = TensorDict(columns, batch_size=[rows])
    for name, value in more.items():
        data[name] = torch.nested.as_nested_tensor(list(with_a_position_more(value)), layout=torch.jagged)
    for name, count in counts.items():
        data.set_non_tensor(name, count)
    return data


def with_a_position_more(x: Tensor) -> Tensor:
    """[rows, tokens, ...] with one more position in each row, which verl never reads."""
    return torch.cat([x, x[:, :1]], 1)


def packed(x: Tensor) -> Tensor:
    """[rows, tokens, ...] as verl packs it."""
    return with_a_position_more(x).flatten(0, 1)


def forward_kl_topk(draw: Draw) -> Iterator[Compared]:
    """verl rounds log-probabilities to float32 (chunked: the logits), and then takes p (log p - log q)."""
    student, log_t, ids, mask = draw_teacher(draw)
    chunked, mode, floor = (
        flag(draw, "chunked"),
        draw.choose(upstream.modes(), "mode"),
        draw.choose(FLOORS, "floor"),
    )
    options = DistillationLossConfig(
        use_policy_gradient=False,  # as a reward the policy losses are compared elsewhere
        loss_mode="forward_kl_topk",
        topk=ids.shape[-1],
        log_prob_min_clamp=floor,
        use_chunked_topk=chunked,
    )
    settings = upstream.actor(loss_agg_mode=mode), DistillationConfig(distillation_loss=options)
    info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    data = engine_batch(mask, info, teacher_logprobs=log_t, teacher_ids=ids)
    logits = student.clone().requires_grad_()
    kept = compute_topk_loss(*settings, data, packed(logits).unsqueeze(0), "thd")
    output = {name: value.squeeze(0) for name, value in kept.items()}
    theirs, _ = distillation_loss(*settings, output, data)
    (want,) = torch.autograd.grad(theirs, logits)

    junk = with_junk(student, mask.unsqueeze(-1)).requires_grad_()
    params = {} if floor == -10.0 else {"logprob_floor": floor}
    token = kernel("divergence", "forward_kl_topk@verl", **params)(junk, log_t, ids, mask)
    ours = reductions.verl(token.loss, mask, mode, info)
    (gradient,) = torch.autograd.grad(ours, junk)
    nats = log_t.clamp(min=floor).abs() + student.abs().amax(-1, keepdim=True) + math.log(student.shape[-1])
    yield Compared(ours, theirs, ids.numel(), float((log_t.exp() * nats).max()), FLOAT32)
    # The loss is cut at 0, where a rounding decides whether there is a gradient.
    is_near_the_cut = token.loss.detach().abs() <= 16 * torch.finfo(FLOAT32).eps * nats.amax(-1)
    gradient, want = (torch.where(is_near_the_cut.unsqueeze(-1), 0.0, g) for g in (gradient, want))
    yield Compared(gradient, want, ids.shape[-1], 1.0, FLOAT32, GRADIENT)
    mass = output["student_mass"].detach().view(len(mask), -1)[:, :-1][mask]
    largest = float(mass.max() * nats.max())  # exp makes of a logit's rounding a relative error
    ours_mass = token.metrics["student_mass"].value[mask]
    yield Compared(ours_mass, mass, ids.shape[-1], largest, FLOAT32, "student_mass")


def estimator(name: str, draw: Draw) -> Iterator[Compared]:
    """An estimate from the sampled token alone."""
    student, _, _, mask = draw_teacher(draw)
    log_s, log_t = -student[..., 0].abs(), -student[..., 1].abs()
    x = log_s.clone().requires_grad_()
    # kl and k1 verl takes as a reward only.
    supervised = {} if name in ("kl", "k1") else {"use_policy_gradient": False}
    options = DistillationLossConfig(loss_mode=name, **supervised)
    settings = upstream.actor(), DistillationConfig(distillation_loss=options)
    data = engine_batch(mask, {}, teacher_logprobs=log_t.unsqueeze(-1))
    theirs, _ = get_distillation_loss_fn(name)(*settings, {"log_probs": packed(x)}, data)
    theirs = torch.where(mask, theirs, 0.0)
    yield from kl_compared(name, theirs, x, log_t, mask)
    if name == "k3":  # verl's default
        inputs = with_junk(log_s, mask), with_junk(log_t, mask), mask
        ours, own = kernel("divergence", "sampled_token@verl"), kernel("kl", ESTIMATORS[name])
        yield Compared(ours(*inputs).loss, own(*inputs), 1, what="sampled_token")


def _claim(ours: str, theirs: str, compare: object, note: str = "") -> Claim:
    place = Place(DISTILLATION, {"name": theirs})
    kind = "kl" if theirs in ESTIMATORS else "divergence"
    return Claim(kind, ours, f"distillation {theirs}", place, compare, note)  # type: ignore[arg-type]


CLAIMS = [
    _claim("forward_kl_topk@verl", "forward_kl_topk", forward_kl_topk, "verl rounds to float32"),
    *(
        _claim(row, name, partial(estimator, name), "and sampled_token@verl" if name == "k3" else "")
        for name, row in ESTIMATORS.items()
    ),
]
