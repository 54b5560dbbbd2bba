"""What we put into verl's registries, called as verl calls it. Against verl's own losses: test_table.py."""

import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, get_adv_estimator_fn

from composer_plugins.adapters.verl_plugin import loss as adapter
from composer_plugins.adapters.verl_plugin.options import log_once
from composer_plugins.conformance import reductions
from composer_plugins.conformance.batches import global_batch, policy_batch
from composer_plugins.conformance.reductions import verl as reduced
from composer_plugins.conformance.verl_claims import upstream
from composer_plugins.conformance.verl_claims.upstream import names
from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from composer_plugins.frameworks.verl import MODES, VERL
from composer_plugins.kernels.types import Metric, TokenLoss
from composer_plugins.losses.registry import losses
from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import drawn_by
from parity_tests.rigs import verl_registered
from parity_tests.rigs.verl_actor import ONES, algorithm, policy_loss

examples = settings(max_examples=40)


def test_every_loss_that_verl_can_feed_is_registered_under_its_name() -> None:
    rows = {loss.kind: set() for loss in losses()} | {"advantage": {"composer"}, "policy": {"composer"}}
    for loss in losses():
        if VERL.runs(loss):
            rows[loss.kind].add(f"composer/{loss.name}")
    assert {name for name in ADV_ESTIMATOR_REGISTRY if name.startswith("composer")} == rows["advantage"]
    assert {name for name in POLICY_LOSS_REGISTRY if name.startswith("composer")} == rows["policy"]
    assert len(rows["advantage"]) >= 10 and len(rows["policy"]) > 20


def test_importing_the_module_register_registers_and_importing_the_package_does_not() -> None:
    """Where the entry point is not allowed, by verl's `external_lib`."""
    program = (
        "from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as names\n"
        "import composer_plugins.adapters.verl_plugin\n"
        "print('composer' in names)\n"
        "from verl.utils.import_utils import import_external_libs\n"
        "import_external_libs('composer_plugins.adapters.verl_plugin.register')\n"
        "print('composer' in names)"
    )
    environment = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    printed = subprocess.check_output(command, text=True, env=environment)
    assert printed.split()[-2:] == ["False", "True"]


def my_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, power: float
) -> TokenLoss:
    """A policy loss of the user's own."""
    ratio = (logprobs - old_logprobs).exp()
    loss = torch.where(mask, -advantages * ratio**power, 0.0)
    return TokenLoss(loss, {"ratio": Metric(ratio.detach(), mask)})


def my_advantage(rewards: Tensor, group_ids: Tensor, mask: Tensor, *, scale: float = 0.0) -> Tensor:
    """An advantage of the user's own, which gets the groups as one that compares rollouts does."""
    return torch.where(mask, scale * rewards, 0.0)


@examples
@given(data=st.data())
def test_a_loss_named_by_import_path_gives_its_value_and_gradient(data: st.DataObject) -> None:
    batch = data.draw(drawn_by(policy_batch))
    mode, info = data.draw(st.sampled_from(MODES)), data.draw(drawn_by(global_batch, batch.mask))
    node = {"policy": f"{__name__}:my_loss", "policy_params": {"power": 2.0}}
    loss, gradient, metrics = policy_loss("composer", batch, mode, info, **node)
    logprobs = batch.logprobs.clone().requires_grad_()
    terms = my_loss(logprobs, *batch[1:4], power=2.0).loss * (1.0 if batch.weights is None else batch.weights)
    wanted = reduced(terms, batch.mask, mode, info)
    assert_parity(loss, wanted, terms=terms.numel(), magnitude=float(terms.detach().abs().max()))
    assert_parity(gradient, torch.autograd.grad(wanted, logprobs)[0], terms=terms.numel())
    assert "actor/composer/policy/ratio" in metrics and all(type(x) is float for x in metrics.values())


def test_an_advantage_named_by_import_path_is_called() -> None:
    mask = torch.tensor([[1, 1], [1, 0]])
    node = {"advantage": f"{__name__}:my_advantage", "advantage_params": {"scale": 2.0}}
    rewards = torch.tensor([[0.0, 1.0], [0.5, 0.0]])
    found, returns = get_adv_estimator_fn("composer")(
        token_level_rewards=rewards, response_mask=mask, config=algorithm(**node), index=names([0, 0])
    )
    assert found is returns and found.tolist() == [[2.0, 2.0], [1.0, 0.0]]


