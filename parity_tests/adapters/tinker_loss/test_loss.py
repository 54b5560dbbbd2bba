"""The three channels of Tinker's loss, in float64, against formulas in plain Python."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.tinker_loss import inputs_apart, loss_fn
from composer_plugins.comparing import Step
from composer_plugins.frameworks.tinker import TINKER
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Loss
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.tinker_data import (
    POLICIES,
    batch,
    changed,
    loss_and_gradients,
    options_of,
    paired,
    without,
)

PREFERENCES = [one for one in losses() if one.kind == "preference" and TINKER.runs(one)]


def numbers(datum: Any, name: str) -> list[float]:
    found: list[float] = datum.loss_fn_inputs[name].to_torch().tolist()
    return found


def unmasked(data: Sequence[Any]) -> Iterator[tuple[int, int]]:
    for i, datum in enumerate(data):
        yield from ((i, t) for t, m in enumerate(numbers(datum, "mask")) if m)


def assert_slopes(gradients: Sequence[Tensor], slopes: dict[Any, float]) -> None:
    """The gradients are these numbers by (datum, token), and 0 elsewhere."""
    for i, gradient in enumerate(gradients):
        numbers = [slopes.get((i, t), 0.0) for t in range(len(gradient))]
        wanted = torch.tensor(numbers, dtype=torch.float64)
        assert_parity(gradient, wanted, terms=4, magnitude=1.0, what=f"gradient of datum {i}")


def assert_equal(function: Callable[..., Any], data: Any, logprobs: Any, value: float, slopes: Any) -> None:
    loss, gradients, _ = loss_and_gradients(function, data, logprobs)
    assert_parity(loss, torch.tensor(value, dtype=torch.float64), terms=40, magnitude=4.0)
    assert_slopes(gradients, slopes)


def ppo_by_hand(data: Any, logprobs: Any, old: str) -> tuple[dict[Any, float], dict[Any, float]]:
    """PPO's loss and its slope at each token, clipped at 0.2."""
    values, slopes = {}, {}
    for i, t in unmasked(data):
        a, lp = numbers(data[i], "advantages")[t], float(logprobs[i][t])
        ratio = math.exp(lp - numbers(data[i], old)[t])
        clipped = min(max(ratio, 0.8), 1.2)
        values[i, t] = max(-a * ratio, -a * clipped)
        slopes[i, t] = -a * ratio if -a * ratio >= -a * clipped else 0.0
    return values, slopes


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("grpo", {}),
        ("ppo", {}),
        ("ppo@tinker", {}),
        ("dr_grpo", {"max_length": 6.0}),
        ("ppo", {"denominator": "seq-mean-token-sum"}),
    ],
)
@pytest.mark.parametrize("old", ["old_logprobs", "logprobs"])
def test_policy_equals_its_formula(policy: str, options: dict[str, Any], old: str) -> None:
    """The denominators are those of the papers, and of Tinker for its dialect."""
    data, logprobs = batch()
    if old == "logprobs":
        data = [without(one, "old_logprobs") for one in data]
    values, slopes = ppo_by_hand(data, logprobs, old)
    lengths = [sum(1 for j, _ in values if j == i) for i in range(len(data))]
    n, rows = len(values), len(data)
    divisor = {
        "grpo": lambda i: rows * lengths[i],
        "ppo": lambda i: rows if options else n,
        "ppo@tinker": lambda i: 1,
        "dr_grpo": lambda i: rows * 6.0,
    }[policy]
    value = sum(x / divisor(i) for (i, _), x in values.items())
    slopes = {(i, t): x / divisor(i) for (i, t), x in slopes.items()}
    assert_equal(loss_fn(policy=policy, **options), data, logprobs, value, slopes)


def test_hint_equals_its_formula() -> None:
    """The score estimator: each token's weight is policy / sampler, the mean is over tokens with a hint."""
    data, logprobs = batch()
    data[1] = changed(data[1], hint_mask=torch.tensor([0.0, 0, 1]))
    data[2] = changed(without(data[2], "teacher_logprobs"), hint_mask=torch.zeros(7))
    function = loss_fn(policy_weight=0.0, hint_weight=0.5, policy="reinforce")
    hinted = [(i, t) for i, t in unmasked(data) if i != 2 and (i, t) != (1, 1)]
    slopes, gaps, n = {}, [], len(hinted)
    for i, t in hinted:
        lp = float(logprobs[i][t])
        gaps.append(lp - numbers(data[i], "teacher_logprobs")[t])
        slopes[i, t] = 0.5 * math.exp(lp - numbers(data[i], "logprobs")[t]) * gaps[-1] / n
    _, gradients, metrics = loss_and_gradients(function, data, logprobs)
    assert_slopes(gradients, slopes)
    assert math.isclose(metrics["composer/hint/kl"], sum(gaps) / n, rel_tol=1e-12)


