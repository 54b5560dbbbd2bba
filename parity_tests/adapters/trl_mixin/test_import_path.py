"""Losses named by import path, "my_losses:policy", in the real trainer."""

from pathlib import Path

import pytest

from composer_plugins.errors import ConfigError
from parity_tests.rigs import tiny

MY_LOSSES = '''
import torch
from composer_plugins.kernels.divergences import reverse_kl
from composer_plugins.kernels.types import PairLoss, TokenLoss

def policy(logprobs, old_logprobs, advantages, mask, *, cap=1e9):
    """A ratio with a cap."""
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).exp().clamp(max=cap)
    return TokenLoss(torch.where(mask, -ratio * advantages, 0.0), {})

def per_sequence(logprobs, old_logprobs, advantages, mask, *, cap=1e9):
    return policy(logprobs, old_logprobs, advantages, mask, cap=cap)
per_sequence.mode = "seq-mean-token-mean"

shapes = set()

def divergence(student_logits, teacher_logits, mask):
    shapes.add(student_logits.shape)
    return reverse_kl(student_logits, teacher_logits, mask)

def preference(chosen, rejected, *, margin=1.0):
    return PairLoss((margin - chosen + rejected).relu(), {})
preference.average = True

def weighted(logprobs, old_logprobs, advantages, mask, *, rollout_logprobs=None):
    assert rollout_logprobs is not None, "an optional input that TRL has"
    return policy(logprobs, rollout_logprobs, advantages, mask)

def averaged(logprobs, advantages, mask):
    return TokenLoss(policy(logprobs, logprobs.detach(), advantages, mask).loss.mean(), {})

def with_values(logprobs, values, mask):
    return TokenLoss(logprobs * values, {})
'''


@pytest.fixture(autouse=True)
def my_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_losses.py").write_text(MY_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("my", "ours"), [("policy", "dapo"), ("per_sequence", "grpo"), ("weighted", "dapo")])
def test_a_policy_has_the_gradient_of_the_same_loss_of_ours(my: str, ours: str) -> None:
    """On the first step no ratio is clipped. Without a mode of its own it has TRL's default, dapo's."""
    expected, gradient = (tiny.gradients(tiny.trainer(policy=one))[0] for one in (ours, f"my_losses:{my}"))
    assert tiny.relative_difference(expected, gradient) <= 1e-6


def test_all_three_channels_train() -> None:
    options = {"policy": "my_losses:policy", "policy_params": {"cap": 2.0}, "max_steps": 2}
    options |= {"hint_weight": 0.7, "hint_divergence": "my_losses:divergence", "replay_weight": 0.3}
    made = tiny.trainer(**options, replay_loss="my_losses:preference", replay_params={"margin": 0.5})
    made.train()
    import my_losses

    # A divergence may compare the tokens of a row with each other, so it gets the logits of whole rows.
    assert {(rows, vocabulary) for rows, _, vocabulary in my_losses.shapes} == {(16, len(tiny.SYMBOLS))}
    entry = made.state.log_history[1]
    assert {f"composer/{channel}/loss" for channel in ("policy", "hint", "replay")} <= entry.keys()
    expected, gradient = (
        tiny.gradients(tiny.trainer(hint_weight=1.0, hint_divergence=name, policy_weight=0.0))[0]
        for name in ("reverse_kl", "my_losses:divergence")
    )
    assert tiny.relative_difference(expected, gradient) <= 1e-6


def test_a_loss_that_averages_over_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^policy: 'my_losses:averaged' returned the shape \[\], and not"):
        tiny.gradients(tiny.trainer(policy="my_losses:averaged"))


def test_a_signature_that_asks_for_what_trl_lacks_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match=r"^policy: .*needs values, .*inputs here: advantages, logprobs, "):
        tiny.trainer(policy="my_losses:with_values")
    with pytest.raises(ConfigError, match=r"^policy: .* needs student_logits, .* which trl does not provide"):
        tiny.trainer(policy="my_losses:divergence")
