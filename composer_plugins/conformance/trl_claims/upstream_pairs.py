"""TRL's own preference losses, called on drawn log-probabilities [chosen; rejected]."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.trl_claims.upstream import Accelerator, in_float64, load, metrics

DPO_DEFAULTS = {
    "beta": 0.1,
    "label_smoothing": 0.0,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "ld_alpha": None,
    "use_weighting": False,
    "loss_weights": None,
}


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
    """What the `_compute_loss` of a preference trainer reads in addition to its own options."""
    model: Any = torch.nn.Identity()
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
    reference: Tensor, loss_types: list[str], *, discopop_tau: float = 0.05, **options: Any
) -> SimpleNamespace:
    """What DPOTrainer._compute_loss reads; the reference's log-probabilities are the ones given."""
    unknown = options.keys() - DPO_DEFAULTS.keys()
    assert not unknown, f"TRL would ignore {unknown}"
    return pair_trainer(
        **DPO_DEFAULTS | {"loss_weights": [1.0] * len(loss_types)} | options,
        loss_types=loss_types,
        precompute_ref_logps=False,
        ref_model=lambda **_: outputs(reference),
        args={"discopop_tau": discopop_tau},
    )


def computed(cls: str, trainer: SimpleNamespace, outputs: Any, batch: dict[str, Tensor]) -> Tensor:
    """The loss that a trainer computes of a batch when its model returns these outputs."""
    with in_float64():
        loss: Tensor = load(cls)._compute_loss(trainer, lambda **_: outputs, batch, False)
    return loss


def dpo_loss(
    trainer: SimpleNamespace, logprobs: Tensor, mask: Tensor, log_sum_sq: Tensor | None = None
) -> Tensor:
    """DPOTrainer's loss of [chosen; rejected]; as out of its head, log-probabilities are 0 where masked."""
    return computed("DPOTrainer", trainer, outputs(logprobs, log_sum_sq), completions(mask))


def batch_loss(cls: str, scores: list[Tensor], nll: Tensor, **options: Any) -> Tensor:
    """The loss of a trainer of CPO's kind; its forward pass gives the scores of both sides and an NLL."""
    trainer = SimpleNamespace(
        accelerator=Accelerator(),
        aux_loss_enabled=False,
        concatenated_forward=lambda model, batch: (*scores, *scores, nll),
        **options,
    )
    owner = load(cls)
    for name in {"cpo_loss", "odds_ratio_loss"} & set(dir(owner)):
        setattr(trainer, name, getattr(owner, name).__get__(trainer))
    with in_float64():
        loss: Tensor = owner.get_batch_loss_metrics(trainer, None, {})[0]
    return loss
