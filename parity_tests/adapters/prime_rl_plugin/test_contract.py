"""`loss_fn` called as PRIME-RL calls it: packing, padding, dummies, references."""

import math
from functools import partial
from itertools import product
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from composer_plugins.adapters.prime_rl_plugin import loss_fn, metrics
from composer_plugins.adapters.prime_rl_plugin.upstream import METRICS
from composer_plugins.conformance.prime_rl_claims.packs import packed
from composer_plugins.kernels.divergences import sampled_token
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import seeds
from parity_tests.rigs import prime_rl_users
from parity_tests.rigs.prime_rl_doubles import compute_loss, sample, sequence, step, trained

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*published with the reduction", "ignore:.*clip_high=0.5 bounds the ratio of a sequence"
)
CONFIGS: dict[str, dict[str, Any]] = {
    "dppo": {},
    "gspo": {"policy": "gspo", "old_policy": "rollout", "policy_params": {"clip_low": 0.5, "clip_high": 0.5}},
    "icepop": {"policy": "reinforce", "rollout_correction": "icepop"},
    "hint": {"hint_weight": 0.3},
    "hint k3": {"hint_weight": 0.3, "hint_estimator": "k3"},
    "hint as advantage": {"hint_weight": 0.3, "hint_estimator": "advantage"},
    "import path": prime_rl_users.USERS,
}
configs = pytest.mark.parametrize("kwargs", CONFIGS.values(), ids=CONFIGS)


@configs
@settings(max_examples=4)
@given(seed=seeds, weights=st.booleans(), reference=st.booleans())
def test_the_cut_into_micro_batches_leaves_the_gradient_alone(
    kwargs: dict[str, Any], seed: int, weights: bool, reference: bool
) -> None:
    lengths = (7, 1, 12, 4)
    samples = [
        sample(seed + i, n, reference=reference and i % 2 == 0, weights=weights)
        for i, n in enumerate(lengths)
    ]
    loss = partial(loss_fn, **kwargs)
    whole = step([trained(samples)], loss)
    for cuts in (2, 4):
        size = len(samples) // cuts
        parts = [trained(samples[i : i + size]) for i in range(0, len(samples), size)]
        gradients = step(parts, loss)
        for i, (gradient, expected) in enumerate(zip(gradients, whole, strict=True)):
            assert_parity(gradient, expected, terms=sum(lengths), what=f"sample {i} in {cuts}")


@configs
def test_padding_in_the_last_sequence_counts_nowhere(kwargs: dict[str, Any]) -> None:
    samples = [sample(i, 6, reference=True) for i in range(3)]
    plain, padded = (packed(trained(samples), padding=n) for n in (0, 9))
    for pack in (plain, padded):
        pack.trainer_logprobs = [x.detach().requires_grad_() for x in pack.trainer_logprobs]
    (loss, metrics), (padded_loss, padded_metrics) = (
        compute_loss(pack, partial(loss_fn, **kwargs), 7) for pack in (plain, padded)
    )
    assert_parity(padded_loss, loss, terms=18)
    for key in metrics:
        assert_parity(
            padded_metrics[key], metrics[key], terms=18, dtype=torch.float32, magnitude=1.0, what=key
        )
    padded_loss.backward()
    last = padded.trainer_logprobs[-1].grad
    assert last is not None and not last[6:].any() and last[:6].any()


@configs
def test_a_dummy_micro_batch_gives_zero_with_a_graph_and_finite_metrics(kwargs: dict[str, Any]) -> None:
    samples = [
        s | {"loss_mask": torch.zeros(5, dtype=torch.bool)} for s in trained([sample(0, 5, reference=True)])
    ]
    loss, metrics = compute_loss(packed(samples), partial(loss_fn, **kwargs), 1)
    assert float(loss.detach()) == 0
    loss.backward()
    gradient = samples[0]["trainer_logprobs"].grad
    assert gradient is not None and not gradient.any()
    for key, value in metrics.items():
        assert value.tolist() == [1.0 if key in {"composer/ratio", "composer/ratio_max"} else 0.0], key