def test_a_count_of_the_whole_batch_is_needed_on_two_ranks() -> None:
    assert policy_loss("composer/cispo", ONES, policy_params={"clip_high": 1.0})[0].isfinite()
    with pytest.raises(ConfigError, match="on 2 ranks needs batch_num_tokens"):
        policy_loss("composer/cispo", ONES, "token-mean", {"dp_size": 2})


def first_call(name: str, **changes: Tensor) -> Tensor:
    """What a policy loss returns at its first call in a process, as verl calls it."""
    ones = torch.ones(2, 3)
    tensors = {"old_log_prob": -ones, "log_prob": -ones, "advantages": ones, "response_mask": ones}
    tensors["log_prob"] = tensors["log_prob"].clone().requires_grad_()
    return adapter.policy_loss(name)(**tensors | changes, config=upstream.actor({}))[0]


@pytest.mark.parametrize("wrong", [0.5, -1.0, float("nan")])
def test_a_response_mask_of_other_numbers_is_an_error_at_once(wrong: float) -> None:
    mask = torch.tensor([[1, 1, 0], [1, wrong, 0]])
    message = f"^response_mask: it holds {wrong:g}, and a mask holds 0 and 1"
    with pytest.raises(DataError, match=message):
        first_call("cispo", response_mask=mask)
    call = batch_of(["a", "a"]) | {"response_mask": mask, "token_level_rewards": torch.eye(2, 3)}
    with pytest.raises(DataError, match=message):
        get_adv_estimator_fn("composer")(**call)
    for same in (torch.tensor([1, 1, 0]), torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, True, False])):
        assert first_call("reinforce", response_mask=same.expand(2, 3)).item() == 1.0


def test_a_micro_batch_without_an_unmasked_token_checks_nothing() -> None:
    """The advantages of a group of equal rewards are 0, and may come first in the place of the mask."""
    function, config, ones = adapter.policy_loss("cispo"), upstream.actor({}), torch.ones(2, 3)
    for advantages in (0 * ones, 0 * ones):
        function(-ones, -ones, advantages, advantages, config=config)
    with pytest.raises(DataError, match="response_mask: it holds -1"):
        function(-ones, -ones, -ones, -ones, config=config)
    function(-ones, -ones, -ones, ones, config=config)
    function(-ones, -ones, -ones, -ones, config=config)  # checked before: no wait for the device


@pytest.mark.parametrize(("name", "argument"), [("ppo", "log_prob"), ("dppo_tv", "old_log_prob")])
def test_a_log_probability_is_at_most_what_bfloat16_rounds_it_to(name: str, argument: str) -> None:
    found = first_call(name, **{argument: torch.full((2, 3), 0.125, requires_grad=argument == "log_prob")})
    assert found.isfinite()
    with pytest.raises(DataError, match=r"logprobs: it holds 0\.13 at an unmasked token, .* where bfloat16"):
        first_call(name, **{argument: torch.full((2, 3), 0.13, requires_grad=argument == "log_prob")})


def test_the_log_says_once_which_values_act(caplog: pytest.LogCaptureFixture) -> None:
    rewards = {"token_level_rewards": torch.eye(2), "response_mask": torch.ones(2, 2), "index": names([0, 0])}
    caplog.set_level(logging.INFO, logger="composer_plugins")
    log_once.cache_clear()
    for _ in range(2):  # with parameters that no other test has
        policy_loss("composer/dapo", ONES, policy_params={"clip_low": 0.21})
        policy_loss("composer/sapo", ONES, policy="sapo@verl", policy_params={"tau_neg": 1.07})
        get_adv_estimator_fn("composer/dr_grpo")(**rewards, config=algorithm())
    unread = "; verl's options for the parameters of its own {} are not read"
    assert [record.getMessage() for record in caplog.records] == [
        "policy dapo(clip_low=0.21, clip_high=0.28), token-mean" + unread.format("policy losses"),
        "policy sapo@verl(tau_pos=1.0, tau_neg=1.07, log_ratio_clamp=20.0), seq-mean-token-mean"
        + unread.format("policy losses"),
        "advantage dr_grpo(singleton=zero)" + unread.format("advantages"),
    ]


