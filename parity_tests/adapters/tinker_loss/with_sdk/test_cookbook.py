"""tinker-cookbook's data and its DPO: a program of its recipes with our loss."""

from typing import Any

import pytest
import torch
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.preference.train_dpo import compute_dpo_loss
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition
from torch import Tensor

from composer_plugins.adapters.tinker_loss import add_advantages, add_ref_logprobs, loss_fn, mark_pairs
from composer_plugins.errors import ComposerError
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.tinker_data import Sampler, loss_and_gradients, without

PROMPT = [1, 2, 3]
SAMPLED = ([4, 5], [6, 7, 8]), ([-1.0, -0.5], [-0.2, -0.3, -2.0])


def rollouts() -> list[Any]:
    """The data that the cookbook's RL makes of one group of two completions."""
    found = []
    for tokens, logprobs, reward in zip(*SAMPLED, (1.0, 0.0), strict=True):
        action = TokensWithLogprobs(tokens=tokens, maybe_logprobs=logprobs)
        seen = types.ModelInput.from_ints(PROMPT)
        step = Transition(ob=seen, ac=action, reward=reward, episode_done=True)
        found.append(Trajectory(transitions=[step], final_ob=types.ModelInput.from_ints([])))
    groups = [TrajectoryGroup(found, [0.0, 0.0], [{}, {}])]
    data, _ = assemble_training_data(groups, compute_advantages(groups))
    return data


def test_data_of_the_cookbook_need_no_change() -> None:
    """Its advantages are those of dr_grpo; the gradient is that of the formula of importance sampling."""
    data = rollouts()
    logprobs = [torch.full((len(one.loss_fn_inputs["target_tokens"].data),), -1.0) for one in data]
    _, gradients, _ = loss_and_gradients(loss_fn(policy="importance_sampling@tinker"), data, logprobs)
    for gradient, sampled, advantage in zip(gradients, SAMPLED[1], (0.5, -0.5), strict=True):
        wanted = -advantage * (-1.0 - torch.tensor(sampled)).exp()
        assert_parity(gradient[2:], wanted, terms=4, dtype=torch.float32)
        assert not gradient[:2].any()
    ours = add_advantages([without(one, "advantages") for one in data], [1.0, 0.0], [0, 0], scale="none")
    for one, theirs in zip(ours, data, strict=True):
        assert one.loss_fn_inputs["advantages"].tolist() == theirs.loss_fn_inputs["advantages"].tolist()


def compared() -> tuple[list[Any], list[Tensor]]:
    """Data as `train_dpo.py` has them: chosen and rejected in turn, `weights` in place of a mask."""
    g = torch.Generator().manual_seed(0)
    data, logprobs = [], []
    for length in (5, 4, 6, 7):
        ids = torch.randint(1, 9, (length + 1,), generator=g)
        inputs = {"target_tokens": ids[1:], "weights": (torch.arange(length) > 1).float()}
        seen = types.ModelInput.from_ints(ids[:-1].tolist())
        data.append(types.Datum(model_input=seen, loss_fn_inputs=inputs))
        logprobs.append(-torch.rand(length, generator=g) - 0.5)
    return data, logprobs


def test_replay_equals_the_dpo_of_the_cookbook() -> None:
    data, logprobs = compared()
    sampler = Sampler()
    scored = add_ref_logprobs(data, sampler, mask="weights")
    function = loss_fn(policy_weight=0.0, replay_weight=1.0, entries={"mask": "weights"})
    marked = mark_pairs(scored[0::2], scored[1::2])
    value, gradients, metrics = loss_and_gradients(function, marked, logprobs)
    leaves = [one.clone().requires_grad_() for one in logprobs]
    refs = [one.loss_fn_inputs["ref_logprobs"].to_torch() for one in scored]
    weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
    sums = [torch.dot(one, w) for one, w in zip(leaves, weights, strict=True)]
    ref_sums = [torch.dot(one, w) for one, w in zip(refs, weights, strict=True)]
    theirs, their_metrics = compute_dpo_loss(sums[0::2], sums[1::2], ref_sums[0::2], ref_sums[1::2], 0.1)
    assert_parity(value, theirs, terms=20, dtype=torch.float32, magnitude=10.0)
    for ours, wanted in zip(gradients, torch.autograd.grad(theirs, leaves), strict=True):
        assert_parity(ours, wanted, terms=20, dtype=torch.float32, magnitude=1.0, what="gradient")
    assert metrics["composer/replay/loss"] == pytest.approx(their_metrics["dpo_loss"], rel=1e-5)


def test_an_error_says_how_to_read_weights_as_the_mask() -> None:
    data, _ = compared()
    with pytest.raises(ComposerError, match="mask='weights'"):
        add_ref_logprobs(data, Sampler())
