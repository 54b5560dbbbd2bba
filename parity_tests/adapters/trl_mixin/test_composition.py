"""The mixin among the other things a trainer does: evaluation, mixed precision, somebody's subclass."""

import copy
import re
import sys
import types
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from docs.generator.written import ROOT, part
from parity_tests.cases import trl_trainers as composition
from parity_tests.rigs import tiny

ALL = {"policy": "grpo", "hint_weight": 0.7, "replay_weight": 0.3}


def test_the_logged_losses_add_up_in_training_and_in_evaluation() -> None:
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    data = {"eval_dataset": Dataset.from_list(tiny.rows())}
    made = tiny.trainer(**ALL, **sizes, per_device_eval_batch_size=4, arguments=data)
    made.train()
    for prefix, entry in (("", made.state.log_history[0]), ("eval_", made.evaluate())):
        policy, hint, replay = (
            float(entry[f"{prefix}composer/{channel}/loss"]) for channel in ("policy", "hint", "replay")
        )
        assert float(entry[f"{prefix}loss"]) == pytest.approx(policy + 0.7 * hint + 0.3 * replay, rel=1e-3)
        assert f"{prefix}composer/replay/rewards/margins" in entry


def test_gradient_checkpointing_gives_the_same_gradient() -> None:
    (plain,) = tiny.gradients(tiny.trainer(**ALL))
    (checkpointed,) = tiny.gradients(tiny.trainer(**ALL, gradient_checkpointing=True))
    assert tiny.relative_difference(plain, checkpointed) <= 1e-6


@cache
def own(row: composition.Row, channel: str = "") -> torch.Tensor:
    """The gradient of the first step of a row's trainer behind the mixin, with a channel."""
    options = composition.CHANNELS[channel] if channel else {}
    return tiny.gradients(tiny.trainer(composition.mixed(row.trainer), **options))[0]


@cache
def alone(channel: str) -> torch.Tensor:
    """The gradient of a channel without the trainer's own loss."""
    options = composition.CHANNELS[channel]
    weight = 1.0 if "policy" in options else 0.0
    return tiny.gradients(tiny.trainer(**options, policy_weight=weight))[0]


def pairs(*, refused: bool) -> list[Any]:
    """Each trainer of the table with each channel that it refuses, or with each that works."""
    return [
        pytest.param(row, channel, id=f"{row.trainer.__name__}, {channel}")
        for row in composition.ROWS
        for channel in composition.CHANNELS
        if (channel in row.refused) is refused
    ]


@pytest.mark.filterwarnings("ignore:epsilon. it is 0.2, GRPO's default")
@pytest.mark.parametrize(("row", "channel"), pairs(refused=False))
def test_a_trainer_keeps_its_own_gradient_and_a_channel_adds_its_own(
    row: composition.Row, channel: str
) -> None:
    options, found = composition.CHANNELS[channel], own(row, channel)
    if not options:
        (expected,) = tiny.gradients(tiny.trainer(row.trainer, GRPOConfig))
        assert torch.equal(found, expected)
    elif "policy" in options:
        # Without advantages what remains of the trainer's own loss are the terms that they do not enter.
        with patch.object(tiny, "reward", lambda completion_ids, **_: [0.5] * len(completion_ids)):
            (rest,) = tiny.gradients(tiny.trainer(row.trainer, GRPOConfig))
        assert tiny.relative_difference(alone(channel) + rest, found) <= tiny.FLOAT32
    else:
        assert tiny.relative_difference(own(row) + alone(channel), found) <= tiny.FLOAT32


@pytest.mark.parametrize(("row", "channel"), pairs(refused=True))
def test_what_does_not_work_is_one_error_that_names_the_trainer(row: composition.Row, channel: str) -> None:
    assert row.trainer.__name__ in str(composition.refusal(row, channel))


def test_a_trainer_of_trl_that_is_not_in_the_table_is_refused() -> None:
    others = composition.other_trainers()
    assert {"RLOOTrainer", "SDPOTrainer"} <= {*others}
    for name, trainer in others.items():
        with pytest.raises(ConfigError, match=rf"{name} has not been tested with the channels; derive it"):
            composition.mixed(trainer)


def test_the_versions_of_the_page_are_those_that_the_messages_name() -> None:
    page = (ROOT / "docs/trl_options.md").read_text()
    assert re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE) == list(upstream.TESTED)


def test_the_page_has_the_trainers_and_channels_of_these_tests() -> None:
    part("docs/trl_options.md", "composition").check()


def test_gmpo_is_a_policy_of_ours_too_and_its_own_clip_range_is_asked_for() -> None:
    """GMPOTrainer's loss is policy='gmpo', and its config has epsilon=0.4."""
    with pytest.warns(ComposerWarning, match="epsilon: it is 0.2, .* own is 0.4; set it to 0.4"):
        tiny.trainer(composition.mixed(GMPOTrainer))
    several = {"max_steps": 3, "num_iterations": 3, "learning_rate": 3e-2}
    theirs = tiny.gradients(tiny.trainer(composition.mixed(GMPOTrainer), epsilon=0.4, **several))
    ours = tiny.gradients(tiny.trainer(policy="gmpo", **several))
    assert max(map(tiny.relative_difference, theirs, ours)) <= tiny.FLOAT32


