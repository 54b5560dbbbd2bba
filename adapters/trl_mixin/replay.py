"""The replay channel: the policy learns from pairs of replayed completions."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.channel import Channel
from composer_plugins.adapters.trl_mixin.encoding import encode_completion, pad
from composer_plugins.adapters.trl_mixin.forward import completion_logits, longest_input, token_logprobs
from composer_plugins.adapters.trl_mixin.teachers import Teacher
from composer_plugins.columns import CHOSEN, REJECTED, Row, pairs_of, prompt_of
from composer_plugins.errors import DataError
from composer_plugins.kernels.preference import sequence_logprobs

SIDES = (CHOSEN, REJECTED)
PARTS = ("ids", "attention", "mask")


@dataclass
class ReplayChannel(Channel):
    """A preference loss on pairs of replayed completions, each pair with its weight."""

    name = "replay"
    columns = SIDES  # of the data set
    denominator = "the mean over completions of the pair's weight * loss, 0 without a pair"
    reference: Teacher | None = field(default=None, init=False)  # the initial policy, where the loss needs it

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of a reference policy."""
        return "ref_chosen" in self.choice.loss.needs

    def check_row(self, trainer: GRPOTrainer, row: Row, training: bool) -> None:
        """Raise DataError unless every pair of the row is complete, will be used, and fits the model."""
        pairs, group = pairs_of(row), upstream.generations(trainer, training)
        text, limit = prompt_of(row), longest_input(trainer)
        if len(pairs) > group:
            problem = f"the row has {len(pairs)} pairs, and its {group} generations use only the first"
            raise DataError(CHOSEN, problem, "repeat the row with the others, or raise num_generations")
        if not pairs:
            return
        (prompt,) = upstream.encode_prompts(trainer, [text])
        for pair in pairs:
            for side in SIDES:
                length = len(prompt) + len(encode_completion(trainer, text, getattr(pair, side)))
                if limit is not None and length > limit:
                    problem = f"with the prompt it has {length} tokens, and the model takes {limit}"
                    raise DataError(side, problem, "drop the pair")

    def tensors(self, trainer: GRPOTrainer, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """The replay channel's part of a generation batch; S is `chosen` or `rejected`.

        `replay_S_ids`, `replay_S_attention` [B, L]: prompt + completion, left-padded so that all end
        together. `replay_S_mask` [B, C]: which of the last C tokens are the completion's. `replay_ref_S`
        [B]: its log-probability under the reference. `replay_weight` [B]: the pair's weight; 0 in a row
        without a pair.

        Generation g of a prompt takes the row's g-th pair, and starts over after the last pair.
        """
        device, tokenizer = trainer.accelerator.device, upstream.tokenizer(trainer)
        group = upstream.generations(trainer, trainer.model.training)
        first = trainer.accelerator.process_index * len(rows)
        pairs = []
        for i, row in enumerate(rows, start=first):
            of_row = pairs_of(row)
            pairs.append(of_row[i % group % len(of_row)] if of_row else None)
        weights = [pair.weight if pair else 0.0 for pair in pairs]
        tensors = {"replay_weight": torch.tensor(weights, device=device)}
        prompts = upstream.encode_prompts(trainer, [row["prompt"] for row in rows])
        for side in SIDES:
            # A row without a pair gets a placeholder, so that every rank runs the same forward passes.
            completions = [
                encode_completion(trainer, row["prompt"], getattr(pair, side))
                if pair
                else [tokenizer.eos_token_id]
                for row, pair in zip(rows, pairs, strict=True)
            ]
            whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
            ids, attention = pad(whole, tokenizer.pad_token_id, "left", device)
            lengths = torch.tensor([len(completion) for completion in completions], device=device)
            from_end = torch.arange(max(map(len, completions)), 0, -1, device=device)
            parts = (ids, attention, from_end <= lengths.unsqueeze(1))
            tensors |= {f"replay_{side}_{part}": x for part, x in zip(PARTS, parts, strict=True)}
            if self.reference is not None:
                tensors[f"replay_ref_{side}"] = self._reference_scores(trainer, self.reference, *parts)
        return tensors

    def loss(self, trainer: GRPOTrainer, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The sum over rows of weight * loss, divided by the number of rows."""
        weight = inputs["replay_weight"]
        tensors = {f"ref_{side}": inputs[f"replay_ref_{side}"] for side in SIDES if self.needs_reference}
        for side in SIDES:
            tensors[side] = self._scores(trainer, model, *(inputs[f"replay_{side}_{part}"] for part in PARTS))
        pair = self.call(tensors)
        reduced = (weight * pair.loss).mean()
        self.log(trainer, reduced, pair.metrics, where=weight > 0)
        return reduced / upstream.accumulation_steps(trainer)

    def _reference_scores(self, trainer: GRPOTrainer, reference: Teacher, *parts: Tensor) -> Tensor:
        """Scores under the reference, once per generation batch, in chunks of one micro-batch."""
        args, training = trainer.args, trainer.model.training
        size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
        with reference.asked() as model:
            chunks = zip(*(part.split(size) for part in parts), strict=True)
            return torch.cat([self._scores(trainer, model, *chunk) for chunk in chunks])

    def _scores(self, trainer: GRPOTrainer, model: Any, *parts: Tensor) -> Tensor:
        """log pi(completion | prompt) [B], summed or averaged over tokens as the loss needs it."""
        ids, attention, mask = parts
        length = mask.shape[1]
        logprobs = token_logprobs(completion_logits(trainer, model, ids, attention, length), ids[:, -length:])
        return sequence_logprobs(logprobs, mask, average=self.choice.average)
