"""Mistakes in a config or a data set of TRL. The config is made, then the trainer, then the first step."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer
from composer_plugins.errors import ComposerError
from composer_plugins.objective.resolve import examine
from parity_tests.adapters.trl_mixin.test_bad_input import GOOD
from parity_tests.cases.recorded import Row, Stage, findings_in_words, in_words, replaced, said
from parity_tests.cases.trl_trainers import Bypassing, mixed
from parity_tests.rigs import tiny

CONFIG, TRAINER, STEP = "making the config", "making the trainer", "the first step"
BOTH = {"hint_weight": 1.0, "replay_weight": 1.0}


class Case(NamedTuple):
    """A mistake in the options, in a row of the data, or in what the trainer is given."""

    name: str
    options: dict[str, Any] = {}
    rows: dict[str, Any] | None = None  # columns of a row, in place of the sound ones; None removes one
    change: str = ""  # as written, where it is not the options
    first_row_only: bool = True
    make: Callable[[], Any] | None = None  # another way to make the trainer
    trains: bool = False  # whether it shows in the first step only


def data(name: str, rows: dict[str, Any], *, all_rows: bool = False, options: dict[str, Any] = BOTH) -> Case:
    """A mistake in the data set, whose other rows are sound."""
    change = ", ".join(f"{column}={value!r}" for column, value in rows.items())
    return Case(name, options, rows, change, first_row_only=not all_rows)


def without(column: str) -> Case:
    """A data set without a column that a channel needs."""
    weight = "hint_weight" if column == "privileged_context" else "replay_weight"
    rows = [{key: value for key, value in GOOD.items() if key != column}] * 4
    return Case(
        f"a data set without the column {column}",
        change=f"{weight}=1.0",
        make=lambda: tiny.trainer(dataset=Dataset.from_list(rows), **{weight: 1.0}),
    )


def _no_end() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    tiny.trainer(replay_weight=1.0, arguments={"processing_class": tokenizer})


def _plain() -> None:
    args = GRPOConfig(output_dir=SCRATCH.name, use_cpu=True, bf16=False)
    ComposerGRPOTrainer(model=tiny.model(), reward_funcs=tiny.reward, args=args)


def _ours_in_a_plain_trainer() -> None:
    tiny.trainer(GRPOTrainer, policy="gspo", loss_type="dapo", hint_weight=1.0)


def _cut_off() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'][:2] }}{% endfor %}"
    row = GOOD | {"prompt": [{"role": "user", "content": GOOD["prompt"]}]}
    given = {"dataset": Dataset.from_list([row] * 4), "arguments": {"processing_class": tokenizer}}
    tiny.trainer(hint_weight=1.0, teacher_prompt_template="{prompt}{privileged_context}", **given)


def _nan_teacher() -> None:
    made = tiny.trainer(hint_weight=1.0)
    made._hint.teacher.model.lm_head.weight.data[4, 0] = float("nan")
    made.train()


def _encoder_decoder() -> None:
    model = tiny.model()
    model.config.is_encoder_decoder = True
    tiny.trainer(hint_weight=1.0, policy_model=model)


def _nan_rewards() -> None:
    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float("nan") if i == 2 else 0.5 for i, _ in enumerate(completion_ids)]

    with patch.object(tiny, "reward", reward):
        tiny.trainer(policy="grpo", loss_type="dapo").train()


def _evaluated() -> None:
    bad = Dataset.from_list([GOOD, GOOD | {"privileged_context": ""}])
    sound = Dataset.from_list([GOOD] * 4)
    tiny.trainer(
        hint_weight=1.0, dataset=sound, per_device_eval_batch_size=4, arguments={"eval_dataset": bad}
    )


def _parsed() -> None:
    from composer_plugins.adapters.trl_mixin import ComposerParser

    file = Path(SCRATCH.name) / "config.yaml"
    file.write_text("hint_wieght: 1.0\n")
    words = ["--config", str(file), "--output_dir", SCRATCH.name]
    ComposerParser((ComposerGRPOConfig,)).parse_args_and_config(words)


SCRATCH = tempfile.TemporaryDirectory()
GRPO = {"policy": "grpo"}
CASES: tuple[Case, ...] = (
    Case("a misspelt option", {"hint_wieght": 1.0}),
    Case("a misspelt option in YAML", change="hint_wieght: 1.0", make=_parsed),
    Case("a misspelt loss", {"policy": "grop"}),
    Case("a misspelt dialect", {"policy": "cispo@tlr"}),
    Case("a misspelt parameter", {"policy": "grpo", "policy_params": {"clip_hihg": 0.28}}),
    Case("verl's name of a parameter", {**GRPO, "policy_params": {"clip_ratio_c": 3.0}}),
    Case("TRL's name of a parameter", {**GRPO, "policy_params": {"epsilon": 0.1}}),
    Case("TRL's cap of cispo as a parameter", {"policy": "cispo", "policy_params": {"epsilon_high": 5.0}}),
    Case("verl's name of TRL's KL coefficient", {"kl_loss_coef": 0.001}),
    Case("verl's name of TRL's clip", {"clip_ratio_high": 0.28}),
    Case("a parameter among the options", {**GRPO, "clip_high": 0.28}),
    Case("a clip of 28 for 28 percent", {**GRPO, "policy_params": {"clip_high": 28}}),
    Case(
        "PPO's clip beside a ratio of the sequence", {"policy": "gspo", "epsilon": 0.2, "epsilon_high": 0.28}
    ),
    Case("PPO's clip beside TRL's cap of cispo", {"policy": "cispo", "epsilon_high": 0.28}),
    Case("TRL's default cap of cispo", {"policy": "cispo@trl"}),
    Case("parameters without a policy", {"policy_params": {"clip_high": 0.28}}),
    Case("a parameter as a string", {"policy": "grpo", "policy_params": {"clip_high": "0.28"}}),
    Case("parameters that are not JSON", {"policy": "grpo", "policy_params": "{clip_high: 0.28"}),
    Case("a preference loss as the policy", {"policy": "dpo"}),
    Case("a dotted path", {"policy": "my_package.losses.my_loss"}),
    Case("a loss that does not import", {"policy": "my_package.losses:my_loss"}),
    Case("a loss over the whole batch", {"policy": "clip_cov"}),
    Case("a loss that needs the top k", {"policy": "dppo_topk_tv"}),
    Case("a required parameter left out", {"policy": "opsm"}),
    Case("TRL's clip and ours", {**GRPO, "epsilon_high": 0.3, "policy_params": {"clip_high": 0.4}}),
    Case("TRL's clip beside a loss without one", {"policy": "reinforce", "epsilon": 0.1}),
    Case("a percentage", {**GRPO, "epsilon": 20.0}),
    Case("TRL's delta beside a loss without it", {"policy": "gspo_token", "delta": 2.0}),
    Case("TRL's ratio of the sequence", {**GRPO, "importance_sampling_level": "sequence"}),
    Case("a misspelt loss_type", {**GRPO, "loss_type": "dapoo"}),
    Case("a loss of TRL's as the reduction", {**GRPO, "loss_type": "cispo"}),
    Case("TRL's KL beside a loss that has no mean", {"policy": "importance_sampling", "beta": 0.1}),
    Case(
        "vLLM's weights beside a loss that has the rollout's ratio", {"policy": "dppo_tv", "use_vllm": True}
    ),
    Case("an advantage, as in verl", {"advantage": "rloo"}),
    Case("a top k, as in verl", {"hint_weight": 1.0, "hint_top_k": 100}),
    Case("an old policy, as in PRIME-RL", {**GRPO, "old_policy": "rollout"}),
    Case("a rollout correction, as in PRIME-RL", {"policy": "reinforce", "rollout_correction": "tis"}),
    Case("a negative weight", {"hint_weight": -0.1}),
    Case("a weight that is None", {"hint_weight": None}),
    Case("a weight that is NaN", {"replay_weight": float("nan")}),
    Case("all weights 0", {"policy_weight": 0.0}),
    Case("a misspelt teacher", {"hint_weight": 1.0, "hint_teacher": "bse"}),
    Case("a misspelt divergence", {"hint_weight": 1.0, "hint_divergence": "jds"}),
    Case("a preference loss as the divergence", {"hint_weight": 1.0, "hint_divergence": "dpo"}),
    Case("a parameter out of its range", {"hint_weight": 1.0, "hint_params": {"beta": 1.5}}),
    Case("a rule for the rest, without a top k", {"hint_weight": 1.0, "hint_params": {"rest": "tail"}}),
    Case("an option of the hint without its weight", {"hint_teacher": "ema"}),
    Case("an EMA rate without an EMA", {"hint_weight": 1.0, "hint_ema_rate": 0.1}),
    Case("a decay as the EMA rate", {"hint_weight": 1.0, "hint_teacher": "ema", "hint_ema_rate": 0.999}),
    Case("a template without the hint", {"hint_weight": 1.0, "teacher_prompt_template": "{prompt}"}),
    Case("unused columns removed", {"hint_weight": 1.0, "remove_unused_columns": True}),
    Case("a misspelt preference loss", {"replay_weight": 1.0, "replay_loss": "ddpo"}),
    Case("a preference loss for single completions", {"replay_weight": 1.0, "replay_loss": "kto"}),
    Case("options of replay without its weight", {"replay_params": {"beta": 0.3}}),
    without("privileged_context"),
    without("chosen"),
    data("an empty hint", {"privileged_context": "  "}),
    data("a hint longer than the model takes", {"privileged_context": "1" * tiny.MAX_LENGTH}),
    data("no hint in any row", {"privileged_context": None}, all_rows=True),
    data("an empty prompt", {"prompt": ""}),
    data("a pair with one side", {"rejected": None}),
    data("pairs of different number", {"chosen": ["1", "2"], "rejected": ["3"]}, all_rows=True),
    data("chosen equals rejected", {"rejected": GOOD["chosen"]}, all_rows=True),
    data("sides that repeat the prompt", {"chosen": "a?12", "rejected": "a?3"}, all_rows=True),
    data("a negative weight of a pair", {"n_teachers_agreeing": -1.0}),
    data("a question as the completion", {"chosen": [{"role": "user", "content": "1"}]}, all_rows=True),
    Case("an empty hint in the evaluation set", change="eval_dataset=...", make=_evaluated),
    Case("a config of TRL's own", change="args=GRPOConfig(...)", make=_plain),
    Case(
        "our config in TRL's own trainer",
        change="GRPOTrainer(args=ComposerGRPOConfig(...))",
        make=_ours_in_a_plain_trainer,
    ),
    Case("a chat template that cuts the hint off", change="m['content'][:2]", make=_cut_off),
    Case("a teacher with a weight that is NaN", change="hint_weight=1.0", make=_nan_teacher, trains=True),
    Case(
        "the mixin in front of RLOOTrainer",
        change="class Mine(ComposerLossMixin, RLOOTrainer)",
        make=lambda: mixed(RLOOTrainer),
    ),
    Case(
        "a trainer whose compute_loss does not call _compute_loss",
        change="class Mine(ComposerLossMixin, MyGRPOTrainer), replay_weight=1.0",
        make=lambda: tiny.trainer(mixed(Bypassing), replay_weight=1.0).train(),
        trains=True,
    ),
    Case("a tokenizer without an end of sequence", change="eos_token=None", make=_no_end),
    Case("an encoder-decoder", change="model=T5ForConditionalGeneration", make=_encoder_decoder),
    Case(
        "a reward that is NaN",
        change="reward_funcs=[lambda ...: float('nan')]",
        make=_nan_rewards,
        trains=True,
    ),
)


def row(case: Case) -> Row:
    """Make the mistake and write down what is said."""
    change = case.change or ", ".join(f"{key}={value!r}" for key, value in case.options.items())
    change = change.replace("1" * tiny.MAX_LENGTH, "111...")
    told = "" if case.make is not None or case.rows is not None else _told(case.options)
    return replaced(Row(case.name, change, told, *said(_stages(case))), {SCRATCH.name: "DIR"})


def _told(options: dict[str, Any]) -> str:
    """What the doctor says of these options."""
    try:
        return findings_in_words(examine("trl", options).findings)
    except ComposerError as error:
        return in_words(error)


def _stages(case: Case) -> Iterator[Stage]:
    if case.make is not None:
        yield (STEP if case.trains else CONFIG if case.make is _parsed else TRAINER), case.make
        return
    if case.rows is None:
        yield (
            CONFIG,
            lambda: ComposerGRPOConfig(output_dir=SCRATCH.name, use_cpu=True, bf16=False, **case.options),
        )
    wrong = [{**GOOD, "n_teachers_agreeing": 1.0, **(case.rows or {})}]
    sound = wrong if not case.first_row_only else [{**GOOD, "n_teachers_agreeing": 1.0}]
    rows = Dataset.from_list([*sound * 3, *wrong]) if case.rows is not None else None
    yield TRAINER, lambda: tiny.trainer(dataset=rows, **case.options)
