"""Each mistake gets one clear error, before training starts."""

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer

from composer_plugins.adapters.trl_mixin import (
    ComposerGRPOConfig,
    ComposerGRPOTrainer,
    ComposerLossMixin,
    ComposerParser,
)
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.findings import ComposerWarning
from parity_tests.rigs import tiny

GOOD = {"prompt": "a?", "privileged_context": "[12]", "chosen": "12", "rejected": "3"}


def config(**options: Any) -> ComposerGRPOConfig:
    return ComposerGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hint_wieght": 1.0}, "hint_wieght: unknown option 'hint_wieght'; did you mean 'hint_weight'?"),
        ({"advantage": "rloo"}, "advantage: it is not available here, because TRL computes the advantages"),
        ({"policy": "grop"}, "policy: unknown policy loss 'grop'; did you mean 'grpo'?"),
        ({"hint_divergence": "jds"}, "hint_divergence: unknown divergence 'jds'; did you mean 'jsd'?"),
        ({"hint_teacher": "bse"}, "hint_teacher: unknown value 'bse'; did you mean 'base'?"),
        ({"replay_loss": "ddpo"}, "replay_loss: unknown preference loss 'ddpo'; did you mean 'dpo'?"),
        ({"policy": "cispo@tlr"}, "policy: unknown dialect 'cispo@tlr'; did you mean 'cispo@trl'"),
        (
            {"policy": "grpo", "loss_type": "dapoo"},
            "loss_type: unknown loss_type 'dapoo'; did you mean 'dapo'",
        ),
        ({"policy": "grpo", "policy_params": {"clip_hihg": 1}}, "did you mean 'clip_high'?"),
        ({"policy_params": {"clip_high": 0.3}}, "policy_params: policy='trl' is the framework's own loss"),
        ({"hint_params": {"beta": 1.5}}, "hint_params.beta: it is 1.5; set a finite number in [0, 1]"),
        ({"hint_weight": float("nan")}, "hint_weight: it is nan"),
        ({"replay_weight": float("inf")}, "replay_weight: it is inf"),
        ({"policy_weight": -1.0}, "policy_weight: it is -1.0"),
        ({"hint_ema_rate": 0.0}, "hint_ema_rate: it is 0.0"),
        ({"teacher_prompt_template": "{prompt}"}, "write {privileged_context}"),
        (
            {"policy": "grpo", "loss_type": "cispo"},
            "loss_type: 'cispo' is a loss of TRL's own",
        ),
        (
            {"policy": "dr_grpo", "scale_rewards": "none", "max_completion_length": None},
            "max_completion_length: it is None, and policy='dr_grpo' divides the loss of a completion by it",
        ),
        *(
            (
                {"policy": policy, "loss_type": "dr_grpo", "max_completion_length": None},
                "max_completion_length: it is None, and loss_type='dr_grpo' divides",
            )
            for policy in ("trl", "gspo")
        ),
        ({"policy": "grpo", "importance_sampling_level": "sequence"}, "set policy='gspo'"),
        (
            {"policy": "dppo_tv", "epsilon": 0.1},
            "epsilon: it is 0.1, and it has no effect on the policy 'dppo_tv'",
        ),
        (
            {"policy": "gspo_token", "delta": 2.0},
            "delta: it is 2.0, and it has no effect on the policy 'gspo_token'",
        ),
        (
            {"policy": "grpo", "epsilon_high": 0.3, "policy_params": {"clip_high": 0.4}},
            "epsilon_high: it is 0.3, which sets clip_high to 0.3, and policy_params.clip_high is 0.4",
        ),
        ({"policy": "dppo_tv", "use_vllm": True}, "vllm_importance_sampling_correction: "),
        ({"hint_weight": 1.0, "remove_unused_columns": True}, "remove_unused_columns: it is True"),
        ({"policy": "grpo", "epsilon": -0.5}, "epsilon: it is -0.5; set a finite number in [0, inf)"),
        ({"policy": "grpo", "epsilon": float("nan")}, "epsilon: it is nan"),
        ({"policy": "grpo", "delta": -1.0}, "delta: it is -1.0"),
        ({"policy": "grpo", "policy_params": "{bad"}, "policy_params: '{bad' is not JSON"),
        ({"hint_params": {"temperature": 10**400}}, "hint_params.temperature: it is 1000"),
        ({"teacher_prompt_template": "{privileged_context:d}"}, "teacher_prompt_template: "),
        ({"hint_weight": None}, "hint_weight: it is None"),
        (
            {"policy": "importance_sampling", "beta": 0.1},
            "beta: TRL's KL is a mean",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        config(**options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"privileged_context": "  "}, "train_dataset row 1, privileged_context: it is empty"),
        ({"privileged_context": "1" * tiny.MAX_LENGTH}, "it exceeds the 32 that the model takes"),
        ({"chosen": ""}, "row 1, chosen: it is empty"),
        ({"rejected": " "}, "row 1, rejected: it is empty"),
        ({"rejected": None}, "row 1, chosen: it has 1 completions, and rejected has 0"),
        (
            {"chosen": "1" * tiny.MAX_LENGTH},
            "with the prompt it has 35 tokens, and the model takes 32",
        ),
        ({"n_teachers_agreeing": -1.0}, "n_teachers_agreeing: it is -1.0"),
        ({"n_teachers_agreeing": float("nan")}, "n_teachers_agreeing: it is nan"),
        ({"n_teachers_agreeing": 1e39}, "n_teachers_agreeing: it is 1e+39"),
        ({"prompt": ""}, "row 1, prompt: it is ''"),
        ({"prompt": None}, "row 1, prompt: it is None"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row: dict[str, Any], message: str) -> None:
    whole = GOOD | {"n_teachers_agreeing": 1.0}
    data = Dataset.from_list([whole, whole | row])
    with pytest.raises(DataError, match=re.escape(message)):
        tiny.trainer(hint_weight=1.0, replay_weight=1.0, dataset=data)


