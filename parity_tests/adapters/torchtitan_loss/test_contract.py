"""What torchtitan is promised: the value, the gradient, the denominator, the metrics, and what is refused."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.adapters.torchtitan_loss import options as torchtitan_options
from composer_plugins.errors import ComposerError, ComposerWarning, ConfigError, DataError
from composer_plugins.frameworks.torchtitan import TORCHTITAN
from composer_plugins.kernels.types import Metric, TokenLoss
from composer_plugins.losses.flags import Flags
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, of_kind
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.torchtitan_doubles import IS_INSTALLED, Batch, flat, make, packed, run, valid_tokens

LAYOUTS: dict[str, Callable[[Batch], Batch]] = {"0.3.0": lambda batch: batch} | (
    {} if IS_INSTALLED else {"b5bcd76": flat}
)


def clipped(batch: Batch, low: float, high: float) -> tuple[float, Tensor]:
    """The sum of PPO's clipped loss and its gradient in the logits, by a loop."""
    logits, total = batch["logits"].double(), 0.0
    gradient = torch.zeros_like(logits)
    for place in batch["loss_mask"].nonzero().tolist():
        i = tuple(place)
        label, a = int(batch["labels"][i]), float(batch["advantages"][i])
        every = logits[i].log_softmax(-1)
        old = float(batch["generator_logprobs"][i])
        if not math.isfinite(old):
            continue
        r = math.exp(float(every[label]) - old)
        bounded = min(max(r, 1 - low), 1 + high)
        total += max(-a * r, -a * bounded)
        if -a * r >= -a * bounded:
            one_hot = torch.zeros_like(every)
            one_hot[label] = 1.0
            gradient[i] = -a * r * (one_hot - every.exp())
    return total, gradient


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("fields", "low", "high"),
    [
        ({}, 0.2, 0.2),
        ({"policy": "dapo@torchtitan", "policy_params": {"clip_high": 0.28}}, 0.2, 0.28),
        ({"policy": "ppo", "policy_params": {"clip_low": 0.1, "clip_high": 0.5}}, 0.1, 0.5),
    ],
)
def test_a_loss_is_its_formula_over_the_global_tokens(
    loss_module: Any, layout: str, fields: dict[str, Any], low: float, high: float
) -> None:
    batch = LAYOUTS[layout](packed())
    value, gradient, _ = run(make(loss_module, **fields), batch, 29)
    total, slopes = clipped(batch, low, high)
    assert_parity(value, torch.tensor(total / 29), terms=40, magnitude=0.1, dtype=torch.float32)
    assert_parity(gradient, slopes / 29, terms=8, dtype=torch.float32, what="gradient")
    assert gradient.any() and not gradient[~batch["loss_mask"]].any()


def test_the_weight_multiplies_the_loss_and_without_a_count_it_is_a_sum(loss_module: Any) -> None:
    batch = packed()
    total, slopes = clipped(batch, 0.2, 0.2)
    value, gradient, _ = run(make(loss_module, policy_weight=0.5), batch, None)
    assert_parity(value, torch.tensor(total / 2), terms=40, magnitude=4.0, dtype=torch.float32)
    assert_parity(gradient, slopes / 2, terms=8, dtype=torch.float32)


PER_TOKEN = ["grpo@torchtitan", "cispo@verl", "sapo", "dppo_tv", "reinforce", "importance_sampling", "minirl"]


@pytest.mark.filterwarnings("ignore::composer_plugins.errors.ComposerWarning")  # their reductions
@pytest.mark.parametrize("policy", PER_TOKEN)
@pytest.mark.parametrize(("parts", "ranks"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)])
def test_the_cut_of_a_batch_leaves_the_gradient(
    loss_module: Any, policy: str, parts: int, ranks: int
) -> None:
    """torchtitan adds up micro-batches and ranks, and passes all the tokens of the step."""
    params = {"clip_low": 0.2, "clip_high": 0.2} if policy == "minirl" else {}
    batch, loss = packed(), make(loss_module, policy=policy, policy_params=params)
    tokens = valid_tokens(batch)
    value, gradient, metrics = run(loss, batch, tokens)
    cut = [{name: x[i :: parts * ranks] for name, x in batch.items()} for i in range(parts * ranks)]
    found = [run(loss, part, tokens) for part in cut]
    assert_parity(sum(one[0] for one in found), value, terms=40, magnitude=1.0, dtype=torch.float32)
    whole = torch.zeros_like(gradient)
    for i, one in enumerate(found):
        whole[i :: parts * ranks] = one[1]
    assert_parity(whole, gradient, terms=8, dtype=torch.float32, what="gradient")
    for name, mean in metrics.items():
        shares = torch.stack([one[2][name] for one in found])
        joined = shares.max() if name.endswith("/max") else shares.sum()
        assert_parity(
            joined, mean, terms=40, magnitude=max(1.0, float(mean.abs())), dtype=torch.float32, what=name
        )


