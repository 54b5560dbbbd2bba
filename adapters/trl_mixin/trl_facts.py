"""What this adapter relies on in TRL 1.16, in one place; another version is an edit of this module.

Read from trl/trainer/grpo_trainer.py of 1.16.0: `_compute_loss` calls
`_get_per_token_logps_and_entropies` exactly once, whose result is (logps, entropies, aux_loss) with logps
already divided by the temperature and 0 at padding; it scales its loss for gradient accumulation itself.
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.errors import ConfigError
from composer_plugins.kernels.aggregation import aggregate

UNTOUCHED = "trl"  # the value of `policy` that keeps TRL's own term
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # whose denominators `reduce_like_trl` knows

# Which of our losses mean by clip_low and clip_high what TRL means by epsilon and epsilon_high; and,
# under True, which of them have TRL's delta as well.
CLIPPED_LIKE_TRL = {False: ("grpo", "dapo", "dr_grpo", "gspo", "gspo_token"), True: ("grpo",)}

# exp(60) times a KL term stays finite in float32; such a ratio means the run is broken anyway.
MAX_LOG_RATIO = 60.0

# Metrics of TRL's policy term: without advantages they read 0, or the KL alone.
METRICS_OF_THE_POLICY_TERM = ("clip_ratio/", "policy_loss")


class Forward:
    """One call of TRL's `_compute_loss`: the inputs it gets, and what its own forward pass computed.

    `without_advantages` zeroes the advantages, so that TRL contributes everything but its policy term: the
    KL, the entropy bonus, MoE's aux loss, the metrics.
    """

    def __init__(self, inputs: dict[str, Any], *, without_advantages: bool) -> None:
        self.inputs = inputs
        self._zeroed = without_advantages
        if without_advantages:
            self.inputs = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}

    def record(self, outputs: Any) -> None:
        """Keep log-probabilities and entropies as they pass, before TRL goes on to use them."""
        self.logprobs, self.entropies = outputs[:2]
        old = self.inputs.get("old_per_token_logps")
        if self._zeroed and old is not None:
            # TRL exponentiates log pi - log old unclamped, and an infinite ratio times a zeroed
            # advantage is NaN. Raising `old` bounds the ratio that TRL sees; ours reads the original.
            floor = self.logprobs.detach() - MAX_LOG_RATIO
            self.inputs["old_per_token_logps"] = torch.maximum(old, floor)


def require_supported_trl() -> None:
    """Raise ConfigError unless the installed GRPOTrainer has the features above."""
    helper = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    if GRPOTrainer.loss_is_scaled_for_ga is not True or "compute_aux_loss" not in helper:
        raise ConfigError(
            "the installed TRL's GRPOTrainer is not the one this adapter was proven on: "
            "pip install 'trl>=1.16,<1.17'"
        )


def accumulation_steps(trainer: Any) -> int:
    """What a mean over the rows of one micro-batch is divided by: TRL divides, not the Trainer."""
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 1


def generations(trainer: Any) -> int:
    """How many completions of one prompt stand side by side, now: evaluation may have fewer."""
    return trainer.num_generations if trainer.model.training else trainer.num_generations_eval


def loss_mask(inputs: dict[str, Any]) -> Tensor:
    """The tokens TRL trains on: completion tokens that no tool wrote."""
    mask = inputs["completion_mask"]
    return (mask * inputs["tool_mask"] if "tool_mask" in inputs else mask).bool()


def reduce_like_trl(trainer: Any, token_loss: Tensor, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
    """A loss per token as TRL's `loss_type` reduces it, scaled for gradient accumulation as TRL does."""
    rows, steps = mask.shape[0], accumulation_steps(trainer)
    if trainer.loss_type == "grpo":
        return aggregate(token_loss, mask, "seq-mean-token-mean", num_sequences=rows) / steps
    if trainer.loss_type == "bnpo":
        return aggregate(token_loss, mask, "token-mean") / steps
    if trainer.loss_type == "luspo":
        return aggregate(token_loss, mask, "seq-mean-token-sum", num_sequences=rows) / steps
    if trainer.loss_type == "dr_grpo":
        length = trainer.max_completion_length
        per_row = aggregate(
            token_loss, mask, "seq-mean-token-sum-norm", num_sequences=rows, max_length=length
        )
        return per_row / steps
    # dapo: all tokens of the generation batch over all ranks, rescaled to one accumulation window; DDP
    # averages gradients, hence the share of one process.
    num_tokens = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
    if trainer.model.training:
        num_tokens = num_tokens * steps / trainer.args.steps_per_generation
    return aggregate(token_loss, mask, "token-sum") / num_tokens


def anchor_logprobs(inputs: dict[str, Any], logprobs: Tensor) -> dict[str, Tensor]:
    """What a ratio is measured from, by the name a kernel calls it: the old policy, and the rollout's.

    TRL leaves out the old policy's where it equals the present one. The rollout's are vLLM's own where
    TRL has them; a token that vLLM could not score (NaN) falls back to the old policy's, as in TRL.
    """
    old = inputs.get("old_per_token_logps")
    old = logprobs.detach() if old is None else old
    rollout = inputs.get("sampling_per_token_logps", old)
    return {"old_logprobs": old, "rollout_logprobs": torch.where(rollout.isnan(), old, rollout)}


def policy_term_factor(
    trainer: Any, inputs: dict[str, Any], logprobs: Tensor, entropies: Tensor, mask: Tensor
) -> Tensor | float:
    """The product of what TRL multiplies its policy term with, per token or per row.

    DeepSeek-V3.2's off-policy sequence mask, the top-entropy mask, and the importance ratio between the
    trainer and vLLM. 1.0 where none of them is on.
    """
    factor: Tensor | float = 1.0
    if trainer.off_policy_mask_threshold is not None:
        advantages = inputs["advantages"]
        old = anchor_logprobs(inputs, logprobs)["old_logprobs"]
        factor = factor * trainer.get_off_policy_mask(
            advantages=advantages if advantages.dim() > 1 else advantages.unsqueeze(1),
            per_token_logps=logprobs,
            sampling_per_token_logps=inputs.get("sampling_per_token_logps", old),
            mask=mask.to(logprobs),
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    if trainer.top_entropy_quantile < 1.0:
        threshold = 1 - trainer.top_entropy_quantile
        factor = factor * trainer.get_high_entropy_mask(entropies, mask.to(logprobs), threshold)
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        factor = factor * inputs["importance_sampling_ratio"]
    return factor
