"""The actor's loss under composer_sync: verl's own, plus the hint's term and the replay's term."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from composer_plugins.adapters.verl_plugin.loss import reduce
from composer_plugins.adapters.verl_plugin.options import (
    NODE,
    Channels,
    channels_of_node,
    under_composer_sync,
)
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
from composer_plugins.adapters.verl_plugin.sync_trainer.logits import log_odds
from composer_plugins.adapters.verl_plugin.sync_trainer.metrics import HINT, POLICY, means_to_sums
from composer_plugins.errors import ConfigError
from composer_plugins.frameworks.verl import BATCH_INPUTS
from composer_plugins.kernels.divergences.supports import Pair, with_rest
from composer_plugins.kernels.masking import at_least_float32
from composer_plugins.kernels.types import Metric as TokenMetric
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.calling import call
from composer_plugins.losses.metrics import means

KERNELS = "composer_plugins.kernels."  # our own losses read the student at the teacher's ids only


class ComposerLoss:
    """The loss function that `set_loss_fn` sends to the actor's workers; verl's engines call it by keyword.

    total = verl's policy loss + hint_weight * hint + replay_weight * replay

    The hint is reduced like the policy loss (`loss_agg_mode`, with the denominators of the whole
    mini-batch), and a token without a hint counts as 0. The replay term is sum_t c_t log pi(y_t), with
    the coefficients that the trainer computed. Both are 0 in a micro-batch that has neither.
    """

    def __init__(self, actor: Any, node: Mapping[str, Any], inputs: Sequence[str] = ()) -> None:
        self.actor, self.node = actor, dict(node)
        self.inputs = {name: BATCH_INPUTS[name] for name in inputs}  # of the policy loss
        self.hint_metrics: Mapping[str, TokenMetric] | None = None  # of the last micro-batch
        self.shown: Tensor | None = None  # of this one: what the hint reads of the logits, [hinted, ...]

    @cached_property
    def channels(self) -> Channels:
        """The channels, parsed once in the worker: the catalogue's rows are not sent to it."""
        return channels_of_node(self.node)

    def __call__(
        self,
        model_output: Mapping[str, Tensor] | None = None,
        data: TensorDict | None = None,
        dp_group: Any = None,
        student_logits: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Return (loss, metrics). In the call before, with `student_logits`, keep what the hint reads."""
        assert data is not None
        if student_logits is not None:
            self.shown = self.hinted_logits(student_logits, data)
            return {}
        assert model_output is not None
        with under_composer_sync(inputs={ours: padded(data, name) for ours, name in self.inputs.items()}):
            loss, metrics = ppo_loss(self.actor, model_output, data, dp_group)
        ours = {name: metrics.pop(name).values[0] for name in list(metrics) if name.startswith(POLICY)}
        metrics |= means_to_sums(ours, int(padded(data, "response_mask").sum()), POLICY)
        logprobs = no_padding_2_padding(model_output["log_probs"], data)
        if self.channels.hint_is_loss:
            hint, hint_metrics = self.hint(data, logprobs)
            loss = loss + self.channels.config.hint_weight * hint
            metrics |= hint_metrics
        if self.channels.replay and REPLAY in data:
            coefficients = padded(data, REPLAY)
            replay = data["dp_size"] * (coefficients * torch.where(coefficients != 0, logprobs, 0.0)).sum()
            loss = loss + self.channels.config.replay_weight * replay
        return loss, metrics

    def hint(self, data: TensorDict, logprobs: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        """Return the hint's term and its metrics.

        `kl` is the mean of log S_old(y) - log T(y) over the tokens with a hint: an estimate of the KL at the
        policy that the step began with, whatever the divergence.
        """
        mask = padded(data, HINT_MASK).bool()
        old, teacher = padded(data, "old_log_probs"), padded(data, TEACHER)
        if self.channels.compares_distributions:
            loss = self.hint_of_logits(logprobs[mask], old[mask], data)
            per_token = loss.new_zeros(mask.shape).masked_scatter(mask, loss)
        else:
            tensors = {"student_logprobs": logprobs, "teacher_logprobs": teacher, "mask": mask}
            per_token = self.divergence(tensors | {"old_logprobs": old})
        value = reduce(per_token, mask, self.actor.loss_agg_mode, self.actor.global_batch_info)
        metrics = {**(self.hint_metrics or {}), "kl": TokenMetric(old - teacher, mask)}
        return value, {
            f"{HINT}loss": Metric(AggregationType.SUM, value.detach()),
            **means_to_sums(means(metrics, HINT), int(mask.sum()), HINT),
        }

    def hinted_logits(self, logits: Tensor, data: TensorDict) -> Tensor:
        """Return the log-odds of the teacher's entries to the sampled token, of each token with a hint.

        If the divergence may read other entries too, return all logits of these tokens.
        """
        where = hinted(data, response_positions(data, logits)).to(logits.device)
        if self.reads_any_entry:
            return logits[0, where]
        sampled, ids = (hinted(data, rows_of(data[name])).long() for name in ("responses", TOP_IDS))
        return log_odds(logits, where, sampled, ids)

    def hint_of_logits(self, logprobs: Tensor, old_logprobs: Tensor, data: TensorDict) -> Tensor:
        """Return the divergence of each token with a hint, of which these are the log-probabilities.

        A divergence of two distributions takes the teacher's k entries and a tail as the whole vocabulary. So
        does one of our divergences that takes the teacher's ids, which are then 0 to k - 1.
        """
        if logprobs.dtype in (torch.bfloat16, torch.float16):
            problem = f"verl's log-probabilities are {logprobs.dtype} here, and distributions need float32"
            raise ConfigError(f"{NODE}.hint_divergence", problem, "set sampled_token, or train in float32")
        ids, teacher = (hinted(data, rows_of(data[name])) for name in (TOP_IDS, TOP_LOGPROBS))
        shown, ids, teacher = self.shown, ids.long(), sum_to_one(teacher)
        assert shown is not None
        self.shown = None  # and with it the graph of this micro-batch
        tensors = {"student_logprobs": logprobs, "old_logprobs": old_logprobs}
        tensors["mask"] = torch.ones_like(logprobs, dtype=torch.bool)
        if not self.reads_any_entry:
            pair = with_rest(Pair(shown + logprobs.unsqueeze(-1), teacher), "tail")
            shown, tensors["teacher_logits"] = pair
            ids = torch.arange(ids.shape[-1], device=ids.device).expand_as(ids)
        tensors |= {"student_logits": shown, "teacher_topk_logprobs": teacher, "teacher_topk_ids": ids}
        t = tensordict_utils.get_non_tensor_data(data, TAID_T, None)
        return self.divergence(tensors, **({} if t is None else {"t": t}))

    @property
    def reads_any_entry(self) -> bool:
        """Whether the divergence may read any entry: it takes the teacher's ids, and is a user's own."""
        hint = self.channels.hint
        assert hint is not None
        return "teacher_topk_ids" in hint.loss.needs and not hint.loss.path.startswith(KERNELS)

    def divergence(self, tensors: dict[str, Tensor], **params: Any) -> Tensor:
        """Return the hint's divergence per token. The tensors of the first call are checked."""
        hint = self.channels.hint
        assert hint is not None
        if hint.value("ratio_cap") is not None:  # weights each token by its ratio to the old policy
            hint = hint.with_optional("student_logprobs", "old_logprobs")
        token: TokenLoss = call(hint, tensors, check=self.hint_metrics is None, **params)
        self.hint_metrics = token.metrics
        return token.loss


def hinted(data: TensorDict, rows: Sequence[Tensor]) -> Tensor:
    """Return the entries of the tokens with a hint. A row that the teacher has not scored may be empty."""
    masks = [mask[: len(row)] for mask, row in zip(rows_of(data[HINT_MASK]), rows, strict=True)]
    mask = torch.cat(masks).bool()
    return torch.cat(list(rows)).to(mask.device)[mask]


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