def test_pairs_that_an_evaluation_cannot_use_name_its_own_option() -> None:
    data = {"eval_dataset": Dataset.from_list(tiny.rows())}
    with pytest.raises(DataError, match="eval_dataset row 0.* or raise num_generations_eval"):
        tiny.trainer(replay_weight=1.0, num_generations_eval=1, arguments=data)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": ["1", "2"], "rejected": ["3"]}, "chosen: it has 2 completions, and rejected has 1"),
        (
            {"chosen": ["1"] * 5, "rejected": ["2"] * 5},
            "the row has 5 pairs, and its 4 generations use only the first",
        ),
        (
            {"chosen": ["1", "2"], "rejected": ["3", "4"], "n_teachers_agreeing": [1.0]},
            "n_teachers_agreeing: it has 1 values for 2 pairs",
        ),
    ],
)
def test_lists_of_pairs_must_match(row: dict[str, Any], message: str) -> None:
    data = Dataset.from_list([{"prompt": "a?"} | row] * 4)
    with pytest.raises(DataError, match=re.escape(message)):
        tiny.trainer(replay_weight=1.0, dataset=data)


@pytest.mark.parametrize(
    ("weight", "column"),
    [("hint_weight", "privileged_context"), ("replay_weight", "chosen"), ("replay_weight", "rejected")],
)
def test_a_weight_without_its_column_is_refused(weight: str, column: str) -> None:
    data = Dataset.from_list([{k: v for k, v in GOOD.items() if k != column}] * 4)
    with pytest.raises(ConfigError, match=f"{weight}: it needs the column '{column}'"):
        tiny.trainer(dataset=data, **{weight: 1.0})


def test_an_eval_dataset_is_checked_like_the_training_set() -> None:
    bad = Dataset.from_list([GOOD, GOOD | {"privileged_context": ""}])
    with pytest.raises(DataError, match="eval_dataset row 1, privileged_context: it is empty"):
        tiny.trainer(
            hint_weight=1.0,
            dataset=Dataset.from_list([GOOD] * 4),
            per_device_eval_batch_size=4,
            arguments={"eval_dataset": bad},
        )


