"""What we put into verl's registries, called as verl calls it, beside verl's own: values and gradients."""

import os
import subprocess
import sys
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    get_adv_estimator_fn,
    get_policy_loss_fn,
)

from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.bundled.adapters import VERL
from composer_plugins.errors import ComposerError, ConfigError, DataError
from composer_plugins.plugins import losses
from parity_tests.support.assertions import assert_parity
from parity_tests.support.verl_facts import (
    MODES,
    Batch,
    Rollouts,
    actor,
    global_batches,
    names,
    policy_batches,
    rollouts,
    row_kernel,
    verl_advantages,
    verl_policy_loss,
)

examples = settings(max_examples=40)

# Ours by its dialect, and verl's name of it.
ESTIMATORS = {"grpo@verl": "grpo", "rloo@verl": "rloo", "opo@verl": "opo"}
POLICIES = {
    "grpo@verl": "vanilla",
    "gspo_token@verl": "gspo",
    "cispo@verl": "cispo",
    "dppo_tv@verl": "dppo_tv",
    "dppo_kl@verl": "dppo_kl",
    "gpg@verl": "gpg",
}


def algorithm(**node: Any) -> Any:
    """`algorithm`, as the estimators get it: raw."""
    return OmegaConf.create({"adv_estimator": "composer", "gamma": 1.0, "composer": node})


def estimate(name: str, batch: Rollouts, **node: Any) -> Tensor:
    """Our estimator, called as compute_advantage calls one that it does not know."""
    advantages, returns = get_adv_estimator_fn(name)(
        token_level_rewards=batch.token_rewards,
        response_mask=batch.mask.long(),
        config=algorithm(**node),
        index=names(batch.ids.tolist()),
    )
    assert torch.equal(advantages, returns)
    return advantages


def configured(info: dict[str, Any], node: dict[str, Any]) -> Any:
    """An actor's configuration whose policy_loss is ours, with the node."""
    config = actor(info)
    object.__setattr__(config, "policy_loss", ComposerPolicyLossConfig(composer=node))
    return config


