"""Group-relative advantages against verl, TRL and understand-r1-zero as recorded.

Not covered, by parameter: verl's estimators other than grpo and rloo with their vectorised forms;
TRL's `normalize_then_sum`.
"""

import pytest
import torch
from torch import Tensor

from composer_plugins.kernels.advantages import dr_grpo, grpo, rloo
from parity_tests import golden
from parity_tests.assertions import assert_parity
from parity_tests.golden import Case, case_id

ESTIMATORS = {"grpo", "grpo_vectorized", "rloo", "rloo_vectorized"}
VERL = [case for case in golden.load("verl_advantages") if case["estimator"] in ESTIMATORS]
TRL = [
    case
    for case in golden.load("trl_grpo_advantages")
    if case["multi_objective_aggregation"] == "sum_then_normalize"
]
R1_ZERO = golden.load("drgrpo_advantages")
TRL_EPS = 1e-4
# To a group of one verl gives a deviation of 1 in float32, and adds its eps in float32.
VERL_SINGLETON_ROUNDING = float(torch.tensor(1.0) + 1e-6) / (1 + 1e-6)


def verl_rewards(case: Case) -> tuple[Tensor, Tensor]:
    """A reward per row and its group; verl's ids are strings, ours any integers."""
    names = sorted(set(case["index"]), reverse=True)
    ids = torch.tensor([7 * names.index(name) - 5 for name in case["index"]])
    return golden.tensor(case["token_level_rewards"]).sum(-1), ids


def verl_per_row(case: Case) -> Tensor:
    """verl repeats a row's advantage over its live tokens."""
    mask, recorded = golden.tensor(case["response_mask"]), golden.tensor(case["advantages"])
    per_row = recorded.gather(1, mask.argmax(1, keepdim=True))
    assert torch.equal(per_row * mask, recorded)
    return per_row.squeeze(1)


def verl_name(case: Case) -> str:
    return f"{case_id(case)}-{case['estimator']}" + ("" if case["norm_by_std"] else "-unscaled")


@pytest.mark.parametrize("case", VERL, ids=verl_name)
def test_advantages_equal_verl(case: Case) -> None:
    rewards, ids = verl_rewards(case)
    theirs, alone = verl_per_row(case), singletons(case)
    estimator = case["estimator"].removesuffix("_vectorized")
    vectorised = estimator != case["estimator"]
    if estimator == "rloo":
        ours = rloo(rewards, ids, singleton="zero" if vectorised else "raw")
    elif case["norm_by_std"]:
        ours = grpo(rewards, ids, singleton="raw")
        theirs = torch.where(alone, theirs * VERL_SINGLETON_ROUNDING, theirs)
    else:
        ours = dr_grpo(rewards, ids)
        theirs = torch.where(alone, 0.0, theirs)  # a test of its own, below
    # Whatever the rewards, the vectorised form takes means and deviations in float32.
    in_float32 = case["estimator"] == "grpo_vectorized"
    assert_parity(
        ours,
        theirs,
        terms=len(rewards),
        magnitude=largest_term(rewards, ids, divided=estimator == "grpo" and case["norm_by_std"]),
        dtype=torch.float32 if in_float32 else torch.float64,
    )


def singletons(case: Case) -> Tensor:
    return torch.tensor([case["index"].count(group) == 1 for group in case["index"]])


def largest_term(rewards: Tensor, ids: Tensor, *, divided: bool) -> float:
    """A mean is as precise as the largest reward; dividing by a small deviation magnifies that."""
    stds = [float(rewards[ids == i].std()) for i in ids.unique() if (ids == i).sum() > 1]
    smallest = min([std for std in stds if divided and std > 0], default=1.0)
    return float(rewards.abs().max()) / min(1.0, smallest)


