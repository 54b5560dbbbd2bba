"""Advantages against the recordings of ten upstream repositories: verl, TRL, NeMo-RL and others.

Where an upstream rounds a count or pads it, its way is spelt out here, so that the rest is compared in
float64, and a claim fails once that way is gone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.conformance import reductions
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import golden
from parity_tests.rigs.dialects import VERL_LENGTH_EPS
from parity_tests.rigs.golden import Case, claim

TRL_EPS = 1e-4
# To a group of one verl gives a deviation of 1 in float32, and adds its eps in float32.
VERL_SINGLETON_ROUNDING = float(torch.tensor(1.0) + 1e-6) / (1 + 1e-6)


def estimator(*names: str) -> Callable[[Case], bool]:
    return lambda case: case["estimator"] in names


def kernel(name: str, **params: Any) -> Callable[..., Tensor]:
    return reductions.kernel("advantage", name, **params)


def verl_rewards(case: Case) -> tuple[Tensor, Tensor]:
    """A reward per row and its group; verl's ids are strings, ours any integers."""
    names = sorted(set(case["index"]), reverse=True)
    ids = torch.tensor([7 * names.index(name) - 5 for name in case["index"]])
    return golden.tensor(case["token_level_rewards"]).sum(-1), ids


def mask_of(case: Case) -> Tensor:
    return golden.tensor(case["response_mask"]).bool()


