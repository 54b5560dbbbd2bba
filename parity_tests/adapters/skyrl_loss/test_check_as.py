"""`composer-plugins check NAME --as skyrl` on the losses of SkyRL's own registry."""

import pytest
import torch

from composer_plugins.conformance.skyrl_claims import upstream
from composer_plugins.errors import ConfigError
from composer_plugins.testing.conventions import check_as

REGISTRY = upstream.ppo_utils.PolicyLossRegistry
DIVIDED = "every_term_is_divided_as_the_advantages_are"


def failed(name: str) -> list[str]:
    return [one.check for one in check_as(name, "skyrl").having("failed")]


def test_a_loss_of_skyrls_registry_is_checked_by_its_name() -> None:
    assert failed("regular") == []
    assert DIVIDED in failed("kl_cov")


def test_a_loss_that_another_package_has_registered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRY._functions, "doubled", REGISTRY.get("kl_cov"))
    assert DIVIDED in failed("doubled")


def test_a_misspelt_name_is_an_error() -> None:
    with pytest.raises(ConfigError, match="unknown policy loss of SkyRL's registry 'regualr'; did you mean"):
        check_as("regualr", "skyrl")


@pytest.mark.parametrize("lengths, times", [([6, 4, 5, 2], 17), ([600, 40, 500, 20], 1160)])
def test_the_mean_of_skyrls_example_is_divided_twice(lengths: list[int], times: int) -> None:
    """examples/train/algorithms/custom_policy_loss, at NovaSky-AI/SkyRL@a956457, returns such a mean."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(-1)
    advantages = upstream.divided(torch.ones(mask.shape).double(), mask, "token_mean", 0, [4])
    assert float(advantages[mask].sum()) == pytest.approx(1.0)
    assert float(advantages.mean()) == pytest.approx(1 / times)
