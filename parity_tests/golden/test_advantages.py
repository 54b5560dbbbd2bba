"""Advantages against the recordings of nine upstream repositories: OpenRLHF, slime, NeMo-RL and others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim


def kernel(name: str, **params: Any) -> Callable[..., Tensor]:
    return reductions.kernel("advantage", name, **params)


def largest_term(rewards: Tensor, ids: Tensor, *, divided: bool) -> float:
    """A mean is as precise as the largest reward; dividing by a small deviation magnifies that."""
    stds = [float(rewards[ids == i].std()) for i in ids.unique() if (ids == i).sum() > 1]
    smallest = min([std for std in stds if divided and std > 0], default=1.0)
    return float(rewards.abs().max()) / min(1.0, smallest)


@claim("drgrpo_advantages")
def test_advantages_equal_understand_r1_zero(case: Case) -> None:
    rewards = golden.tensor(case["rewards"]).sum(-1)
    ids = torch.arange(len(rewards)) // case["num_samples"]
    scaled = case["critic_type"] == "grpo"
    ours = kernel("grpo@r1-zero" if scaled else "dr_grpo@r1-zero")(rewards, ids)
    theirs = golden.tensor(case["advantages"])
    assert_parity(ours, theirs, terms=len(rewards), magnitude=largest_term(rewards, ids, divided=scaled))


def rows_of(case: Case) -> tuple[Tensor, Tensor]:
    """Rewards in the precision of the recording, and the group of each: `num_samples` rows in a sequence."""
    rewards = golden.tensor(case["rewards"], golden.dtype(case))
    return rewards, torch.arange(len(rewards)) // case.get("num_samples", len(rewards))


def is_flat(case: Case) -> bool:
    """Whether all rewards are equal, and their mean in float32 is not."""
    return case["edge"] == "tenths" and case.get("dtype") == "torch.float32"


def is_alone(case: Case) -> bool:
    return case["edge"] == "groups_of_one"


def assert_rewards_equal(name: str, case: Case, ids: Tensor | None = None, *, divided: bool) -> None:
    """The advantages of a catalogue row are those recorded."""
    __tracebackhide__ = True
    rewards, groups = rows_of(case)
    ids = groups if ids is None else ids
    largest = largest_term(rewards, ids, divided=divided)
    if is_flat(case):
        assert not kernel(name)(rewards, ids).any()
        assert golden.tensor(case["advantages"]).abs().min() > 0, "upstream's mean has become exact"
        return
    theirs = golden.tensor(case["advantages"])
    assert_parity(
        kernel(name)(rewards, ids), theirs, terms=len(ids), magnitude=largest, dtype=golden.dtype(case)
    )


@claim("openrlhf_advantages", where=lambda case: not is_alone(case))
def test_grpo_equals_openrlhf(case: Case) -> None:
    assert_rewards_equal("grpo@openrlhf", case, divided=True)


def one_group_if_incomplete(case: Case) -> Tensor:
    """slime's groups: all rows are one where the batch has not the size that its options say."""
    rewards, ids = rows_of(case)
    whole = len(rewards) == case["num_samples"] * case["rollout_batch_size"]
    return ids if whole else torch.zeros_like(ids)


@claim("slime_advantages", where=lambda case: not is_alone(case))
def test_grpo_equals_slime(case: Case) -> None:
    divided = case["grpo_std_normalization"]
    name = "grpo@slime" if divided else "dr_grpo"
    assert_rewards_equal(name, case, one_group_if_incomplete(case), divided=divided)


@claim("openrlhf_advantages", "slime_advantages", where=is_alone)
def test_a_group_of_one_is_nan_in_openrlhf_and_in_slime_and_zero_here(case: Case) -> None:
    """Their deviation with ddof=1 divides by 0."""
    rewards, ids = rows_of(case)
    assert golden.tensor(case["advantages"]).isnan().all()
    for name in ("grpo@openrlhf", "grpo@slime"):
        assert torch.equal(kernel(name)(rewards, ids), torch.zeros_like(rewards))


@claim("openrlhf_0_11_advantages")
def test_dr_grpo_and_rloo_equal_openrlhf(case: Case) -> None:
    """`dr_grpo@openrlhf` and `rloo@openrlhf`."""
    assert_rewards_equal(f"{case['estimator']}@openrlhf", case, divided=False)


