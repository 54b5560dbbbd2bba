"""The catalogue says what the kernels do; these tests hold the two together."""

import inspect

import pytest

from composer_plugins.catalogue import Loss, Parameter
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError
from composer_plugins.hookspecs import hookimpl
from composer_plugins.plugins import get_plugin_manager, losses

LOSSES = losses()


@pytest.mark.parametrize("name", LOSSES)
def test_a_row_has_the_parameters_and_defaults_of_its_kernel(name: str) -> None:
    loss = LOSSES[name]
    signature = inspect.signature(loss.kernel()).parameters.values()
    keywords = {p.name: p.default for p in signature if p.kind is inspect.Parameter.KEYWORD_ONLY}
    keywords.pop("region_logprobs", None)  # a tensor, which an adapter passes and a config cannot
    assert {n: p.default for n, p in loss.parameters.items()} == keywords


@pytest.mark.parametrize("name", LOSSES)
def test_a_row_names_the_tensors_its_kernel_takes_in_order(name: str) -> None:
    loss = LOSSES[name]
    signature = inspect.signature(loss.kernel()).parameters.values()
    tensors = [p.name for p in signature if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    mask = [] if loss.kind == "preference" else ["mask"]
    assert [*loss.needs, *mask] == tensors


@pytest.mark.parametrize("name", LOSSES)
def test_the_defaults_of_a_row_pass_its_own_check(name: str) -> None:
    loss = LOSSES[name]
    assert loss.check({n: p.default for n, p in loss.parameters.items()}) is not None


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("0.2", "a string"),
        (True, "a bool"),
        (float("nan"), "not a number"),
        (-0.1, "below the range"),
        (1.1, "above the range"),
        (None, "None, where a number is the default"),
    ],
)
def test_a_value_the_kernel_cannot_take_is_refused(value: object, why: str) -> None:
    with pytest.raises(ConfigError, match="wanted a finite number"):
        Parameter(0.2, "a clip", low=0, high=1).check("clip_low", value)


def test_a_name_registered_twice_is_an_error() -> None:
    class Twice:
        @hookimpl
        def register_losses(self, register) -> None:  # type: ignore[no-untyped-def]
            register(LOSSES["grpo"])

    manager = get_plugin_manager()
    manager.register(Twice())
    with pytest.raises(ConfigError, match="'grpo' is registered twice"):
        losses(manager)


def test_another_plugins_loss_stands_beside_ours() -> None:
    mine = Loss("mine", "policy", "nowhere:mine", "a loss", "a paper", ("logprobs", "old_logprobs"), {})

    class Plugin:
        @hookimpl
        def register_losses(self, register) -> None:  # type: ignore[no-untyped-def]
            register(mine)

    manager = get_plugin_manager()
    manager.register(Plugin())
    assert losses(manager)["mine"] is mine
    assert set(losses(manager)) == {*LOSSES, "mine"}


def test_the_frameworks_own_policy_is_only_known_where_it_is_offered() -> None:
    assert ComposerConfig.parse({"policy": "trl"}, untouched="trl").policy == "trl"
    with pytest.raises(ConfigError, match="unknown policy 'trl'"):
        ComposerConfig.parse({"policy": "trl"})


def test_an_unknown_name_without_a_near_match_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match="unknown replay_loss 'xyz'; known: dpo, simpo"):
        ComposerConfig.parse({"replay_loss": "xyz"})


def test_a_value_of_the_wrong_type_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"^hint_weight is 'much': input should be a valid number"):
        ComposerConfig.parse({"hint_weight": "much"})
