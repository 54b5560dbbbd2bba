"""Mistakes of which a message is not all: cases/trl.py has the others, and what is said of each."""

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import (
    ComposerGRPOConfig,
    ComposerLossMixin,
    ComposerParser,
    before_training,
)
from composer_plugins.errors import ComposerWarning, DataError
from parity_tests.rigs import tiny
from parity_tests.rigs.tiny import config


def test_our_config_has_a_log_level_for_a_script_that_asks_for_it() -> None:
    assert config().get_process_log_level() > 0


@pytest.mark.filterwarnings("ignore:train_dataset. in 2 of 4 hints the teacher's prompt has the same tokens")
def test_a_chat_template_that_cuts_the_hint_off_gives_no_hint() -> None:
    """Teacher and policy would see the same tokens in row 0, and its hint would still count."""
    tokenizer = tiny.tokenizer("{% for m in messages %}{{ m['content'][:4] }}{% endfor %}")
    rows = [
        {"prompt": [{"role": "user", "content": text}], "privileged_context": "[12]"}
        for text in ("aaaa?", "b?")
    ]
    options = {"hint_weight": 1.0, "teacher_prompt_template": "{prompt}{privileged_context}"}
    arguments = {"processing_class": tokenizer}
    made = tiny.trainer(**options, dataset=rows * 2, arguments=arguments, scripted=False)
    with pytest.warns(ComposerWarning, match="hint_weight: in 8 of 16 rows of a batch the teacher's prompt"):
        inputs = tiny.batch(made)
    made._compute_loss(made.model, inputs)
    assert made._metrics["train"]["composer/hint/row_frac"] == [0.5]


class Weighing(GRPOTrainer):
    """A trainer that passes a weight of each token where TRL has a mask."""

    name: str

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(*args, **kwargs)
        return output | {self.name: 0.5 * output["completion_mask"]}


@pytest.mark.parametrize("name", ["completion_mask", "tool_mask"])
@pytest.mark.parametrize("options", [{"policy": "grpo"}, {"hint_weight": 1.0}], ids=["policy", "hint"])
def test_weights_in_the_place_of_a_mask_are_an_error(options: dict[str, Any], name: str) -> None:
    made = tiny.trainer(type("Mine", (ComposerLossMixin, Weighing), {"name": name}), **options)
    with pytest.raises(DataError, match=f"^{name}: it holds 0.5, and a mask holds 0 and 1; pass"):
        made.train()


def test_yaml_and_command_line_make_a_config(tmp_path: Path) -> None:
    yaml = tmp_path / "config.yaml"
    yaml.write_text(
        "policy: grpo\npolicy_params: {clip_high: 0.28}\nhint_weight: 1.0\nuse_cpu: true\nbf16: false\n"
        "hint_params: {beta: 0.1}\nreplay_weight: 0.2\n"
    )
    words = ["--config", str(yaml), "--output_dir", str(tmp_path), "--hint_weight", "0.7"]
    words += ["--replay_params", '{"beta": 0.3}', "--loss_type", "dr_grpo"]
    (made,) = ComposerParser((ComposerGRPOConfig,)).parse_args_and_config(words)
    assert made.resolved.policy.params == {"clip_high": 0.28}
    assert (made.resolved.composer.hint_weight, made.loss_type) == (0.7, "dr_grpo")
    assert made.resolved.composer.hint_params == {"beta": 0.1}
    assert made.resolved.composer.replay_params == {"beta": 0.3}


@pytest.mark.parametrize(
    "options",
    [
        {"hint_teacher": "ema", "hint_weight": 0.1},
        {"replay_params": {"beta": 0.3}, "replay_weight": 0.1},
        {"teacher_prompt_template": "{privileged_context}", "hint_weight": 0.1},
        {"policy": "dr_grpo@trl"},
        {"policy": "gspo", "policy_params": {"clip_high": 3e-4}, "loss_type": "grpo", "policy_weight": 0.5},
        {"policy": "grpo", "policy_params": {"clip_high": 10.0}},  # as DeepSeek-R1
        {"policy_weight": 0.0, "hint_weight": 1.0},
    ],
    ids=str,
)
def test_options_that_act_are_no_warning(options: dict[str, Any]) -> None:
    config(**options)  # a warning is an error here


def test_the_check_of_a_large_data_set_shows_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(before_training, "SHOWN_AFTER", 0.0)
    tiny.trainer(hint_weight=1.0, disable_tqdm=False)
    assert "checking the hint columns of train_dataset" in capsys.readouterr().err
    tiny.trainer(hint_weight=1.0, disable_tqdm=True)
    assert "checking" not in capsys.readouterr().err
