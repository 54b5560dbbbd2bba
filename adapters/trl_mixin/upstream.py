"""Everything this adapter relies on inside TRL 1.16: private names, version checks, internal functions.

To port the adapter to another release, edit this file and the methods that `mixin.py` overrides:
`_generate_and_score_completions`, `_get_per_token_logps_and_entropies` and `_compute_loss`.
Read from trl/trainer/grpo_trainer.py of 1.16.0: `_compute_loss` calls `_get_per_token_logps_and_entropies`
once, which returns (logps, entropies, aux_loss); the logps are divided by the temperature and 0 at padding.
TRL scales its loss for gradient accumulation itself.
"""

import inspect
from dataclasses import fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import create_model_from_path, get_config_model_id, pad

from composer_plugins.columns import Completion, Prompt, after_prompt, completion_messages
from composer_plugins.errors import ConfigError, DataError
from composer_plugins.kernels.aggregation import Mode, aggregate

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(GRPOConfig)}

# The values of `loss_type` that are a denominator of the one clipped loss, and the aggregation mode of each.
# "bnpo" is a token mean over one micro-batch, so it depends on how the batch is cut.
MODES = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "bnpo",
    "dr_grpo": "seq-mean-token-sum-norm",
    "dapo": "token-mean",
    "luspo": "seq-mean-token-sum",
}
LOSS_TYPES = {mode: loss_type for loss_type, mode in MODES.items()}  # "token-sum" has none, and no KL
OTHER_LOSSES = ("cispo", "sapo", "vespo")  # values of `loss_type` that are losses of their own

DENOMINATORS = {
    "seq-mean-token-mean": "the mean over completions of the mean over their tokens",
    "bnpo": "the mean over the tokens of one micro-batch",
    "seq-mean-token-sum-norm": "the mean over completions of their sum over tokens / max_completion_length",
    "token-mean": "the mean over all tokens of the whole batch",
    "seq-mean-token-sum": "the mean over completions of the sum over their tokens",
    "token-sum": "the sum over all tokens of the whole batch",
}

# By parameter of ours that a clip option of TRL sets: the losses of ours in which it means the same.
CLIPPED = ("grpo", "dapo", "dr_grpo", "gspo", "gspo_token")
CLIP_OPTIONS = {"clip_low": CLIPPED, "clip_high": CLIPPED, "ratio_cap": ("grpo",)}

# exp(60) times a KL term stays finite in float32.
MAX_LOG_RATIO = 60.0

# The metrics of TRL's policy term. With zero advantages they are 0, or the KL alone.
POLICY_METRICS = ("clip_ratio/", "policy_loss")


def require_supported_trl() -> None:
    """Raise ConfigError unless the installed GRPOTrainer is the one described above."""
    helper = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    if GRPOTrainer.loss_is_scaled_for_ga is not True or "compute_aux_loss" not in helper:
        problem = "the installed version is not one that this adapter supports"
        raise ConfigError("trl", problem, "install 'trl>=1.16,<1.17'")


class PolicyForward:
    """One call of TRL's `_compute_loss`: the inputs it gets, and the results of its forward pass.

    `without_advantages` zeroes the advantages. TRL's policy term is then 0, and its KL, entropy bonus, MoE
    loss and metrics remain.
    """

    def __init__(self, inputs: dict[str, Any], *, without_advantages: bool) -> None:
        self.inputs = inputs
        self._without_advantages = without_advantages
        if without_advantages:
            self.inputs = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}

    def record(self, outputs: Any) -> None:
        """Keep the log-probabilities and entropies. TRL's loss is computed after this call."""
        self.logprobs, self.entropies = outputs[:2]
        old = self.inputs.get("old_per_token_logps")
        if self._without_advantages and old is not None:
            # TRL does not clamp log pi - log old before exp, and an infinite ratio times a zero advantage
            # is NaN. So TRL sees a bounded ratio; our loss reads the original.
            floor = self.logprobs.detach() - MAX_LOG_RATIO
            self.inputs["old_per_token_logps"] = torch.maximum(old, floor)


def accumulation_steps(trainer: GRPOTrainer) -> int:
    """The number of micro-batches of the current optimizer step; 1 in evaluation.

    TRL divides by it, not the Trainer. The last step of an epoch may have fewer micro-batches.
    """
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 1


def generations(trainer: GRPOTrainer, training: bool) -> int:
    """The number of completions of each prompt; evaluation may have fewer."""
    return trainer.num_generations if training else trainer.num_generations_eval


