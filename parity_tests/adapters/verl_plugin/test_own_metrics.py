"""verl's own metrics of the policy loss, which a loss of ours logs too, with verl's meaning."""

from typing import Any

import pytest
import torch
from torch import Tensor

from composer_plugins.conformance.batches import Batch
from composer_plugins.frameworks.verl import VERL
from composer_plugins.kernels.types import Metric, TokenLoss
from composer_plugins.losses.row import REQUIRED
from parity_tests.rigs.every import rows
from parity_tests.rigs.verl_actor import policy_loss

KL, CLIPPED, LOWER = (f"actor/{name}" for name in ("ppo_kl", "pg_clipfrac", "pg_clipfrac_lower"))

pytestmark = pytest.mark.filterwarnings("ignore::composer_plugins.errors.ComposerWarning")


def logged(batch: Batch, policy: str, **params: Any) -> dict[str, float]:
    """What our loss logs under verl's names."""
    found = policy_loss("composer", batch, policy=policy, policy_params=params)[2]
    assert all(type(value) is float for value in found.values())
    return {name: value for name, value in found.items() if not name.startswith("actor/composer/")}


def test_every_policy_loss_logs_the_kl_and_only_those_with_a_clip_or_a_mask_its_fraction() -> None:
    g = torch.Generator().manual_seed(1)
    old = -torch.rand(3, 4, generator=g) - 0.2
    moved = old + 0.2 * torch.randn(3, 4, generator=g).clamp(max=0.9)
    advantages = torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4).contiguous()
    batch = Batch(moved.clamp(max=0), old, advantages, torch.rand(3, 4, generator=g) < 0.8, None)
    found = {}
    for loss in filter(VERL.runs, rows("policy")):
        required = [one for one, default in loss.defaults.items() if default is REQUIRED]
        examples = {one: loss.parameters[one].example for one in required}
        found[loss.name] = logged(batch, loss.name, **examples)
    assert len(found) > 20 and all(KL in one for one in found.values())
    assert {name for name, one in found.items() if CLIPPED not in one} == {
        *("dro", "gpg", "importance_sampling", "reinforce", "rloo", "vespo"),
        *("kimi_k15", "luffy", "opmd", "topr"),
    }
    assert all((LOWER in one) == (CLIPPED in one) for one in found.values())
    kl = float((old - batch.logprobs)[batch.mask].mean())
    assert all(one[KL] == pytest.approx(kl, abs=1e-6) for one in found.values())


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "wanted"),
    [
        (4.0, -1.0, {"policy": "ppo"}, (0.0, 0.0)),
        (4.0, -1.0, {"policy": "ppo", "dual_clip": 3.0}, (0.0, 1.0)),
        (4.0, -1.0, {"policy": "ppo", "ratio_cap": 3.0}, (0.0, 1.0)),
        (4.0, 1.0, {"policy": "ppo", "ratio_cap": 3.0}, (1.0, 0.0)),
        (4.0, 1.0, {"policy": "masked_is", "ratio_cap": 3.0}, (0.0, 1.0)),
        (9.0, 1.0, {"policy": "masked_is", "ratio_cap": 3.0}, (1.0, 0.0)),
        (4.0, 1.0, {"policy": "minirl", "clip_low": 0.2, "clip_high": 5.0, "ratio_cap": 3.0}, (0.0, 1.0)),
        # The product of a sequence's ratios is capped here, and it is not among the metrics.
        (4.0, 1.0, {"policy": "masked_is", "ratio_cap": 3.0, "level": "sequence"}, (0.0, 0.0)),
        (0.5, -1.0, {"policy": "opsm", "threshold": 0.1}, (1.0, 0.0)),
        (1.0, -1.0, {"policy": "opsm", "threshold": 0.1}, (0.0, 0.0)),
    ],
    ids=str,
)
def test_the_lower_fraction_is_of_tokens_beyond_the_second_bound(
    ratio: float, advantage: float, options: dict[str, Any], wanted: tuple[float, float]
) -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    batch = Batch(-3 * one, -3 * one - torch.log(ratio * one), advantage * one, one.bool(), None)
    found = logged(batch, **options)
    assert (found[CLIPPED], found[LOWER]) == wanted


def with_clip(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> TokenLoss:
    """A loss of the user's own, which says that it clipped every token but the first."""
    clipped = torch.arange(mask.shape[1]).expand(mask.shape) > 0
    loss = torch.where(mask, -advantages * (logprobs - old_logprobs).exp(), 0.0)
    return TokenLoss(loss, {"clip_frac_high": Metric(clipped, mask)})


def test_a_loss_of_the_users_own_has_the_fractions_that_it_reports() -> None:
    ones = -torch.ones(2, 4, dtype=torch.float64)
    batch = Batch(ones, ones, ones, ones.bool(), None)
    assert logged(batch, f"{__name__}:with_clip") == {KL: 0.0, CLIPPED: 0.75, LOWER: 0.0}
