"""TRL's own distillation losses, called on drawn logits and log-probabilities."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.trl_claims.upstream import Accelerator, labels, load


def distillation_loss(
    hidden: Tensor,
    teacher_hidden: Tensor,
    head: Tensor,
    teacher_head: Tensor,
    mask: Tensor,
    beta: float,
    num_items: float | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """DistillationTrainer's loss, and the number of tokens that it counts."""
    function = load("DistillationTrainer", "_chunked_divergence_loss")
    states = (hidden, teacher_hidden, head, teacher_head)
    loss, _, count = function(*states, mask, beta, num_items, temperature=temperature)
    return loss, count


def sdpo_loss(
    student: Tensor, teacher: Tensor, mask: Tensor, tokens: Tensor, old: Tensor, **options: Any
) -> Tensor:
    """SDPOTrainer's self-distillation; `options` by the names of its config."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(**options),
        accelerator=Accelerator(),
        _log_self_distillation_metric=lambda mode, value: None,
    )
    logits = load("SDPOTrainer", "DistillationLogits")(tokens, mask.long(), mask.long(), student, teacher)
    loss: Tensor = load("SDPOTrainer")._compute_self_distillation_loss(
        trainer, SimpleNamespace(training=True), {"old_per_token_logps": old}, logits
    )
    return loss


def sdpo_policy_loss(
    trainer: SimpleNamespace, logits: Tensor, old: Tensor, advantages: Tensor, mask: Tensor
) -> Tensor:
    """SDPOTrainer's policy term, of tokens that are all the first entry of the vocabulary."""
    ids = torch.zeros_like(mask, dtype=torch.long)
    given = {"completion_ids": ids, "completion_mask": mask.long(), "advantages": advantages}
    loss: Tensor = load("SDPOTrainer")._compute_policy_loss(
        trainer, given | {"old_per_token_logps": old}, logits
    )
    return loss


def iw_opd_loss(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor,
    teacher: Tensor,
    rollout: Tensor,
    *,
    gamma: float,
    epsilon: float,
) -> Tensor:
    """IWOPDTrainer's policy loss."""
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=gamma,
        iw_opd_epsilon=epsilon,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss: Tensor = load("IWOPDTrainer")._compute_iw_opd_loss(
        trainer, logits, tokens, torch.where(mask, tokens, -100), teacher, rollout
    )
    return loss


def _server(beta: float, add_tail: bool) -> tuple[SimpleNamespace, Any]:
    cls = load("ServerDistillationTrainer")
    reduce = cls._reduce_divergence_loss
    return SimpleNamespace(beta=beta, loss_add_tail=add_tail, _reduce_divergence_loss=reduce), cls


def server_forward_kl(
    student: Tensor, top_logprobs: Tensor, top_ids: Tensor, mask: Tensor, *, add_tail: bool
) -> Tensor:
    """ServerDistillationTrainer's loss with beta = 0, on the teacher's largest entries."""
    trainer, cls = _server(0.0, add_tail)
    given = {"topk_logprobs": top_logprobs, "topk_token_ids": top_ids}
    loss: Tensor = cls._compute_server_forward_kl_loss(
        trainer, given, torch.log_softmax(student, -1), labels(mask)
    )
    return loss


def server_reverse_kl(student: Tensor, teacher_logprobs: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """ServerDistillationTrainer's loss with beta = 1, on one token and the rest."""
    trainer, cls = _server(1.0, True)
    loss: Tensor = cls._compute_sparse_top_1_divergence_loss(
        trainer,
        torch.log_softmax(student, -1),
        *(ids, teacher_logprobs, ids, teacher_logprobs, labels(mask)),
    )
    return loss


def uld_loss(student: Tensor, teacher: Tensor, mask: Tensor, temperature: float) -> Tensor:
    """GOLDTrainer's ULD, without the cross-entropy and the alignment of two tokenizers."""
    config = SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=temperature,
        uld_teacher_temperature=temperature,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        uld_token_merge_strategy="observed",
        use_extended_uld=False,
    )
    ids = torch.zeros_like(mask, dtype=torch.long)
    loss: Tensor = load("GOLDTrainer", "ULDLoss")(config)(
        student, teacher, labels(mask), labels(mask), ids, ids
    )
    return loss
