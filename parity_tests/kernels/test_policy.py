"""How policy losses relate to one another, and what only one of them does."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.kernels import advantages, corrections, divergences, policy, preference
from composer_plugins.kernels.aggregation import Mode
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.choosing import choose
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Loss, of_kind
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from composer_plugins.testing.settings import settings as settings_of
from composer_plugins.testing.settings import value_and_gradients
from composer_plugins.testing.strategies import token_batches

Kernel = Callable[..., TokenLoss]
Batch = dict[str, Tensor]
few = settings(max_examples=12)  # there are many losses
ROWS = of_kind(losses(), "policy").values()

OF_DPO = {"label_smoothing", "divergence", "alpha"}
# Presets: the kernel, the defaults that differ, and the parameters that are none of theirs.
PRESETS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any], set[str]]] = {
    "policy-grpo": (policy.grpo, policy.ppo, {}, set()),
    "policy-dapo": (policy.dapo, policy.ppo, {"clip_high": 0.28}, set()),
    "policy-dr_grpo": (policy.dr_grpo, policy.ppo, {}, set()),
    "policy-luspo": (policy.luspo, policy.gspo, {"clip_low": 2e-3, "clip_high": 2.5e-3}, set()),
    "policy-rloo": (policy.rloo, policy.reinforce, {}, set()),
    "policy-gpg": (policy.gpg, policy.reinforce, {}, set()),
    "advantage-dr_grpo": (advantages.dr_grpo, advantages.grpo, {}, {"scale", "ddof", "eps"}),
    "correction-icepop": (corrections.icepop, corrections.mis, {"low": 0.5, "high": 5.0}, {"level"}),
    "divergence-reverse_kl": (divergences.reverse_kl, divergences.jsd, {}, {"beta"}),
    "preference-sigmoid_norm": (preference.sigmoid_norm, preference.dpo, {}, OF_DPO),
}


@pytest.mark.parametrize("label", PRESETS)
def test_a_preset_is_its_kernel_with_the_defaults_that_its_signature_shows(label: str) -> None:
    preset, kernel, defaults, without = PRESETS[label]
    kind, _, name = label.partition("-")
    assert (preset.__name__, preset.__module__) == (name, kernel.__module__)
    assert preset.__doc__ and preset.__doc__ != kernel.__doc__
    shown, wanted = inspect.signature(preset).parameters, inspect.signature(kernel).parameters
    assert set(shown) == set(wanted) - without
    changed = {n: p.default for n, p in shown.items() if p.default != wanted[n].default}
    assert changed == defaults
    assert of_kind(losses(), kind)[name].kernel() is preset


def test_the_first_denominator_in_a_docstring_is_the_mode_of_its_row() -> None:
    named = {}
    for row in ROWS:
        if found := re.search(f'"({"|".join(Mode.__args__)})"', row.kernel().__doc__ or ""):
            named[row.name] = (row.mode, found[1])
    assert len(named) > 20 and all(mode == documented for mode, documented in named.values()), named


def test_upstream_arithmetic_overflows_to_nan_where_ours_saturates() -> None:
    # TRL, PRIME-RL, slime and NeMo-RL exponentiate the log ratio as it is.
    logprobs, old = torch.zeros(1, requires_grad=True), torch.full((1,), -100.0)
    ratio = (logprobs - old).exp()
    torch.minimum(2 * ratio, 2 * ratio.clamp(0.8, 1.2)).sum().backward()
    assert logprobs.grad.isnan().all(), "torch has made 0 * inf harmless"
    ours = policy.grpo(logprobs, old, torch.full((1,), 2.0), torch.tensor([True])).loss
    (gradient,) = torch.autograd.grad(ours.sum(), logprobs)
    assert ours == -2.4 and gradient == 0


@pytest.mark.parametrize("row", [row for row in ROWS if "advantages" in row.needs], ids=lambda row: row.name)
def test_a_rows_nan_advantage_gives_its_masked_tokens_no_gradient(row: Loss) -> None:
    setting = next(settings_of(row))
    for spread in (0.0, 0.3, 1e4):  # 1e4: a ratio that saturates
        batch = setting.draw(spread=spread, per_token=False)
        batch["mask"][0] = torch.tensor([True, False, True, True, False, True])
        batch["advantages"][0] = torch.nan
        loss, gradients = value_and_gradients(setting, batch)
        assert loss[0, 0].isnan() and gradients["logprobs"][0, 0].isnan()
        for x in (loss, *gradients.values()):
            assert not x[~batch["mask"]].any()  # of NaN any() is True


@few
@given(batch=token_batches(), seed=st.integers(0, 1000))
def test_corrections_enter_vespo_as_if_the_old_policy_had_moved(batch: Batch, seed: int) -> None:
    mask, g = batch["mask"], torch.Generator().manual_seed(seed)
    logs = 0.1 * torch.randn(mask.shape, generator=g, dtype=torch.float64)
    ours = policy.vespo(**batch, log_weights=with_junk(logs, mask))
    moved = policy.vespo(**batch | {"old_logprobs": batch["old_logprobs"] - logs})
    # log w is a sum; phi is steepest in it near exp(-lambda w), w at most 20 before it is 0
    scale = {"terms": 100 * mask.shape[-1]}
    assert_parity(ours.loss, moved.loss, **scale)
    dead = policy.vespo(**batch, log_weights=torch.where(mask, -torch.inf, 0.0).double())
    assert dead.loss.isfinite().all()  # a correction of 0 is taken as e^-20


def test_a_region_may_be_endless() -> None:
    """PRIME-RL's own tests set a bound of 10 for a difference of probabilities."""
    for name in ("dppo_tv", "ipo", "dppo_topk_tv", "ref_kl"):
        assert choose("policy", name, {"tv_low": 10.0, "tv_high": 10.0})


