"""Checks before training: the model, the trainer's options, and every row that a channel reads."""

import warnings
from collections.abc import Sequence
from typing import Any

from datasets.utils import tqdm
from transformers import Trainer
from trl import GRPOTrainer

from composer_plugins import columns
from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.channels import HintChannel, ReplayChannel
from composer_plugins.adapters.trl_mixin.forward import text_config
from composer_plugins.adapters.trl_mixin.metrics import warn_once
from composer_plugins.columns import pairs_of
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import ComposerWarning, ConfigError, DataError
from composer_plugins.frameworks.trl import OWN_POLICY, TESTED
from composer_plugins.losses.calling import check_top_k
from composer_plugins.losses.choosing import Choice

DataChannel = HintChannel | ReplayChannel
SHOWN_AFTER = 2.0  # seconds, of the progress of the check of a data set
NOT_INITIAL = "the model without its adapter is not the initial policy"

# Parts of the names of LoRA's weights. It adds B A, of an embedding with A = 0. DoRA's magnitude equals the
# magnitude of the weight below it as long as this product is 0.
FREE_AT_THE_START = (".lora_A.", ".lora_embedding_B.", ".lora_magnitude_vector.")
ZERO_AT_THE_START = (".lora_B.", ".lora_embedding_A.")


def warn_of_new_trl() -> None:
    """Warn if the installed TRL is newer than those that this adapter has been tested with."""
    if upstream.is_newer_than_tested():
        _warn(
            f"trl: the installed version {upstream.VERSION} is newer than those that this adapter has been "
            f"tested with ({', '.join(TESTED)}); compare a short run of ComposerGRPOTrainer without "
            f"channels with one of GRPOTrainer, or install {TESTED[-1]}"
        )


def check_class(cls: type) -> None:
    """Raise ConfigError for a class derived from a trainer of TRL that was not tested with the channels."""
    tested = {*GRPOTrainer.__mro__, *upstream.own_policies(cls)}
    for base in cls.__mro__:
        if base.__module__.startswith("trl.") and issubclass(base, Trainer) and base not in tested:
            problem = f"{base.__module__}.{base.__name__} has not been tested with the channels"
            raise ConfigError(f"class {cls.__name__}", problem, "derive it from trl.GRPOTrainer")


def warn_of_defaults(cls: type, options: Any) -> None:
    """Warn of an option at GRPOConfig's default where the trainer of TRL has a default of its own."""
    for base in upstream.own_policies(cls):
        for name, value in OWN_POLICY[base.__name__].items():
            if getattr(options, name) == upstream.DEFAULTS[name]:
                _warn(
                    f"{name}: it is {getattr(options, name)}, GRPO's default, and {base.__name__}'s own is "
                    f"{value}; set it to {value}"
                )


def bypassed(trainer: Any) -> ConfigError:
    """The error for a trainer whose steps do not call the `_compute_loss` of the mixin."""
    problem = "its loss bypasses ComposerLossMixin._compute_loss, so the channels have no effect"
    remedy = "call super() in its compute_loss and _compute_loss"
    if trainer.args.use_liger_kernel:
        remedy = f"set use_liger_kernel=False: TRL before 1.14 then has Liger's loss. Otherwise {remedy}"
    return ConfigError(type(trainer).__name__, problem, remedy)


def not_scored(trainer: Any) -> ConfigError:
    """The error for a trainer whose rollouts do not call the `_calculate_rewards` of the mixin."""
    problem = "its rollouts bypass ComposerLossMixin._calculate_rewards, from which the channels have the "
    problem += "rewards and prompts"
    remedy = "call super() in its _generate_and_score_completions and _calculate_rewards"
    return ConfigError(type(trainer).__name__, problem, remedy)


def check_rollouts(trainer: GRPOTrainer, rows: int, output: dict[str, Any]) -> None:
    """Raise ConfigError if a subclass makes rollouts that the rows, hints and pairs do not belong to."""
    made = len(output["prompt_ids"])
    if made != rows:
        problem = f"its _generate_and_score_completions returns {made} completions for {rows} rows, so it is "
        problem += "not known which hint and pair each completion has"
        remedy = "return one completion for each row, in their order"
        raise ConfigError(type(trainer).__name__, problem, remedy)


