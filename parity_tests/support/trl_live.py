"""TRL's own loss code, called on drawn tensors: its methods, on the few attributes of `self` that they read.

Nothing of TRL is copied or patched. A method is called unbound on a namespace; a static method and a
function as they are. What TRL computes in torch's default dtype (a temperature made by torch.where, n /
(n - 1) of two integers) is computed in float64 inside `in_float64`, so that a comparison can be strict;
what it rounds to float32 by name stays rounded.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, KTOTrainer

CPU = torch.device("cpu")


class Accelerator:
    """One process: what is gathered or reduced over ranks is what was given."""

    device, process_index, sync_gradients = CPU, 0, True

    def __init__(self, num_processes: int = 1) -> None:
        self.num_processes = num_processes

    def gather(self, x: Any) -> Any:
        """Of one process, itself."""
        return x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        """Of one process, itself."""
        return x

    def pad_across_processes(self, x: Tensor, dim: int, pad_index: float) -> Tensor:
        """Of one process, itself."""
        return x


@contextmanager
def in_float64() -> Iterator[None]:
    """Let TRL make its own numbers in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compared_with(source: str, option: str) -> set[str]:
    """The strings that some source compares `option`, a variable or an attribute, with."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        names = [getattr(x, "attr", getattr(x, "id", "")) for x in ast.walk(node.left)]
        if option in names:
            constants = [
                c.value for x in node.comparators for c in ast.walk(x) if isinstance(c, ast.Constant)
            ]
            found.update(value for value in constants if isinstance(value, str))
    return found


def metrics() -> dict[str, defaultdict[str, list[float]]]:
    """Where a trainer logs."""
    return {"train": defaultdict(list), "eval": defaultdict(list)}


GRPO_ARGS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
}


def grpo_trainer(training: bool = True, processes: int = 1, **options: Any) -> SimpleNamespace:
    """What GRPOTrainer._compute_loss reads; `options` by the names of attributes or of GRPOConfig."""
    args = SimpleNamespace(**{name: options.pop(name, value) for name, value in GRPO_ARGS.items()})
    defaults = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "max_completion_length": 7,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "entropy_coef": 0.0,
    }
    unknown = set(options) - set(defaults)
    assert not unknown, f"TRL would ignore {unknown}"
    trainer = SimpleNamespace(
        **defaults | options,
        args=args,
        model=SimpleNamespace(training=training),
        accelerator=Accelerator(processes),
        aux_loss_enabled=False,
        use_adaptive_entropy=False,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _metrics=metrics(),
    )
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
    trainer.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(trainer, *a)
    return trainer


def grpo_inputs(mask: Tensor, advantages: Tensor, **more: Tensor | None) -> dict[str, Tensor]:
    """The batch of a policy loss; what is None is left out."""
    ids = torch.zeros_like(mask, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": advantages,
        "num_items_in_batch": mask.sum(),
    }
    return batch | {name: value for name, value in more.items() if value is not None}


def policy_loss(
    trainer: SimpleNamespace,
    logprobs: Tensor,
    entropies: Tensor,
    inputs: dict[str, Tensor],
    cls: type = GRPOTrainer,
) -> Tensor:
    """`cls._compute_loss` where the model's log-probabilities and entropies are the ones given."""
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropies, None)
    with in_float64():
        loss: Tensor = cls._compute_loss(trainer, None, inputs)
    return loss


def outputs(logprobs: Tensor, log_sum_sq: Tensor | None = None) -> SimpleNamespace:
    """What a model with TRL's fused head returns."""
    nothing = torch.zeros_like(logprobs).detach()
    return SimpleNamespace(
        log_probs=logprobs,
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
        log_sum_sq_probs=nothing if log_sum_sq is None else log_sum_sq,
    )


def completions(mask: Tensor) -> dict[str, Tensor]:
    """A batch of completions [B, T], each after one token of prompt."""
    padded = torch.nn.functional.pad(mask.long(), (1, 0))
    return {"input_ids": padded, "attention_mask": padded, "completion_mask": padded}


def pair_trainer(**options: Any) -> SimpleNamespace:
    """What the `_compute_loss` of a preference trainer reads beside its own options."""
    model = torch.nn.Identity()
    model.is_gradient_checkpointing = False
    return SimpleNamespace(
        model=model,
        accelerator=Accelerator(),
        args=SimpleNamespace(gradient_checkpointing_kwargs=None, **options.pop("args", {})),
        aux_loss_enabled=False,
        _metrics=metrics(),
        _total_train_tokens=0,
        _tp_size=1,
        **options,
    )


def dpo_trainer(
    reference: Tensor, loss_types: Iterable[str], *, discopop_tau: float = 0.05, **options: Any
) -> SimpleNamespace:
    """What DPOTrainer._compute_loss reads; the reference's log-probabilities are the ones given."""
    loss_types = list(loss_types)
    defaults = {
        "beta": 0.1,
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "ld_alpha": None,
        "use_weighting": False,
        "loss_weights": [1.0] * len(loss_types),
    }
    unknown = set(options) - set(defaults)
    assert not unknown, f"TRL would ignore {unknown}"
    return pair_trainer(
        **defaults | options,
        loss_types=loss_types,
        precompute_ref_logps=False,
        ref_model=lambda **_: outputs(reference),
        args={"discopop_tau": discopop_tau},
    )


def dpo_loss(
    trainer: SimpleNamespace, logprobs: Tensor, mask: Tensor, log_sum_sq: Tensor | None = None
) -> Tensor:
    """DPOTrainer's loss of [chosen; rejected]; as out of its head, log-probabilities are 0 where masked."""
    with in_float64():
        loss: Tensor = DPOTrainer._compute_loss(
            trainer, lambda **_: outputs(logprobs, log_sum_sq), completions(mask), False
        )
    return loss


def kto_loss(
    logprobs: Tensor,
    mask: Tensor,
    *,
    labels: Tensor,
    ref_logps: Tensor,
    kl_logps: Tensor,
    ref_kl_logps: Tensor,
    loss_type: str,
    **options: float,
) -> Tensor:
    """KTOTrainer's loss; the KL's completions have the log-probabilities given."""
    trainer = pair_trainer(
        loss_type=loss_type,
        calculate_KL=loss_type == "kto",
        precompute_ref_logps=True,
        _compute_kl_logps=lambda model, batch: kl_logps,
        **{"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0} | options,
    )
    batch = {"label": labels, "ref_logps": ref_logps, "ref_KL_logps": ref_kl_logps}
    with in_float64():
        loss: Tensor = KTOTrainer._compute_loss(
            trainer, lambda **_: outputs(logprobs), completions(mask) | batch, False
        )
    return loss


def batch_loss(cls: type, chosen: Tensor, rejected: Tensor, nll: Tensor, **options: Any) -> Tensor:
    """The loss of a trainer of CPO's kind; its forward pass gives the scores and the NLL of the chosen."""
    trainer = SimpleNamespace(
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        concatenated_forward=lambda model, batch: (chosen, rejected, chosen, rejected, nll),
        **options,
    )
    for name in {"cpo_loss", "odds_ratio_loss"} & set(dir(cls)):
        setattr(trainer, name, getattr(cls, name).__get__(trainer))
    with in_float64():
        loss: Tensor = cls.get_batch_loss_metrics(trainer, None, {})[0]
    return loss