class Filtering(GRPOTrainer):
    """Drops the last row."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        return {name: value[:-1] if value.dim() else value for name, value in output.items()}


class Generating(GRPOTrainer):
    """Makes its own rollouts and scores."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return {"prompt_ids": torch.ones(len(inputs), 2)}


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (Filtering, "returns 15 completions for 16 rows, so it is not known which hint and pair"),
        (Generating, "its rollouts bypass ComposerLossMixin._calculate_rewards, from which the channels"),
    ],
)
def test_rollouts_that_rows_do_not_belong_to_are_an_error(trainer: type, message: str) -> None:
    error = composition.error_of(trainer, {"hint_weight": 1.0})
    assert error is not None and message in str(error)


class Resampling(GRPOTrainer):
    """Replaces the first group by the second one, as dynamic sampling does."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return super()._generate_and_score_completions([*inputs[4:8], *inputs[4:]])


def test_rollouts_of_other_rows_than_those_of_the_batch_are_an_error() -> None:
    made = tiny.trainer(composition.mixed(Resampling), hint_weight=1.0, scripted=False)
    with pytest.raises(DataError, match="^MyResampling: it returned prompt_ids that are not the row"):
        made.train()


def test_rloo_trainers_gradient_is_that_of_the_options_of_the_page() -> None:
    """G is 4. RLOO's KL, which it subtracts from the rewards, is off."""
    line = '`policy="rloo"`, `scale_rewards="none"` and `policy_weight=G / (G - 1)`, where'
    assert line in (ROOT / "docs/trl_options.md").read_text()

    def generate(self: Any, prompt_ids: Any, *_: Any) -> Any:
        return tiny.rollout([self._tokenizer.decode(ids) for ids in prompt_ids], self)["completion_ids"]

    with patch.object(RLOOTrainer, "_generate_single_turn", generate):
        (theirs,) = tiny.gradients(tiny.trainer(RLOOTrainer, RLOOConfig, scripted=False, beta=0.0))
    (ours,) = tiny.gradients(tiny.trainer(policy="rloo", scale_rewards="none", policy_weight=4 / 3))
    assert tiny.relative_difference(theirs, ours) <= tiny.FLOAT32


def test_truncated_completions_push_in_no_channel_but_replay() -> None:
    options = {"mask_truncated_completions": True, "hint_weight": 1.0}
    inputs = tiny.batch(tiny.trainer(**options))
    empty = inputs["completion_mask"].sum(1) == 0
    assert empty.any() and not empty.all()
    assert not inputs["hint_mask"][empty].any()


def test_the_input_rows_are_left_as_they_were() -> None:
    made = tiny.trainer(**ALL)
    rows = [row for row in tiny.rows() for _ in range(4)]
    before = copy.deepcopy(rows)
    made.model.train()
    made._generate_and_score_completions(rows)
    assert rows == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo makes warnings of its own, and an error of each
@pytest.mark.parametrize("model", [tiny.model, tiny.absolute_model])
def test_a_compiled_model_gives_the_gradient_of_the_uncompiled_one(model: Any) -> None:
    """Of all three channels. `inductor` generates code for minutes; `eager` runs what dynamo captured."""
    (plain,) = tiny.gradients(tiny.trainer(**ALL, policy_model=model()))
    made = tiny.trainer(**ALL, policy_model=model(), torch_compile=True, torch_compile_backend="eager")
    (compiled,) = tiny.gradients(made)
    assert type(made.model_wrapped).__name__ == "OptimizedModule"
    assert tiny.relative_difference(plain, compiled) <= tiny.FLOAT32


def liger(model: torch.nn.Module, **config: Any) -> None:
    """A double of Liger's patch of a model, whose Triton kernels need a GPU: its norms, with the same values.

    Its fused cross entropy would replace the model's forward pass, and so the log-probabilities.
    """
    assert config["fused_linear_cross_entropy"] is False
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module)
    model.patched = True


def _norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden, module.weight.shape, module.weight, module.variance_epsilon)


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated")
def test_ligers_layers_leave_the_channels_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,) = tiny.gradients(tiny.trainer(**ALL))
    module = types.ModuleType("liger_kernel.transformers")
    monkeypatch.setattr(module, "_apply_liger_kernel_to_instance", liger, raising=False)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", module)
    monkeypatch.setattr("transformers.integrations.liger.is_liger_kernel_available", lambda: True)
    made = tiny.trainer(**ALL, use_liger_kernel=True)
    (patched,) = tiny.gradients(made)
    assert made.model.patched
    assert tiny.relative_difference(plain, patched) <= tiny.FLOAT32
