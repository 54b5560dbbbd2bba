"""What PRIME-RL's users can get wrong in `[trainer.loss.kwargs]`, and what tensors cannot be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from composer_plugins.adapters import prime_rl_loss
from composer_plugins.adapters.prime_rl_loss import cispo, loss_fn
from composer_plugins.adapters.prime_rl_parts.config import parse
from composer_plugins.bundled.adapters import PRIME_RL
from composer_plugins.catalogue import of_kind
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.plugins import losses


def inputs(**changed: Any) -> SimpleNamespace:
    """One sequence of v0.8's; a field that is `...` is left out."""
    fields: dict[str, Any] = {
        "trainer_logprobs": torch.tensor([-1.0, -0.5, -2.0], requires_grad=True),
        "inference_logprobs": torch.tensor([-1.1, -0.4, -2.0]),
        "ref_logprobs": None,
        "advantages": torch.full((3,), 0.5),
        "loss_mask": torch.tensor([False, True, True]),
        "loss_weights": None,
    } | changed
    return SimpleNamespace(**{name: value for name, value in fields.items() if value is not ...})


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"hint_wieght": 0.1}, "unknown option 'hint_wieght': did you mean 'hint_weight'?"),
        ({"policy": "dpo_tv"}, "unknown policy 'dpo_tv': did you mean 'dppo_tv'?"),
        ({"policy": "dppo_tv@prime"}, "unknown dialect 'dppo_tv@prime'"),
        (
            {"policy_params": {"tv_hihg": 0.1}},
            "unknown parameter of 'dppo_tv' 'tv_hihg': did you mean 'tv_high'?",
        ),
        ({"policy_params": {"tv_high": "0.1"}}, "'tv_high' is '0.1'; wanted a finite number"),
        ({"policy_params": 3}, "policy_params is 3: input should be a valid dictionary"),
        ({"hint_weight": "0.1"}, "hint_weight is '0.1': input should be a valid number"),
        ({"hint_weight": True}, "hint_weight is True: input should be a valid number"),
        ({"hint_weight": -1.0}, "hint_weight is -1.0"),
        ({"hint_weight": float("nan")}, "hint_weight is nan"),
        (
            {"policy": "grpo"},
            "policy 'grpo' needs old_logprobs, and PRIME-RL keeps only the rollout engine's",
        ),
        ({"policy": "grpo", "anchor": "old"}, "unknown anchor 'old'"),
        ({"anchor": "rollout"}, "policy 'dppo_tv' takes no old_logprobs: remove it"),
        ({"policy": "clip_cov", "anchor": "rollout"}, "a statistic of the whole batch"),
        (
            {"policy": "dppo_topk_tv"},
            "needs topk_logprobs, rollout_topk_logprobs, which PRIME-RL does not hand",
        ),
        ({"mismatch": "tis"}, "it would count twice"),
        ({"policy": "grpo", "anchor": "rollout", "mismatch": "tis"}, "it would count twice"),
        ({"policy": "reinforce", "mismatch": "tsi"}, "unknown mismatch 'tsi': did you mean 'tis'?"),
        ({"policy": "reinforce", "mismatch": "mis"}, "mis has no default for high"),
        (
            {"policy": "reinforce", "mismatch": "tis", "mismatch_params": {"normalise": True}},
            "a statistic of the whole batch",
        ),
        ({"mismatch_params": {"cap": 2.0}}, "without a mismatch: name one"),
        ({"hint_weight": 1.0, "hint_divergence": "jsd"}, "hint_divergence = 'sampled_token'"),
        ({"hint_weight": 1.0, "hint_estimator": "k4"}, "unknown hint_estimator 'k4'"),
        (
            {"hint_weight": 1.0, "hint_estimator": "k2", "hint_params": {"estimator": "k3"}},
            "one option: set one of them",
        ),
        ({"hint_estimator": "k2"}, "hint_estimator without a hint_weight: no hint is learned"),
        (
            {"hint_weight": 1.0, "hint_estimator": "advantage", "hint_params": {"ratio_cap": 2.0}},
            "hint_params belong to a divergence",
        ),
        (
            {"policy": "reinforce", "mismatch": "icepop", "mismatch_params": {"low": 6.0}},
            "low 6 is above high 5",
        ),
        ({"hint_teacher": "ema"}, "hint_teacher is not decided in the loss"),
        ({"replay_loss": "simpo"}, "replay_loss is not decided in the loss"),
        ({"policy": "opd", "hint_weight": 1.0, "hint_estimator": "advantage"}, "has the hint for credit"),
    ],
)
def test_a_table_that_means_nothing_is_refused_by_its_key(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        loss_fn(inputs(), **kwargs)
    assert str(error.value).startswith("[trainer.loss.kwargs] ")
    assert message in str(error.value)


def test_a_named_function_takes_no_second_choice() -> None:
    with pytest.raises(ConfigError, match="policy: cispo has chosen already"):
        cispo(inputs(), policy="grpo")


def test_a_channel_that_these_inputs_cannot_carry_is_refused_at_the_first_call() -> None:
    with pytest.raises(ConfigError, match="loss_weights, which PRIME-RL has since 0.7"):
        loss_fn(inputs(loss_weights=...), replay_weight=1.0)
    with pytest.raises(ConfigError, match="neither ref_logprobs nor teacher_logprobs"):
        loss_fn(inputs(ref_logprobs=...), hint_weight=0.25)


def test_version_0_6_lets_no_teacher_run_beside_rl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prime_rl_loss, "installed", lambda: "0.6.0")
    with pytest.raises(ConfigError, match=r"PRIME-RL 0.6 lets no teacher run beside RL"):
        loss_fn(inputs(), hint_weight=0.125)
    parse({}, "0.6.0")
    parse({"hint_weight": 0.1}, "0.8.0")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"trainer_logprobs": torch.tensor([-1, -2, -3])},
            "trainer_logprobs is torch.int64; wanted floating",
        ),
        ({"loss_mask": torch.ones(3)}, "loss_mask is torch.float32; wanted booleans"),
        ({"inference_logprobs": torch.zeros(4)}, r"inference_logprobs is \(4,\) and loss_mask \(3,\)"),
        ({"advantages": torch.zeros(2)}, r"advantages is \(2,\)"),
        ({"advantages": ...}, "LossInputs without advantages"),
        ({"loss_weights": torch.ones(3, 1)}, r"loss_weights is \(3, 1\)"),
        ({"loss_weights": [1.0, 1.0, 1.0]}, "loss_weights is list; wanted floating point"),
        ({"ref_logprobs": torch.zeros(1)}, r"the reference is \(1,\)"),
        ({"ref_logprobs": torch.zeros(3, dtype=torch.int64)}, "the reference is torch.int64"),
    ],
)
def test_tensors_of_another_kind_are_refused_at_the_first_call(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        loss_fn(inputs(**changed), policy_weight=0.5)  # a table of its own: nothing was seen yet


@pytest.mark.parametrize("where", ["trainer_logprobs", "inference_logprobs", "advantages"])
@pytest.mark.parametrize("kwargs", [{}, {"policy": "gspo", "anchor": "rollout"}, {"policy": "ipo"}])
def test_a_nan_at_a_live_token_surfaces_and_a_masked_one_does_nothing(
    where: str, kwargs: dict[str, Any]
) -> None:
    nan = inputs()
    poisoned = getattr(nan, where).detach().clone()
    poisoned[1] = torch.nan
    setattr(nan, where, poisoned.requires_grad_(where == "trainer_logprobs"))
    assert loss_fn(nan, **kwargs).loss.isnan()
    masked = inputs()
    poisoned = getattr(masked, where).detach().clone()
    poisoned[0] = torch.nan
    setattr(masked, where, poisoned.requires_grad_(where == "trainer_logprobs"))
    out = loss_fn(masked, **kwargs)
    assert torch.equal(out.loss, loss_fn(inputs(), **kwargs).loss)
    assert all(value.isfinite() for value in out.metrics.values())
    if where == "trainer_logprobs":
        out.loss.backward()
        assert masked.trainer_logprobs.grad[0] == 0 and masked.trainer_logprobs.grad.isfinite().all()


def test_a_stream_that_comes_later_is_looked_at_when_it_comes() -> None:
    loss_fn(inputs(), policy_weight=0.75)
    with pytest.raises(DataError, match=r"the reference is \(1,\)"):
        loss_fn(inputs(ref_logprobs=torch.zeros(1)), policy_weight=0.75)


def test_a_reference_that_rounds_above_0_is_a_reference() -> None:
    given = inputs(ref_logprobs=torch.tensor([0.0, 1e-6, -1.0]))
    out = loss_fn(given, hint_weight=0.1)
    assert torch.autograd.grad(out.loss, given.trainer_logprobs)[0][1] != 0
    assert out.metrics["composer/replay_fraction"] == 0 and out.metrics["composer/reference_fraction"] == 1


def test_a_nan_of_the_reference_surfaces() -> None:
    reference = torch.tensor([0.0, torch.nan, -1.0])
    assert loss_fn(inputs(ref_logprobs=reference), hint_weight=0.5).loss.isnan()


def test_a_ratio_beyond_overflow_stays_finite() -> None:
    far = inputs(trainer_logprobs=torch.tensor([-1.0, -0.1, -2.0], requires_grad=True))
    far.inference_logprobs = torch.tensor([-1.0, -95.1, -2.0])
    for kwargs in ({}, {"policy": "ipo@prime-rl"}):
        out = loss_fn(far, **kwargs)
        gradient = torch.autograd.grad(out.loss, far.trainer_logprobs)[0]
        assert out.loss.isfinite() and gradient.isfinite().all()
        assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize("name", sorted(of_kind(losses(), "policy")))
def test_every_policy_loss_runs_or_says_why_not(name: str) -> None:
    row = of_kind(losses(), "policy")[name]
    kwargs: dict[str, Any] = {"policy": name}
    required = {n: p.example for n, p in row.parameters.items() if repr(p.default) == "required"}
    if required:
        kwargs["policy_params"] = required
    if "old_logprobs" in row.needs:
        kwargs["anchor"] = "rollout"
    if not PRIME_RL.runs(row):
        with pytest.raises(ConfigError, match="does not hand over|whole batch"):
            loss_fn(inputs(), **kwargs)
        return
    given = inputs(ref_logprobs=torch.tensor([0.0, -0.7, -1.5]))
    out = loss_fn(given, **kwargs)
    assert out.loss.isfinite()
    assert torch.autograd.grad(out.loss, given.trainer_logprobs)[0][0] == 0
