"""The actor's loss under composer_sync: verl's own, and beside it the hint's and the replay's terms."""

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

from composer_plugins.adapters.verl_parts.fields import (
    HINT_MASK,
    REPLAY,
    TAID_T,
    TEACHER,
    TOP_IDS,
    TOP_LOGPROBS,
    rows_of,
)
from composer_plugins.adapters.verl_parts.rules import Channels, carried, channels
from composer_plugins.adapters.verl_plugin.means import HINT, POLICY, sums
from composer_plugins.adapters.verl_plugin.policy import logged, reduced
from composer_plugins.catalogue import Choice
from composer_plugins.checks import check_inputs
from composer_plugins.kernels.contract import Metric as Quantity
from composer_plugins.kernels.contract import TokenLoss
from composer_plugins.kernels.divergences.supports import log_probs_at
from composer_plugins.kernels.masking import at_least_float32

PLANE = "composer_hint"  # the hint's loss of each token, as an engine takes it from the logits


class ComposerLoss:
    """What `set_loss_fn` gives to the actor's workers; called as verl's engines call a loss function.

    total = verl's policy loss + hint_weight * hint + replay_weight * replay

    The hint is reduced as the policy's loss is (`loss_agg_mode`, by the denominators of the whole
    mini-batch), and a token without a hint counts as 0. The replay term is sum_t c_t log pi(y_t), with
    the coefficients that the trainer computed. Both are 0 in a micro-batch that has neither.
    """

    def __init__(self, actor: Any, node: Mapping[str, Any]) -> None:
        self.actor, self.node = actor, dict(node)
        self.seen: Mapping[str, Quantity] | None = None  # of the hint, in the micro-batch at hand

    @cached_property
    def channels(self) -> Channels:
        """Parsed in the worker, once: the catalogue's rows do not travel."""
        return channels(self.node)

    def __call__(
        self,
        model_output: Mapping[str, Tensor] | None = None,
        data: TensorDict | None = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """(loss, metrics); or of `student_logits`, which an engine shows first, the hint of each token."""
        assert data is not None
        if student_logits is not None:
            return {PLANE: self.hint_of_logits(student_logits, data)}
        assert model_output is not None
        with carried():
            loss, metrics = ppo_loss(self.actor, model_output, data, dp_group)
        ours = {name: metrics.pop(name).values[0] for name in list(metrics) if name.startswith(POLICY)}
        metrics |= sums(ours, int(padded(data, "response_mask").sum()), POLICY)
        logprobs = no_padding_2_padding(model_output["log_probs"], data)
        if self.channels.hint_is_loss:
            hint, more = self.hint(model_output, data, logprobs)
            loss = loss + self.channels.config.hint_weight * hint
            metrics |= more
        if self.channels.replay and REPLAY in data:
            coefficients = padded(data, REPLAY)
            replay = data["dp_size"] * (coefficients * torch.where(coefficients != 0, logprobs, 0.0)).sum()
            loss = loss + self.channels.config.replay_weight * replay
        return loss, metrics

    def hint(
        self, model_output: Mapping[str, Tensor], data: TensorDict, logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The hint's term, and what is logged of it."""
        mask = padded(data, HINT_MASK).bool()
        if self.channels.compares_distributions:
            per_token = torch.where(mask, no_padding_2_padding(model_output[PLANE], data), 0.0)
        else:
            given = {"student_logprobs": logprobs, "teacher_logprobs": padded(data, TEACHER), "mask": mask}
            per_token = self.divergence(given | {"old_logprobs": padded(data, "old_log_probs")})
        info = self.actor.global_batch_info
        value = reduced(per_token, mask, self.actor.loss_agg_mode, info)
        means = logged(self.seen or {}, "hint/")
        return value, {
            "actor/composer/hint_loss": Metric(AggregationType.SUM, value.detach()),
            **sums(means, int(mask.sum()), HINT),
        }

    def hint_of_logits(self, logits: Tensor, data: TensorDict) -> Tensor:
        """The divergence of each token of the packed sequences [1, tokens]: 0 outside the responses.

        On the teacher's k entries and a tail, which are then the whole vocabulary of a divergence that
        wants two distributions.
        """
        where = response_positions(data).to(logits.device)
        student = logits[0, where]
        mask, ids, teacher = (torch.cat(rows_of(data[name])) for name in (HINT_MASK, TOP_IDS, TOP_LOGPROBS))
        mask = mask.bool()
        given = {"mask": mask, "teacher_topk_ids": ids, "teacher_topk_logprobs": teacher}
        hint = self.channels.hint
        assert hint is not None
        if "teacher_logits" in hint.loss.needs:
            pair = log_probs_at(student, teacher, ids, mask, temperature=1.0, rest="tail")
            given |= {"student_logits": pair.student, "teacher_logits": pair.teacher}
        else:
            given["student_logits"] = student
        if weighs(hint):
            said = torch.cat(rows_of(data["responses"])).unsqueeze(-1)
            given["student_logprobs"] = (
                torch.log_softmax(at_least_float32(student), -1).gather(-1, said).squeeze(-1)
            )
            given["old_logprobs"] = torch.cat(rows_of(data["old_log_probs"]))
        t = tensordict_utils.get_non_tensor_data(data, TAID_T, None)
        loss = self.divergence(given, {} if t is None else {"t": t})
        plane = torch.zeros(logits.shape[1], dtype=loss.dtype, device=loss.device)
        return plane.index_copy(0, where, loss).unsqueeze(0)

    def divergence(self, given: dict[str, Tensor], more: Mapping[str, Any] | None = None) -> Tensor:
        """The hint's divergence on what it needs; the first tensors are checked."""
        hint = self.channels.hint
        assert hint is not None
        if self.seen is None:
            check_inputs(hint, given)
        optional = {name: given[name] for name in hint.loss.optional if name in given and weighs(hint)}
        needs = (given[name] for name in hint.loss.needs)
        token: TokenLoss = hint.loss.kernel()(*needs, **optional, **(hint.params | dict(more or {})))
        self.seen = token.metrics
        return token.loss


def weighs(hint: Choice) -> bool:
    """Whether the divergence weights each token by the policy's ratio to its old self."""
    ratio_cap = hint.loss.parameters.get("ratio_cap")
    return hint.params.get("ratio_cap", ratio_cap.default if ratio_cap else None) is not None


def padded(data: TensorDict, name: str) -> Tensor:
    """A field [rows, longest response]."""
    field: Tensor = data.select(name).to_padded_tensor()[name]
    return field


def response_positions(data: TensorDict) -> Tensor:
    """Which of the packed tokens predict a response's: from the prompt's last to the last but one."""
    ends = torch.tensor([len(row) for row in rows_of(data["input_ids"])]).cumsum(0)
    lengths = [len(row) for row in rows_of(data["responses"])]
    return torch.cat([torch.arange(end - n - 1, end - 1) for end, n in zip(ends, lengths, strict=True)])
