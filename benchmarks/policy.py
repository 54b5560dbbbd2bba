"""Policy losses forward and backward on [64, 4096] float32, beside verl's and TRL's own functions.

Ours is the kernel with its metrics and the aggregation; theirs is the whole function with theirs.
"""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from trl import GRPOTrainer
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig

from benchmarks.timing import THREADS, best_seconds
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.choosing import choose

SHAPE = (64, 4096)
ROUNDS = 7

# Our dialect, verl's name of it, TRL's loss_type.
LOSSES: tuple[tuple[str, str | None, str | None], ...] = (
    ("grpo", "vanilla", "bnpo"),
    ("gspo_token", "gspo", None),
    ("cispo", "cispo", "cispo"),
    ("sapo", "sapo", "sapo"),
    ("dppo_tv", "dppo_tv", None),
    ("dppo_kl", "dppo_kl", None),
    ("gmpo", "geo_mean", None),
    ("gpg", "gpg", None),
    ("vespo", None, "vespo"),
    ("luspo", None, "luspo"),
)


def batch() -> dict[str, Tensor]:
    """Log-probabilities of a policy near the old policy; a third of each row is padding or so."""
    g = torch.Generator().manual_seed(0)
    old = -2 * torch.rand(SHAPE, generator=g)
    logprobs = (old + 0.2 * torch.randn(SHAPE, generator=g)).clamp(max=0)
    lengths = torch.randint(SHAPE[1] // 3, SHAPE[1] + 1, (SHAPE[0], 1), generator=g)
    mask = torch.arange(SHAPE[1]) < lengths
    advantages = torch.randn(SHAPE[0], 1, generator=g)
    return {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages, "mask": mask}


def ours(name: str, given: dict[str, Tensor]) -> Callable[[], object]:
    """The kernel, a token mean, and its backward."""
    choice = choose("policy", name)
    loss, params = choice.loss, choice.params
    kernel = loss.kernel()
    given = {**given, "rollout_logprobs": given["old_logprobs"]}

    def run() -> Tensor:
        leaf = given["logprobs"].detach().requires_grad_()
        tensors = [leaf if need == "logprobs" else given[need] for need in loss.needs]
        token = kernel(*tensors, **params)
        aggregate(token.loss, given["mask"], "token-mean").backward()
        return leaf.grad

    return run


def verl(name: str, given: dict[str, Tensor]) -> Callable[[], object]:
    """verl's registered function, fed as its actor feeds it, and its backward."""
    function = core_algos.get_policy_loss_fn(name)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        policy_loss=PolicyLossConfig(loss_mode=name),
    )
    mask = given["mask"].float()
    advantages = given["advantages"].expand(SHAPE).contiguous()

    def run() -> Tensor:
        leaf = given["logprobs"].detach().requires_grad_()
        loss, _ = function(
            old_log_prob=given["old_logprobs"],
            log_prob=leaf,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode="token-mean",
            config=config,
        )
        loss.backward()
        return leaf.grad

    return run


def trl(loss_type: str, given: dict[str, Tensor]) -> Callable[[], object]:
    """TRL's `_compute_loss` on the attributes it reads, its model's forward left out, and its backward."""
    mask = given["mask"].int()
    ids = torch.zeros(SHAPE, dtype=torch.long)
    trainer: Any = SimpleNamespace(
        loss_type=loss_type,
        importance_sampling_level="sequence" if loss_type == "luspo" else "token",
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.2,
        max_completion_length=SHAPE[1],
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        entropy_coef=0.0,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=False,
        aux_loss_enabled=False,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, *_, **__: x, device=mask.device
        ),
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        ),
    )
    entropies = torch.zeros(SHAPE)

    def run() -> Tensor:
        leaf = given["logprobs"].detach().requires_grad_()
        trainer._metrics = {"train": defaultdict(list)}
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, entropies, None)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": given["advantages"][:, 0],
            "old_per_token_logps": given["old_logprobs"],
            "num_items_in_batch": mask.sum(),
        }
        GRPOTrainer._compute_loss(trainer, None, inputs).backward()
        return leaf.grad

    return run


def table() -> Table:
    """Milliseconds of ours, and how its time compares with each peer's."""
    given = batch()
    made = Table(
        "loss", title=f"Policy losses, forward and backward on {list(SHAPE)} float32, {THREADS} threads"
    )
    for heading in ("ours, ms", "verl, ms", "TRL, ms", "x verl (goal 0.90)", "x TRL (goal 1.00)"):
        made.add_column(heading, justify="right")
    for name, in_verl, in_trl in LOSSES:
        functions = {"ours": ours(name, given)}
        if in_verl:
            functions["verl"] = verl(in_verl, given)
        if in_trl:
            functions["trl"] = trl(in_trl, given)
        best = best_seconds(functions, ROUNDS)
        ms = [f"{1000 * best[k]:.1f}" if k in best else "" for k in ("ours", "verl", "trl")]
        ratios = [f"{best['ours'] / best[k]:.2f}" if k in best else "" for k in ("verl", "trl")]
        made.add_row(name, *ms, *ratios)
    return made
