"""The options of a config are read once, each loss is looked up once, and a process loads little."""

import copy
import pickle
from types import FrameType

import pytest

from composer_plugins.errors import ComposerWarning, ConfigError
from parity_tests.rigs import tiny
from parity_tests.rigs.calls import calls, qualified
from parity_tests.rigs.loaded import check_loaded
from parity_tests.rigs.tiny import config

BOTH = {"policy": "cispo", "hint_weight": 1.0, "replay_weight": 1.0}


def of_the_adapter(frame: FrameType) -> str:
    """The name of a function, but not of those that make the tiny model and its tokenizer."""
    return "" if frame.f_code.co_filename.endswith("probe.py") else qualified(frame)


def test_a_trainer_parses_its_options_once_and_looks_up_each_loss_once() -> None:
    def make() -> None:
        tiny.trainer(**BOTH, dataset=tiny.rows(8))

    make()  # what is kept for the whole process
    found = calls(make, of_the_adapter)
    assert (found["ComposerConfig.parse"], found["choose"]) == (1, 3)
    assert found["ComposerGRPOConfig._resolve"] == 1
    assert sum(found.values()) < 960, found.most_common(20)


def test_a_step_reads_no_option() -> None:
    made = tiny.trainer(**BOTH, max_steps=2)
    made.train()
    inputs = tiny.batch(made)
    found = calls(lambda: made._compute_loss(made.model, inputs), of_the_adapter)
    assert not {name for name in found if name.startswith(("ComposerGRPOConfig.", "ComposerConfig."))}


def test_an_option_that_is_changed_later_is_read_anew() -> None:
    made = config(policy="gspo")
    first = made.resolved
    assert made.resolved is first
    made.policy, made.policy_params = "grpo", {"clip_low": 0.1}
    assert made.resolved.policy.params == {"clip_low": 0.1}
    made.policy = "grop"
    with pytest.raises(ConfigError, match="unknown policy loss 'grop'"):
        _ = made.resolved


def test_a_copy_has_the_options_and_not_what_they_were_read_as() -> None:
    made = config(policy="gspo", hint_weight=0.5)
    for same in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert "_resolved" not in vars(same) and "_resolved" in vars(made)
        assert same.resolved.composer == made.resolved.composer


def test_the_warnings_of_a_config_come_once() -> None:
    with pytest.warns(ComposerWarning) as warned:
        made = config(hint_teacher="ema")
        tiny.trainer(config=lambda **_: made)
    assert len([one for one in warned if one.category is ComposerWarning]) == 1


def test_a_trainer_loads_little_of_ours() -> None:
    check_loaded("adapters.trl_mixin.mixin", "trl", 12_500)
