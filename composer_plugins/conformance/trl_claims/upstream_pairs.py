"""TRL's own preference losses, called on drawn log-probabilities [chosen; rejected]."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.trl_claims.upstream import Accelerator, in_float64, load, metrics


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
        loss: Tensor = load("DPOTrainer")._compute_loss(
            trainer, lambda **_: outputs(logprobs, log_sum_sq), completions(mask), False
        )
    return loss


def logged(trainer: SimpleNamespace) -> dict[str, list[float]]:
    """What a trainer has logged in training."""
    found: dict[str, list[float]] = trainer._metrics["train"]
    return found


def kto_loss(
    logprobs: Tensor,
    mask: Tensor,
    *,
    labels: Tensor,
    ref_logps: Tensor,
    kl_logps: Tensor,
    ref_kl_logps: Tensor,
    loss_type: str,
    **options: Any,
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
        loss: Tensor = load("KTOTrainer")._compute_loss(
            trainer, lambda **_: outputs(logprobs), completions(mask) | batch, False
        )
    return loss


def batch_loss(cls: Any, chosen: Tensor, rejected: Tensor, nll: Tensor, **options: Any) -> Tensor:
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


def tpo_loss(logits: Tensor, ids: Tensor, mask: Tensor, **options: Any) -> Tensor:
    """TPOTrainer's loss of [chosen; rejected; gold] where the model's logits are the ones given."""
    trainer = pair_trainer(**options)
    batch = completions(mask) | {"input_ids": ids}
    with in_float64():
        loss: Tensor = load("TPOTrainer")._compute_loss(
            trainer, lambda **_: SimpleNamespace(logits=logits), batch, False
        )
    return loss
