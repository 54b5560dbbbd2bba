"""verl's distillation losses against ours, through the functions that its engine calls, on drawn logits."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.distillation.losses import (
    DISTILLATION_LOSS_REGISTRY,
    compute_topk_loss,
    distillation_loss,
    get_distillation_loss_fn,
)
from verl.workers.config import DistillationConfig, DistillationLossConfig

from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from parity_tests.support.verl_facts import (
    FLOAT64,
    MODES,
    actor,
    assert_complete,
    draw_mask,
    generator,
    reduced,
    row_kernel,
    rows_and_tokens,
    with_dialect,
)

examples = settings(max_examples=50)
FLOORS = (-10.0, -2.0)  # of both log-probabilities: verl's default, and one that many entries reach
PROMPT = 1  # tokens of prompt; verl reads the logits one position before each response token

ESTIMATORS = {
    **dict.fromkeys(("kl", "k1"), "k1@verl"),
    **dict.fromkeys(("mse", "k2"), "k2@verl"),
    **dict.fromkeys(("low_var_kl", "k3"), "k3@verl"),
    "abs": "abs@verl",
}


def config(**options: Any) -> DistillationConfig:
    """verl's defaults, but a supervised loss: as a reward the policy losses are compared elsewhere."""
    return DistillationConfig(distillation_loss=DistillationLossConfig(use_policy_gradient=False, **options))


def engine_batch(mask: Tensor, **more: Tensor) -> TensorDict:
    """What verl's engine passes: one prompt token per row, responses as wide as the mask."""
    rows, tokens = mask.shape
    data = TensorDict(
        {
            "prompts": torch.ones(rows, PROMPT, dtype=torch.int64),
            "responses": torch.ones(rows, tokens, dtype=torch.int64),
            "attention_mask": torch.ones(rows, PROMPT + tokens, dtype=torch.int64),
            "response_mask": mask.long(),
        },
        batch_size=[rows],
    )
    for name, value in more.items():
        data[name] = value
    return data


def packed(x: Tensor) -> Tensor:
    """[rows, tokens, ...] as verl packs it: every row with one more position, which it never reads."""
    return torch.cat([x, x[:, :1]], 1).flatten(0, 1)


def nested(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(torch.cat([x, x[:, :1]], 1)), layout=torch.jagged)


@st.composite
def teachers(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Student logits, the teacher's k largest log-probabilities and their ids, and a mask."""
    g = generator(draw)
    rows, tokens = rows_and_tokens(draw, max_rows=3, max_tokens=4)
    vocab = draw(st.integers(2, 9), label="vocabulary")
    k = draw(st.integers(1, vocab), label="k")
    scale = draw(st.sampled_from([0.1, 1.0, 10.0]), label="logit scale")
    student = scale * torch.randn(rows, tokens, vocab, generator=g, dtype=FLOAT64)
    teacher = (scale * torch.randn(rows, tokens, vocab, generator=g, dtype=FLOAT64)).log_softmax(-1)
    top = teacher.topk(k)
    return student, top.values, top.indices, draw_mask(draw, g, rows, tokens)


@examples
@given(drawn=teachers(), chunked=st.booleans(), mode=st.sampled_from(MODES), floor=st.sampled_from(FLOORS))
def test_forward_kl_topk_equals_verl(
    drawn: tuple[Tensor, Tensor, Tensor, Tensor], chunked: bool, mode: str, floor: float
) -> None:
    student, log_t, ids, mask = drawn
    options = config(
        loss_mode="forward_kl_topk", topk=ids.shape[-1], log_prob_min_clamp=floor, use_chunked_topk=chunked
    )
    info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    data = engine_batch(mask, teacher_logprobs=nested(log_t), teacher_ids=nested(ids))
    for name, count in info.items():
        data.set_non_tensor(name, count)
    logits = student.clone().requires_grad_()
    settings_of_actor = actor(loss_agg_mode=mode)
    per_token = compute_topk_loss(settings_of_actor, options, data, packed(logits).unsqueeze(0), "thd")
    output = {name: value.squeeze(0) for name, value in per_token.items()}
    theirs, _ = distillation_loss(settings_of_actor, options, output, data)
    (gradient,) = torch.autograd.grad(theirs, logits)

    junk = with_junk(student, mask.unsqueeze(-1)).requires_grad_()
    params = {} if floor == -10.0 else {"logprob_floor": floor}
    token = row_kernel("divergence", "forward_kl_topk@verl", **params)(junk, log_t, ids, mask)
    ours = reduced(token.loss, mask, mode, info)
    (our_gradient,) = torch.autograd.grad(ours, junk)
    # verl rounds log-probabilities to float32 (chunked: the logits), and then takes p (log p - log q).
    nats = log_t.clamp(min=floor).abs() + student.abs().amax(-1, keepdim=True) + math.log(student.shape[-1])
    largest = float((log_t.exp() * nats).max())
    assert_parity(ours, theirs, terms=ids.numel(), magnitude=largest, dtype=torch.float32)
    assert_parity(
        our_gradient, gradient, terms=ids.shape[-1], magnitude=1.0, dtype=torch.float32, what="gradient"
    )
    mass, theirs = token.metrics["student_mass"].value[mask], output_rows(output["student_mass"], mask)
    largest = float(theirs.max() * nats.max())  # exp makes of a logit's rounding a relative error
    assert_parity(mass, theirs, terms=ids.shape[-1], magnitude=largest, dtype=torch.float32)


def output_rows(x: Tensor, mask: Tensor) -> Tensor:
    """The unmasked tokens of a packed output."""
    return x.detach().view(mask.shape[0], -1)[:, :-1][mask]


@pytest.mark.parametrize("name", ESTIMATORS)
@examples
@given(data=st.data())
def test_estimator_equals_verl(name: str, data: st.DataObject) -> None:
    student, _, _, mask = data.draw(teachers())
    log_s = -student[..., 0].abs()
    log_t = -student[..., 1].abs()
    x = log_s.clone().requires_grad_()
    if name in ("kl", "k1"):  # which verl takes as a reward only
        options = DistillationConfig(distillation_loss=DistillationLossConfig(loss_mode=name))
    else:
        options = config(loss_mode=name)
    batch = engine_batch(mask, teacher_logprobs=nested(log_t.unsqueeze(-1)))
    per_token, _ = get_distillation_loss_fn(name)(actor(), options, {"log_probs": packed(x)}, batch)
    theirs = torch.where(mask, per_token, 0.0)
    (gradient,) = torch.autograd.grad(theirs.sum(), x)
    junk = with_junk(log_s, mask).requires_grad_()
    inputs = junk, with_junk(log_t, mask), mask
    ours = row_kernel("kl", ESTIMATORS[name])(*inputs)
    if name == "k3":  # verl's default
        assert torch.equal(row_kernel("divergence", "sampled_token@verl")(*inputs).loss, ours)
    (our_gradient,) = torch.autograd.grad(ours.sum(), junk)
    largest = max(1.0, float(theirs.detach().abs().max()), float(gradient.abs().max()))
    assert_parity(ours, theirs, terms=3, magnitude=largest)
    assert_parity(our_gradient, gradient, terms=3, magnitude=largest, what="gradient")


def test_every_distillation_loss_of_verl_is_compared() -> None:
    assert_complete(DISTILLATION_LOSS_REGISTRY, {"forward_kl_topk", *ESTIMATORS}, {})


def test_every_divergence_with_a_dialect_of_verl_is_called_here() -> None:
    assert {loss.name for loss in with_dialect("divergence")} == {"forward_kl_topk", "sampled_token"}