def test_every_micro_batch_is_looked_at_for_advantages_that_differ_within_a_response() -> None:
    """Not the first one alone, and without another wait for the device than that for the metrics."""
    batch = ONES._replace(mask=torch.tensor([[1, 1, 0], [0, 0, 0]]).bool())
    differing = batch._replace(advantages=torch.tensor([[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]))
    masked = batch._replace(advantages=torch.tensor([[1.0, 1.0, 9.0], [1.0, 2.0, 3.0]]))
    for name in ("composer/gspo", "composer/luspo", "composer/gmpo"):
        mode = "seq-mean-token-sum" if name.endswith("luspo") else "seq-mean-token-mean"
        policy_loss(name, batch, mode)
        with mock.patch.object(Tensor, "__bool__", side_effect=AssertionError("it waits for the device")):
            _, _, metrics = policy_loss(name, masked, mode)
        assert not any("differ" in key for key in metrics)
        with pytest.raises(DataError, match="advantages: they differ within a sequence, .* gspo_token"):
            policy_loss(name, differing, mode)


GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "gpg", "maxrl", "pass_at_k", "reinforce_pp_baseline")


def batch_of(uids: list[str], rollouts_per_prompt: int | None = None, **node: Any) -> dict[str, Any]:
    """What verl hands an estimator for rollouts with these uids; without a number its table is alone."""
    rewards = torch.stack([torch.zeros(len(uids)), torch.arange(1.0, 1 + len(uids))], -1)
    config: Any = OmegaConf.create({"algorithm": algorithm(**node), "trainer": {"use_v1": True}})
    config.actor_rollout_ref = {"rollout": {"n": rollouts_per_prompt}}
    table = config.algorithm if rollouts_per_prompt else algorithm(**node)
    mask = torch.ones(rewards.shape, dtype=torch.long)
    index = np.array(uids, dtype=object)
    return {"token_level_rewards": rewards, "response_mask": mask, "index": index, "config": table}


@pytest.mark.parametrize("loss", ["vanilla", "composer/cispo"])
def test_a_policy_beside_a_loss_of_verls_own_is_an_error(loss: str) -> None:
    """verl would train its own loss, and say nothing: the snippet without the lines of `policy_loss`."""
    call = batch_of(["a", "a"], 2, advantage="grpo", policy="cispo")
    call["config"]._get_parent().actor_rollout_ref.actor = {"policy_loss": {"loss_mode": loss}}
    problem = r"algorithm\.composer\.policy: it is set, and it has no effect, .*loss_mode is 'vanilla'; "
    with pytest.raises(ConfigError, match=problem) if loss == "vanilla" else nullcontext():
        get_adv_estimator_fn("composer")(**call)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
@pytest.mark.parametrize("name", sorted({claim.ours for claim in verl_registered.advantages()}))
def test_a_bad_reward_is_zero_or_leaves_its_rollout_out(name: str, bad: float) -> None:
    """The other rollouts have the advantages of a batch with 0 in its place, or without the row."""
    uids, row = ["a", "a", "b", "a", "b", "b"], 3

    def found(how: str, reward: float, *, without: bool = False) -> torch.Tensor:
        call = batch_of(uids, advantage=name, on_bad_reward=how)
        call["token_level_rewards"][row, -1] = reward
        kept = [i for i in range(len(uids)) if not (without and i == row)]
        call |= {key: call[key][kept] for key in ("token_level_rewards", "response_mask", "index")}
        return get_adv_estimator_fn("composer")(**call)[0]

    message = f"rewards: 1 of 6 rollouts have the reward {bad:g}, the first in row 3, of the uid 'a', and on"
    with pytest.warns(ComposerWarning, match=message):
        zeroed = found("zero", bad)
    assert torch.equal(zeroed, found("error", 0.0)) and zeroed.any()
    with pytest.warns(ComposerWarning, match="on_bad_reward is 'drop', so they are left out"):
        dropped = found("drop", bad)
    rest = [i for i in range(len(uids)) if i != row]
    torch.testing.assert_close(dropped[rest], found("error", 0.0, without=True), rtol=1e-6, atol=1e-6)
    assert not dropped[row].any() and dropped.any()