@configs
def test_every_call_has_the_same_metrics_in_the_same_order(kwargs: dict[str, Any]) -> None:
    keys = set()
    for reference, weights, unmasked in product((None, 0.0, -1.0), (None, 1.0), (True, False)):
        given = sample(3, 6)
        if reference is not None:
            given["reference"] = torch.full((6,), reference, dtype=torch.float64)
        if weights is not None:
            given["weights"] = torch.full((6,), weights, dtype=torch.float64)
        given["loss_mask"] &= unmasked
        out = loss_fn(sequence(*trained([given])), **kwargs)
        assert all(
            v.dim() == 0 and v.dtype is torch.float32 and not v.requires_grad for v in out.metrics.values()
        )
        assert all(key.startswith("composer/") or key in METRICS for key in out.metrics)
        keys.add(tuple(out.metrics))
    assert len(keys) == 1


def test_a_neighbour_with_a_reference_gives_none_to_one_without() -> None:
    with_one, without = sample(0, 6, reference=True), sample(1, 5)
    pack = packed(trained([with_one, without]))
    assert pack.reference is not None and not pack.reference[1].any()  # packing writes 0.0 there
    kwargs = {"hint_weight": 1.0, "policy_weight": 0.0}
    loss, metrics = compute_loss(pack, partial(loss_fn, **kwargs), 1)
    loss.backward()
    first, second = (x.grad for x in pack.trainer_logprobs)
    assert first is not None and first[with_one["loss_mask"]].all()
    assert second is not None and not second.any()
    assert metrics["composer/hint/token_frac"].tolist() == [1.0, 0.0]


def test_the_hint_is_the_sampled_divergence_weighed_by_the_ratio() -> None:
    given = sample(5, 8, reference=True)
    given["reference"][4] = 0.0  # of this token the teacher is certain: it has a reference too
    pack = packed(trained([given]))
    logprobs, mask = pack.trainer_logprobs[0], given["loss_mask"]
    loss, metrics = compute_loss(pack, partial(loss_fn, hint_weight=0.7, policy_weight=0.0), 1)
    token = sampled_token(logprobs, given["reference"], mask, old_logprobs=given["inference_logprobs"]).loss
    assert_parity(loss, 0.7 * token.sum(), terms=8)
    ours, expected = (torch.autograd.grad(x, logprobs)[0] for x in (loss, 0.7 * token.sum()))
    assert_parity(ours, expected, terms=8)
    assert metrics["composer/hint/token_frac"].tolist() == [1.0]
    gap = (logprobs - given["reference"])[mask].mean()
    assert_parity(metrics["composer/hint/kl"][0], gap.detach(), terms=8, dtype=torch.float32, magnitude=3.0)


def test_loss_weights_multiply_policy_and_hint() -> None:
    given = sample(2, 9, reference=True, weights=True)
    given["weights"][4] = 0.5
    pack = packed(trained([given]))
    loss, _ = compute_loss(pack, partial(loss_fn, hint_weight=0.7), 1)
    logprobs = pack.trainer_logprobs[0]
    gradient = torch.autograd.grad(loss, logprobs)[0]
    without = packed([given | {"trainer_logprobs": logprobs}])
    without.weights = None
    without.loss_mask = [given["loss_mask"] & (given["weights"] != 0)]
    plain, _ = compute_loss(without, partial(loss_fn, hint_weight=0.7), 1)
    assert_parity(gradient, torch.autograd.grad(plain, logprobs)[0] * given["weights"], terms=9)


def test_a_reference_at_masked_tokens_alone_is_none() -> None:
    given = sample(0, 6, reference=True)
    given["reference"] = torch.where(given["loss_mask"], 0.0, given["reference"])
    out = loss_fn(sequence(*trained([given])), hint_weight=1.0)
    assert out.metrics["composer/hint/token_frac"] == out.metrics["composer/hint/kl"] == 0
    assert out.metrics["composer/hint/loss"] == 0