def test_hint_in_the_advantages_equals_its_formula() -> None:
    data, logprobs = batch()
    hint = {"hint_weight": 0.3, "hint_estimator": "advantage"}
    function = loss_fn(policy="reinforce", denominator="token-sum", **hint)
    slopes = {}
    for i, t in unmasked(data):
        gap = numbers(data[i], "teacher_logprobs")[t] - float(logprobs[i][t])
        slopes[i, t] = -(numbers(data[i], "advantages")[t] + 0.3 * gap)
    assert_slopes(loss_and_gradients(function, data, logprobs)[1], slopes)


def test_data_of_a_pair_do_not_train_the_policy() -> None:
    """Nor do they count in its denominator, or in that of the hint."""
    data, logprobs = paired()
    options = {"policy": "cispo", "hint_weight": 0.5}
    _, wanted, _ = loss_and_gradients(loss_fn(**options), data[2:3], logprobs[2:3])
    _, gradients, _ = loss_and_gradients(loss_fn(**options, replay_weight=1.0), data, logprobs)
    assert_parity(gradients[2], wanted[0], terms=4)
    pairs = loss_fn(policy_weight=0.0, replay_weight=1.0)
    for at, gradient in enumerate(loss_and_gradients(pairs, data, logprobs)[1]):
        if at != 2:
            assert_parity(gradients[at], gradient, terms=4)


