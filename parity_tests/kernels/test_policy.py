"""What every policy loss promises: masking, cuts, NaN, overflow, precision; and how they relate."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from composer_plugins.kernels import policy
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.contract import TokenLoss
from parity_tests.support.assertions import assert_parity
from parity_tests.support.strategies import token_batches, with_junk

Kernel = Callable[..., TokenLoss]


def with_settings(kernel: Kernel, **settings: float) -> Kernel:
    """The kernel, whether it calls its anchor the old policy or the rollout's."""

    def loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        return kernel(logprobs, old_logprobs, advantages, mask, **settings)

    return loss


def without_anchor(kernel: Kernel) -> Kernel:
    """The kernel of an on-policy loss, called as the others are."""

    def loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
        return kernel(logprobs, advantages, mask)

    return loss


SETTINGS: dict[str, Kernel] = {
    "grpo": with_settings(policy.grpo),
    "grpo-verl": with_settings(policy.grpo, dual_clip=3.0, log_ratio_clamp=20.0),
    "grpo-dual-clip": with_settings(policy.grpo, dual_clip=3.0),
    "grpo-delta": with_settings(policy.grpo, ratio_cap=1.5),
    "dapo": with_settings(policy.dapo),
    "dr_grpo": with_settings(policy.dr_grpo),
    "gspo": with_settings(policy.gspo),
    "gspo_token": with_settings(policy.gspo_token),
    "gspo_token-verl": with_settings(policy.gspo_token, log_ratio_cap=10.0),
    "cispo": with_settings(policy.cispo),
    "cispo-verl": with_settings(policy.cispo, clip_low=0.2, log_ratio_clamp=20.0),
    "ppo": with_settings(policy.ppo),
    "luspo": with_settings(policy.luspo),
    "gmpo": with_settings(policy.gmpo),
    "sapo": with_settings(policy.sapo),
    "sapo-verl": with_settings(policy.sapo, log_ratio_clamp=20.0),
    "kimi": with_settings(policy.kimi, ratio_low=0.5, ratio_high=2.0, tau=1e-3),
    "vespo": with_settings(policy.vespo),
    "dro": with_settings(policy.dro, beta=0.05),
    "importance_sampling": with_settings(policy.importance_sampling),
    "reinforce": without_anchor(policy.reinforce),
    "rloo": without_anchor(policy.rloo),
    "gpg": without_anchor(policy.gpg),
    "dppo_tv": with_settings(policy.dppo_tv),
    "dppo_tv-verl": with_settings(policy.dppo_tv, ratio_cap=3.0, log_ratio_clamp=20.0),
    "dppo_kl": with_settings(policy.dppo_kl),
    "dppo_kl-verl": with_settings(policy.dppo_kl, ratio_cap=3.0, log_ratio_clamp=20.0),
}
every_loss = pytest.mark.parametrize("loss", SETTINGS.values(), ids=SETTINGS.keys())
few = settings(max_examples=12)  # there are many losses
ON_POLICY = {"reinforce", "rloo", "gpg"}
anchored = pytest.mark.parametrize(
    "loss",
    [SETTINGS[n] for n in SETTINGS if n not in ON_POLICY],
    ids=[n for n in SETTINGS if n not in ON_POLICY],
)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])

Batch = dict[str, Tensor]


def gradient_of(loss: Kernel, batch: Batch) -> Tensor:
    """The gradient of the loss summed over tokens."""
    x = batch["logprobs"].detach().requires_grad_()
    return torch.autograd.grad(loss(**batch | {"logprobs": x}).loss.sum(), x)[0]


def over_tokens(batch: Batch) -> Batch:
    """The same batch with an advantage per token."""
    return batch | {"advantages": batch["advantages"].expand(batch["mask"].shape)}