def test_a_group_of_one_gets_zero_unless_asked_where_verl_passes_its_reward_through() -> None:
    loops = [c for c in VERL if not c["estimator"].endswith("_vectorized")]
    cases = [c for c in loops if singletons(c).any()]
    assert cases
    for case in cases:
        rewards, ids = verl_rewards(case)
        alone = singletons(case)
        raw = verl_per_row(case)[alone]
        assert raw.tolist() == pytest.approx(rewards[alone].tolist(), rel=1e-5)
        for estimator in (grpo, dr_grpo, rloo):
            assert not estimator(rewards, ids)[alone].any()


def test_verl_grpo_vectorized_is_rounded_to_float32_and_ours_is_not() -> None:
    cases = [c for c in VERL if c["estimator"] == "grpo_vectorized"]
    off = []
    for case in cases:
        rewards, ids = verl_rewards(case)
        ours = grpo(rewards, ids, singleton="raw") if case["norm_by_std"] else dr_grpo(rewards, ids)
        off.append(float((ours - verl_per_row(case))[~singletons(case)].abs().max()))
    assert max(off) > 1e-10, "compare grpo_vectorized in float64"


def trl_rewards(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """TRL's weighted sum over reward functions; a row is live if any of them could score it."""
    per_function = golden.tensor(case["rewards_per_func"])
    live = ~per_function.isnan().all(1)
    total = (per_function * golden.tensor(case["reward_weights"])).nansum(1)
    ids = torch.arange(len(total)) // case["num_generations"]
    return torch.where(live, total, torch.nan), ids, live


def trl_bessel_rounding(case: Case, live: Tensor) -> Tensor:
    """By what factor TRL's std is off: it rounds n / (n - 1) to float32."""
    width = len(live) if case["scale_rewards"] == "batch" else case["num_generations"]
    n = live.view(-1, width).sum(1).repeat_interleave(width)
    exact = n.to(torch.float64) / (n - 1)
    return ((n / (n - 1)).to(torch.float64) / exact).sqrt().nan_to_num(1.0, 1.0)


def trl_advantages(case: Case) -> Tensor:
    rewards, ids, live = trl_rewards(case)
    if case["scale_rewards"] == "none":
        return dr_grpo(rewards, ids, live)
    return grpo(rewards, ids, live, scale=case["scale_rewards"], eps=TRL_EPS)


@pytest.mark.parametrize("case", TRL, ids=lambda c: f"{case_id(c)}-{c['scale_rewards']}")
def test_advantages_equal_trl(case: Case) -> None:
    rewards, _, live = trl_rewards(case)
    theirs = golden.tensor(case["advantages"])
    if case["scale_rewards"] != "none":
        std = golden.tensor(case["std"]).nan_to_num(0.0)
        unrounded = std / trl_bessel_rounding(case, live)
        theirs = theirs * (std + TRL_EPS) / (unrounded + TRL_EPS)
    # The rewards' own rounding, divided by the deviation: upstream subtracts means, we do not.
    largest = float(rewards[live].abs().max()) * max(1.0, float(theirs.abs().max()))
    assert_parity(trl_advantages(case), theirs, terms=len(rewards), magnitude=largest)


def test_trl_rounds_its_std_to_float32_and_we_do_not() -> None:
    cases = [c for c in TRL if c["scale_rewards"] != "none" and c["num_generations"] > 2]
    off = [(trl_advantages(c) - golden.tensor(c["advantages"])).abs().max() for c in cases]
    assert 1e-10 < float(max(off)) < 1e-6, "drop trl_bessel_rounding"


@pytest.mark.parametrize("case", R1_ZERO, ids=lambda c: f"{case_id(c)}-{c['critic_type']}")
def test_advantages_equal_understand_r1_zero(case: Case) -> None:
    rewards = golden.tensor(case["rewards"]).sum(-1)
    ids = torch.arange(len(rewards)) // case["num_samples"]
    scaled = case["critic_type"] == "grpo"
    ours = grpo(rewards, ids, eps=1e-8) if scaled else dr_grpo(rewards, ids)
    theirs = golden.tensor(case["advantages"])
    largest = largest_term(rewards, ids, divided=scaled)
    assert_parity(ours, theirs, terms=len(rewards), magnitude=largest)
