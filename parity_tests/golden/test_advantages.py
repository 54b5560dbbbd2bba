"""Advantages against the recordings of nine upstream repositories: OpenRLHF, slime, NeMo-RL and others."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.golden import Case, claim

kernel = partial(reductions.kernel, "advantage")


def largest_term(rewards: Tensor, ids: Tensor, *, divided: bool) -> float:
    """A mean is as precise as the largest reward; dividing by a small deviation magnifies that."""
    stds = [float(rewards[ids == i].std()) for i in ids.unique() if (ids == i).sum() > 1]
    smallest = min([std for std in stds if divided and std > 0], default=1.0)
    return float(rewards.abs().max()) / min(1.0, smallest)


# Of each recording the key that a row depends on, and the row for each of its values.
ROWS: dict[str, tuple[str, dict[Any, str]]] = {
    "drgrpo_advantages": ("critic_type", {"grpo": "grpo@r1-zero", "drgrpo": "dr_grpo@r1-zero"}),
    "openrlhf_advantages": ("file", {"openrlhf_advantages": "grpo@openrlhf"}),
    "slime_advantages": ("grpo_std_normalization", {True: "grpo@slime", False: "dr_grpo"}),
    "openrlhf_0_11_advantages": ("estimator", {"dr_grpo": "dr_grpo@openrlhf", "rloo": "rloo@openrlhf"}),
    "open_instruct_advantages": (
        "advantage_normalization_type",
        {"standard": "grpo@open-instruct", "centered": "dr_grpo"},
    ),
    "prime_rl_advantages": ("algorithm", {"grpo": "dr_grpo@prime-rl", "max_rl": "maxrl@prime-rl"}),
    "torchtitan_advantages": (
        "should_std_normalize",
        {True: "grpo@torchtitan", False: "dr_grpo@torchtitan"},
    ),
}


def rows_of(case: Case) -> tuple[Tensor, Tensor]:
    """Rewards in the precision of the recording, and the group of each: `num_samples` rows in a sequence.

    In slime, all rows are one group where the batch has not the size that its options say.
    """
    rewards = golden.tensor(case["rewards"], golden.dtype(case))
    rewards = rewards.sum(-1) if case["file"] == "drgrpo_advantages" else rewards
    size = case.get("num_samples", len(rewards))
    if case.get("rollout_batch_size", len(rewards) // size) * size != len(rewards):
        size = len(rewards)
    return rewards, torch.arange(len(rewards)) // size


def is_nan(case: Case) -> bool:
    """Whether a deviation with ddof=1 divides by 0 upstream."""
    return case["edge"] == "groups_of_one" and case["file"] in {"openrlhf_advantages", "slime_advantages"}


@claim(*ROWS, where=lambda case: not is_nan(case))
def test_advantages_of_groups_equal_upstream(case: Case) -> None:
    key, names = ROWS[case["file"]]
    name, (rewards, ids) = names[case[key]], rows_of(case)
    ours, theirs = kernel(name)(rewards, ids), golden.tensor(case["advantages"])
    if case["edge"] == "tenths" and case.get("dtype") == "torch.float32":  # all rewards are equal
        assert not ours.any()
        assert theirs.abs().min() > 0, "upstream's mean has become exact"
        return
    largest = largest_term(rewards, ids, divided=name.startswith(("grpo", "maxrl")))
    assert_parity(ours, theirs, terms=len(ids), magnitude=largest, dtype=golden.dtype(case))


@claim("openrlhf_advantages", "slime_advantages", where=is_nan)
def test_a_group_of_one_is_nan_in_openrlhf_and_in_slime_and_zero_here(case: Case) -> None:
    rewards, ids = rows_of(case)
    assert golden.tensor(case["advantages"]).isnan().all()
    for name in ("grpo@openrlhf", "grpo@slime"):
        assert torch.equal(kernel(name)(rewards, ids), torch.zeros_like(rewards))


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
