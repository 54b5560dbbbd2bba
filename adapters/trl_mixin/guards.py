"""Whatever can be refused before training starts, is refused here."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.integrations import is_deepspeed_zero3_enabled

from composer_plugins import columns
from composer_plugins.adapters.trl_mixin.encoding import encode_completion, encode_prompts
from composer_plugins.adapters.trl_mixin.trl_facts import generations
from composer_plugins.checks import check_top_k
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ConfigError, DataError


def check_model(given: dict[str, Any], config: ComposerConfig, asks_base: bool) -> bool:
    """Whether the policy will be a PEFT model; raises for one whose initial weights cannot be asked."""
    has_adapter = hasattr(given.get("model"), "peft_config")
    if not has_adapter and given.get("peft_config") is None:
        return False
    if config.hint_weight > 0 and config.hint_teacher == "ema":
        raise ConfigError("hint_teacher='ema' keeps a copy of all weights, which PEFT avoids: use 'base'")
    adapter = given.get("peft_config")
    init, bias = getattr(adapter, "init_lora_weights", True), getattr(adapter, "bias", "none")
    if asks_base and (init not in (True, "gaussian") or bias != "none"):
        raise ConfigError(
            f"init_lora_weights={init!r} and bias={bias!r}: with the adapter switched off the model must be "
            "the initial policy, which holds for init_lora_weights=True or 'gaussian' with bias='none'"
        )
    if has_adapter and asks_base:
        raise ConfigError(
            "the model comes with an adapter, so the policy without it is not the initial policy: pass the "
            "base model and a peft_config, or call merge_and_unload() first"
        )
    return True


def check_trainer(trainer: Any, config: ComposerConfig) -> None:
    """Raise ConfigError for what the extra forward passes cannot do."""
    if not (config.hint_weight > 0 or config.replay_weight > 0):
        return
    if config.hint_weight > 0 and not trainer._is_vlm:
        model = trainer.accelerator.unwrap_model(trainer.model)
        check_top_k(config.choose_hint(), model.config.get_text_config().vocab_size)
    if trainer.args.cast_lm_head_to_fp32:
        raise ConfigError(
            "cast_lm_head_to_fp32 is not applied to the frozen copies, which would then differ from the "
            "policy before the first step: leave it False with the hint and replay channels"
        )
    if config.hint_weight > 0 and config.hint_teacher == "ema":
        half = {p.dtype for p in trainer.model.parameters()} & {torch.bfloat16, torch.float16}
        if half:
            raise ConfigError(
                f"hint_teacher='ema' on {half.pop()} weights: a step of hint_ema_rate is lost to rounding "
                "and the teacher stands still; load the model in float32 (bf16=True computes in bfloat16)"
            )
    if config.replay_weight > 0 and trainer._tokenizer.eos_token_id is None:
        raise ConfigError("the tokenizer has no eos_token, with which a replayed completion ends: set one")
    sharded = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed ZeRO-3"
    if trainer.is_fsdp_enabled or is_deepspeed_zero3_enabled():
        raise ConfigError(
            f"{sharded} shards the weights, and the frozen copies of the hint and replay channels have not "
            "been proven on it: use DDP or ZeRO-1/2, or PEFT with hint_teacher='base'"
        )
    if trainer._is_vlm:
        raise ConfigError("the hint and replay channels are for text: their forward passes carry no images")
    if trainer.environment_factories is not None:
        raise ConfigError(
            "with environment_factory the prompt is only known after reset(), so a hint or a pair of the "
            "data set would go with another prompt: set hint_weight=0 and replay_weight=0"
        )
    reentrant = (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if trainer.args.gradient_checkpointing and reentrant and trainer.accelerator.num_processes > 1:
        raise ConfigError(
            "reentrant gradient checkpointing allows one forward pass per step under DDP, and these "
            "channels make several: gradient_checkpointing_kwargs={'use_reentrant': False}"
        )


def check_datasets(trainer: Any, config: ComposerConfig) -> None:
    """Read every row that a channel will be fed from, once, before training."""
    eval_dataset = trainer.eval_dataset
    named = eval_dataset if isinstance(eval_dataset, dict) else {"": eval_dataset}
    datasets = {"train_dataset": trainer.train_dataset}
    datasets |= {f"eval_dataset {name}".strip(): data for name, data in named.items()}
    for name, dataset in datasets.items():
        if dataset is None:
            continue
        if config.hint_weight > 0:
            for label, row in columns.rows_of(dataset, (columns.HINT,), "hint_weight", name):
                _at(label, check_hint, trainer, config, row)
        if config.replay_weight > 0:
            needed = (columns.CHOSEN, columns.REJECTED)
            group = trainer.num_generations if name == "train_dataset" else trainer.num_generations_eval
            for label, row in columns.rows_of(dataset, needed, "replay_weight", name):
                _at(label, check_pairs, trainer, row, group)


def check_streamed(trainer: Any, config: ComposerConfig, rows: Sequence[columns.Row]) -> None:
    """The same for the rows of a streamed data set, which `check_datasets` could not read ahead."""
    training = trainer.model.training
    if not columns.is_streamed(trainer.train_dataset if training else trainer.eval_dataset):
        return
    for row in rows:
        if config.hint_weight > 0:
            _at("streamed row", check_hint, trainer, config, row)
        if config.replay_weight > 0:
            _at("streamed row", check_pairs, trainer, row, generations(trainer))


def check_hint(trainer: Any, config: ComposerConfig, row: columns.Row) -> None:
    """Raise DataError unless the teacher can read this row's prompt, hint and longest completion."""
    hint, prompt = columns.hint_of(row), columns.prompt_of(row)
    limit = _longest_input(trainer)
    if hint is None:
        return
    (ids,) = encode_prompts(trainer, [columns.hinted_prompt(prompt, hint, config.teacher_prompt_template)])
    if limit is not None and len(ids) + trainer.max_completion_length > limit:
        raise DataError(
            f"prompt + {columns.HINT} are {len(ids)} tokens, and with max_completion_length="
            f"{trainer.max_completion_length} exceed the {limit} that the model takes: shorten the hint, or "
            "lower max_completion_length"
        )


def check_pairs(trainer: Any, row: columns.Row, group: int) -> None:
    """Raise DataError unless every pair of this row is whole, will be used, and fits the model."""
    pairs = columns.pairs_of(row)
    if len(pairs) > group:
        raise DataError(
            f"{len(pairs)} pairs, of which {group} generations of a prompt would use only the first "
            "ones: repeat the row with the others, or raise num_generations"
        )
    text = columns.prompt_of(row)
    limit = _longest_input(trainer)
    if not pairs:
        return
    (prompt,) = encode_prompts(trainer, [text])
    for pair in pairs:
        for name, side in ((columns.CHOSEN, pair.chosen), (columns.REJECTED, pair.rejected)):
            length = len(prompt) + len(encode_completion(trainer, text, side))
            if limit is not None and length > limit:
                raise DataError(
                    f"prompt + {name} are {length} tokens, and the model takes {limit}: drop the pair"
                )


def _longest_input(trainer: Any) -> int | None:
    config = trainer.accelerator.unwrap_model(trainer.model).config.get_text_config()
    return getattr(config, "max_position_embeddings", None)


def _at(label: str, check: Any, *args: Any) -> None:
    try:
        check(*args)
    except DataError as error:
        raise DataError(f"{label}: {error}") from None