@every_loss
@few
@given(batch=token_batches())
def test_masked_tokens_have_no_influence_whatever_they_hold(loss: Kernel, batch: Batch) -> None:
    clean, mask = over_tokens(batch), batch["mask"]
    dirty = {name: x if name == "mask" else with_junk(x, mask) for name, x in clean.items()}
    assert torch.equal(loss(**dirty).loss, loss(**clean).loss)
    gradient = gradient_of(loss, dirty)
    assert torch.equal(gradient, gradient_of(loss, clean))
    assert not gradient[~mask].any() and not loss(**dirty).loss[~mask].any()


@every_loss
@few
@given(batch=token_batches(), parts=st.sampled_from([1, 2, 4]))
def test_cut_into_micro_batches_leaves_the_gradient_alone(loss: Kernel, batch: Batch, parts: int) -> None:
    mask = batch["mask"]
    counts = {"num_tokens": mask.sum(), "num_sequences": mask.any(-1).sum(), "max_length": 11}
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        x = batch["logprobs"].detach().requires_grad_()
        inputs = batch | {"logprobs": x}
        whole = aggregate(loss(**inputs).loss, mask, mode, max_length=11)
        (expected,) = torch.autograd.grad(whole, x)
        for rows in torch.arange(len(x)).chunk(parts):
            part = {name: value[rows] for name, value in inputs.items()}
            aggregate(loss(**part).loss, part["mask"], mode, **counts).backward()
        assert_parity(x.grad, expected, terms=1)


@every_loss
@few
@given(batch=token_batches(), seed=st.integers(0, 1000))
def test_rows_may_come_in_any_order(loss: Kernel, batch: Batch, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch["mask"]), generator=g)
    shuffled = {name: value[order] for name, value in batch.items()}
    assert_parity(
        loss(**shuffled).loss, loss(**batch).loss[order], terms=1
    )  # sigmoid: by vector or one by one


@every_loss
@few
@given(batch=token_batches(max_rows=1))
def test_packed_padded_and_nested_batches_are_the_same_call(loss: Kernel, batch: Batch) -> None:
    padded = loss(**batch)
    packed = loss(**{name: value[0] for name, value in batch.items()})
    nested = loss(**{name: value[None] for name, value in batch.items()})
    for other in (packed.loss[None], nested.loss[0]):
        assert torch.equal(padded.loss, other)
    for name, metric in padded.metrics.items():
        assert torch.equal(metric.value[0], packed.metrics[name].value)


@every_loss
@pytest.mark.parametrize("name", ["logprobs", "advantages"])
@few
@given(batch=token_batches())
def test_nan_in_a_live_token_stays_nan(loss: Kernel, name: str, batch: Batch) -> None:
    assert_nan_stays(loss, name, batch)


@anchored
@few
@given(batch=token_batches())
def test_nan_in_a_live_token_of_the_anchor_stays_nan(loss: Kernel, batch: Batch) -> None:
    assert_nan_stays(loss, "old_logprobs", batch)


def assert_nan_stays(loss: Kernel, name: str, batch: Batch) -> None:
    batch = over_tokens(batch)
    batch["mask"][0, 0] = True
    batch[name] = batch[name].clone()
    batch[name][0, 0] = torch.nan
    loss_per_token = loss(**batch).loss
    assert loss_per_token[0, 0].isnan() and loss_per_token[1:].isfinite().all()
    assert not loss_per_token[~batch["mask"]].any()  # though GSPO's one ratio is NaN for the whole row


@pytest.mark.parametrize("loss", [policy.dppo_tv, policy.dppo_kl])
def test_nan_in_the_centre_of_the_region_stays_nan(loss: Kernel) -> None:
    x, mask = torch.full((3,), -1.0), torch.tensor([True, True, False])
    region = torch.tensor([torch.nan, -torch.inf, torch.nan])
    ours = loss(x, x, torch.ones(1), mask, region_logprobs=region).loss
    assert ours.isnan().tolist() == [True, False, False]