@pytest.mark.parametrize(("name", "params"), [("bnpo", {}), ("pass_at_k_training", {"k": 2})], ids=str)
def test_an_advantage_that_verl_has_not_runs_under_our_name(name: str, params: dict[str, int]) -> None:
    """On rewards in [0, 1] of three prompts."""
    call = batch_of(list("aaabbbccc"), 3, advantage=name, advantage_params=params)
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.25])
    call["token_level_rewards"][:, -1] = rewards
    found = get_adv_estimator_fn(f"composer/{name}")(**call)[0]
    ids = torch.arange(9) // 3
    wanted = reductions.kernel("advantage", name, **params)(rewards, ids)
    assert wanted.any() and torch.equal(found, wanted.unsqueeze(1).expand_as(found))


def my_lone_advantage(rewards: torch.Tensor) -> torch.Tensor:
    """An advantage of the user's that leaves no row out."""
    return rewards - rewards.mean()


def test_an_advantage_without_a_mask_cannot_drop_a_rollout() -> None:
    call = batch_of(["a", "a"], advantage=f"{__name__}:my_lone_advantage", on_bad_reward="drop")
    call["token_level_rewards"][0, 0] = torch.nan
    with pytest.warns(ComposerWarning), pytest.raises(ConfigError, match="no input `mask` .* to 'zero'"):
        get_adv_estimator_fn("composer")(**call)


OF_VERL = [f"{one}@verl" for one in GROUPED if one != "maxrl"]


@pytest.mark.parametrize("name", [*GROUPED, *OF_VERL, f"{__name__}:my_advantage"])
@pytest.mark.parametrize("rollouts", [None, 1, 8])
def test_groups_of_one_are_warned_of_once(name: str, rollouts: int | None) -> None:
    """Also where rollout.n is 8: the groups are the uids."""
    call = batch_of(list("abcdefgh"), rollouts, advantage=name)
    message = (
        "^composer/health/group_of_one_frac: the 8 rollouts .* are 8 groups of 1, .*; sample each prompt 2"
    )
    with pytest.warns(ComposerWarning, match=message) as caught:
        for _ in range(2):
            get_adv_estimator_fn("composer")(**call)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error:composer/health")
def test_a_batch_in_which_a_rollout_is_compared_is_not_warned_of() -> None:
    """And neither is an advantage that compares nothing; verl's padding rows are no group."""
    for uids in (["a", "a"], ["a", "b", "a"], ["a", "a", *["pad0"] * 3], ["pad0", "pad0"]):
        get_adv_estimator_fn("composer")(**batch_of(uids))
    get_adv_estimator_fn("composer")(**batch_of(["a", "b"], advantage="reinforce_pp"))
    with pytest.warns(ComposerWarning, match="the 2 rollouts of this batch are 2 groups of 1"):
        get_adv_estimator_fn("composer")(**batch_of(["a", "b", "pad0", "pad0"]))


def test_padding_rows_singletons_and_nan_rewards() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0], [0, 0], [0, 0]])
    # A pair, a group of one, a synthetic row of verl's, and a row of the pair's group that was masked out.
    ids = np.array(["a", "a", "b", "pad0", "a", "pad0"], dtype=object)
    call = {"token_level_rewards": rewards, "response_mask": mask, "index": ids}
    advantages, _ = get_adv_estimator_fn("composer/grpo")(**call, config=algorithm())
    own, _ = get_adv_estimator_fn("grpo")(**call)
    assert_parity(advantages[:2], own[:2], terms=6, magnitude=2.0, dtype=torch.float32)
    assert advantages[0].tolist() == [pytest.approx(1.0, abs=1e-5)] * 2
    assert not advantages[2:].any()
    # verl counts its padding rows in a statistic of the batch, and ours do not.
    ours, _ = get_adv_estimator_fn("composer/gpg")(**call, config=algorithm())
    own, _ = get_adv_estimator_fn("gpg")(**call)
    assert_parity(ours[:2] * (6 / 4), own[:2], terms=6, magnitude=2.0, dtype=torch.float32)
    for bad in ("nan", "inf"):
        rewards[1, 1] = float(bad)
        with pytest.raises(DataError, match=f"1 of 6 rollouts have the reward {bad}, the first in row 1"):
            get_adv_estimator_fn("composer/grpo")(**call, config=algorithm())
