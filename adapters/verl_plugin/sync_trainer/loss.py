"""The actor's loss under composer_sync: verl's own, plus the hint's term and the replay's term."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from composer_plugins.adapters.verl_plugin.policy_loss import means, reduce
from composer_plugins.adapters.verl_plugin.rules import Channels, channels_delivered, parse_channels
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    HINT_MASK,
    REPLAY,
    TAID_T,
    TEACHER,
    TOP_IDS,
    TOP_LOGPROBS,
    response_positions,
    rows_of,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.metrics import HINT, POLICY, means_to_sums
from composer_plugins.kernels.divergences.supports import log_probs_at
from composer_plugins.kernels.masking import at_least_float32
from composer_plugins.kernels.types import Metric as TokenMetric
from composer_plugins.kernels.types import TokenLoss

PLANE = "composer_hint"  # the hint's loss of each token, as an engine returns it from the logits


class ComposerLoss:
    """The loss function that `set_loss_fn` sends to the actor's workers; verl's engines call it by keyword.

    total = verl's policy loss + hint_weight * hint + replay_weight * replay

    The hint is reduced like the policy loss (`loss_agg_mode`, with the denominators of the whole
    mini-batch), and a token without a hint counts as 0. The replay term is sum_t c_t log pi(y_t), with
    the coefficients that the trainer computed. Both are 0 in a micro-batch that has neither.
    """

    def __init__(self, actor: Any, node: Mapping[str, Any]) -> None:
        self.actor, self.node = actor, dict(node)
        self.hint_metrics: Mapping[str, TokenMetric] | None = None  # of the last micro-batch

    @cached_property
    def channels(self) -> Channels:
        """The channels, parsed once in the worker: the catalogue's rows are not sent to it."""
        return parse_channels(self.node)

    def __call__(
        self,
        model_output: Mapping[str, Tensor] | None = None,
        data: TensorDict | None = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Return (loss, metrics); called with `student_logits`, the hint's loss of each token."""
        assert data is not None
        if student_logits is not None:
            return {PLANE: self.hint_of_logits(student_logits, data)}
        assert model_output is not None
        with channels_delivered():
            loss, metrics = ppo_loss(self.actor, model_output, data, dp_group)
        ours = {name: metrics.pop(name).values[0] for name in list(metrics) if name.startswith(POLICY)}
        metrics |= means_to_sums(ours, int(padded(data, "response_mask").sum()), POLICY)
        logprobs = no_padding_2_padding(model_output["log_probs"], data)
        if self.channels.hint_is_loss:
            hint, hint_metrics = self.hint(model_output, data, logprobs)
            loss = loss + self.channels.config.hint_weight * hint
            metrics |= hint_metrics
        if self.channels.replay and REPLAY in data:
            coefficients = padded(data, REPLAY)
            replay = data["dp_size"] * (coefficients * torch.where(coefficients != 0, logprobs, 0.0)).sum()
            loss = loss + self.channels.config.replay_weight * replay
        return loss, metrics

    def hint(
        self, model_output: Mapping[str, Tensor], data: TensorDict, logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """Return the hint's term and its metrics.

        `kl` is the mean of log S_old(y) - log T(y) over the tokens with a hint: an estimate of the KL at the
        policy that the step began with, whatever the divergence.
        """
        mask = padded(data, HINT_MASK).bool()
        old, teacher = padded(data, "old_log_probs"), padded(data, TEACHER)
        if self.channels.compares_distributions:
            per_token = torch.where(mask, no_padding_2_padding(model_output[PLANE], data), 0.0)
        else:
            tensors = {"student_logprobs": logprobs, "teacher_logprobs": teacher, "mask": mask}
            per_token = self.divergence(tensors | {"old_logprobs": old})
        value = reduce(per_token, mask, self.actor.loss_agg_mode, self.actor.global_batch_info)
        metrics = {**(self.hint_metrics or {}), "kl": TokenMetric(old - teacher, mask)}
        return value, {
            f"{HINT}loss": Metric(AggregationType.SUM, value.detach()),
            **means_to_sums(means(metrics, HINT), int(mask.sum()), HINT),
        }

    def hint_of_logits(self, logits: Tensor, data: TensorDict) -> Tensor:
        """Return the divergence of each token of the packed sequences [1, tokens].

        It is 0 outside the responses that the teacher has scored. A divergence of two distributions takes
        the teacher's k entries and a tail as the whole vocabulary.
        """
        entries = rows_of(data[TOP_IDS])

        def scored(rows: list[Tensor]) -> Tensor:
            return torch.cat([row[: len(ids)] for row, ids in zip(rows, entries, strict=True)])

        where = scored(response_positions(data)).to(logits.device)
        student, mask = logits[0, where], scored(rows_of(data[HINT_MASK])).bool()
        ids, teacher = torch.cat(entries).long(), sum_to_one(torch.cat(rows_of(data[TOP_LOGPROBS])))
        tensors = {"mask": mask, "teacher_topk_ids": ids, "teacher_topk_logprobs": teacher}
        hint = self.channels.hint
        assert hint is not None
        if "teacher_logits" in hint.loss.needs:
            pair = log_probs_at(student, teacher, ids, mask, temperature=1.0, rest="tail")
            tensors |= {"student_logits": pair.student, "teacher_logits": pair.teacher}
        else:
            tensors["student_logits"] = student
        if hint.value("ratio_cap") is not None:
            sampled = scored(rows_of(data["responses"])).unsqueeze(-1)
            logprobs = torch.log_softmax(at_least_float32(student), -1)
            tensors["student_logprobs"] = logprobs.gather(-1, sampled).squeeze(-1)
            tensors["old_logprobs"] = scored(rows_of(data["old_log_probs"]))
        t = tensordict_utils.get_non_tensor_data(data, TAID_T, None)
        loss = self.divergence(tensors, **({} if t is None else {"t": t}))
        plane = torch.zeros(logits.shape[1], dtype=loss.dtype, device=loss.device)
        return plane.index_copy(0, where, loss).unsqueeze(0)

    def divergence(self, tensors: dict[str, Tensor], **params: Any) -> Tensor:
        """Return the hint's divergence per token. The tensors of the first call are checked."""
        hint = self.channels.hint
        assert hint is not None
        if hint.value("ratio_cap") is not None:  # weights each token by its ratio to the old policy
            hint = hint.with_optional("student_logprobs", "old_logprobs")
        token: TokenLoss = hint.call(tensors, check=self.hint_metrics is None, **params)
        self.hint_metrics = token.metrics
        return token.loss


def sum_to_one(logprobs: Tensor) -> Tensor:
    """Return the k entries of `TOP_LOGPROBS`, scaled so that they and the rest sum to 1 in float32.

    They were rounded to half precision. Otherwise the tail would be 1 less a rounded sum, whose error may be
    larger than the tail.
    """
    entries, rest = at_least_float32(logprobs).split([logprobs.shape[-1] - 1, 1], -1)
    return entries + torch.log1p(-rest.exp()) - entries.logsumexp(-1, keepdim=True)


def padded(data: TensorDict, name: str) -> Tensor:
    """Return a field as [rows, longest response]."""
    field: Tensor = data.select(name).to_padded_tensor()[name]
    return field
