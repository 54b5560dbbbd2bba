"""A trainer whose replies are sampled from older weights, as those of an asynchronous trainer are."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.trl_mixin import ComposerGRPOTrainer


class OlderRolloutsTrainer(ComposerGRPOTrainer):
    """Samples the replies of step s from the weights of step max(0, s - age).

    The old log-probabilities are those of the same weights, so a ratio compares the policy with the policy
    that sampled. `age + 1` copies of the weights are kept.
    """

    def __init__(self, *args: Any, age: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.past: deque[list[Tensor]] = deque(maxlen=age + 1)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self.past.append([one.detach().clone() for one in self.model.parameters()])
        with self.weights(self.past[0]):
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            output["old_per_token_logps"] = self.sampler_logprobs(output)
        return output

    @contextmanager
    def weights(self, older: list[Tensor]) -> Iterator[None]:
        """Put older weights into the model, and afterwards the present ones again."""
        self.write(older)
        try:
            yield
        finally:
            self.write(self.past[-1])

    @torch.no_grad()
    def write(self, weights: list[Tensor]) -> None:
        """Write these numbers to the parameters of the model."""
        for one, values in zip(self.model.parameters(), weights, strict=True):
            one.copy_(values)

    @torch.no_grad()
    def sampler_logprobs(self, output: dict[str, Any]) -> Tensor:
        """The log-probabilities [B, T] of the replies under the weights that the model has now."""
        ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        length = output["completion_ids"].shape[1]
        logprobs: Tensor = self._get_per_token_logps_and_entropies(self.model, ids, mask, length)[0]
        return logprobs