def test_what_is_masked_out_and_what_is_not_finite_has_no_effect(loss_module: Any) -> None:
    batch, loss = packed(), make(loss_module)
    wanted = run(loss, batch, 29)
    masked = ~batch["loss_mask"]
    dirty = batch | {
        name: torch.where(masked, torch.nan, batch[name]) for name in ("generator_logprobs", "advantages")
    }
    found = run(make(loss_module), dirty, 29)
    for a, b in zip(found[:2], wanted[:2], strict=True):
        assert torch.equal(a, b)
    dropped = batch | {"loss_mask": batch["loss_mask"] & batch["generator_logprobs"].isfinite()}
    assert torch.equal(run(loss, dropped, 29)[1], wanted[1])  # the token that is not finite counts nowhere
    assert all(x.isfinite() for x in found[2].values())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_loss_that_is_not_finite_names_its_input(loss_module: Any, value: float) -> None:
    batch, loss = packed(), make(loss_module)
    run(loss, batch, 29)
    advantages = batch["advantages"].clone()
    advantages[1, 3] = value
    problem = "policy 'grpo@torchtitan': the loss is not finite, because advantages is not finite at an unm"
    with pytest.raises(DataError, match=f"^{problem}.*; look at the rewards of this batch$"):
        run(loss, batch | {"advantages": advantages}, 29)


def test_a_micro_batch_of_padding_is_zero_with_a_gradient(loss_module: Any) -> None:
    batch = {name: x[-1:] for name, x in packed().items()}
    value, gradient, metrics = run(make(loss_module), batch, 29)
    assert not value and not gradient.any() and not any(float(x) for x in metrics.values())


def test_metrics_are_single_numbers_with_the_same_names_at_every_call(loss_module: Any) -> None:
    loss = make(loss_module, policy="cispo", policy_params={"clip_high": 4.0})
    first, second = (run(loss, packed(seed), 29)[2] for seed in (0, 1))
    assert first.keys() == second.keys()
    assert {"loss/mean", "trainer/entropy/mean", "composer/ratio/mean", "bit_wise/logprob_diff/max"} <= {
        *first
    }
    assert all(x.dim() == 0 and not x.requires_grad for x in first.values())


def test_a_config_is_parsed_once_and_can_be_sent_to_another_process(
    loss_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, parse = [], torchtitan_options.parse
    monkeypatch.setattr(torchtitan_options, "parse", lambda fields: (calls.append(1), parse(fields))[1])
    fields: dict[str, Any] = {"policy": "cispo", "policy_params": {"clip_high": 3.25}}
    config = pickle.loads(pickle.dumps(loss_module.ComposerLoss.Config(**fields)))
    config.build()
    config.build(compile_config=None)
    assert len(calls) == 1 and config.policy_params == {"clip_high": 3.25}


# What torchtitan cannot run


UNAVAILABLE = {"policy": "gspo", "hint_weight": 0.1, "replay_weight": 0.1}
REFUSED: list[tuple[dict[str, Any], list[str], str]] = [
    (UNAVAILABLE, ["hint_weight", "replay_weight", "policy"], "no teacher's"),  # all at once
    ({"replay_weight": 1.0}, ["replay_weight"], "no pairs of completions"),
    ({"policy": "cipso"}, ["policy"], "did you mean 'cispo'"),
    ({"policy_params": {"clip_eps": 0.1}}, ["policy_params.clip_eps"], "set clip_low and clip_high"),
    ({"policy_weight": -1.0}, ["policy_weight"], "greater than or equal to 0"),
]


@pytest.mark.parametrize(("fields", "keys", "words"), REFUSED)
def test_a_wrong_field_is_one_error_when_the_config_is_made(
    loss_module: Any, fields: dict[str, Any], keys: list[str], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        loss_module.ComposerLoss.Config(**fields)
    assert [one.key for one in (refused.value, *refused.value.others)] == keys
    assert words in str(refused.value)


@pytest.mark.filterwarnings("ignore::composer_plugins.errors.ComposerWarning")
@pytest.mark.parametrize("name", of_kind(losses(), "policy"))
def test_a_loss_runs_here_or_is_refused_with_the_reason(loss_module: Any, name: str) -> None:
    """A loss of whole sequences, of the whole batch, or with other inputs is refused; any other one runs."""
    row = of_kind(losses(), "policy")[name]
    params = {key: row.parameters[key].example for key, x in row.defaults.items() if x is REQUIRED}
    try:
        loss = make(loss_module, policy=name, policy_params=params)
    except ComposerError as error:
        assert error.key == "policy" and not TORCHTITAN.runs(row)
        marked = row.per_sequence or row.over_sequence
        assert ("is a loss of whole sequences" in str(error)) == (marked and not TORCHTITAN.missing(row))
        return
    assert TORCHTITAN.runs(row), "mark the row: over_sequence=True, or over_batch=True"
    assert run(loss, packed(), 29)[1].any()


def test_a_parameter_that_looks_at_the_sequence_is_refused(loss_module: Any) -> None:
    """`masked_is` is a loss of single tokens, until it drops whole sequences."""
    loss_module.ComposerLoss.Config(policy="masked_is", policy_params={"token_high": 2.0})
    for params in ({"geo_high": 1.5}, {"sequence_high": 100.0}, {"level": "sequence"}):
        with pytest.raises(ConfigError, match="whole sequences"):
            loss_module.ComposerLoss.Config(policy="masked_is", policy_params=params)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy": "dr_grpo"}, "published with the reduction seq-mean-token-sum-norm"),
        ({"policy": "sapo"}, "published with the reduction seq-mean-token-mean"),
        ({"policy": "dapo", "policy_params": {"clip_high": 28.0}}, "set 0.28"),
    ],
)
def test_what_is_probably_not_intended_is_a_warning(
    loss_module: Any, fields: dict[str, Any], words: str
) -> None:
    torchtitan_options._requested.clear()
    with pytest.warns(ComposerWarning, match=words):
        loss_module.ComposerLoss.Config(**fields)