@pytest.mark.parametrize("loss", PREFERENCES, ids=lambda one: one.name)
def test_every_preference_loss_gets_the_scores_of_the_pairs(loss: Loss) -> None:
    """Summed or averaged as the loss wants them; the mean is over pairs of weight * loss."""
    data, logprobs = paired((1.0, 3.0))
    required = {n: p.example for n, p in loss.parameters.items() if repr(loss.defaults[n]) == "required"}
    function = loss_fn(policy_weight=0.0, replay_weight=2.0, replay_loss=loss.name, replay_params=required)
    value, gradients, metrics = loss_and_gradients(function, data, logprobs)
    leaves = [one.clone().requires_grad_() for one in logprobs]

    def score(i: int, x: Tensor, average: bool) -> Tensor:
        tokens = [x[t] for j, t in unmasked(data) if j == i]
        return sum(tokens[1:], tokens[0]) / (len(tokens) if average else 1)

    def scores(rows: tuple[int, int], average: bool = loss.average, *, of_ref: bool = False) -> Tensor:
        refs = [one.loss_fn_inputs["ref_logprobs"].to_torch() for one in data]
        return torch.stack([score(i, (refs if of_ref else leaves)[i], average) for i in rows])

    better, worse = (0, 1), (3, 4)  # of `paired`
    given = {
        "chosen": scores(better),
        "rejected": scores(worse),
        "ref_chosen": scores(better, of_ref=True),
        "ref_rejected": scores(worse, of_ref=True),
        "chosen_nll": -scores(better, True),
    }
    of_pairs = loss.kernel()(*(given[need] for need in loss.needs), **required).loss
    wanted = 2.0 * (torch.tensor([1.0, 3.0]) * of_pairs).mean()
    assert_parity(value, wanted, terms=20, magnitude=max(1.0, float(wanted.detach().abs())))
    for ours, theirs in zip(gradients, torch.autograd.grad(wanted, leaves, allow_unused=True), strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        assert_parity(ours, theirs, terms=20, magnitude=1.0, what="gradient")
    assert all(isinstance(x, float) for x in metrics.values())


@pytest.mark.parametrize("loss", POLICIES, ids=lambda one: one.name)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_step_in_several_calls_has_the_same_gradient(loss: Loss, parts: int) -> None:
    """With all three channels. The metrics of the calls add up too, and those of the channels to the loss."""
    pairs, of_pairs = paired(order=range(5))
    data, logprobs = batch(lengths=(5, 3, 7, 4), prompts=(2, 1, 3, 1), seed=3)
    whole, all_logprobs = [*pairs, *data], [*of_pairs, *logprobs]
    weights = {"policy": 0.5, "hint": 0.3, "replay": 0.7}
    options = options_of(loss) | {f"{name}_weight": weight for name, weight in weights.items()}
    value, gradients, logged = loss_and_gradients(loss_fn(**options), whole, all_logprobs)
    several = loss_fn(**options, calls_per_step=parts)
    step = several.of_step(several.count(whole))
    cuts = {1: [9], 2: [4, 9], 4: [2, 4, 7, 9]}[parts]  # the data of a pair stay together
    total, found, calls, start = torch.zeros(()), [], [], 0
    for end in cuts:
        one, more, metrics = loss_and_gradients(step, whole[start:end], all_logprobs[start:end])
        total, found, calls, start = total + one, [*found, *more], [*calls, metrics], end
        terms = sum(weight * metrics[f"composer/{name}/loss"] for name, weight in weights.items())
        assert math.isclose(metrics["composer/loss"], terms, rel_tol=1e-12)
    for name in ("composer/loss", *(f"composer/{name}/loss" for name in weights)):
        assert math.isclose(sum(one[name] for one in calls), logged[name], rel_tol=1e-12)
    assert_parity(total, value, terms=60, magnitude=max(1.0, float(value.abs())))
    for i, (ours, wanted) in enumerate(zip(found, gradients, strict=True)):
        assert_parity(ours, wanted, terms=12, magnitude=1.0, what=f"gradient of datum {i}")


@pytest.mark.parametrize("loss", POLICIES, ids=lambda one: one.name)
def test_masked_nan_stays_out(loss: Loss) -> None:
    data, logprobs = batch()
    function = loss_fn(**options_of(loss), hint_weight=0.3)
    value, gradients, metrics = loss_and_gradients(function, data, logprobs)
    names = ("advantages", "logprobs", "old_logprobs", "ref_logprobs", "teacher_logprobs")
    poisoned, nans = [], []
    for one, logprob in zip(data, logprobs, strict=True):
        masked = one.loss_fn_inputs["mask"].to_torch() == 0
        tensors = {name: one.loss_fn_inputs[name].to_torch() for name in names}
        poisoned.append(changed(one, **{n: torch.where(masked, torch.nan, x) for n, x in tensors.items()}))
        nans.append(torch.where(masked, torch.nan, logprob))
    same, others, again = loss_and_gradients(function, poisoned, nans)
    assert torch.equal(same, value) and again == metrics
    for ours, wanted in zip(others, gradients, strict=True):
        assert torch.equal(ours, wanted)


def test_data_without_a_channel_get_a_gradient_of_zero() -> None:
    """The SDK rejects a loss that leaves the log-probabilities of a datum out."""
    data, logprobs = batch()
    data[1] = changed(data[1], mask=torch.zeros(3))
    for options in ({"policy": "reinforce"}, {"policy_weight": 0.0, "hint_weight": 1.0}):
        _, gradients, _ = loss_and_gradients(loss_fn(**options), data, logprobs)
        assert not gradients[1].any() and gradients[0].any()


def test_inputs_may_stay_on_this_side() -> None:
    """An older SDK rejects entries other than target_tokens and weights."""
    data, logprobs = batch()
    function = loss_fn(policy="cispo")
    bare, apart = inputs_apart(data, function)
    assert all(list(one.loss_fn_inputs) == ["target_tokens"] for one in bare)
    wanted, ours = (loss_and_gradients(f, d, logprobs) for f, d in ((function, data), (apart, bare)))
    assert torch.equal(wanted[0], ours[0]) and wanted[2] == ours[2]


def test_a_loss_says_what_it_trains() -> None:
    function = loss_fn(policy="dr_grpo", max_length=8.0, replay_weight=0.5, replay_loss="simpo")
    terms = repr(function).split(" + ")
    assert terms[0].startswith("1 * (policy dr_grpo(clip_low=0.2") and "seq-mean-token-sum-norm)" in terms[0]
    assert terms[1].startswith("0.5 * (replay simpo(beta=") and len(terms) == 2
    function = loss_fn("reinforce", rollout_correction="tis", calls_per_step=4)
    assert ", rollout_correction tis(" in repr(function) and repr(function).endswith(", calls_per_step=4")
    assert repr(loss_fn("ppo", old_policy="current")).endswith(", token-mean, old_policy='current')")


def test_rollout_correction_weighs_the_tokens() -> None:
    """TIS with a cap of 2, of old over sampler, on a decoupled PPO."""
    data, logprobs = batch()
    values, slopes = ppo_by_hand(data, logprobs, "old_logprobs")
    weights = {
        (i, t): min(2.0, math.exp(numbers(data[i], "old_logprobs")[t] - numbers(data[i], "logprobs")[t]))
        for i, t in values
    }
    function = loss_fn(policy="ppo@tinker", rollout_correction="tis", rollout_correction_params={"cap": 2.0})
    value = sum(weights[at] * x for at, x in values.items())
    assert_equal(function, data, logprobs, value, {at: weights[at] * x for at, x in slopes.items()})


@pytest.mark.parametrize("denominator", ["token-mean", "seq-mean-token-mean", "token-sum"])
def test_the_loss_of_a_record_is_the_loss_of_the_call(denominator: str, tmp_path: Path) -> None:
    function = loss_fn(policy="cispo", denominator=denominator, record_batches=str(tmp_path))
    value, _, metrics = loss_and_gradients(function, *batch())
    found = Step.read(tmp_path).reproduced()
    assert found is not None and found["equal"]
    assert (
        found["recomputed"] == pytest.approx(float(value)) == pytest.approx(metrics["composer/policy/loss"])
    )