@every_loss
@every_dtype
@pytest.mark.parametrize("log_ratio", [50.0, 88.0, 100.0, 709.0, 720.0, 1e4])
def test_overflowing_ratios_give_a_finite_loss_and_gradient(
    loss: Kernel, dtype: torch.dtype, log_ratio: float
) -> None:
    far, near = torch.full((4, 2), -log_ratio, dtype=dtype), torch.zeros(4, 2, dtype=dtype)
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=dtype).unsqueeze(-1)
    batch = {
        "logprobs": torch.where(torch.arange(4).unsqueeze(-1) < 2, near, far),
        "old_logprobs": torch.where(torch.arange(4).unsqueeze(-1) < 2, far, near),
        "advantages": 5 * signs,
        "mask": torch.ones(4, 2, dtype=torch.bool),
    }
    assert loss(**batch).loss.isfinite().all() and loss(**batch).loss.sum().isfinite()
    assert gradient_of(loss, batch).isfinite().all()


def test_upstream_arithmetic_overflows_to_nan_where_ours_saturates() -> None:
    # TRL, PRIME-RL, slime and NeMo-RL exponentiate the log ratio as it is.
    logprobs, old = torch.zeros(1, requires_grad=True), torch.full((1,), -100.0)
    ratio = (logprobs - old).exp()
    torch.minimum(2 * ratio, 2 * ratio.clamp(0.8, 1.2)).sum().backward()
    assert logprobs.grad.isnan().all(), "torch has made 0 * inf harmless"
    ours = policy.grpo(logprobs, old, torch.full((1,), 2.0), torch.tensor([True])).loss
    (gradient,) = torch.autograd.grad(ours.sum(), logprobs)
    assert ours == -2.4 and gradient == 0


