"""slime's packed logits -> a loss of the catalogue -> slime's own reducer.

slime's `get_log_probs_and_entropy` computes the log-probabilities under tensor and context parallelism. Under
context parallelism a rank has two chunks of each response. Here they are gathered, because a loss may need
the whole response (GSPO), and the loss is cut again for the reducer of the rank. Miles has the same
functions in other modules. Both are imported when the loss is called, and not before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_plugins.adapters.slime_loss.options import BY_ROLLOUT, NODE, READ, parsed
from composer_plugins.adapters.slime_loss.upstream import host
from composer_plugins.errors import DataError, log_info
from composer_plugins.frameworks.slime import SLIME
from composer_plugins.health import watch
from composer_plugins.kernels.masking import keep
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.finite import FiniteCheck
from composer_plugins.losses.masks import boolean_mask
from composer_plugins.objective.options import described
from composer_plugins.objective.own_options import Trained
from composer_plugins.objective.per_token import Terms, per_token

# By our input: the key of the batch, and what fills it.
STREAMS = {
    "advantages": ("advantages", "remove --disable-compute-advantages-and-returns"),
    "old_logprobs": ("log_probs", ""),
    "rollout_logprobs": ("rollout_log_probs", "set --use-rollout-logprobs, which keeps them"),
    "ref_logprobs": ("ref_log_probs", "set --ref-load, and --use-kl-loss or --kl-coef"),
    "teacher_logprobs": ("teacher_log_probs", "set --use-opd with --opd-type"),
}


class SlimeLoss:
    """A policy loss with slime's own terms added.

        total = policy_weight w_t policy_t + kl_loss_coef KL_t - entropy_coef H_t + hint_weight hint_t

    `args.composer` has the options of ComposerConfig, and `mode` and `max_length`: policy, which has to be
    set, policy_params, policy_weight, rollout_correction, rollout_correction_params, hint_weight,
    hint_estimator, hint_params. slime's own terms (use_kl_loss, use_tis ...) act, and a clip of its own that
    is moved is an error. Denominator: with calculate_per_token_loss the tokens of the step; without it the
    rollouts of the step, and in each the mean over its tokens, or the sum with `mode`.
    Raises ConfigError for what is not understood and cannot be delivered, DataError for a batch without what
    the loss needs or with other lengths, and for a loss that is not finite, on a GPU some calls later.
    """

    def __init__(self, found: Trained) -> None:
        self.terms, self.mode = Terms.of(found.objective, found.config), found.objective.mode
        loss = found.objective.policy.loss
        reads = {"advantages", "old_logprobs", *loss.needs}
        reads |= {"ref_logprobs"} if self.terms.reads_reference else set()
        by_rollout = "rollout engine" in (found.objective.old, found.objective.kl and found.objective.kl.old)
        if by_rollout or found.objective.correction is not None:
            reads |= {"rollout_logprobs"}
        elif found.objective.rollout == "trainer":
            reads -= {"rollout_logprobs"}
        reads |= {"teacher_logprobs"} if self.terms.reads_teacher else set()
        # In one order: each is gathered, and every rank has to gather the same one.
        self.reads = [name for name in STREAMS if name in reads]
        self.entropies = bool(found.objective.entropy) or "entropies" in loss.needs
        self.is_new = True
        self.health = watch.Health.of(found.config, found.objective.policy, "slime", self.mode)
        self.require_finite = FiniteCheck(f"policy {found.objective.policy.name!r}")

    def __call__(
        self,
        args: Any,
        batch: Mapping[str, Any],
        logits: Tensor,
        sum_of_sample_mean: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [] of one micro-batch, which slime divides, and metrics as tensors []."""
        here, lengths = host(args, batch), (batch["total_lengths"], batch["response_lengths"])
        found = here.log_probs(
            logits,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=lengths[0],
            response_lengths=lengths[1],
            with_entropy=self.entropies,
        )
        own = found["log_probs"]
        streams: dict[str, Any] = {"logprobs": own}
        streams |= {"entropies": found["entropy"]} if self.entropies else {}
        for name in self.reads:
            streams[name] = self._stream(name, batch, own)

        def rows(name: str) -> Tensor:
            whole = [here.gather(x, *sizes) for x, *sizes in zip(streams[name], *lengths, strict=True)]
            return pad_sequence([x if name in ("logprobs", "entropies") else x.detach() for x in whole], True)

        given = {name: rows(name).to(logits.device) for name in streams}
        for i, (mask, tokens) in enumerate(zip(batch["loss_masks"], lengths[1], strict=True)):
            if len(mask) != tokens:
                problem = f"response {i} has {len(mask)} values, and {tokens} tokens"
                raise DataError("batch['loss_masks']", problem, "pass one value per token of the response")
        masks = pad_sequence(list(batch["loss_masks"]), True).to(logits.device)
        given["mask"] = boolean_mask("batch['loss_masks']", masks, check=self.is_new)
        if self.is_new:
            log_info(described(SLIME, self.terms.objective.policy, self.mode))
        token = per_token(self.terms, given, check=self.is_new)
        self.is_new = False
        measured = self.health.micro_batch(given, token.metrics)
        token = TokenLoss(token.loss, token.metrics | watch.per_token(measured, given["mask"]))

        def local(x: Tensor) -> Tensor:
            cut = (here.cut(row[: sizes[1]], *sizes) for row, *sizes in zip(x, *lengths, strict=True))
            return torch.cat(list(cut))

        loss = sum_of_sample_mean(local(token.loss * self._factors(args, batch, token.loss)))
        self.require_finite(loss, given)
        if not sum(x.numel() for x in own):
            loss = loss + 0 * logits.sum()  # as in slime: a rank without a token takes part in the backward
        metrics = {
            f"{NODE}/{name}": sum_of_sample_mean(local(keep(one.value.to(token.loss.dtype), one.where)))
            for name, one in token.metrics.items()
        }
        return loss, {"loss": loss.detach().clone(), **metrics}

    def _stream(self, name: str, batch: Mapping[str, Any], own: list[Tensor]) -> list[Tensor]:
        """A stream of the batch, as this rank has it; the old policy is this one where slime has none."""
        key, remedy = STREAMS[name]
        found = batch.get(key)
        if not found and name == "old_logprobs":
            return [x.detach() for x in own]
        if not found:
            policy = self.terms.objective.policy.name
            problem = f"it is missing, and {policy!r} or a term that is added to it needs it"
            raise DataError(f"batch[{key!r}]", problem, remedy)
        if len(found) != len(own):
            problem = f"it has {len(found)} responses, and the batch {len(own)}"
            raise DataError(f"batch[{key!r}]", problem, "pass one tensor per response")
        for i, (x, mine, tokens) in enumerate(zip(found, own, batch["response_lengths"], strict=True)):
            if len(x) != len(mine):
                here = f"this rank has {len(mine)} of its {tokens} tokens"
                remedy = "pass one value per token of this rank, as slice_log_prob_with_cp of slime cuts them"
                raise DataError(f"batch[{key!r}]", f"response {i} has {len(x)} values, and {here}", remedy)
        return list(found)

    def _factors(self, args: Any, batch: Mapping[str, Any], like: Tensor) -> Tensor | float:
        """What undoes slime's division by the tokens of a rollout, [rows, 1]."""
        if self.mode == BY_ROLLOUT[0] or args.calculate_per_token_loss:
            return 1.0
        sums = batch.get("rollout_mask_sums")
        sums = [x.sum() for x in batch["loss_masks"]] if sums is None else sums
        counts = torch.stack([torch.as_tensor(x) for x in sums]).to(like).clamp(min=1).unsqueeze(-1)
        return counts / (self.terms.objective.length or 1.0)


_losses: dict[str, SlimeLoss] = {}


def loss_of(args: Any) -> SlimeLoss:
    """The loss of these arguments, parsed once."""
    key = repr([getattr(args, name, None) for name in READ])
    if key not in _losses:
        _losses[key] = SlimeLoss(parsed(args))
    return _losses[key]