def test_the_evaluations_generations_bound_its_pairs() -> None:
    pairs = {"chosen": ["1", "2"], "rejected": ["3", "4"]}
    with pytest.raises(DataError, match="eval_dataset row 0, chosen: the row has 2 pairs, and its 1 gen"):
        tiny.trainer(
            replay_weight=1.0,
            num_generations_eval=1,
            dataset=Dataset.from_list([GOOD | pairs] * 4),
            arguments={"eval_dataset": Dataset.from_list([GOOD | pairs])},
        )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [{"role": "user", "content": None}]}, "row 0, message content: it is None"),
        ({"chosen": [{"role": "user", "content": "1"}]}, "role: a completion starts with the role 'user'"),
    ],
)
def test_messages_that_mean_nothing_are_refused(row: dict[str, Any], message: str) -> None:
    chat = {"prompt": [{"role": "user", "content": "a?"}], "privileged_context": "[12]"}
    chat |= {"chosen": [{"role": "assistant", "content": "12"}], "rejected": "3"}
    with pytest.raises(DataError, match=message):
        tiny.trainer(hint_weight=1.0, replay_weight=1.0, dataset=Dataset.from_list([chat | row] * 4))


def test_messages_do_not_complete_a_string_prompt() -> None:
    row = GOOD | {"chosen": [{"role": "assistant", "content": "12"}]}
    with pytest.raises(DataError, match="prompt: it is a string, and a completion is messages"):
        tiny.trainer(replay_weight=1.0, dataset=Dataset.from_list([row] * 4))


def test_a_head_that_only_the_policy_casts_is_refused() -> None:
    with pytest.raises(ConfigError, match="cast_lm_head_to_fp32: it is not applied to the frozen copies"):
        tiny.trainer(hint_weight=1.0, cast_lm_head_to_fp32=True)


def test_a_tokenizer_without_an_end_of_sequence_is_refused() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="the tokenizer has no eos_token"):
        tiny.trainer(replay_weight=1.0, arguments={"processing_class": tokenizer})


def test_the_mixin_behind_the_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match="stands after GRPOTrainer in the bases"):
        type("Backwards", (GRPOTrainer, ComposerLossMixin), {})


def test_a_trainer_of_another_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"the mixin needs a trl\.GRPOTrainer"):
        type("Other", (ComposerLossMixin, Trainer), {})
    with pytest.raises(ConfigError, match=r"Nothing: it is not a trl\.GRPOTrainer"):
        type("Nothing", (ComposerLossMixin,), {})()


@pytest.mark.parametrize("given", [GRPOConfig, None])
def test_a_plain_config_is_refused(given: Any) -> None:
    args = given and given(output_dir="unused", use_cpu=True, bf16=False)
    with pytest.raises(ConfigError, match="args: it is of type .*; pass a ComposerGRPOConfig"):
        ComposerGRPOTrainer(model=tiny.model(), reward_funcs=tiny.reward, args=args)


@pytest.mark.parametrize("cls", [GRPOTrainer, type("MyTrainer", (GRPOTrainer,), {})])
@pytest.mark.parametrize("options", [{}, {"policy": "gspo", "loss_type": "dapo", "hint_weight": 1.0}])
def test_our_config_in_a_trainer_without_the_mixin_is_refused(cls: type, options: dict[str, Any]) -> None:
    """It would train TRL's own loss, in which policy, hint and replay have no effect."""
    args = config(**options)
    assert args.get_process_log_level() > 0  # as a script may call it
    remedy = rf"use ComposerGRPOTrainer, or write class My{cls.__name__}\(ComposerLossMixin, {cls.__name__}\)"
    with pytest.raises(
        ConfigError, match=f"args: it is a ComposerGRPOConfig, and {cls.__name__} has .*{remedy}"
    ):
        tiny.trainer(cls, lambda **_: args)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (
            0.999,
            "hint_ema_rate: it is 0.999, the share .* set it to 0.001 if 0.999 is meant as a decay, or to",
        ),
        (0.5, "hint_ema_rate: it is 0.5, the share .* set it to 0.5 if 0.5 is meant as a decay, or to 0.05"),
        (1.0, "hint_ema_rate: it is 1, so the teacher is the policy itself, as hint_teacher='live'"),
    ],
)
def test_an_ema_rate_that_is_nearly_the_live_teacher_is_a_warning(rate: float, message: str) -> None:
    with pytest.warns(ComposerWarning, match=message):
        tiny.trainer(hint_weight=1.0, hint_teacher="ema", hint_ema_rate=rate)
    tiny.trainer(hint_weight=1.0, hint_teacher="ema", hint_ema_rate=0.49)  # a warning is an error here