@every_loss
def test_batch_without_a_live_token_gives_zero_with_a_graph(loss: Kernel) -> None:
    x = torch.full((2, 3), torch.nan, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    total = aggregate(loss(x, x.detach(), torch.full((2, 1), torch.nan), mask).loss, mask, "token-mean")
    assert total == 0
    total.backward()
    assert not x.grad.any()


@every_loss
@few
@given(batch=token_batches())
def test_half_precision_is_upcast_before_anything_else(loss: Kernel, batch: Batch) -> None:
    half = {n: x if n == "mask" else x.to(torch.bfloat16) for n, x in batch.items()}
    single = {n: x if n == "mask" else x.float() for n, x in half.items()}
    ours = loss(**half)
    assert ours.loss.dtype == torch.float32
    assert torch.equal(ours.loss, loss(**single).loss)
    for name, metric in loss(**single).metrics.items():
        assert torch.equal(ours.metrics[name].value, metric.value)


@every_loss
@few
@given(batch=token_batches())
def test_gradient_flows_into_logprobs_only(loss: Kernel, batch: Batch) -> None:
    inputs = {n: x if n == "mask" else x.detach().requires_grad_() for n, x in batch.items()}
    loss(**inputs).loss.sum().backward()
    assert inputs["logprobs"].grad is not None
    assert inputs["old_logprobs"].grad is None and inputs["advantages"].grad is None


@every_loss
@few
@given(batch=token_batches())
def test_on_policy_every_gradient_is_that_of_reinforce(loss: Kernel, batch: Batch) -> None:
    live = batch["logprobs"].detach().requires_grad_()
    on_policy = batch | {"logprobs": live, "old_logprobs": live}  # undetached on purpose
    (gradient,) = torch.autograd.grad(loss(**on_policy).loss.sum(), live)
    expected = torch.where(batch["mask"], -batch["advantages"], 0.0)
    assert_parity(gradient, expected, terms=batch["mask"].shape[-1])


@few
@given(batch=token_batches())
def test_dapo_and_dr_grpo_are_grpo_with_their_parameters(batch: Batch) -> None:
    dapo = policy.grpo(**batch, clip_low=0.2, clip_high=0.28)
    assert torch.equal(policy.dapo(**batch).loss, dapo.loss)
    assert torch.equal(policy.dr_grpo(**batch).loss, policy.grpo(**batch).loss)


@few
@given(batch=token_batches())
def test_ppo_and_grpo_are_one_loss_and_so_are_gspo_and_luspo(batch: Batch) -> None:
    for chosen in ({}, {"dual_clip": 1.5}, {"ratio_cap": 1.1}, {"log_ratio_clamp": 0.1}):
        ppo = policy.ppo(**batch, **chosen).loss
        for loss in (policy.grpo, policy.dr_grpo, partial(policy.dapo, clip_high=0.2)):
            assert torch.equal(loss(**batch, **chosen).loss, ppo)
    clips = {"clip_low": 0.1, "clip_high": 0.2, "ratio_cap": 1.1}
    assert torch.equal(policy.luspo(**batch, **clips).loss, policy.gspo(**batch, **clips).loss)


@few
@given(batch=token_batches(), seed=st.integers(0, 1000))
def test_corrections_enter_vespo_as_if_the_anchor_had_moved(batch: Batch, seed: int) -> None:
    mask, g = batch["mask"], torch.Generator().manual_seed(seed)
    logs = 0.1 * torch.randn(mask.shape, generator=g, dtype=torch.float64)
    ours = policy.vespo(**batch, log_weights=with_junk(logs, mask))
    moved = policy.vespo(**batch | {"old_logprobs": batch["old_logprobs"] - logs})
    # log w is a sum; phi is steepest in it near exp(-lambda w), w at most 20 before it is 0
    scale = {"terms": 100 * mask.shape[-1]}
    assert_parity(ours.loss, moved.loss, **scale)
    dead = policy.vespo(**batch, log_weights=torch.where(mask, -torch.inf, 0.0).double())
    assert dead.loss.isfinite().all()  # a correction of 0 is taken as e^-20


@few
@given(batch=token_batches())
def test_vespo_weighs_an_on_policy_sequence_by_one(batch: Batch) -> None:
    on_policy = batch | {"old_logprobs": batch["logprobs"]}
    assert torch.equal(policy.vespo(**on_policy).loss, policy.reinforce(*on_policy_inputs(batch)).loss)


def on_policy_inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """What a loss without an anchor takes."""
    return batch["logprobs"], batch["advantages"], batch["mask"]


@few
@given(batch=token_batches())
def test_gmpo_with_endless_clips_is_gspo_with_endless_clips(batch: Batch) -> None:
    gspo = policy.gspo(**batch, clip_low=1.0, clip_high=1e9).loss
    assert_parity(policy.gmpo(**batch, clip_low=1e9, clip_high=1e9).loss, gspo, terms=1)


def test_gmpo_clips_before_the_mean_and_gspo_after() -> None:
    # One far token among four: +2 nats is 0.4 after the clip, so the mean is 0.1 and not 0.5.
    old, mask = torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool)
    logprobs = torch.tensor([[2.0, 0.0, 0.0, 0.0]], dtype=torch.float64) - 3
    ours = policy.gmpo(logprobs, old - 3, torch.ones(1, 1, dtype=torch.float64), mask).loss
    assert_parity(ours, -torch.full((1, 4), 0.1, dtype=torch.float64).exp(), terms=4)


@few
@given(batch=token_batches())
def test_kimi_clips_whatever_the_sign_of_the_advantage(batch: Batch) -> None:
    ours = with_settings(policy.kimi, ratio_low=0.8, ratio_high=1.2, tau=0.0)
    ratio, mask = ours(**batch).metrics["ratio"].value, batch["mask"]
    outside = mask & ((ratio < 0.8) | (ratio > 1.2))
    assert not gradient_of(ours, batch)[outside].any()