def assert_rows_equal(
    ours: Tensor, case: Case, *, divided: bool = False, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> None:
    """verl repeats a row's advantage over its unmasked tokens."""
    __tracebackhide__ = True
    rewards, ids = verl_rewards(case)
    assert_parity(
        ours.unsqueeze(-1) * mask_of(case),
        golden.tensor(case["advantages"]),
        terms=len(rewards),
        magnitude=scale * largest_term(rewards, ids, divided=divided),
        dtype=dtype,
    )


def singletons(case: Case) -> Tensor:
    return torch.tensor([case["index"].count(group) == 1 for group in case["index"]])


def largest_term(rewards: Tensor, ids: Tensor, *, divided: bool) -> float:
    """A mean is as precise as the largest reward; dividing by a small deviation magnifies that."""
    stds = [float(rewards[ids == i].std()) for i in ids.unique() if (ids == i).sum() > 1]
    smallest = min([std for std in stds if divided and std > 0], default=1.0)
    return float(rewards.abs().max()) / min(1.0, smallest)


def precision(case: Case) -> torch.dtype:
    """Whatever the rewards, the vectorised GRPO takes means and deviations in float32."""
    return torch.float32 if case["estimator"] == "grpo_vectorized" else torch.float64


@claim("verl_advantages", estimator("grpo", "grpo_vectorized"))
def test_grpo_equals_verl(case: Case) -> None:
    name = "grpo@verl" if case["norm_by_std"] else "dr_grpo@verl"
    ours = kernel(name)(*verl_rewards(case))
    if case["norm_by_std"]:
        ours = torch.where(singletons(case), ours / VERL_SINGLETON_ROUNDING, ours)
    assert_rows_equal(ours, case, divided=case["norm_by_std"], dtype=precision(case))


@claim("verl_advantages", estimator("rloo", "rloo_vectorized"))
def test_rloo_equals_verl(case: Case) -> None:
    option = {"singleton": "zero"} if case["estimator"] == "rloo_vectorized" else {}
    assert_rows_equal(kernel("rloo@verl")(*verl_rewards(case), **option), case)


@claim("verl_advantages", estimator("opo"))
def test_opo_equals_verl(case: Case) -> None:
    assert_rows_equal(kernel("opo@verl")(*verl_rewards(case), mask_of(case).sum(-1)), case)


@claim("verl_advantages", estimator("gpg"))
def test_gpg_equals_verl(case: Case) -> None:
    rewards, ids = verl_rewards(case)
    alpha, rounded = gpg_alpha(rewards)
    ours = kernel("gpg@verl")(rewards, ids) * (rounded / alpha)
    assert_rows_equal(ours, case, scale=alpha)


def gpg_alpha(rewards: Tensor) -> tuple[float, float]:
    """Rows over rewards that are not 0, and the same as verl divides integers: in float32."""
    count = max(1, int(rewards.count_nonzero()))
    return len(rewards) / count, float(torch.tensor(len(rewards)) / count)


@claim("verl_advantages", estimator("grpo_passk"))
def test_pass_at_k_equals_verl(case: Case) -> None:
    option = {} if case["norm_by_std"] else {"scale": "none"}
    ours = kernel("pass_at_k@verl")(*verl_rewards(case), **option)
    assert_rows_equal(ours, case, divided=case["norm_by_std"])


def as_verl_whitens(ours: Tensor, raw: Tensor, mask: Tensor) -> Tensor:
    """`ours`, which whitens `raw`, with a mean and a variance over n + 1e-8 as verl has them, and not n."""
    x, n = raw[mask], int(mask.sum())
    mean = x.sum() / (n + VERL_LENGTH_EPS)
    variance = (x - mean).square().sum() / (n + VERL_LENGTH_EPS) * n / (n - 1)
    return (ours * (x.var() + 1e-8).sqrt() + x.mean() - mean) / (variance + 1e-8).sqrt()


def assert_whitened_equal(ours: Tensor, raw: Tensor, case: Case, dtype: torch.dtype = torch.float64) -> None:
    """Per token; a small variance magnifies the rounding of the largest term, at most by 1e4."""
    __tracebackhide__ = True
    mask, theirs = mask_of(case), golden.tensor(case["advantages"])
    divisor = min(1.0, float((raw[mask].var() + 1e-8).sqrt()))
    largest = float(golden.tensor(case["token_level_rewards"]).abs().max() + raw.abs().max()) / divisor**2
    ours = torch.where(mask, as_verl_whitens(ours, raw, mask), 0.0)
    assert_parity(ours, theirs, terms=2 * int(mask.sum()), magnitude=largest, dtype=dtype)


@claim("verl_advantages", estimator("reinforce_plus_plus"))
def test_reinforce_pp_equals_verl(case: Case) -> None:
    rewards, mask = golden.tensor(case["token_level_rewards"]), mask_of(case)
    option = {"gamma": case["gamma"]} if "gamma" in case else {}
    ours = kernel("reinforce_pp@verl")(rewards, mask, **option)
    raw = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        running = torch.where(mask[:, t], rewards[:, t] + option.get("gamma", 1.0) * running, running)
        raw[:, t] = running
    assert_whitened_equal(ours, raw, case)


@claim("verl_advantages", estimator("reinforce_plus_plus_baseline"))
def test_reinforce_pp_baseline_equals_verl(case: Case) -> None:
    rewards, ids = verl_rewards(case)
    ours = kernel("reinforce_pp_baseline@verl")(rewards, ids, mask_of(case).sum(-1))
    raw = kernel("dr_grpo@verl")(rewards, ids)
    assert_whitened_equal(per_token(ours, case), per_token(raw, case), case)


@claim("verl_advantages", estimator("gdpo"))
def test_gdpo_equals_verl(case: Case) -> None:
    rewards, ids = verl_rewards(case)
    ours = kernel("gdpo@verl")(rewards.unsqueeze(1), ids, lengths=mask_of(case).sum(-1))
    raw = kernel("grpo@verl")(rewards, ids)
    # A group of one is divided by 1 + eps in float32.
    dtype = torch.float32 if singletons(case).any() else torch.float64
    assert_whitened_equal(per_token(ours, case), per_token(raw, case), case, dtype)


def per_token(rows: Tensor, case: Case) -> Tensor:
    return rows.unsqueeze(-1).expand(mask_of(case).shape)


def test_a_group_of_one_gets_zero_unless_asked_where_verl_passes_its_reward_through() -> None:
    loops = {"grpo", "rloo", "opo", "gpg"}
    alone = [c for c in golden.load("verl_advantages") if c["estimator"] in loops and singletons(c).any()]
    assert alone
    for case in alone:
        rewards, ids = verl_rewards(case)
        single = singletons(case)
        scale = gpg_alpha(rewards)[0] if case["estimator"] == "gpg" else 1.0
        theirs = golden.tensor(case["advantages"])[single].amax(-1)
        least = golden.tensor(case["advantages"])[single].amin(-1)
        raw = torch.where(theirs == 0, least, theirs)  # a row of one number and zeros
        assert raw.tolist() == pytest.approx((scale * rewards[single]).tolist(), rel=1e-5)
        for name in ("grpo", "dr_grpo", "rloo", "gpg"):
            assert not kernel(name)(rewards, ids)[single].any()


def test_verl_grpo_vectorized_is_rounded_to_float32_and_ours_is_not() -> None:
    off = []
    for case in filter(estimator("grpo_vectorized"), golden.load("verl_advantages")):
        name = "grpo@verl" if case["norm_by_std"] else "dr_grpo@verl"
        ours = per_token(kernel(name)(*verl_rewards(case)), case) * mask_of(case)
        off.append(float((ours - golden.tensor(case["advantages"]))[~singletons(case)].abs().max()))
    assert max(off) > 1e-10, "compare grpo_vectorized in float64"


def trl_rewards(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's weighted sum over reward functions; a row is unmasked if any of them could score it."""
    per_function = golden.tensor(case["rewards_per_func"])
    unmasked = ~per_function.isnan().all(1)
    total = (per_function * golden.tensor(case["reward_weights"])).nansum(1)
    return torch.where(unmasked, total, torch.nan), trl_ids(case), unmasked


def trl_ids(case: Case) -> Tensor:
    return torch.arange(len(case["rewards_per_func"])) // case["num_generations"]


def trl_bessel_rounding(unmasked: Tensor, width: int) -> Tensor:
    """By what factor TRL's std is off: it rounds n / (n - 1) to float32."""
    n = unmasked.view(-1, width).sum(1).repeat_interleave(width)
    exact = n.to(torch.float64) / (n - 1)
    return ((n / (n - 1)).to(torch.float64) / exact).sqrt().nan_to_num(1.0, 1.0)


def sums_first(case: Case) -> bool:
    return case["multi_objective_aggregation"] == "sum_then_normalize"


@claim("trl_grpo_advantages", sums_first)
def test_advantages_equal_trl(case: Case) -> None:
    rewards, ids, unmasked = trl_rewards(case)
    ours = kernel("grpo@trl")(rewards, ids, unmasked, scale=case["scale_rewards"])
    theirs = golden.tensor(case["advantages"])
    if case["scale_rewards"] == "none":
        assert torch.equal(ours, kernel("dr_grpo@trl")(rewards, ids, unmasked))
    else:
        std = golden.tensor(case["std"]).nan_to_num(0.0)
        width = len(unmasked) if case["scale_rewards"] == "batch" else case["num_generations"]
        unrounded = std / trl_bessel_rounding(unmasked, width)
        theirs = theirs * (std + TRL_EPS) / (unrounded + TRL_EPS)
    # The rewards' own rounding, divided by the deviation: upstream subtracts means, we do not.
    largest = float(rewards[unmasked].abs().max()) * max(1.0, float(theirs.abs().max()))
    assert_parity(ours, theirs, terms=len(rewards), magnitude=largest)


@claim("trl_grpo_advantages", lambda case: not sums_first(case))
def test_gdpo_equals_trl(case: Case) -> None:
    """Whatever scale_rewards is: normalise_then_sum does not read it."""
    components, ids = golden.tensor(case["rewards_per_func"]), trl_ids(case)
    weights, scored = golden.tensor(case["reward_weights"]), ~components.isnan()
    ours = kernel("gdpo@trl")(components, ids, component_weights=weights, component_mask=scored)
    # The float32 is that of TRL's n / (n - 1), as above.
    assert_parity(ours, golden.tensor(case["advantages"]), terms=len(ids), dtype=torch.float32)


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


@claim("openrlhf_advantages", lambda case: not is_alone(case))
def test_grpo_equals_openrlhf(case: Case) -> None:
    assert_rewards_equal("grpo@openrlhf", case, divided=True)


def one_group_if_incomplete(case: Case) -> Tensor:
    """slime's groups: all rows are one where the batch has not the size that its options say."""
    rewards, ids = rows_of(case)
    whole = len(rewards) == case["num_samples"] * case["rollout_batch_size"]
    return ids if whole else torch.zeros_like(ids)


@claim("slime_advantages", lambda case: not is_alone(case))
def test_grpo_equals_slime(case: Case) -> None:
    divided = case["grpo_std_normalization"]
    name = "grpo@slime" if divided else "dr_grpo"
    assert_rewards_equal(name, case, one_group_if_incomplete(case), divided=divided)


def assert_alone(name: str, case: Case) -> None:
    """A group of one: NaN upstream, whose deviation with ddof=1 divides by 0, and 0 here."""
    rewards, ids = rows_of(case)
    assert golden.tensor(case["advantages"]).isnan().all()
    assert torch.equal(kernel(name)(rewards, ids), torch.zeros_like(rewards))


@claim("openrlhf_0_11_advantages")
def test_dr_grpo_and_rloo_equal_openrlhf(case: Case) -> None:
    """`dr_grpo@openrlhf` and `rloo@openrlhf`."""
    assert_rewards_equal(f"{case['estimator']}@openrlhf", case, divided=False)


@claim("openrlhf_advantages", is_alone)
def test_a_group_of_one_is_nan_in_openrlhf_and_zero_here(case: Case) -> None:
    assert_alone("grpo@openrlhf", case)


@claim("slime_advantages", is_alone)
def test_a_group_of_one_is_nan_in_slime_and_zero_here(case: Case) -> None:
    assert_alone("grpo@slime", case)


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