@pytest.mark.parametrize("chat", [False, True])
def test_pairs_that_repeat_their_prompt_are_a_warning(chat: bool) -> None:
    prompt: Any = [{"role": "user", "content": "a?"}] if chat else "a?"
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    rows = [
        GOOD | {"prompt": prompt, "chosen": f"{start}12", "rejected": f"{start}3"} for start in ("a?", "")
    ]
    message = (
        "in 1 of 2 pairs chosen and rejected begin with the text of the prompt, first in row 0; write the"
    )
    with pytest.warns(ComposerWarning, match=message):
        tiny.trainer(
            replay_weight=1.0, dataset=Dataset.from_list(rows), arguments={"processing_class": tokenizer}
        )


def test_a_chat_template_that_cuts_the_hint_off_is_a_warning_and_gives_no_hint() -> None:
    """Teacher and policy would see the same tokens in row 0, and its hint would still count."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'][:4] }}{% endfor %}"
    rows = [
        {"prompt": [{"role": "user", "content": text}], "privileged_context": "[12]"}
        for text in ("aaaa?", "b?")
    ]
    options = {"hint_weight": 1.0, "teacher_prompt_template": "{prompt}{privileged_context}"}
    same = "the teacher's prompt has the same tokens as the policy's"
    with pytest.warns(ComposerWarning, match=f"in 2 of 4 hints {same}, first in row 0; set a chat template"):
        made = tiny.trainer(
            **options,
            dataset=Dataset.from_list(rows * 2),
            arguments={"processing_class": tokenizer},
            scripted=False,
        )
    with pytest.warns(
        ComposerWarning, match=f"hint_weight: in 8 of 16 rows of a batch {same}, so they count"
    ):
        inputs = tiny.batch(made)
    made._compute_loss(made.model, inputs)
    assert made._metrics["train"]["composer/hint/row_frac"] == [0.5]


def test_a_chat_template_that_rewrites_the_prompt_is_refused() -> None:
    data = [{"prompt": [{"role": "user", "content": "a?"}], "chosen": "12", "rejected": "3"}] * 4
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(DataError, match="row 0, chat template: it renders prompt"):
        tiny.trainer(
            replay_weight=1.0,
            dataset=Dataset.from_list(data),
            arguments={"processing_class": tokenizer},
        )


@pytest.mark.parametrize("source", ["yaml", "command line"])
def test_an_unknown_key_names_its_nearest_match(tmp_path: Any, source: str) -> None:
    yaml = tmp_path / "config.yaml"
    yaml.write_text("hint_wieght: 1.0\n" if source == "yaml" else "hint_weight: 1.0\n")
    words = ["--config", str(yaml), "--output_dir", str(tmp_path)]
    words += ["--hint_wieght", "1"] if source == "command line" else []
    with pytest.raises(ConfigError, match="unknown option 'hint_wieght'; did you mean 'hint_weight'?"):
        ComposerParser((ComposerGRPOConfig,)).parse_args_and_config(words)


OTHER_NAMES: list[tuple[dict[str, Any], str]] = [
    ({"kl_coef": 0.1}, "kl_coef: unknown option 'kl_coef'; did you mean 'beta'?"),
    (
        {"policy": "gspo", "kl_loss_coef": 0.1},
        "kl_loss_coef: unknown option 'kl_loss_coef'; did you mean 'be",
    ),
    ({"clip_ratio_high": 0.28}, "clip_ratio_high: unknown option 'clip_ratio_high'; did you mean 'epsilon_h"),
    ({"clip_low": 0.1}, "clip_low: unknown option 'clip_low'; did you mean 'epsilon'?"),
    (
        {"loss_type": "cispo", "clip_high": 4.0},
        "clip_high: unknown option 'clip_high'; set epsilon_high to 1 + clip_high, because TRL's cispo caps",
    ),
    (
        {"policy": "cispo", "clip_ratio_high": 4.0},
        "clip_ratio_high: it is a parameter of policy 'cispo'; set clip_high in policy_params, its name here",
    ),
    (
        {"policy": "grpo@trl", "clip_high": 0.28},
        "clip_high: it is a parameter of policy 'grpo'; set clip_high in policy_params",
    ),
    (
        {"policy": "ppo", "clip_ratio_c": 3.0},
        "clip_ratio_c: it is a parameter of policy 'ppo'; set dual_clip",
    ),
    ({"policy": "grpo", "hint_top_k": 100}, "hint_top_k: it is not available here, because TRL compares"),
]


@pytest.mark.parametrize(("options", "message"), OTHER_NAMES)
@pytest.mark.parametrize("source", ["constructor", "yaml", "command line"])
def test_another_frameworks_name_of_an_option_is_answered_with_trls_or_ours(
    options: dict[str, Any], message: str, source: str, tmp_path: Any
) -> None:
    words = ["--output_dir", str(tmp_path)]
    words += [word for key, x in options.items() for word in (f"--{key}", str(x))] * (source != "yaml")
    if source == "yaml":
        yaml = tmp_path / "config.yaml"
        yaml.write_text("".join(f"{key}: {x}\n" for key, x in options.items()))
        words += ["--config", str(yaml)]
    with pytest.raises(ConfigError, match=re.escape(message)):
        if source == "constructor":
            config(**options)
        ComposerParser((ComposerGRPOConfig,)).parse_args_and_config(words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"policy": "cispo", "epsilon_high": 0.28},
            "epsilon_high: clip_high=-0.72 caps every weight at 0.28, so the gradient of each on-policy tok",
        ),
        ({"policy": "gspo", "epsilon": 0.2, "epsilon_high": 0.28}, "epsilon_high: clip_high=0.28 bounds the"),
        (
            {"policy": "gspo", "epsilon": 0.1},
            "epsilon: clip_high=0.1 bounds the ratio of a sequence, a geome",
        ),
        (
            {"policy": "grpo", "epsilon_high": 28.0},
            "epsilon_high: clip_high=28 clips the ratio only above 29",
        ),
        (
            {"policy": "grpo", "policy_params": {"clip_high": 28}},
            "policy_params.clip_high: clip_high=28 clips the ratio only above 29, which hardly any token",
        ),
    ],
)
def test_a_clip_bound_that_hardly_anyone_intends_is_a_warning(options: dict[str, Any], message: str) -> None:
    with pytest.warns(ComposerWarning) as warned:
        config(**options)
    (said,) = [str(one.message) for one in warned if issubclass(one.category, ComposerWarning)]
    assert said.startswith(message)


def test_yaml_and_command_line_make_a_config(tmp_path: Any) -> None:
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


def test_an_option_of_a_channel_without_a_weight_is_a_warning() -> None:
    for options in (
        {"hint_teacher": "ema"},
        {"replay_params": {"beta": 0.3}},
        {"teacher_prompt_template": "{privileged_context}"},
    ):
        (name, weight), *_ = [(o, "replay_weight" if "replay" in o else "hint_weight") for o in options]
        with pytest.warns(ComposerWarning, match=f"{name}: it has no effect, because {weight} is 0"):
            config(**options)
        config(**options, **{weight: 0.1})


def test_trls_clip_options_reach_our_kernel() -> None:
    assert config(policy="grpo").resolved.policy.params == {}
    params = config(policy="gspo", epsilon=0.001).resolved.policy.params
    assert params == {"clip_low": 0.001, "clip_high": 0.001}
    params = config(policy="grpo", epsilon=10.0).resolved.policy.params  # TRL's settings for DeepSeek-R1
    assert params == {"clip_low": 10.0, "clip_high": 10.0}
    made = config(policy="grpo", epsilon_high=0.28, delta=2.0).resolved.policy.params
    assert made == {"clip_high": 0.28, "ratio_cap": 2.0}


def test_a_streamed_data_set_is_checked_as_it_arrives() -> None:
    long = GOOD | {"privileged_context": "1" * tiny.MAX_LENGTH}
    data = Dataset.from_list([GOOD, long]).to_iterable_dataset()
    made = tiny.trainer(hint_weight=1.0, dataset=data, per_device_train_batch_size=8)
    with pytest.raises(DataError, match="streamed row, privileged_context: .* exceeds the 32"):
        made.train()


def test_each_streamed_data_set_of_a_dict_is_checked_in_evaluation() -> None:
    """Also beside one that is not streamed."""
    many = GOOD | {"chosen": ["1"] * 7, "rejected": ["2"] * 7}
    one = GOOD | {"chosen": ["1"], "rejected": ["2"]}
    streamed = Dataset.from_list([one, many]).to_iterable_dataset()
    made = tiny.trainer(
        replay_weight=1.0,
        per_device_eval_batch_size=8,
        arguments={"eval_dataset": {"a": Dataset.from_list([one] * 2), "b": streamed}},
    )
    with pytest.raises(DataError, match="streamed row, chosen: the row has 7 pairs, and its 4 generations"):
        made.evaluate()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"privileged_context": None}, "train_dataset: none of its 4 rows has a hint, so the hint loss is"),
        ({"chosen": None, "rejected": None}, "none of its 4 rows has a pair with a weight above 0"),
        ({"n_teachers_agreeing": 0.0}, "none of its 4 rows has a pair with a weight above 0"),
        ({"rejected": GOOD["chosen"]}, "in 4 of 4 pairs chosen equals rejected, first in row 0"),
        ({"privileged_context": "None"}, "in 4 of 4 hints the text is 'None', first in row 0; write None in"),
        ({"privileged_context": GOOD["prompt"]}, "in 4 of 4 hints the text is the prompt, first in row 0"),
        ({"chosen": "1<eos>"}, "in 4 of 4 pairs chosen or rejected contains '<eos>', first in row 0"),
    ],
)
def test_rows_that_teach_nothing_are_a_warning_with_their_number(rows: dict[str, Any], message: str) -> None:
    with pytest.warns(ComposerWarning, match=re.escape(message)):
        tiny.trainer(hint_weight=1.0, replay_weight=1.0, dataset=Dataset.from_list([GOOD | rows] * 4))


def test_an_encoder_decoder_is_refused() -> None:
    model = tiny.model()
    model.config.is_encoder_decoder = True
    with pytest.raises(
        ConfigError, match="model: it is an encoder-decoder, and the hint and replay channels"
    ):
        tiny.trainer(hint_weight=1.0, policy_model=model)


def test_every_error_of_a_config_is_named_at_once(tmp_path: Path) -> None:
    def errors(**options: Any) -> list[str]:
        with pytest.raises(ConfigError) as refused:
            ComposerGRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)
        return [line.partition(":")[0] for line in str(refused.value).splitlines()]

    named = {"policy": "grpoo", "hint_weight": 1.0, "hint_divergence": "jsdd", "replay_params": {"bta": 1}}
    assert errors(**named, replay_weight=1.0, hint_source="colum", fused_linear=1) == [
        "policy",
        "hint_divergence",
        "replay_params.bta",
        "hint_source",
        "fused_linear",
    ]
    assert errors(policy_params="{", hint_params="[") == ["policy_params", "hint_params"]
    beside = {"loss_type": "cispo", "importance_sampling_level": "sequence", "remove_unused_columns": True}
    assert errors(policy="grpo", replay_weight=1.0, replay_loss="orpo", **beside) == [
        "replay_loss",
        "loss_type",
        "importance_sampling_level",
        "remove_unused_columns",
    ]
    assert errors(policy="cispo@trl", epsilon=0.1, delta=3.0) == ["epsilon", "delta"]
