"""Another package's function in verl's registries under a name of ours: an error, whichever came first."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from verl.trainer.ppo import core_algos

from composer_plugins.adapters.verl_plugin import estimators, loss, register
from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.verl import Key
from parity_tests.rigs.verl_wheels import start

ACME = """
from verl.trainer.ppo.core_algos import register_policy_loss

@register_policy_loss("composer")
def theirs(*_, **__):
    raise RuntimeError("the loss of acme")
"""


def theirs(*_: Any, **__: Any) -> None:
    """Another package's function."""


def message(key: str, place: str = f"{__name__}.theirs") -> str:
    return f"{key}: 'composer' is {place} in verl's registry, and not the function of composer-plugins"


PLACES: dict[str, Callable[[], Any]] = {
    "registration": register.register,
    "our config": lambda: ComposerPolicyLossConfig(loss_mode="composer"),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_replaced_policy_loss_is_an_error(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLACES[place]()
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "composer", theirs)
    with pytest.raises(ConfigError, match=f"^{message(Key.LOSS_MODE)}"):
        PLACES[place]()


def test_an_estimator_of_our_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="composer has already been registered"):  # verl's own, after us
        core_algos.register_adv_est("composer")(theirs)
    monkeypatch.setitem(core_algos.ADV_ESTIMATOR_REGISTRY, "composer", theirs)  # before us
    with pytest.raises(ConfigError, match=f"^{message(Key.ESTIMATOR)}"):
        register.register()


def test_names_that_are_not_ours_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("composer/of_acme", "composer_of_acme"):
        monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, name, theirs)
    for call in PLACES.values():
        call()


def test_our_own_functions_may_be_registered_again() -> None:
    """A module that is imported twice makes other functions, of the same names."""
    before = dict(core_algos.POLICY_LOSS_REGISTRY)
    for module in (loss, estimators, register):
        importlib.reload(module)
    core_algos.register_policy_loss("composer")(loss.policy_loss(None))
    try:
        for call in PLACES.values():
            call()
        assert not register.FAILURE
    finally:
        core_algos.POLICY_LOSS_REGISTRY.update(before)


@pytest.mark.slow
def test_one_that_is_registered_first_leaves_ours_out_in_words(tmp_path: Path) -> None:
    (tmp_path / "acme_losses.py").write_text(ACME)
    program = (
        "from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as names\n"
        "print(*sorted(name for name in names if name.startswith('composer')))\n"
        "from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig\n"
        "ComposerPolicyLossConfig()"
    )
    done = start(["-c", program], tmp_path, VERL_USE_EXTERNAL_MODULES="acme_losses")
    wanted = message(Key.LOSS_MODE, "acme_losses.theirs")
    assert done.returncode == 1 and done.stdout.split()[-1:] == ["composer"]
    assert f"composer-plugins is not registered in verl: ConfigError: {wanted}" in done.stderr
    assert f"composer_plugins.errors.ConfigError: {wanted}" in done.stderr
