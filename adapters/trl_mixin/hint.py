"""The hint channel: the policy learns from a teacher that sees a hint."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.channel import Channel
from composer_plugins.adapters.trl_mixin.encoding import pad
from composer_plugins.adapters.trl_mixin.forward import completion_logits, longest_input, token_logprobs
from composer_plugins.adapters.trl_mixin.teachers import Teacher
from composer_plugins.columns import HINT, Row, hint_of, hinted_prompt, prompt_of
from composer_plugins.errors import DataError
from composer_plugins.kernels.aggregation import aggregate


@dataclass
class HintChannel(Channel):
    """The divergence from the teacher, which sees the hint, to the policy, which does not."""

    name = "hint"
    columns = (HINT,)  # of the data set
    denominator = "the mean over completions of the mean over their tokens, 0 without a hint"
    template: str
    teacher: Teacher = field(init=False)  # known once TRL has prepared the model

    def check_row(self, trainer: GRPOTrainer, row: Row, training: bool) -> None:
        """Raise DataError unless prompt, hint and the longest completion fit the model."""
        hint, prompt = hint_of(row), prompt_of(row)
        if hint is None:
            return
        (ids,) = upstream.encode_prompts(trainer, [hinted_prompt(prompt, hint, self.template)])
        limit, longest = longest_input(trainer), trainer.max_completion_length
        if limit is not None and len(ids) + longest > limit:
            problem = f"with the prompt it has {len(ids)} tokens, and with max_completion_length={longest} "
            problem += f"it exceeds the {limit} that the model takes"
            raise DataError(HINT, problem, "shorten the hint, or lower max_completion_length")

    def tensors(
        self, trainer: GRPOTrainer, rows: list[dict[str, Any]], batch: dict[str, Any]
    ) -> dict[str, Tensor]:
        """The hint channel's part of a generation batch.

        `hint_prompt_ids`, `hint_prompt_mask` [B, P']: the teacher's prompts, left-padded.
        `hint_mask` [B, T]: the completion tokens that are distilled: those that TRL trains on, in rows with
        a hint. A `rollout_func` may restrict them: if it returns `hint_mask`, one list per completion with a
        0 or 1 per token, only tokens marked 1 count.
        """
        if trainer.rollout_func is not None:
            _check_prompts(trainer, rows, batch)
        device = batch["completion_ids"].device
        hints = [hint_of(row) for row in rows]
        prompts = [hinted_prompt(row["prompt"], h, self.template) for row, h in zip(rows, hints, strict=True)]
        encoded = upstream.encode_prompts(trainer, prompts)
        ids, attention = pad(encoded, upstream.tokenizer(trainer).pad_token_id, "left", device)
        has_hint = torch.tensor([hint is not None for hint in hints], device=device)
        mask = upstream.loss_mask(batch) & has_hint.unsqueeze(1)
        for i, row in enumerate(rows):
            if row.get("hint_mask") is not None:
                mask[i] &= _marked(row["hint_mask"], batch["completion_mask"][i])
        return {"hint_prompt_ids": ids, "hint_prompt_mask": attention, "hint_mask": mask}

    def loss(self, trainer: GRPOTrainer, model: Any, inputs: dict[str, Any], logprobs: Tensor) -> Tensor:
        """The mean over all rows of the mean over `hint_mask` tokens; a row without a hint counts as 0.

        So the denominator depends on neither the micro-batch nor the rank.
        """
        ids, attention, mask = inputs["completion_ids"], inputs["completion_mask"], inputs["hint_mask"]
        needs = self.choice.loss.needs

        def logits(model: Any, prompt: str) -> Tensor:
            whole = torch.cat([inputs[f"{prompt}_ids"], ids], 1)
            whole_attention = torch.cat([inputs[f"{prompt}_mask"], attention], 1)
            return completion_logits(trainer, model, whole, whole_attention, ids.shape[1])

        with self.teacher.asked() as teacher:
            teacher_logits = logits(teacher, "hint_prompt")
        tensors = {"mask": mask, "teacher_logits": teacher_logits, "student_logprobs": logprobs}
        if "teacher_logprobs" in needs:
            tensors["teacher_logprobs"] = token_logprobs(teacher_logits, ids)
        if "student_logits" in needs:
            tensors["student_logits"] = logits(model, "prompt")
        token = self.call(tensors)
        reduced = aggregate(token.loss, mask, "seq-mean-token-mean", num_sequences=mask.shape[0])
        self.log(trainer, reduced, token.metrics)
        return reduced / upstream.accumulation_steps(trainer)


def _marked(marks: Any, completion_mask: Tensor) -> Tensor:
    """The tokens of one completion that a rollout's `hint_mask` marks, as wide as the batch."""
    length = int(completion_mask.sum())
    where = torch.zeros_like(completion_mask, dtype=torch.bool)
    if length == 0:  # mask_truncated_completions has masked the whole row out
        return where
    if len(marks) != length or any(mark not in (0, 1) for mark in marks):
        problem = f"it has {len(marks)} entries, as {marks[:3]}, for a completion of {length} tokens"
        raise DataError("hint_mask", problem, "return a 0 or a 1 for each token")
    where[:length] = torch.tensor(marks, device=where.device).bool()
    return where


def _check_prompts(trainer: GRPOTrainer, rows: list[dict[str, Any]], batch: dict[str, Any]) -> None:
    """Raise DataError unless the student saw the row's prompt, which the teacher's prompt is made from."""
    ours = upstream.encode_prompts(trainer, [row["prompt"] for row in rows])
    for ids, prompt, mask in zip(ours, batch["prompt_ids"], batch["prompt_mask"], strict=True):
        if prompt[mask.bool()].tolist() != ids:
            problem = "it returned prompt_ids that are not the row's prompt, which the teacher's is made from"
            raise DataError("rollout_func", problem, "put the change into the prompt column")