@few
@given(batch=token_batches())
def test_gspo_and_gspo_token_agree_for_advantages_per_sequence(batch: Batch) -> None:
    def reduced(loss: Kernel) -> tuple[Tensor, Tensor]:
        x = batch["logprobs"].detach().requires_grad_()
        per_token = loss(**batch | {"logprobs": x}).loss
        total = aggregate(per_token, batch["mask"], "seq-mean-token-mean")
        return total, torch.autograd.grad(total, x)[0]

    for ours, theirs in zip(reduced(policy.gspo), reduced(policy.gspo_token), strict=True):
        assert_parity(ours, theirs, terms=batch["mask"].numel())


@few
@given(batch=token_batches())
def test_dppo_in_an_endless_region_is_cispo(batch: Batch) -> None:
    cispo = policy.cispo(**batch, clip_high=1.5).loss
    tv = with_settings(policy.dppo_tv, tv_low=1.0, tv_high=1.0, ratio_cap=2.5)
    kl = with_settings(policy.dppo_kl, kl_low=1e9, kl_high=1e9, ratio_cap=2.5)
    assert torch.equal(tv(**batch).loss, cispo) and torch.equal(kl(**batch).loss, cispo)


@pytest.mark.parametrize("loss", [policy.grpo, policy.gspo, policy.sapo, policy.gmpo, SETTINGS["grpo-verl"]])
def test_gradient_is_that_of_the_value(loss: Kernel) -> None:
    # Only losses without a detached weight; the seed keeps every ratio away from the clips' kinks.
    g = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(4, 5, generator=g, dtype=torch.float64)
    old = logprobs + 0.6 * torch.randn(4, 5, generator=g, dtype=torch.float64)
    advantages = torch.randn(4, 1, generator=g, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=g) < 0.8
    ratio = loss(logprobs, old, advantages, mask).metrics["ratio"].value
    kinks = torch.tensor([0.8, 1.2, 3.0, 1 - 3e-4, 1 + 4e-4], dtype=torch.float64)
    assert (ratio.unsqueeze(-1) - kinks).abs()[mask].min() > 1e-4
    assert torch.autograd.gradcheck(lambda x: loss(x, old, advantages, mask).loss, logprobs.requires_grad_())


def test_vespo_holds_a_correction_and_their_sum_to_twenty_nats() -> None:
    """50 and -20 nats are a weight of 1 once each is held to 20; held as a sum they would be 20 nats."""
    lp, mask = torch.full((1, 2), -1.0, dtype=torch.float64), torch.ones(1, 2, dtype=torch.bool)
    advantages = torch.ones(1, 1, dtype=torch.float64)
    for logs in ([50.0, -20.0], [-50.0, 20.0], [0.0, 0.0]):
        ours = policy.vespo(lp, lp, advantages, mask, log_weights=torch.tensor([logs], dtype=torch.float64))
        assert ours.loss.tolist() == [[1.0, 1.0]] and ours.metrics["ratio"].value.tolist() == [[1.0, 1.0]]
    far = torch.tensor([[15.0, 15.0]], dtype=torch.float64)
    for logs in (far, -far):
        ratio = policy.vespo(lp, lp, advantages, mask, log_weights=logs).metrics["ratio"].value
        assert_parity(ratio, logs.sign().mul(20).exp(), terms=1)


def test_gmpo_counts_no_clip_where_there_is_no_advantage() -> None:
    lp, mask = torch.full((1, 3), -1.0, dtype=torch.float64), torch.ones(1, 3, dtype=torch.bool)
    advantages = torch.tensor([[0.0, -1.0, 1.0]], dtype=torch.float64)
    below, above = (policy.gmpo(lp, lp + shift, advantages, mask).metrics for shift in (0.5, -0.5))
    assert below["clip_low"].value.tolist() == [[False, True, False]] and not below["clip_high"].value.any()
    assert above["clip_high"].value.tolist() == [[False, False, True]] and not above["clip_low"].value.any()