def test_the_largest_ratio_is_the_largest_and_not_the_farthest() -> None:
    given = sample(0, 6)
    given["inference_logprobs"] = given["trainer_logprobs"] - torch.tensor([9, 9, 0.1, -3, -2, 0])
    out = loss_fn(sequence(*trained([given])))
    assert float(out.metrics["composer/ratio_max"]) == pytest.approx(math.exp(0.1))
    log_ratio = (given["trainer_logprobs"] - given["inference_logprobs"])[given["loss_mask"]]
    assert float(out.metrics["composer/ratio"]) == pytest.approx(float(log_ratio.exp().mean()))


def test_a_replayed_token_is_its_coefficient_alone_and_logged_with_it() -> None:
    given = sample(1, 6)
    given["reference"] = torch.ones(6, dtype=torch.float64)
    given["weights"] = torch.tensor([torch.nan, 1.0, 0.5, -0.5, 0.25, 0.25], dtype=torch.float64)
    leaf = trained([given])[0]
    inputs = sequence(leaf)
    out = loss_fn(inputs, replay_weight=2.0)
    mask = inputs.loss_mask
    wanted = -(given["weights"] * leaf["trainer_logprobs"])[mask]
    assert_parity(out.loss, 2 * wanted.sum(), terms=6)
    assert float(out.metrics["composer/replay/loss"]) == pytest.approx(float(wanted.detach().mean()))
    assert out.metrics["composer/replay/token_frac"] == 1 and out.metrics["composer/policy/loss"] == 0
    gradient = torch.autograd.grad(out.loss, leaf["trainer_logprobs"])[0]
    assert torch.equal(gradient[mask], -2 * given["weights"][mask]) and not gradient[~mask].any()


def test_a_loss_by_import_path_is_that_function_on_the_unmasked_tokens() -> None:
    inputs = sequence(*trained([sample(6, 30)]))
    out = loss_fn(inputs, **CONFIGS["import path"])
    weight = (inputs.trainer_logprobs.detach() - inputs.inference_logprobs).exp().clamp(max=1.5)
    expected = -(weight * inputs.advantages * inputs.trainer_logprobs)[inputs.loss_mask].sum()
    assert_parity(out.loss, expected, terms=30)
    assert 0 < out.metrics["composer/policy/capped_frac"] < 1


def test_a_users_loss_trains_no_masked_token() -> None:
    inputs = sequence(*trained([sample(6, 30)]))
    inputs.trainer_logprobs.requires_grad_()
    out = loss_fn(inputs, policy=f"{prime_rl_users.__name__}:unmasked")
    (slope,) = torch.autograd.grad(out.loss, inputs.trainer_logprobs)
    assert slope[inputs.loss_mask].all() and not slope[~inputs.loss_mask].any()


def test_a_users_metric_with_the_name_of_one_of_ours_is_logged_as_it_is() -> None:
    inputs = sequence(*trained([sample(6, 30)]))
    logged = loss_fn(inputs, policy=f"{prime_rl_users.__name__}:reports_a_clip").metrics
    assert logged["composer/policy/clip_frac_low"] == 0.25 and "is_masked" not in logged


@configs
def test_no_call_waits_for_the_device(kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under fake tensors `.item()` and `bool()` of a tensor raise. These pass for tensors of a GPU."""

    class Event:
        def record(self) -> None: ...

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(FakeTensor, "is_cuda", True, raising=False)
    loss_fn(sequence(*trained([sample(0, 6, reference=True, weights=True)])), **kwargs)
    metrics._layout.cache_clear()  # tensors of the device
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(x) for name, x in sample(0, 6, reference=True, weights=True).items()}
        out = loss_fn(sequence(given), **kwargs)
    assert out.loss.shape == ()
    metrics._layout.cache_clear()
