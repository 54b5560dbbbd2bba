"""Where advantages differ on purpose from those of the installed verl."""

import pytest
import torch
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.core_algos import compute_gae_advantage_return as verl_gae

from composer_plugins.conformance.batches import FLOAT64, Rollouts
from composer_plugins.conformance.verl_claims.advantages import kernel, lengths
from composer_plugins.conformance.verl_claims.upstream import advantages as verl_advantages


def test_opo_of_a_group_without_an_unmasked_token_is_nan_in_verl_and_zero_here() -> None:
    rewards = torch.tensor([1.0, 2.0], dtype=FLOAT64)
    batch = Rollouts(rewards, rewards.unsqueeze(1), torch.tensor([0, 0]), torch.zeros(2, 1, dtype=torch.bool))
    assert verl_advantages("opo", batch).isnan().all()
    assert kernel("opo@verl")(batch.rewards, batch.ids, lengths(batch)).isfinite().all()


def test_verl_divides_counts_in_float32_and_ours_do_not() -> None:
    rewards, ids = torch.tensor([0.1, 0.0, 0.3, 0.7], dtype=FLOAT64), torch.zeros(4, dtype=torch.int64)
    batch = Rollouts(rewards, rewards.unsqueeze(1), ids, torch.ones(4, 1, dtype=torch.bool))
    baseline = kernel("reinforce_pp_baseline@verl")(rewards, ids, lengths(batch))
    off = {"gpg": kernel("gpg@verl")(rewards, ids), "reinforce_plus_plus_baseline": baseline}
    off["grpo_vectorized"] = kernel("grpo@verl")(rewards, ids)  # its means and deviations are float32
    for name, ours in off.items():
        error = (ours - verl_advantages(name, batch).squeeze(1)).abs().max()
        assert 1e-10 < float(error) < 1e-6, f"compare {name} in float64 whatever the counts"


def test_a_group_of_one_gets_zero_unless_asked_where_verl_passes_its_reward_through() -> None:
    rewards, ids = torch.tensor([0.5], dtype=FLOAT64), torch.tensor([0])
    batch = Rollouts(rewards, rewards.unsqueeze(1), ids, torch.ones(1, 1, dtype=torch.bool))
    for name in ("grpo", "rloo", "opo", "gpg"):
        assert verl_advantages(name, batch).item() == pytest.approx(0.5, rel=1e-5)
    for name in ("grpo", "dr_grpo", "rloo", "gpg"):
        assert kernel(name)(rewards, ids).item() == 0


def test_verl_leaves_something_where_the_mask_is_false_and_ours_do_not() -> None:
    rewards = torch.tensor([[0.0, 0.0, 0.5]], dtype=FLOAT64)
    values, mask = torch.tensor([[0.3, 0.2, 0.1]], dtype=FLOAT64), torch.tensor([[True, False, True]])
    baselines = torch.zeros(1, dtype=FLOAT64)
    remax, _ = ADV_ESTIMATOR_REGISTRY["remax"](rewards, baselines, mask.long())
    gae, _ = verl_gae(rewards, values, mask.long(), 1.0, 1.0)
    assert (remax * gae)[~mask].all()
    assert not kernel("remax@verl")(rewards, baselines, mask)[~mask].any()
    assert not kernel("gae@verl")(rewards, values, mask)[~mask].any()


def test_verl_ends_token_baselines_by_a_count_and_ours_by_position() -> None:
    """Of two rows with the tokens 0 and 2, and 0, 1 and 2: a tool wrote the first row's token 1."""
    mask = torch.tensor([[True, False, True], [True, True, True]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.5]], dtype=FLOAT64)
    ids, old = torch.tensor([0, 0]), torch.full((2, 3), -1.0, dtype=FLOAT64)
    squared = torch.full((2, 3), 0.5, dtype=FLOAT64)
    batch = Rollouts(rewards.sum(1), rewards, ids, mask)
    given = {"old_log_probs": old, "sum_pi_squared": squared}
    theirs = verl_advantages("optimal_token_baseline", batch, **given)
    ours = kernel("optimal_token_baseline@verl")(rewards, old, squared, ids, mask)
    assert theirs[1, 2] == 0.5 and ours[1, 2] < 0  # the return itself, and less a baseline
    assert ours[1, 1] == 0.5 and torch.allclose(ours[0, :1], theirs[0, :1])
