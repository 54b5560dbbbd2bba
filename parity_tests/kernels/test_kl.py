"""KL estimators: slime's as recorded, and what they promise."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.kernels.kl import absolute, k1, k1_plus, k2, k3, k3_plus, subtract_kl
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.inputs import with_junk
from composer_plugins.testing.strategies import token_batches
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim

# slime clamps its low_var_kl, and not its k3.
SLIME_ROWS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3@slime"}


@claim("slime_kl")
def test_estimator_equals_slime(case: Case) -> None:
    """In float32, to which slime casts its inputs."""
    logprobs, ref = (golden.tensor(case[key], golden.dtype(case)) for key in ("log_prob", "ref_log_prob"))
    logprobs.requires_grad_()
    name = SLIME_ROWS[case["kl_loss_type"]]
    ours = reductions.kernel("kl", name)(logprobs, ref, torch.ones_like(ref, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(ours.sum(), logprobs)
    # The terms of k3 are exp(-d), d and 1, and exp(-d) has the rounding of d.
    log_r = (logprobs.detach() - ref).abs()
    scale = {"terms": 3, "dtype": golden.dtype(case), "magnitude": float((log_r.exp() * (1 + log_r)).max())}
    assert_parity(ours, golden.tensor(case["kl"]), **scale)
    assert_parity(gradient, golden.tensor(case["grad_of_sum"]), **scale, what="gradient")


CLAMPS = st.sampled_from([None, 0.4, 20.0])
CORRECTED = [(kind, upstream) for kind in ("k1", "k2", "k3") for upstream in ("nemo-rl", "slime")]


@pytest.mark.parametrize(("kind", "upstream"), [*CORRECTED, ("k3", "trl")])
@given(batch=token_batches(), seed=st.integers(0, 99), low=CLAMPS, out=CLAMPS, by_sequence=st.booleans())
def test_a_corrected_estimator_is_the_ratio_times_the_estimator(
    kind: str,
    upstream: str,
    batch: dict[str, Tensor],
    seed: int,
    low: float | None,
    out: float | None,
    by_sequence: bool,
) -> None:
    """Of k1_corrected, k2_corrected and k3_corrected: @nemo-rl has clamps, @slime one and @trl a level.

    Where the log ratio to the reference is clamped, the weight has no gradient.
    """
    logprobs, old, mask = batch["logprobs"].requires_grad_(), batch["old_logprobs"], batch["mask"]
    ref = logprobs.detach() + 3 * torch.randn(old.shape, generator=torch.Generator().manual_seed(seed))
    options: dict[str, Any] = {"log_ratio_clamp": low, "value_clamp": out}
    if upstream == "nemo-rl" and low is None and out is None:
        options, low, out = {}, 20.0, 10.0  # its own
    elif upstream != "nemo-rl":
        low, out = None, 10.0 if upstream == "slime" and kind == "k3" else None  # the product's
        options = {"level": "sequence"} if upstream == "trl" and by_sequence else {}
    for sampler in (old, logprobs.detach()):
        log_r, log_w = ref - logprobs, logprobs - sampler
        if "level" in options:
            log_w = (log_w * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
        weight = log_w.exp()
        if low is not None:
            clamped = log_r.clamp(-low, low)
            log_r, weight = clamped, torch.where(log_r == clamped, weight, weight.detach())
        theirs = weight * {"k1": -log_r, "k2": log_r**2 / 2, "k3": torch.exp(log_r) - 1 - log_r}[kind]
        theirs = torch.where(mask, theirs if out is None else theirs.clamp(-out, out), 0.0)
        kernel = reductions.kernel("kl", f"{kind}_corrected@{upstream}", **options)
        ours = kernel(logprobs, *(with_junk(x, mask) for x in (sampler, ref)), mask)
        mine, want = (torch.autograd.grad(x.sum(), logprobs)[0] for x in (ours, theirs))
        scale = {"terms": logprobs.numel() if upstream == "trl" else 4}
        scale["magnitude"] = max(1.0, float(theirs.detach().abs().max()), float(want.abs().max()))
        assert_parity(ours, theirs, **scale)
        assert_parity(mine, want, **scale, what="gradient")


@given(batch=token_batches())
def test_plus_has_the_value_of_its_estimator_and_the_gradient_of_k2(batch: dict[str, Tensor]) -> None:
    x, ref, mask = batch["logprobs"].requires_grad_(), batch["old_logprobs"], batch["mask"]
    (wanted,) = torch.autograd.grad(k2(x, ref, mask).sum(), x)
    clamps = {"log_ratio_clamp": 1.0, "value_clamp": 0.5}
    for plus, plain, options in ((k1_plus, k1, {}), (k3_plus, k3, {}), (k3_plus, k3, clamps)):
        value = plus(x, ref, mask, **options)
        assert torch.equal(value, plain(x, ref, mask, **options))
        assert torch.equal(torch.autograd.grad(value.sum(), x)[0], wanted)


@given(batch=token_batches(), weight=st.sampled_from([0.0, 0.001, 2.0]))
def test_subtract_kl_subtracts_the_log_ratio_at_unmasked_tokens(
    batch: dict[str, Tensor], weight: float
) -> None:
    x, ref, mask = batch["logprobs"].requires_grad_(), batch["old_logprobs"], batch["mask"]
    rewards = batch["advantages"].expand(mask.shape)
    ours = subtract_kl(with_junk(rewards, mask), x, with_junk(ref, mask), mask, kl_weight=weight)
    assert not ours.requires_grad
    assert_parity(ours, torch.where(mask, rewards - weight * (x - ref), 0.0).detach(), terms=2)


@given(batch=token_batches())
def test_estimators_equal_the_definition(batch: dict[str, Tensor]) -> None:
    logprobs, ref, mask = batch["logprobs"], batch["old_logprobs"], batch["mask"]
    for estimator, value, slope in (
        (k1, lambda d: d, lambda d: 1.0),
        (k2, lambda d: d * d / 2, lambda d: d),
        (k3, lambda d: math.expm1(-d) + d, lambda d: -math.expm1(-d)),
        (absolute, abs, lambda d: (d > 0) - (d < 0)),
        (reductions.kernel("kl", "squared@prime-rl"), lambda d: d * d, lambda d: 2 * d),
    ):
        x = with_junk(logprobs, mask).requires_grad_()
        ours = estimator(x, with_junk(ref, mask), mask)
        (gradient,) = torch.autograd.grad(ours.sum(), x)
        for got, function in ((ours, value), (gradient, slope)):
            d = (logprobs - ref).flatten().tolist()
            wanted = [function(a) * unmasked for a, unmasked in zip(d, mask.flatten().tolist(), strict=True)]
            largest = max(1.0, max(map(abs, wanted)))
            expected = ref.new_tensor(wanted).view(ref.shape)
            assert_parity(got, expected, terms=3, magnitude=largest)


@given(seed=st.integers(0, 10_000), spread=st.sampled_from([1e-5, 1e-3, 0.1, 3.0, 200.0]))
def test_k2_and_k3_are_never_negative_in_float32(seed: int, spread: float) -> None:
    # exp(-d) - 1 + d, as verl and TRL write it, is rounding noise of either sign below d = 1e-3.
    d = torch.randn(500, generator=torch.Generator().manual_seed(seed)) * spread
    unmasked = torch.ones(500, dtype=torch.bool)
    assert (k2(d, torch.zeros(500), unmasked) >= 0).all()
    assert (k3(d, torch.zeros(500), unmasked) >= 0).all()
    if spread == 1e-3:
        assert (d.neg().exp() - 1 + d < 0).any()


@given(d=st.floats(1e-6, 1.0))
def test_k3_keeps_its_precision_near_zero_in_float32(d: float) -> None:
    unmasked = torch.ones(1, dtype=torch.bool)
    ours = k3(torch.tensor([d]), torch.zeros(1), unmasked)
    exact = torch.tensor([math.expm1(-float(torch.tensor(d))) + float(torch.tensor(d))])
    # expm1 and d differ by half of d squared: the rounding is that of d.
    assert_parity(ours, exact, terms=2, dtype=torch.float32, magnitude=d)


@pytest.mark.parametrize("d", [-3.0, -1.5, -0.5, 0.5, 1.5, 3.0])
def test_k3_clamps_are_flat_beyond_their_limit(d: float) -> None:
    # With verl's 20 and 10 the second hides the first, so the recordings cannot tell them apart.
    def k3_and_slope(**clamps: float) -> tuple[float, float]:
        x = torch.tensor([d], dtype=torch.float64, requires_grad=True)
        value = k3(x, torch.zeros(1, dtype=torch.float64), torch.tensor([True]), **clamps)
        return float(value.detach()), float(torch.autograd.grad(value.sum(), x)[0])

    inner = min(max(d, -1.0), 1.0)
    wanted = math.expm1(-inner) + inner, -math.expm1(-d) * (abs(d) < 1)
    assert k3_and_slope(log_ratio_clamp=1.0) == pytest.approx(wanted, rel=1e-12)
    value = math.expm1(-d) + d
    wanted = min(value, 0.5), -math.expm1(-d) * (value < 0.5)
    assert k3_and_slope(value_clamp=0.5) == pytest.approx(wanted, rel=1e-12)


def test_beyond_saturation_k3_stops_pulling_instead_of_pushing() -> None:
    """exp saturates there with gradient 0; left alone, +d would push the policy away from the reference."""
    logprobs = torch.tensor([-100.0, -1e38], requires_grad=True)
    value = k3(logprobs, torch.zeros(2), torch.tensor([True, True]))
    assert (value > 0).all() and value.isfinite().all()
    value.sum().backward()
    assert not logprobs.grad.any()