def reduce_loss(
    trainer: GRPOTrainer, token_loss: Tensor, mask: Tensor, mode: str, inputs: dict[str, Any]
) -> Tensor:
    """Reduce a loss per token by `mode`, scaled for gradient accumulation and ranks as TRL scales its own.

    A row counts as a completion even if all its tokens are masked, as in TRL.
    """
    steps, processes = accumulation_steps(trainer), trainer.accelerator.num_processes
    if mode == "token-sum":
        return aggregate(token_loss, mask, "token-sum") * processes  # DDP averages gradients over the ranks
    if mode == "token-mean":
        # TRL counts the tokens of the generation batch on all ranks; one optimizer step sees a part of it.
        num_tokens = inputs["num_items_in_batch"].clamp(min=1.0) / processes
        if trainer.model.training:
            num_tokens = num_tokens * steps / trainer.args.steps_per_generation
        return aggregate(token_loss, mask, "token-sum") / num_tokens
    if mode == "bnpo":
        return aggregate(token_loss, mask, "token-mean") / steps
    rows, length = mask.shape[0], trainer.max_completion_length
    return aggregate(token_loss, mask, cast(Mode, mode), num_sequences=rows, max_length=length) / steps


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """The completion tokens [B, T] that TRL trains on: those that no tool wrote."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def policy_tensors(inputs: dict[str, Any], logprobs: Tensor) -> dict[str, Tensor]:
    """The inputs of a policy loss, by their names in the catalogue.

    TRL leaves out the old policy's log-probabilities where they equal the present ones. The rollout
    policy's are vLLM's where TRL has them; where vLLM has none for a token (NaN), the old policy's are used.
    """
    advantages, old = inputs["advantages"], inputs.get("old_per_token_logps")
    old = logprobs.detach() if old is None else old
    rollout = inputs.get("sampling_per_token_logps", old)
    return {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": torch.where(rollout.isnan(), old, rollout),
        "advantages": advantages if advantages.dim() > 1 else advantages.unsqueeze(1),
        "mask": loss_mask(inputs),
    }


def policy_factor(
    trainer: GRPOTrainer, inputs: dict[str, Any], tensors: dict[str, Tensor], entropies: Tensor
) -> Tensor | float:
    """The product of the masks and weights that TRL's options multiply a policy loss with.

    These are the off-policy sequence mask of DeepSeek-V3.2, the top-entropy mask, and the importance ratio
    between the trainer and vLLM. The factor is 1.0 where none of these options is set.
    """
    factor: Tensor | float = 1.0
    mask = tensors["mask"].to(entropies)
    if trainer.off_policy_mask_threshold is not None:
        factor = factor * trainer.get_off_policy_mask(
            advantages=tensors["advantages"],
            per_token_logps=tensors["logprobs"],
            sampling_per_token_logps=inputs.get("sampling_per_token_logps", tensors["old_logprobs"]),
            mask=mask,
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    if trainer.top_entropy_quantile < 1.0:
        factor = factor * trainer.get_high_entropy_mask(entropies, mask, 1 - trainer.top_entropy_quantile)
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        factor = factor * inputs["importance_sampling_ratio"]
    return factor


def metrics(trainer: GRPOTrainer) -> dict[str, list[float]]:
    """The values of each metric since the last log, of training or of evaluation. TRL logs their mean."""
    return trainer._metrics["train" if trainer.model.training else "eval"]


def tokenizer(trainer: GRPOTrainer) -> Any:
    """The tokenizer, also where TRL was given a processor."""
    return trainer._tokenizer


def is_vision_model(trainer: GRPOTrainer) -> bool:
    """Whether the policy takes images."""
    return trainer._is_vlm


def encode_prompts(trainer: GRPOTrainer, prompts: list[Prompt]) -> list[list[int]]:
    """Token ids of prompts, with the chat template, tools and special tokens that TRL itself uses."""
    return trainer._tokenize_prompts(prompts)[0] if prompts else []


def encode_completion(trainer: GRPOTrainer, prompt: Prompt, completion: Completion) -> list[int]:
    """Token ids of a completion of `prompt`, with the end of sequence.

    Of a conversation they are what the chat template adds to the prompt, with the tools that TRL uses.
    """
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise DataError("prompt", "it is a string, and a completion is messages", "write both alike")
        ids = tokenizer(trainer)(completion, add_special_tokens=False)["input_ids"]
        ends = bool(ids) and ids[-1] in trainer.eos_token_ids
        return ids if ends else [*ids, tokenizer(trainer).eos_token_id]
    rendered = trainer.processing_class.apply_chat_template(
        conversation=[[*prompt, *completion_messages(completion)]],
        tools=trainer.tools or None,
        chat_template=trainer.chat_template,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    (start,) = encode_prompts(trainer, [prompt])
    return after_prompt(rendered["input_ids"][0], start)


def pad_left(trainer: GRPOTrainer, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of token ids, padded on the left to one width, and a mask [B, width] that is 0 on padding."""
    tensors, device = [torch.tensor(row, dtype=torch.long) for row in rows], trainer.accelerator.device
    ids = pad(tensors, tokenizer(trainer).pad_token_id, padding_side="left")
    mask = pad([torch.ones_like(row) for row in tensors], 0, padding_side="left")
    return ids.to(device), mask.to(device)


def load_copy(trainer: GRPOTrainer) -> nn.Module:
    """A second model from the path that the policy was loaded from, with the weights that TRL holds now."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    options = dict(trainer.args.model_init_kwargs or {})
    options.setdefault("trust_remote_code", trainer.args.trust_remote_code)
    options |= {"dtype": policy.dtype, "device_map": None}
    with torch.random.fork_rng():  # loading may initialise weights; the run's random numbers stay TRL's
        loaded = create_model_from_path(get_config_model_id(policy.config), **options)
    loaded.load_state_dict(policy.state_dict())
    return loaded
