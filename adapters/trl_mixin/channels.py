"""The three channels on TRL's batches: what each adds to the batch, and what it adds to the loss."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from composer_plugins import columns
from composer_plugins.adapters.trl_mixin import metrics
from composer_plugins.adapters.trl_mixin.encoding import encode_completion, encode_prompts, pad
from composer_plugins.adapters.trl_mixin.forward import completion_logits, token_logprobs
from composer_plugins.adapters.trl_mixin.teachers import without_gradient_or_dropout
from composer_plugins.adapters.trl_mixin.trl_facts import (
    METRICS_OF_THE_POLICY_TERM,
    Forward,
    accumulation_steps,
    anchor_logprobs,
    generations,
    loss_mask,
    policy_term_factor,
    reduce_like_trl,
)
from composer_plugins.catalogue import Choice
from composer_plugins.checks import check_inputs
from composer_plugins.columns import hinted_prompt
from composer_plugins.errors import DataError
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.preference import sequence_logprobs

SIDES = ("chosen", "rejected")


def policy_loss(trainer: Any, inputs: dict[str, Any], forward: Forward) -> Tensor:
    """Our policy term, on the log-probabilities of TRL's own forward pass, with TRL's denominator."""
    logprobs, mask = forward.logprobs, loss_mask(inputs)
    advantages = inputs["advantages"]
    advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
    tensors = {"logprobs": logprobs, "advantages": advantages, "mask": mask}
    token = _call(trainer, trainer._policy, tensors | anchor_logprobs(inputs, logprobs))
    factor = policy_term_factor(trainer, inputs, logprobs, forward.entropies, mask)
    reduced = reduce_like_trl(trainer, token.loss * factor, mask, inputs)

    mode = "train" if trainer.model.training else "eval"
    for name in [n for n in trainer._metrics[mode] if n.startswith(METRICS_OF_THE_POLICY_TERM)]:
        del trainer._metrics[mode][name]  # ours stand under composer/policy
    value = metrics.scalar(reduced * accumulation_steps(trainer))
    metrics.log_metrics(trainer, {"policy_loss": value, **metrics.under("policy", token.metrics)})
    return reduced


def hint_tensors(trainer: Any, rows: list[dict[str, Any]], batch: dict[str, Any]) -> dict[str, Tensor]:
    """What the hint channel adds to a generation batch of TRL's.

    `hint_prompt_ids`, `hint_prompt_mask` [B, P']: the teacher's prompts, left-padded.
    `hint_mask` [B, T]: the completion tokens that are distilled: those TRL trains on, in rows that have a
    hint. A row may narrow it (targeted distillation): if a `rollout_func` returns `hint_mask`, one list per
    completion with a 0 or 1 per token, only the tokens marked 1 count.
    """
    device = batch["completion_ids"].device
    hints = [columns.hint_of(row) for row in rows]
    template = trainer._composer.teacher_prompt_template
    prompts = [hinted_prompt(row["prompt"], hint, template) for row, hint in zip(rows, hints, strict=True)]
    if trainer.rollout_func is not None:
        _check_prompts(trainer, rows, batch)
    ids, attention = pad(encode_prompts(trainer, prompts), trainer._tokenizer.pad_token_id, "left", device)
    mask = loss_mask(batch) & torch.tensor([h is not None for h in hints], device=device).unsqueeze(1)
    for i, row in enumerate(rows):
        if row.get("hint_mask") is not None:
            mask[i] &= _narrowed(row["hint_mask"], batch["completion_mask"][i])
    return {"hint_prompt_ids": ids, "hint_prompt_mask": attention, "hint_mask": mask}


def hint_loss(trainer: Any, model: Any, inputs: dict[str, Any], logprobs: Tensor) -> Tensor:
    """The divergence from the teacher, who sees the hint, to the policy, who does not.

    Mean over all rows of the mean over `hint_mask` tokens; a row without a hint counts as 0, so the
    denominator depends neither on the micro-batch nor on the rank.
    """
    ids, attention = inputs["completion_ids"], inputs["completion_mask"]
    mask, length = inputs["hint_mask"], inputs["completion_ids"].shape[1]
    hinted = torch.cat([inputs["hint_prompt_ids"], ids], 1)
    hinted_attention = torch.cat([inputs["hint_prompt_mask"], attention], 1)
    teacher, context = _hint_teacher(trainer)
    with without_gradient_or_dropout(teacher), context:
        teacher_logits = completion_logits(trainer, teacher, hinted, hinted_attention, length)
    tensors = {"teacher_logits": teacher_logits, "mask": mask}
    needs = trainer._hint.loss.needs
    if "student_logprobs" in needs:
        tensors |= {"student_logprobs": logprobs, "teacher_logprobs": token_logprobs(teacher_logits, ids)}
    if "student_logits" in needs:
        plain = torch.cat([inputs["prompt_ids"], ids], 1)
        plain_attention = torch.cat([inputs["prompt_mask"], attention], 1)
        tensors["student_logits"] = completion_logits(trainer, model, plain, plain_attention, length)
    token = _call(trainer, trainer._hint, tensors)
    reduced = aggregate(token.loss, mask, "seq-mean-token-mean", num_sequences=mask.shape[0])
    logged = {"hint_loss": metrics.scalar(reduced), **metrics.under("hint", token.metrics)}
    metrics.log_metrics(trainer, logged)
    return reduced / accumulation_steps(trainer)


def replay_tensors(trainer: Any, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """What the replay channel adds to a generation batch of TRL's; S is `chosen` or `rejected`.

    `replay_S_ids`, `replay_S_attention` [B, L]: prompt + completion, left-padded so that all end together.
    `replay_S_mask` [B, C]: which of the last C tokens are the completion's. `replay_ref_S` [B]: its
    log-probability under the frozen base. `replay_weight` [B]: the pair's weight, 0 in a row without one.

    Generation g of a prompt takes the row's g-th pair, and starts over when the pairs run out.
    """
    device = trainer.accelerator.device
    group = generations(trainer)
    first = trainer.accelerator.process_index * len(rows)
    nothing = [trainer._tokenizer.eos_token_id]  # every rank runs the same forwards, pairs or not
    prompts = encode_prompts(trainer, [row["prompt"] for row in rows])
    completions: dict[str, list[list[int]]] = {side: [] for side in SIDES}
    weights = []
    for i, row in enumerate(rows):
        pairs = columns.pairs_of(row)
        pair = pairs[(first + i) % group % len(pairs)] if pairs else None
        weights.append(pair.weight if pair else 0.0)
        for side in SIDES:
            encoded = encode_completion(trainer, row["prompt"], getattr(pair, side)) if pair else nothing
            completions[side].append(encoded)

    tensors = {"replay_weight": torch.tensor(weights, device=device)}
    for side, encoded in completions.items():
        whole = [prompt + completion for prompt, completion in zip(prompts, encoded, strict=True)]
        ids, attention = pad(whole, trainer._tokenizer.pad_token_id, "left", device)
        lengths = torch.tensor([len(completion) for completion in encoded], device=device)
        from_end = torch.arange(max(map(len, encoded)), 0, -1, device=device)
        tensors[f"replay_{side}_ids"], tensors[f"replay_{side}_attention"] = ids, attention
        tensors[f"replay_{side}_mask"] = from_end <= lengths.unsqueeze(1)
        if "ref_chosen" in trainer._replay.loss.needs:
            tensors[f"replay_ref_{side}"] = _reference_scores(trainer, tensors, side)
    return tensors


def replay_loss(trainer: Any, model: Any, inputs: dict[str, Any]) -> Tensor:
    """The weighted preference loss: sum over rows of weight * loss, over the number of rows."""
    needs, weight = trainer._replay.loss.needs, inputs["replay_weight"]
    scores = {side: _scores(trainer, model, inputs, side) for side in SIDES}
    scores |= {f"ref_{side}": inputs[f"replay_ref_{side}"] for side in SIDES if f"ref_{side}" in needs}
    pair = _call(trainer, trainer._replay, scores)
    reduced = (weight * pair.loss).mean()
    logged = {
        "replay_loss": metrics.scalar(reduced),
        **metrics.under("replay", pair.metrics, weight > 0),
    }
    metrics.log_metrics(trainer, logged)
    return reduced / accumulation_steps(trainer)


def _call(trainer: Any, choice: Choice, tensors: dict[str, Tensor]) -> Any:
    """The chosen kernel on the tensors it needs, by their names in the catalogue; the first are checked."""
    if choice.loss not in trainer._checked:
        check_inputs(choice, tensors)
        trainer._checked.append(choice.loss)
    return choice.loss.kernel()(*(tensors[name] for name in choice.loss.needs), **choice.params)


def _hint_teacher(trainer: Any) -> tuple[Any, Any]:
    """Who is asked, and the context to ask in."""
    kind = trainer._composer.hint_teacher
    if kind == "base":
        return _base(trainer)
    if kind == "ema":
        return trainer._ema, nullcontext()
    return trainer.accelerator.unwrap_model(trainer.model), nullcontext()


def _base(trainer: Any) -> tuple[Any, Any]:
    """The initial policy: a frozen copy, or a PEFT model with its adapter switched off."""
    if trainer._base is not None:
        return trainer._base, nullcontext()
    policy = trainer.accelerator.unwrap_model(trainer.model)
    return policy, policy.disable_adapter()


def _reference_scores(trainer: Any, tensors: dict[str, Tensor], side: str) -> Tensor:
    """Scores under the frozen base, in chunks of one micro-batch, once per generation batch."""
    base, context = _base(trainer)
    training = trainer.model.training
    args = trainer.args
    size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
    keys = [f"replay_{side}_{part}" for part in ("ids", "attention", "mask")]
    chunks = zip(*(tensors[key].split(size) for key in keys), strict=True)
    with without_gradient_or_dropout(base), context:
        return torch.cat([_scores(trainer, base, dict(zip(keys, c, strict=True)), side) for c in chunks])


def _scores(trainer: Any, model: Any, tensors: dict[str, Tensor], side: str) -> Tensor:
    """log pi(completion | prompt) [B], summed or averaged over tokens as the loss wants."""
    ids, attention, mask = (tensors[f"replay_{side}_{part}"] for part in ("ids", "attention", "mask"))
    length = mask.shape[1]
    logits = completion_logits(trainer, model, ids, attention, length)
    logprobs = token_logprobs(logits, ids[:, -length:])
    return sequence_logprobs(logprobs, mask, average=trainer._replay.average)


def _narrowed(row_mask: Any, completion_mask: Tensor) -> Tensor:
    length = int(completion_mask.sum())
    if length == 0:  # mask_truncated_completions has taken the row out already
        return torch.zeros_like(completion_mask, dtype=torch.bool)
    if len(row_mask) != length or any(entry not in (0, 1) for entry in row_mask):
        raise DataError(
            f"hint_mask has {len(row_mask)} entries for a completion of {length} tokens; wanted a 0 or a 1 "
            "for each token"
        )
    narrowed = torch.zeros_like(completion_mask, dtype=torch.bool)
    narrowed[:length] = torch.tensor(row_mask, device=narrowed.device).bool()
    return narrowed


def _check_prompts(trainer: Any, rows: list[dict[str, Any]], batch: dict[str, Any]) -> None:
    """The teacher's prompt is the row's with a hint, so the student must have seen the row's."""
    ours = encode_prompts(trainer, [row["prompt"] for row in rows])
    for ids, prompt, mask in zip(ours, batch["prompt_ids"], batch["prompt_mask"], strict=True):
        if prompt[mask.bool()].tolist() != ids:
            raise DataError(
                "rollout_func returned other prompt_ids than the row's prompt has, and the hint's teacher "
                "would differ from the student by more than the hint: put the change into the prompt column"
            )