def check_adapter(arguments: dict[str, Any]) -> None:
    """Raise ConfigError for a PEFT model that does not give access to the initial policy."""
    model, config = arguments.get("model"), arguments.get("peft_config")
    if config is not None and (reason := _changes_start(config)):
        remedy = "use an adapter that changes nothing before it is trained and trains no bias of the model, "
        remedy += "LoraConfig with init_lora_weights=True or 'gaussian' and bias='none' for example"
        raise ConfigError("peft_config", f"with {reason}, {NOT_INITIAL}", remedy)
    if getattr(model, "peft_config", None) and not _is_new(model):
        remedy = "pass the base model and a peft_config, or call merge_and_unload() first"
        raise ConfigError("model", f"it has a trained adapter, so {NOT_INITIAL}", remedy)


def _changes_start(adapter: Any) -> str:
    """What in an adapter's config changes the model at the start, or trains its biases; "" for nothing."""
    if getattr(adapter, "is_prompt_learning", False):
        return f"the learned tokens of {type(adapter).__name__}"

    def changes(name: str, value: Any) -> bool:
        if name == "bias":
            return bool(value != "none")
        if name == "init_lora_weights":
            return value not in (True, "gaussian")
        is_init = name.startswith("init_") and name.endswith("weights")  # init_ia3_weights of IA3Config
        return is_init and value is False

    return ", ".join(f"{name}={value!r}" for name, value in vars(adapter).items() if changes(name, value))


def _is_new(model: Any) -> bool:
    """Whether a PEFT model computes the same as its base, as which its modules_to_save and tokens begin.

    Only these and LoRA may be trained. FSDP may have the values on the first rank alone. ZeRO-3 has emptied
    the weights, whose values are not known then.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    everything = weights | dict(model.named_buffers(remove_duplicate=False))
    return all(
        _changes_nothing(name, weight, everything)
        for name, weight in weights.items()
        if weight.requires_grad or "lora_" in name
    )


def _changes_nothing(name: str, weight: Any, everything: dict[str, Any]) -> bool:
    """Whether a weight of an adapter is such that the model computes the same as without it."""
    if any(part in name for part in FREE_AT_THE_START):
        return True
    if any(part in name for part in ZERO_AT_THE_START):
        return bool(weight.is_meta or (weight.numel() and not weight.any()))
    if ".trainable_tokens_delta." in name:  # the rows of the embedding, and not their difference
        original = name.replace(".trainable_tokens_delta.", ".trainable_tokens_original.")
    else:
        module, _, trained = name.partition(".modules_to_save.")  # trained: "default.weight"
        original = f"{module}.original_module.{trained.partition('.')[2]}"
    before = everything.get(original)
    if before is None:
        return False
    return bool(weight.is_meta or (weight.numel() and weight.equal(before.to(weight))))


def check_trainer(trainer: GRPOTrainer, config: ComposerConfig) -> None:
    """Raise ConfigError where the forward passes of the hint and replay channels do not work."""
    vision = upstream.tokenizer(trainer) is not trainer.processing_class  # which is a processor
    if trainer.model.config.is_encoder_decoder:
        problem = (
            "it is an encoder-decoder, and the hint and replay channels append a completion to its prompt"
        )
        raise ConfigError("model", problem, "use a decoder-only model")
    if config.hint_weight > 0 and not vision:
        check_top_k(config.choose_hint(), text_config(trainer).vocab_size)
    if config.replay_weight > 0 and upstream.tokenizer(trainer).eos_token_id is None:
        problem = "the tokenizer has no eos_token, which a replayed completion ends with"
        raise ConfigError("processing_class", problem, "set tokenizer.eos_token")
    if vision:
        problem = "it takes images, and the hint and replay channels do not pass images to the model"
        raise ConfigError("model", problem, "set hint_weight=0 and replay_weight=0")


def check_frozen(trainer: GRPOTrainer) -> None:
    """Raise ConfigError where a frozen copy of the policy does not compute what the policy does."""
    if trainer.args.cast_lm_head_to_fp32:
        problem = "it is not applied to the frozen copies, which would then differ from the initial policy"
        remedy = "leave it False with the hint and replay channels and with a reference"
        raise ConfigError("cast_lm_head_to_fp32", problem, remedy)
    if trainer.is_fsdp_enabled and not getattr(trainer.accelerator, "is_fsdp2", False):
        problem = "it is 1, and frozen copies and the hint and replay channels were tested with FSDP2 only"
        raise ConfigError("fsdp_version", problem, "set it to 2 in accelerate's config or in fsdp_config")


def check_ratio(hint: Choice) -> None:
    """Raise ConfigError if the hint weighs tokens by TRL's old log-probabilities; see `may_count_padding`."""
    if hint.value("ratio_cap") is not None:
        problem = f"it is {hint.value('ratio_cap')}, and the model has no rotary positions, so that TRL's "
        problem += "old log-probabilities may count the padding of shorter prompts"
        raise ConfigError("hint_params.ratio_cap", problem, "set it to None")


