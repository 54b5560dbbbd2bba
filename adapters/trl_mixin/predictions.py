"""What predicts the tokens of a completion: hidden states and an output head, or logits.

From hidden states and the head `kernels.linear` computes log-probabilities and divergences without a tensor
of logits. Both classes here have the same methods.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from composer_plugins.kernels.linear import divergence, log_probs
from composer_plugins.kernels.linear.divergence import Weighted
from composer_plugins.kernels.linear.tiles import whole_rows
from composer_plugins.kernels.masking import at_least_float32
from composer_plugins.kernels.types import Metric, TokenLoss

Divergence = Callable[[dict[str, Tensor]], TokenLoss]


class Logits(NamedTuple):
    """The logits [B, T, V] of the tokens of a completion, divided by the temperature."""

    values: Tensor

    def logprobs(self, ids: Tensor, mask: Tensor) -> Tensor:
        """log pi(y_t) [B, T] of the tokens `ids`, in nats, in float32 at least."""
        logprobs = torch.log_softmax(at_least_float32(self.values), -1)
        return logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)

    def per_token(self, call: Divergence, teacher: Any, tensors: Mapping[str, Tensor]) -> TokenLoss:
        """The divergence `call` from the teacher. `tensors` [B, T] are its other inputs, as the mask."""
        return call({**tensors, "student_logits": self.values, "teacher_logits": teacher.values})


@dataclass(frozen=True)
class HeadInputs:
    """The hidden states [B, T, hidden] that predict the tokens of a completion, and the output head."""

    hidden: Tensor
    weight: Tensor  # [V, hidden]
    bias: Tensor | None
    softcap: float | None
    logit_scale: float
    temperature: float

    @property
    def _head(self) -> dict[str, Any]:
        return {"bias": self.bias, "softcap": self.softcap, "logit_scale": self.logit_scale}

    def logprobs(self, ids: Tensor, mask: Tensor) -> Tensor:
        """log pi(y_t) [B, T] of the tokens `ids`, in nats, in float32 at least; 0 where masked."""
        found = log_probs(self.hidden, self.weight, ids, mask, temperature=self.temperature, **self._head)
        assert isinstance(found, Tensor)  # without the entropy it is a tensor, not a pair
        return found

    def divergence(
        self, teacher: "HeadInputs", mask: Tensor, token_weight: Tensor, *, beta: float, temperature: float
    ) -> Weighted:
        """`kernels.linear.divergence` from the teacher, at a `temperature` besides the sampling's."""
        return divergence(
            self.hidden,
            self.weight,
            teacher.hidden,
            teacher.weight,
            mask,
            beta=beta,
            temperature=self.temperature * temperature,
            token_weight=token_weight,
            **self._head,
            **{f"teacher_{name}": value for name, value in teacher._head.items()},
        )

    def per_token(self, call: Divergence, teacher: Any, tensors: Mapping[str, Tensor]) -> TokenLoss:
        """As of `Logits`, for a few unmasked tokens at a time. The backward computes their logits again."""
        mask = tensors["mask"]
        places = mask.flatten().nonzero().squeeze(-1)

        def tile(hidden: Tensor, teacher_hidden: Tensor, rows: Tensor) -> TokenLoss:
            pair = {"student_logits": self.logits(hidden), "teacher_logits": teacher.logits(teacher_hidden)}
            return call(pair | {name: x.flatten()[rows] for name, x in tensors.items()})

        def whole(parts: Iterable[Tensor]) -> Tensor:
            found = torch.cat(list(parts))
            return found.new_zeros(mask.numel()).index_put((places,), found).view(mask.shape)

        size = max(1, whole_rows(mask, len(self.weight))[0] // 4)  # autograd keeps several tensors of a tile
        states = self.hidden.flatten(0, 1)[places], teacher.hidden.flatten(0, 1)[places], places
        parts = zip(*(x.split(size) for x in states), strict=True)
        tiles = [checkpoint(tile, *part, use_reentrant=False) for part in parts]
        metrics = {
            name: Metric(*(whole(tile.metrics[name][i] for tile in tiles) for i in range(2)))
            for name in tiles[0].metrics
        }
        return TokenLoss(whole(tile.loss for tile in tiles), metrics)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [rows, V] of some hidden states [rows, hidden], as the model computes them."""
        logits = F.linear(hidden, self.weight, self.bias) * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return at_least_float32(logits) / self.temperature


Predictions = HeadInputs | Logits
