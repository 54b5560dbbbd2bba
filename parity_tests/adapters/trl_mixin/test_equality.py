"""TRL's own loss under the mixin, and TRL's GRPO through our kernel: equal values and gradients."""

from typing import Any

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.upstream import policy_tensors
from composer_plugins.frameworks.trl import TRL
from parity_tests.rigs import tiny

BY_TOKENS = pytest.mark.skipif(
    upstream.release() < (1, 10), reason="luspo by tokens, which averages over padding before TRL 1.10"
)
LOSSES = [
    pytest.param(
        one.options,
        one.row,
        id="-".join(one.options.values()),
        marks=[BY_TOKENS]
        if one.options == {"loss_type": "luspo", "importance_sampling_level": "token"}
        else [],
    )
    for one in TRL.losses
]


def trained(made: Any) -> list[torch.Tensor]:
    """Its parameters after training. Construction seeds the random numbers, so train before the next."""
    made.train()
    return list(made.model.parameters())


def logged(made: Any) -> list[dict[str, Any]]:
    """What it logs at each step of its training."""
    made.train()
    return [entry for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("scripted", [True, False], ids=["scripted", "sampled"])
def test_without_channels_every_parameter_is_bit_identical_to_a_plain_trainer(scripted: bool) -> None:
    """Three optimizer steps; sampled too, so the mixin may not consume a random number either."""
    options = {"max_steps": 3, "scripted": scripted, "num_iterations": 2, "max_grad_norm": 1.0}
    start = list(tiny.model().parameters())
    theirs = trained(tiny.trainer(GRPOTrainer, GRPOConfig, **options))
    mine = trained(tiny.trainer(**options))
    assert not all(torch.equal(a, b) for a, b in zip(start, theirs, strict=True)), "nothing was trained"
    assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))


@pytest.mark.filterwarnings("ignore:policy_params.clip_")  # TRL clips gspo as it clips a token
@pytest.mark.parametrize(("theirs", "policy"), LOSSES)
def test_grpo_through_our_kernel_equals_trl(theirs: dict[str, str], policy: str) -> None:
    """The second of two steps is one on the same rollouts, so that the ratios differ from 1 and clip.

    A third one would multiply the roundings of the first.
    """
    options: dict[str, Any] = {"max_steps": 2, "num_iterations": 2, "per_device_train_batch_size": 8}
    options |= {"gradient_accumulation_steps": 2, "learning_rate": 3e-2}
    mine = {"policy": policy}
    if tiny.config(**mine).resolved.mode != TRL.denominators[theirs["loss_type"]]:
        mine["loss_type"] = theirs["loss_type"]
    own = tiny.gradients(tiny.trainer(**options, **theirs))
    ours = tiny.trainer(**options, **mine)
    assert max(map(tiny.relative_difference, own, tiny.gradients(ours))) <= tiny.FLOAT32
    ratios = [entry["composer/policy/ratio"] for entry in ours.state.log_history if "loss" in entry]
    assert any(abs(ratio - 1) > 0.01 for ratio in ratios), "the ratios never left 1"


def test_vllms_ratio_enters_vespos_weight_of_the_sequence_as_in_trl() -> None:
    """vLLM does not run here; its ratio in the batch, and the switches that make TRL read it, do.

    test_vllm_server.py has the ratio that multiplies a loss.
    """
    vllm = {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
    choice = tiny.config(policy="vespo@trl", **vllm).resolved.policy
    theirs = tiny.trainer(num_iterations=2, loss_type="vespo")
    ours = tiny.trainer(num_iterations=2, policy="vespo@trl")
    inputs = tiny.batch(theirs)
    tiny.batch(ours)
    torch.manual_seed(0)
    old = inputs["old_per_token_logps"]
    inputs["old_per_token_logps"] = old + 0.7 * torch.randn_like(old)
    _, without = tiny.loss_and_gradient(theirs, inputs)
    ratio = 2 * torch.rand_like(old)
    inputs["importance_sampling_ratio"] = torch.where(inputs["completion_mask"].bool(), ratio, 1.0)
    for made in (theirs, ours):
        made.use_vllm = made.vllm_importance_sampling_correction = True
    ours._policy.choice = choice
    _, expected = tiny.loss_and_gradient(theirs, inputs)
    _, gradient = tiny.loss_and_gradient(ours, inputs)
    assert tiny.relative_difference(without, expected) > 0.1, "the ratio changed nothing"
    assert tiny.relative_difference(expected, gradient) <= tiny.FLOAT32


@pytest.mark.parametrize("policy", ["grpo", "dr_grpo", "gspo", "gspo_token", "cispo", "dppo_tv", "dppo_kl"])
def test_an_overflowing_ratio_leaves_loss_and_gradient_finite(policy: str) -> None:
    """log pi - log old = 1000 on every token, against a zeroed advantage in TRL's own term."""
    made = tiny.trainer(policy=policy, num_iterations=2)
    inputs = tiny.batch(made)
    inputs = {**inputs, "old_per_token_logps": inputs["old_per_token_logps"] - 1000}
    loss, gradient = tiny.loss_and_gradient(made, inputs)
    assert loss.isfinite() and gradient.isfinite().all()


def test_a_token_that_vllm_could_not_score_falls_back_to_the_old_policy() -> None:
    logprobs, old = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.5]])
    inputs = {"old_per_token_logps": old, "sampling_per_token_logps": torch.tensor([[torch.nan, -3.0]])}
    inputs |= {"advantages": torch.ones(1), "completion_mask": torch.ones(1, 2)}
    assert policy_tensors(inputs, logprobs)["rollout_logprobs"].tolist() == [[-1.5, -3.0]]


def test_the_last_window_divides_by_the_micro_batches_it_has() -> None:
    """Three micro-batches in windows of two: the second window holds one, and is not halved."""
    for channel in ({"loss_type": "grpo"}, {"policy_weight": 0.0, "hint_weight": 1.0}):
        made = tiny.trainer(**channel, per_device_train_batch_size=8, gradient_accumulation_steps=2)
        inputs = tiny.batch(made)
        made.current_gradient_accumulation_steps = 2
        _, half = tiny.loss_and_gradient(made, inputs)
        made.current_gradient_accumulation_steps = 1
        _, whole = tiny.loss_and_gradient(made, inputs)
        assert tiny.relative_difference(whole, 2 * half) <= tiny.FLOAT32


def test_trls_clip_metrics_give_way_to_ours() -> None:
    """Under zeroed advantages TRL's would read 0 whatever happens."""
    options = {"max_steps": 4, "num_iterations": 2, "learning_rate": 3e-2, "loss_type": "grpo"}
    mine = logged(tiny.trainer(policy="grpo", **options))
    reference = logged(tiny.trainer(**options))
    assert not any(key.startswith("clip_ratio") for entry in mine for key in entry)
    assert any(entry["clip_ratio/low_mean"] > 0 for entry in reference)
    for entry, expected in zip(mine, reference, strict=True):
        for side in ("low", "high"):
            ours_fraction = float(entry[f"composer/policy/clip_frac_{side}"])
            assert ours_fraction == pytest.approx(float(expected[f"clip_ratio/{side}_mean"]), abs=1e-6)