def warn_of_reset(trainer: Any, rows: Sequence[columns.Row], prompts: Sequence[Any]) -> None:
    """Warn once if an environment's `reset` adds to the prompt of a row with pairs."""
    if any(row["prompt"] != prompt and pairs_of(row) for row, prompt in zip(rows, prompts, strict=True)):
        message = "environment_factory: reset() adds to the prompt of a row, and its pairs are completions "
        message += "of the row's prompt without that; write what they need to know into the prompt"
        warn_once(trainer.composer_warned, message)


def check_datasets(trainer: GRPOTrainer, channels: Sequence[DataChannel]) -> None:
    """Check every row that a channel reads; of a streamed data set the first."""
    datasets = {"train_dataset": trainer.train_dataset}
    datasets |= {f"eval_dataset {name}".strip(): data for name, data in _evaluated(trainer).items()}
    for name, dataset in datasets.items():
        if dataset is None:
            continue
        for channel in channels:
            rows = columns.rows_of(dataset, channel.columns, f"{channel.name}_weight", name)
            notes = []
            total = None if columns.is_streamed(dataset) else len(dataset)
            hidden = trainer.args.disable_tqdm or not trainer.accelerator.is_main_process
            words = f"checking the {channel.name} columns of {name}"
            for label, row in tqdm(rows, words, total, leave=False, delay=SHOWN_AFTER, disable=hidden):
                notes.append(_checked(channel, trainer, row, label, name == "train_dataset"))
            if not columns.is_streamed(dataset):
                by_rollout = trainer.rollout_func is not None and columns.HINT in channel.columns
                unless = "the rollout_func returns hints" if by_rollout else ""
                for warning in columns.warnings_of(notes, channel.name, name, unless):
                    _warn(warning)


def check_streamed(
    trainer: GRPOTrainer, channels: Sequence[DataChannel], rows: Sequence[columns.Row]
) -> None:
    """Check the rows of one batch, if they come from a streamed data set, or may come from one."""
    training = trainer.model.training
    datasets = [trainer.train_dataset] if training else _evaluated(trainer).values()
    if any(map(columns.is_streamed, datasets)):
        for channel in channels:
            for row in rows:
                _checked(channel, trainer, row, "streamed row", training)


def _checked(
    channel: DataChannel, trainer: GRPOTrainer, row: columns.Row, label: str, training: bool
) -> list[str]:
    """The notes of a row; its label stands before the key of its DataError."""
    try:
        return channel.check_row(trainer, row, training)
    except DataError as error:
        raise error.under(label, ", ") from None


def _evaluated(trainer: GRPOTrainer) -> dict[str, Any]:
    """The evaluation data sets by name; a single one, and None, has the name ""."""
    datasets = trainer.eval_dataset
    return datasets if isinstance(datasets, dict) else {"": datasets}


def _warn(message: str) -> None:
    warnings.warn(message, ComposerWarning, stacklevel=4)  # the line that constructs the trainer