# A user's own loss


def plain(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    loss = torch.where(mask, -advantages * logprobs, 0.0)
    return TokenLoss(loss, {"logp": Metric(logprobs.detach(), mask)})


def only_on_a_gpu(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    if logprobs.dtype is torch.float64:
        raise RuntimeError("no kernel image is available for a CPU")
    return plain(logprobs, rollout_logprobs, advantages, mask)


def centred(logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    return plain(logprobs, rollout_logprobs, advantages - advantages.mean(-1, keepdim=True), mask)


def test_a_function_of_the_users_trains(loss_module: Any) -> None:
    batch = packed()
    _, gradient, metrics = run(make(loss_module, policy=f"{__name__}:plain"), batch, 29)
    wanted = run(make(loss_module, policy="reinforce"), batch, 29)[1]
    assert torch.equal(gradient, wanted) and "composer/logp/mean" in metrics


def test_a_users_function_over_a_row_is_refused_and_one_that_needs_a_gpu_warns(loss_module: Any) -> None:
    with pytest.raises(ConfigError, match="whole sequences"):
        loss_module.ComposerLoss.Config(policy=f"{__name__}:centred")
    with pytest.warns(ComposerWarning, match="cannot be called on a CPU"):
        loss_module.ComposerLoss.Config(policy=f"{__name__}:only_on_a_gpu")


def test_later_calls_do_not_wait_for_the_device(loss_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of the device "meta" has no numbers, so a look at one of them is an error."""
    loss = make(loss_module)
    run(loss, packed(), 29)
    monkeypatch.setattr(Flags, "read", lambda self, flags: [])
    run(loss, {name: x.to("meta") for name, x in packed().items()}, 29)


WRONG: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "another dtype": ("advantages", lambda x: x.long(), "advantages"),
    "no mask": (
        "loss_mask",
        lambda x: x * 0.5,
        "^loss_mask: it holds 0.5, and a mask holds 0 and 1; pass the",
    ),
    "above 0": ("generator_logprobs", lambda x: x.abs() + 0.13, "log-probability"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tensors_are_an_error_at_the_first_call(loss_module: Any, case: str) -> None:
    name, change, problem = WRONG[case]
    batch = packed()
    with pytest.raises(DataError, match=problem):
        run(make(loss_module), batch | {name: change(batch[name])}, 29)


def test_a_temperature_of_a_newer_torchtitan_is_an_error(loss_module: Any) -> None:
    batch = packed()
    wanted = run(make(loss_module), batch, 29)
    for neutral in (None, 1.0, 1):
        assert torch.equal(run(make(loss_module), batch | {"temperature": neutral}, 29)[1], wanted[1])
    for temperature in (0.8, torch.ones(4, 12)):
        with pytest.raises(ConfigError, match="^loss: torchtitan passes a temperature, so it is newer than"):
            run(make(loss_module), batch | {"temperature": temperature}, 29)