def test_vespo_clamps_a_correction_and_their_sum_to_twenty_nats() -> None:
    """50 and -20 nats, each clamped to 20, are a weight of 1; clamped as a sum they would be 20 nats."""
    lp, mask = torch.full((1, 2), -1.0, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    advantages = torch.ones(1, 1, dtype=torch.float64)
    for logs in ([50.0, -20.0], [-50.0, 20.0], [0.0, 0.0]):
        ours = policy.vespo(lp, lp, advantages, mask, log_weights=torch.tensor([logs], dtype=torch.float64))
        assert ours.loss.tolist() == [[1.0, 1.0]] and ours.metrics["ratio"].value.tolist() == [[1.0, 1.0]]
    far = torch.tensor([[15.0, 15.0]], dtype=torch.float64)
    for logs in (far, -far):
        ratio = policy.vespo(lp, lp, advantages, mask, log_weights=logs).metrics["ratio"].value
        assert_parity(ratio, logs.sign().mul(20).exp(), terms=1)


@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_gmpo_counts_no_clip_where_there_is_no_advantage(shift: float) -> None:
    lp, mask = torch.full((1, 3), -1.0, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    advantages = torch.tensor([[0.0, -1.0, 1.0]], dtype=torch.float64)
    metrics = policy.gmpo(lp, lp + shift, advantages, mask).metrics
    low, high = (metrics[f"clip_frac_{side}"].value.tolist() for side in ("low", "high"))
    assert (low, high) == ([[False, shift > 0, False]], [[False, False, shift < 0]])


def test_a_kl_below_rounding_drops_no_response() -> None:
    """OpenRLHF/OpenRLHF#1354: the KL of two near probabilities is negative in float32."""
    lp = torch.full((1, 3), -1.0)
    near = torch.full((1, 3), -0.99999)
    loss = policy.flash_reinforce(near, lp, torch.ones(1, 1), lp < 0, delta=0.0).loss
    assert loss.all()


def test_a_missing_teacher_is_a_nan_loss_and_raises_in_trl() -> None:
    lp = torch.full((1, 2), -1.0, dtype=torch.float64)
    teacher, mask = torch.tensor([[torch.nan, -2.0]], dtype=torch.float64), lp < 0
    assert policy.iw_opd(lp, lp, teacher, mask).loss.isnan().all()
    assert policy.opd(lp, lp, teacher, mask).loss.isnan().tolist() == [[True, False]]
    dead = torch.tensor([[False, True]])
    assert policy.iw_opd(lp, lp, teacher, dead).loss.tolist() == [[0.0, -1.5]]