def policy_loss(
    name: str, batch: Batch, mode: str, info: dict[str, Any], **node: Any
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Our policy loss, called as ppo_loss calls it, and its gradient."""
    logprobs = batch.logprobs.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn(name)(
        old_log_prob=batch.old_logprobs,
        log_prob=logprobs,
        advantages=batch.advantages,
        response_mask=batch.mask,
        loss_agg_mode=mode,
        config=configured(info, node),
        rollout_is_weights=batch.weights,
    )
    return loss, torch.autograd.grad(loss, logprobs)[0], metrics


@pytest.mark.parametrize("ours", ESTIMATORS)
@examples
@given(batch=rollouts(min_group=2))
def test_an_estimator_equals_verls(ours: str, batch: Rollouts) -> None:
    theirs = verl_advantages(ESTIMATORS[ours], batch)
    advantages = estimate("composer", batch, advantage=ours)
    name = ours.partition("@")[0]
    assert torch.equal(estimate(f"composer/{name}", batch, advantage=ours), advantages)
    live = batch.mask.any(-1)
    for group in batch.ids[live].unique():
        rows = live & (batch.ids == group)
        if rows.sum() < 2 or (batch.ids == group).sum() != rows.sum():
            continue  # an empty row counts in verl's group, and in none of ours
        rewards = batch.rewards[rows]
        scale = float(rewards.abs().max()) / (
            1.0 if "rloo" in ours or "opo" in ours else min(1.0, float(rewards.std()) + 1e-6)
        )
        if rewards.std() > 1e-9 * rewards.abs().max():  # ours of equal rewards is exactly 0
            assert_parity(advantages[rows], theirs[rows], terms=8 * len(rewards), magnitude=scale)
        else:
            assert not advantages[rows].any()


@pytest.mark.parametrize("ours", POLICIES)
@examples
@given(data=st.data())
def test_a_policy_loss_equals_verls(ours: str, data: st.DataObject) -> None:
    batch = data.draw(policy_batches())
    mode, info = data.draw(st.sampled_from(MODES)), data.draw(global_batches(batch.mask))
    theirs = verl_policy_loss(POLICIES[ours], batch, actor(info), mode)
    loss, gradient, metrics = policy_loss("composer", batch, mode, info, policy=ours)
    needs = {"gpg@verl": (batch.logprobs, batch.advantages)}.get(ours, batch[:3])
    terms = row_kernel("policy", ours)(*needs, batch.mask).loss  # the sum may cancel, its terms do not
    largest = float(terms.abs().max()) * (1.0 if batch.weights is None else float(batch.weights.max()))
    assert_parity(loss, theirs[0], terms=8 * terms.numel(), magnitude=8 * largest)
    assert_parity(gradient, theirs[1], terms=8 * batch.mask.numel())
    assert all(key.startswith("actor/composer/") and type(value) is float for key, value in metrics.items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cuts", [1, 2, 4])
def test_micro_batches_and_ranks_leave_the_gradient_alone(mode: str, ranks: int, cuts: int) -> None:
    g = torch.Generator().manual_seed(3)
    logprobs = -3 * torch.rand(8, 6, generator=g, dtype=torch.float64)
    old = (logprobs + 0.1 * torch.randn(8, 6, generator=g, dtype=torch.float64)).clamp(max=0)
    advantages = torch.randn(8, 1, generator=g, dtype=torch.float64).expand(8, 6).contiguous()
    mask = torch.rand(8, 6, generator=g) < 0.7
    batch = Batch(logprobs, old, advantages, mask, None)
    counts = {"batch_num_tokens": int(mask.sum()), "global_batch_size": 8, "loss_scale_factor": 6}
    whole = policy_loss("composer/cispo", batch, mode, {"dp_size": 1, **counts})[1]
    rows = torch.arange(8).chunk(ranks)
    found = torch.zeros_like(whole)
    for of_rank in rows:  # FSDP takes the mean of the ranks' gradients
        for part in of_rank.chunk(cuts):
            cut = Batch(*(x[part] for x in batch[:4]), None)
            found[part] += policy_loss("composer/cispo", cut, mode, {"dp_size": ranks, **counts})[1] / ranks
    assert_parity(found, whole, terms=48)


def test_every_loss_that_verl_can_feed_is_registered_under_its_name() -> None:
    rows = {loss.kind: set() for loss in losses()} | {"advantage": {"composer"}, "policy": {"composer"}}
    for loss in losses():
        if VERL.runs(loss):
            rows[loss.kind].add(f"composer/{loss.name}")
    assert {name for name in ADV_ESTIMATOR_REGISTRY if name.startswith("composer")} == rows["advantage"]
    assert {name for name in POLICY_LOSS_REGISTRY if name.startswith("composer")} == rows["policy"]
    assert len(rows["advantage"]) > 10 and len(rows["policy"]) > 20


def test_import_verl_alone_registers_everything() -> None:
    """By the entry point, in a process of its own; and twice does no harm."""
    program = (
        "import verl\n"
        "from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as A, POLICY_LOSS_REGISTRY as P\n"
        "print(*(sum(name.startswith('composer') for name in names) for names in (A, P)))"
    )
    counts = subprocess.check_output([sys.executable, "-W", "ignore", "-c", program], text=True).split()[-2:]
    assert [int(n) for n in counts] == [
        len([n for n in registry if n.startswith("composer")])
        for registry in (ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY)
    ]


def test_external_lib_registers_what_the_entry_point_may_not() -> None:
    program = (
        "from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as names\n"
        "print('composer' in names)\n"
        "from verl.utils.import_utils import import_external_libs\n"
        "import_external_libs('composer_plugins.adapters.verl_plugin')\n"
        "print('composer' in names)"
    )
    environment = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    printed = subprocess.check_output(
        [sys.executable, "-W", "ignore", "-c", program], text=True, env=environment
    )
    assert printed.split()[-2:] == ["False", "True"]


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"advantge": "grpo"}, "unknown option 'advantge': did you mean 'advantage'?"),
        ({"advantage": "gropo"}, "unknown advantage 'gropo': did you mean 'grpo'?"),
        ({"advantage": "gdpo"}, "needs reward_components, which verl does not hand over"),
        ({"advantage_params": {"scale": "std"}}, "unknown grpo's parameter 'scale' 'std'"),
        ({"hint_weight": 0.1}, "hint_weight > 0, and a registered estimator"),
        ({"replay_weight": 0.1}, "replay_weight > 0, and a registered estimator"),
        ({"mismatch": "tis"}, "algorithm.rollout_correction; remove it"),
    ],
)
def test_a_node_that_means_nothing_is_refused_at_the_first_call(node: dict[str, Any], message: str) -> None:
    mask = torch.ones(2, 3, dtype=torch.long)
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    with pytest.raises(ConfigError) as error:
        get_adv_estimator_fn("composer")(
            token_level_rewards=rewards, response_mask=mask, config=algorithm(**node), index=names([0, 0])
        )
    assert message in str(error.value) and str(error.value).startswith("algorithm.composer: ")


def test_a_name_and_a_node_that_contradict_each_other_are_refused() -> None:
    batch = Batch(*(-torch.ones(2, 3) for _ in range(3)), torch.ones(2, 3, dtype=torch.bool), None)
    with pytest.raises(ComposerError, match="policy is 'grpo' beside composer/cispo"):
        policy_loss("composer/cispo", batch, "token-mean", {}, policy="grpo")
    loss, _, _ = policy_loss("composer/cispo", batch, "token-mean", {}, policy_params={"clip_high": 1.0})
    assert loss.isfinite()
    with pytest.raises(ConfigError, match="on 2 ranks without batch_num_tokens"):
        policy_loss("composer/cispo", batch, "token-mean", {"dp_size": 2})


def test_padding_rows_singletons_and_nan_rewards() -> None:
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]])
    ids = names([0, 0, 1, 2])  # a pair, a group of one, a synthetic row of verl's
    call = get_adv_estimator_fn("composer/grpo")
    advantages, _ = call(token_level_rewards=rewards, response_mask=mask, config=algorithm(), index=ids)
    assert advantages[0].tolist() == [pytest.approx(0.7071, abs=1e-3)] * 2
    assert not advantages[2:].any()
    rewards[1, 1] = torch.nan
    with pytest.raises(DataError, match="rewards of 1 of 4 rollouts are NaN, row 1 first"):
        call(token_level_rewards=rewards, response_mask=mask, config=algorithm(), index=ids)