@claim("open_instruct_advantages")
def test_grpo_equals_open_instruct(case: Case) -> None:
    """Its default is "centered", without a deviation."""
    divided = case["advantage_normalization_type"] == "standard"
    assert_rewards_equal("grpo@open-instruct" if divided else "dr_grpo", case, divided=divided)


@claim("prime_rl_advantages")
def test_advantages_equal_prime_rl(case: Case) -> None:
    name = {"grpo": "dr_grpo@prime-rl", "max_rl": "maxrl@prime-rl"}[case["algorithm"]]
    assert_rewards_equal(name, case, divided=case["algorithm"] == "max_rl")


def rows_by_index(case: Case) -> tuple[Tensor, Tensor]:
    return golden.tensor(case["rewards"]), torch.tensor(case["index"])


@claim("passk_training")
def test_pass_at_k_training_equals_its_authors(case: Case) -> None:
    """`pass_at_k_training@passk-training`; sigma may be as small as a fifth."""
    ours = kernel("pass_at_k_training@passk-training", k=case["k"])(*rows_by_index(case))
    assert_parity(ours, golden.tensor(case["advantages"]), terms=len(ours), magnitude=10.0)


@claim("bnpo")
def test_bnpo_equals_its_authors(case: Case) -> None:
    """`bnpo@bnpo`: a weight is the exponential of a difference of logarithms of the gamma function."""
    theirs = golden.tensor(case["advantages"])
    ours = kernel("bnpo@bnpo")(*rows_by_index(case))
    largest = 1000 * max(1.0, float(theirs.abs().max()))
    assert_parity(ours, theirs, terms=len(ours), magnitude=largest)


def test_bnpo_leaves_a_group_of_one_out_unless_asked() -> None:
    differ = []
    for case in golden.load("bnpo"):
        rewards, ids = rows_by_index(case)
        alone = (ids == ids.unsqueeze(1)).sum(0) == 1
        ours = kernel("bnpo")(rewards, ids)
        assert not ours[alone].any()
        assert_parity(ours[~alone], kernel("bnpo")(rewards[~alone], ids[~alone]), terms=len(ids))
        theirs = golden.tensor(case["advantages"])
        differ.append(bool(alone.any()) and not torch.allclose(ours[~alone], theirs[~alone]))
    assert any(differ) or golden.directory != golden.GOLDEN


@claim("nemo_rl_gae")
def test_length_adaptive_gae_equals_nemo_rl(case: Case) -> None:
    """`length_adaptive_gae@nemo-rl`, whose lambda is a float32 there, and its critic's targets by `gae`."""
    mask, values = torch.tensor(case["mask"]).bool(), golden.tensor(case["values"])
    places = torch.arange(mask.shape[1]).expand(mask.shape)
    last = (places * mask).argmax(1, keepdim=True)
    rewards = torch.zeros_like(values).scatter(1, last, golden.tensor(case["rewards"]).unsqueeze(1))
    gamma = case["kwargs"]["gae_gamma"]
    options = {"gamma": gamma, "alpha": case["kwargs"]["length_adaptive_alpha"]}
    ours = kernel("length_adaptive_gae@nemo-rl", **options)(rewards, values, mask)
    scale = {"terms": mask.shape[1], "magnitude": 30.0}
    assert_parity(ours, golden.tensor(case["advantages"]), **scale, dtype=torch.float32)
    targets = kernel("gae", gamma=gamma, lam=1.0, whiten=False)(rewards, values, mask) + values
    theirs = golden.tensor(case["returns"])
    assert_parity(torch.where(mask, targets, 0.0), theirs, **scale, what="returns")


@claim("torchtitan_advantages")
def test_advantages_equal_torchtitan(case: Case) -> None:
    """`grpo@torchtitan` and `dr_grpo@torchtitan`, one group at a time."""
    rewards = golden.tensor(case["rewards"])
    name = "grpo@torchtitan" if case["should_std_normalize"] else "dr_grpo@torchtitan"
    ours = kernel(name)(rewards, torch.zeros(len(rewards), dtype=torch.long))
    magnitude = largest_term(rewards, torch.zeros_like(rewards), divided=case["should_std_normalize"])
    assert_parity(ours, golden.tensor(case["advantages"]), terms=len(rewards), magnitude=magnitude)
