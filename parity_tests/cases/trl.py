"""Mistakes in a config or a data set of TRL. The config is made, then the trainer, then the first step."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from datasets import Dataset
from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from composer_plugins.adapters.trl_mixin import (
    ComposerGRPOConfig,
    ComposerGRPOTrainer,
    ComposerLossMixin,
    ComposerParser,
)
from composer_plugins.errors import ComposerError
from composer_plugins.objective.resolve import examine
from parity_tests.cases.recorded import Row, Stage, findings_in_words, in_words, said
from parity_tests.cases.trl_trainers import Bypassing, mixed
from parity_tests.rigs import tiny, tool_calls
from parity_tests.rigs.tiny import GOOD

CONFIG, TRAINER, STEP = "making the config", "making the trainer", "the first step"
BOTH = {"hint_weight": 1.0, "replay_weight": 1.0}
SCRATCH = tempfile.TemporaryDirectory()
CHAT: dict[str, Any] = {"prompt": [{"role": "user", "content": "a?"}]}
ROLLOUTS = {"hint_weight": 1.0, "hint_source": "successful_rollout"}
SHORT = {
    "reprompt_template": "{prompt}{solution}{feedback}",
    "solution_template": "[{successful_previous_attempt}]",
}
FEEDBACK = {**ROLLOUTS, **SHORT, "include_environment_feedback": True}
HINT, WEIGHT = "privileged_context", "n_teachers_agreeing"
CPU = {"use_cpu": True, "bf16": False}
NO_LENGTH = {"max_completion_length": None}
SEQUENCE_MASK = {"use_vllm": True, "vllm_importance_sampling_mode": "sequence_mask"}
QV = {"target_modules": ["q_proj", "v_proj"]}
TOKENS = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
Make = Callable[[], Any]  # makes a mistake


class Case(NamedTuple):
    """A mistake: what is run until something is said, and the options that the doctor is given."""

    name: str
    stages: list[Stage]
    options: dict[str, Any] | None = None


def of_options(name: str, options: dict[str, Any]) -> Case:
    """A mistake in the options: the config is made, then the trainer."""
    config = partial(ComposerGRPOConfig, SCRATCH.name, **CPU, **options)
    return Case(name, [(CONFIG, config), (TRAINER, partial(tiny.trainer, **options))], options)


def of_rows(name: str, columns: dict[str, Any], *, every: bool = False) -> Case:
    """A mistake in columns of the last row, or of every row."""
    sound = {**GOOD, "n_teachers_agreeing": 1.0}
    wrong = sound | columns
    rows = [*[wrong if every else sound] * 3, wrong]
    # A rollout_func may return hints, so that the columns alone do not say that there are none.
    return Case(name, [(TRAINER, on(rows, scripted=not every, **BOTH))])


def without(column: str, **options: Any) -> Make:
    """Make a trainer on a data set without a column."""
    return on([{key: value for key, value in GOOD.items() if key != column}] * 4, **options)


def on(rows: list[dict[str, Any]], **options: Any) -> Make:
    """Make a trainer on these rows."""
    return lambda: tiny.trainer(dataset=rows, **options)


def evaluated(rows: Any, **options: Any) -> Make:
    """Make a trainer with an evaluation set that is wrong, beside a sound training set."""
    data = Dataset.from_list(rows) if isinstance(rows, list) else rows
    return on([GOOD] * 4, arguments={"eval_dataset": data}, per_device_eval_batch_size=4, **options)


def streamed(rows: list[dict[str, Any]]) -> Any:
    """A data set that has no length."""
    return Dataset.from_list(rows).to_iterable_dataset()


def with_template(template: str, **options: Any) -> Make:
    """Make a trainer on messages whose tokenizer has this chat template, and tokens for a tag."""
    tokenizer = tiny.tokenizer(template)
    tokenizer.add_tokens(["<t>", "</t>"])
    return on([GOOD | CHAT] * 4, arguments={"processing_class": tokenizer}, **options)


def parsed(yaml: str, *words: str) -> Make:
    """Read the options from a YAML file and from the command line."""

    def parse() -> None:
        (file := Path(SCRATCH.name) / "config.yaml").write_text(f"{yaml}\n")
        given = ["--config", str(file), "--output_dir", SCRATCH.name, *words]
        ComposerParser((ComposerGRPOConfig,)).parse_args_and_config(given)

    return parse


def rolled_out(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Make:
    """Make a batch with a rollout_func that returns what `change` makes of the scripted rollout."""
    return lambda: tiny.batch(tiny.with_rollout(change))


def adapted(adapter: Any) -> Make:
    """Make a trainer with an adapter without which the model is not the initial policy."""
    return lambda: tiny.trainer(hint_weight=1.0, arguments={"peft_config": adapter})


def paired(**columns: Any) -> Make:
    """Make a trainer on pairs of tool calls with these columns."""
    return lambda: tool_calls.of_pairs(**columns)


def with_args(args: Any) -> None:
    """Make a trainer with this config."""
    ComposerGRPOTrainer(model=tiny.model(), reward_funcs=tiny.reward, args=args)


def no_end() -> None:
    """Make a trainer whose tokenizer does not say how a completion ends."""
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    tiny.trainer(replay_weight=1.0, arguments={"processing_class": tokenizer})


def encoder_decoder() -> None:
    """Make a trainer of another kind of model."""
    model = tiny.model()
    model.config.is_encoder_decoder = True
    tiny.trainer(hint_weight=1.0, policy_model=model)


def nan_teacher() -> None:
    """Train with a teacher that has no finite log-probabilities."""
    made = tiny.trainer(hint_weight=1.0)
    made._hint.teacher.model.lm_head.weight.data[4, 0] = float("nan")
    made.train()


def nan_rewards() -> None:
    """Train with one reward that is NaN."""

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float("nan") if i == 2 else 0.5 for i, _ in enumerate(completion_ids)]

    with patch.object(tiny, "reward", reward):
        tiny.trainer(policy="grpo", loss_type="dapo").train()


# Options of the config, and what the trainer says where the config says nothing.
OPTIONS: dict[str, dict[str, Any]] = {
    "a misspelt option": {"hint_wieght": 1.0},
    "a misspelt loss": {"policy": "grop"},
    "a misspelt parameter": {"policy": "grpo", "policy_params": {"clip_hihg": 0.28}},
    "a parameter among the options": {"policy": "grpo", "clip_high": 0.28},
    "a clip of 28 for 28 percent": {"policy": "grpo", "policy_params": {"clip_high": 28}},
    "TRL's default cap of cispo": {"policy": "cispo@trl"},
    "parameters without a policy": {"policy_params": {"clip_high": 0.28}},
    "a preference loss over the whole batch": {"replay_weight": 1.0, "replay_loss": "aot"},
    "a loss that needs the top k": {"policy": "dppo_topk_tv"},
    "a required parameter left out": {"policy": "opsm"},
    "TRL's clip beside a loss without one": {"policy": "reinforce", "epsilon": 0.1},
    "a negative clip": {"policy": "grpo", "policy_params": {"clip_low": -0.5}},
    "TRL's ratio of the sequence": {"policy": "grpo", "importance_sampling_level": "sequence"},
    "a misspelt loss_type": {"policy": "grpo", "loss_type": "dapoo"},
    "a loss of TRL's as the reduction": {"policy": "grpo", "loss_type": "cispo"},
    "TRL's KL beside a loss that has no mean": {"policy": "importance_sampling", "beta": 0.1},
    "Dr. GRPO without a length": {"policy": "dr_grpo", **NO_LENGTH},
    "one completion per prompt": {"num_generations": 1},
    "vLLM's weights beside a loss that has the rollout's ratio": {"policy": "dppo_tv", "use_vllm": True},
    "one vLLM weight per sequence beside VESPO": {"policy": "vespo", **SEQUENCE_MASK},
    "an advantage, as in verl": {"advantage": "rloo"},
    "a top k, as in verl": {"hint_weight": 1.0, "hint_top_k": 100},
    "a negative weight": {"hint_weight": -0.1},
    "a weight that is None": {"hint_weight": None},
    "all weights 0": {"policy_weight": 0.0},
    "options of the policy loss without its weight": {
        **{"hint_weight": 1.0, "policy_weight": 0.0, "policy": "gspo", "policy_params": {"clip_high": 0.3}},
        **{"beta": 0.5, "loss_type": "grpo"},
    },
    "a misspelt teacher": {"hint_weight": 1.0, "hint_teacher": "bse"},
    "a preference loss as the divergence": {"hint_weight": 1.0, "hint_divergence": "dpo"},
    "a parameter out of its range": {"hint_weight": 1.0, "hint_params": {"beta": 1.5}},
    "a parameter beyond float64": {"hint_weight": 1.0, "hint_params": {"temperature": 10**400}},
    "a top k above the vocabulary": {"hint_weight": 1.0, "hint_params": {"top_k": 9999}},
    "a rule for the rest, without a top k": {"hint_weight": 1.0, "hint_params": {"rest": "tail"}},
    "an option of the hint without its weight": {"hint_teacher": "ema"},
    "an EMA rate without an EMA": {"hint_weight": 1.0, "hint_ema_rate": 0.1},
    "a template without the hint": {"hint_weight": 1.0, "teacher_prompt_template": "{prompt}"},
    "a template with a format": {"hint_weight": 1.0, "teacher_prompt_template": "{privileged_context:d}"},
    "unused columns removed": {"hint_weight": 1.0, "remove_unused_columns": True},
    "an output head in float32": {"hint_weight": 1.0, "cast_lm_head_to_fp32": True},
    "a preference loss for single completions": {"replay_weight": 1.0, "replay_loss": "kto"},
    "a misspelt source of hints": {"hint_weight": 1.0, "hint_source": "succesful_rollout"},
    "a threshold that is NaN": {**ROLLOUTS, "success_reward_threshold": float("nan")},
    "a prompt without the solution": {**ROLLOUTS, "reprompt_template": "{prompt}"},
    "a solution without the attempt": {**ROLLOUTS, "solution_template": "{solution}"},
    "a template that does not end": {**ROLLOUTS, "feedback_template": "{"},
    "a threshold for hints of a column": {"hint_weight": 1.0, "success_reward_threshold": 0.5},
    "a template of a column beside rollouts": {**ROLLOUTS, "teacher_prompt_template": "{privileged_context}"},
    "a rule of the feedback without it": {**ROLLOUTS, "environment_feedback_only_without_solution": True},
    "a column of feedback that is not read": {**ROLLOUTS, **SHORT},
    "four mistakes at once": {
        **{"policy": "grpoo", "hint_weight": 1.0, "hint_divergence": "jsdd", "replay_weight": 1.0},
        **{"replay_params": {"bta": 1}, "hint_source": "colum"},
    },
    "two options that are not JSON": {"policy_params": "{", "hint_params": "["},
    "four options that do not go together": {
        **{"policy": "grpo", "replay_weight": 1.0, "replay_loss": "tpo", "loss_type": "cispo"},
        **{"importance_sampling_level": "sequence", "remove_unused_columns": True},
    },
    "two options of TRL's own losses": {"policy": "cispo@trl", "epsilon": 0.1, "delta": 3.0},
}

# Columns of the last row of a data set, whose others are sound.
ONE_ROW: dict[str, dict[str, Any]] = {
    "an empty hint": {"privileged_context": "  "},
    "a hint longer than the model takes": {"privileged_context": "1" * tiny.MAX_LENGTH},
    "an empty prompt": {"prompt": ""},
    "a completion of white space": {"rejected": " "},
    "a pair longer than the model takes": {"chosen": "1" * tiny.MAX_LENGTH},
    "a pair with one side": {"rejected": None},
    "a weight of a pair that is NaN": {"n_teachers_agreeing": float("nan")},
    "a weight of a pair beyond float32": {"n_teachers_agreeing": 1e39},
}

# Columns of every row.
ALL_ROWS: dict[str, dict[str, Any]] = {
    "no hint in any row": {"privileged_context": None},
    "None as the text of a hint": {"privileged_context": "None"},
    "the prompt as the hint": {"privileged_context": GOOD["prompt"]},
    "no pair in any row": {"chosen": None, "rejected": None, "n_teachers_agreeing": None},
    "pairs whose weights are 0": {"n_teachers_agreeing": 0.0},
    "more pairs than generations": {"chosen": ["1"] * 5, "rejected": ["2"] * 5, WEIGHT: None},
    "more pairs than weights": {"chosen": ["1", "2"], "rejected": ["3", "4"], WEIGHT: [1.0]},
    "chosen equals rejected": {"rejected": GOOD["chosen"]},
    "a completion with the end of sequence": {"chosen": "1<eos>"},
    "sides that repeat the prompt": {"chosen": "a?12", "rejected": "a?3"},
    "a question as the completion": {"chosen": [{"role": "user", "content": "1"}]},
    "a question as the completion of messages": {**CHAT, "chosen": [{"role": "user", "content": "1"}]},
    "a message without content": {"prompt": [{"role": "user", "content": None}]},
}

CUTS = "{% for m in messages %}{{ m['content'][:2] }}{% endfor %}"
COUNTS = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
OPENS = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<t>{% endif %}"
WITHOUT_A_HINT = [GOOD, GOOD | {"privileged_context": ""}]
LONG = [GOOD, GOOD | {"privileged_context": "1" * tiny.MAX_LENGTH}]
TWO, SEVEN = (GOOD | {"chosen": ["1"] * count, "rejected": ["2"] * count} for count in (2, 7))

# What is neither an option nor a row.
CONFIGS: dict[str, Make] = {
    "a misspelt option in YAML": parsed("hint_wieght: 1.0"),
    "a misspelt option of a command line": parsed("seed: 1", "--hint_wieght", "1"),
}
TRAINERS: dict[str, Make] = {
    "a data set without hints": without(HINT, hint_weight=1.0),
    "a data set without the worse side": without("rejected", replay_weight=1.0),
    "a data set without feedback": without(HINT, **FEEDBACK),
    "an empty hint in the evaluation set": evaluated(WITHOUT_A_HINT, hint_weight=1.0),
    "more pairs than an evaluation has generations": evaluated(
        [TWO], replay_weight=1.0, num_generations_eval=1
    ),
    "a config of TRL's own": lambda: with_args(GRPOConfig(SCRATCH.name, **CPU)),
    "no config": lambda: with_args(None),
    "our config in TRL's own trainer": lambda: tiny.trainer(
        GRPOTrainer, policy="gspo", loss_type="dapo", hint_weight=1.0
    ),
    "our config in a trainer derived from TRL's": lambda: tiny.trainer(type("MyTrainer", (GRPOTrainer,), {})),
    "the mixin in front of RLOOTrainer": lambda: type("Mine", (ComposerLossMixin, RLOOTrainer), {}),
    "the mixin behind the trainer": lambda: tiny.trainer(type("Mine", (GRPOTrainer, ComposerLossMixin), {})),
    "a chat template that cuts the hint off": with_template(
        CUTS, hint_weight=1.0, teacher_prompt_template="{prompt}{privileged_context}"
    ),
    "a chat template that rewrites the prompt": with_template(COUNTS, replay_weight=1.0),
    "a completion without its reasoning": with_template(OPENS, replay_weight=1.0),
    "a tokenizer without an end of sequence": no_end,
    "an encoder-decoder": encoder_decoder,
    "a learned prompt": adapted(PromptTuningConfig(**TOKENS)),
    "an adapter that changes the weights": adapted(LoraConfig(**QV, init_lora_weights="pissa")),
    "an adapter that trains biases": adapted(LoraConfig(**QV, bias="all")),
    "IA3 with random weights": adapted(IA3Config(**QV, feedforward_modules=[], init_ia3_weights=False)),
    "a model with a learned prompt": lambda: tiny.trainer(
        policy_model=get_peft_model(tiny.model(), PromptTuningConfig(**TOKENS)), replay_weight=1.0
    ),
    "a tool as a word": paired(tools="read"),
    "tools beside a prompt that is a string": paired(prompt="a?", chosen="1", rejected="2"),
    "a tool call without a function": paired(chosen=tool_calls.answer("", [{"name": "read"}])),
    "arguments that are not JSON": paired(chosen=tool_calls.answer(None, tool_calls.calls("{"))),
    "neither content nor a tool call": paired(chosen=tool_calls.answer(None, None)),
    "a pair of one tool call": paired(rejected=tool_calls.call("a")),
}
STEPS: dict[str, Make] = {
    "a streamed hint longer than the model takes": lambda: tiny.trainer(
        hint_weight=1.0, dataset=streamed(LONG), per_device_train_batch_size=8
    ).train(),
    "more streamed pairs than generations": lambda: evaluated(
        {"a": Dataset.from_list([TWO]), "b": streamed([TWO, SEVEN])}, replay_weight=1.0
    )().evaluate(),
    "a teacher with a weight that is NaN": nan_teacher,
    "a trainer whose compute_loss does not call _compute_loss": lambda: tiny.trainer(
        mixed(Bypassing), replay_weight=1.0
    ).train(),
    "a reward that is NaN": nan_rewards,
    "a mask of the hint of another length": rolled_out(
        lambda r: {"hint_mask": [[1, *ids] for ids in r["completion_ids"]]}
    ),
    "a mask of the hint that is not 0 or 1": rolled_out(
        lambda r: {"hint_mask": [[0.5] * len(ids) for ids in r["completion_ids"]]}
    ),
    # The student would be conditioned on one prompt and the teacher on another.
    "a rollout of another prompt": rolled_out(
        lambda r: {"prompt_ids": [[5, 6, *ids] for ids in r["prompt_ids"]]}
    ),
}
CASES: tuple[Case, ...] = (
    *(of_options(name, options) for name, options in OPTIONS.items()),
    *(of_rows(name, columns) for name, columns in ONE_ROW.items()),
    *(of_rows(name, columns, every=True) for name, columns in ALL_ROWS.items()),
    *(
        Case(name, [(when, make)])
        for when, table in ((CONFIG, CONFIGS), (TRAINER, TRAINERS), (STEP, STEPS))
        for name, make in table.items()
    ),
)


def row(case: Case) -> Row:
    """Make the mistake and write down what is said."""
    try:
        told = "" if case.options is None else findings_in_words(examine("trl", case.options).findings)
    except ComposerError as error:
        told = in_words(error)
    return Row(case.name, told, *said(case.stages))
