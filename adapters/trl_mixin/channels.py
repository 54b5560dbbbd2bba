"""The three channels of the composer loss: each makes its tensors and its loss, and logs its metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.forward import completion, longest_input
from composer_plugins.adapters.trl_mixin.hints import HintSource, environment_rows
from composer_plugins.adapters.trl_mixin.metrics import Logged, warn_once
from composer_plugins.adapters.trl_mixin.predictions import HeadInputs, Predictions
from composer_plugins.adapters.trl_mixin.teachers import Teacher
from composer_plugins.columns import (
    CHOSEN,
    DOUBTS,
    REJECTED,
    Row,
    check_calls_are_shown,
    pair_notes,
    pairs_of,
    prompt_of,
    special_tokens,
)
from composer_plugins.errors import DataError
from composer_plugins.frameworks.contract import NOTHING
from composer_plugins.frameworks.trl import MODES_IN_WORDS
from composer_plugins.kernels.aggregation import Mode, aggregate
from composer_plugins.kernels.masking import wide
from composer_plugins.kernels.preference import sequence_logprobs
from composer_plugins.kernels.types import Metric
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.inputs import OF_SIDE

SIDES = (CHOSEN, REJECTED)
PARTS = ("ids", "attention", "mask")  # of the tensors of a side
MEAN: Mode = "seq-mean-token-mean"  # how the hint loss is reduced

KERNEL_MODES: dict[str, Mode] = {"bnpo": "token-mean"}  # of a micro-batch

# The divergences that `kernels.linear.divergence` computes, and their beta, unless it is a parameter.
LINEAR = {"jsd": None, "forward_kl": 0.0, "reverse_kl": 1.0}


@dataclass
class Channel:
    """One term of the composer loss."""

    name: ClassVar[str]

    choice: Choice
    denominator: str = field(init=False)  # in words, for the log
    fused_linear: bool = field(default=False, init=False)  # whether it does without logits
    logged: Logged = field(init=False)  # of the last micro-batch
    _checked: bool = field(default=False, init=False)

    def call(self, tensors: dict[str, Tensor]) -> Any:
        """Call the chosen loss. The tensors of the first batch are checked."""
        result = call(self.choice, tensors, check=not self._checked)
        self._checked = True
        return result

    def keep(
        self,
        trainer: GRPOTrainer,
        loss: Tensor,
        metrics: dict[str, Metric],
        inputs: dict[str, Tensor],
        how: Mapping[str, Any] = NOTHING,
    ) -> None:
        """Keep what `metrics.log` logs: the loss as it is returned, and sums and counts of the metrics.

        The losses of a step's micro-batches add up to the loss of the step. A value that is not finite comes
        from one of `inputs`, which has a "mask".
        """
        parts = {
            name: (torch.where(where, value, 0.0).sum(), where.sum())
            for name, (value, where) in metrics.items()
        }
        loss = loss.detach()
        share = torch.full_like(loss, 1 / upstream.accumulation_steps(trainer))
        detached = {name: tensor.detach() for name, tensor in inputs.items()}
        self.logged = Logged(self.name, {"loss": (loss, share), **parts}, detached, metrics, how)

    def describe(self) -> str:
        """The loss, its parameters and its denominator."""
        return f"{self.name} {self.choice.described}, {self.denominator}"


@dataclass
class PolicyChannel(Channel):
    """One of our policy losses, on the log-probabilities of TRL's own forward pass."""

    name = "policy"
    mode: str  # how it is reduced: a key of MODES_IN_WORDS
    source: str  # where the mode comes from: "set by loss_type=grpo", "as in the paper"

    def __post_init__(self) -> None:
        self.denominator = f"{MODES_IN_WORDS[self.mode]} ({self.source})"

    def loss(self, trainer: GRPOTrainer, inputs: dict[str, Any], forward: upstream.PolicyForward) -> Tensor:
        """The policy loss of one micro-batch. It is added to what TRL returns for zero advantages."""
        tensors = upstream.policy_tensors(inputs, forward.logprobs, check=not self._checked)
        token = self.call(tensors)
        weighted = "log_weights" in self.choice.optional
        factor = upstream.policy_factor(
            trainer, inputs, tensors, forward.entropies, takes_log_weights=weighted
        )
        reduced, how = self._reduced(trainer, token.loss * factor, tensors["mask"], inputs)
        how["loss"] = reduced if isinstance(factor, float) else None  # weights are not in the record
        logged = upstream.metrics(trainer)
        for name in [name for name in logged if name.startswith(upstream.POLICY_METRICS)]:
            del logged[name]  # ours are logged under composer/policy
        self.keep(trainer, reduced, token.metrics, tensors, how)
        return reduced

    def _reduced(
        self, trainer: GRPOTrainer, token_loss: Tensor, mask: Tensor, inputs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """The loss reduced by `mode`, scaled for accumulation and ranks as TRL scales its own; and how.

        A row counts as a completion even if all its tokens are masked, as in TRL.
        """
        steps, processes = upstream.accumulation_steps(trainer), trainer.accelerator.num_processes
        mode = cast(Mode, KERNEL_MODES.get(self.mode, self.mode))
        rows, length = mask.shape[0] * steps, trainer.max_completion_length  # of the optimizer step
        counts, factor = dict[str, Any](num_sequences=rows, max_length=length), 1.0
        if self.mode == "token-sum":
            counts, factor = {}, processes  # DDP averages gradients over ranks
        elif self.mode == "bnpo":
            counts, factor = {}, 1 / steps
        elif self.mode == "token-mean":
            # TRL counts the tokens of the generation batch on all ranks; an optimizer step sees a part of it.
            tokens = inputs["num_items_in_batch"].clamp(min=1.0) / processes
            if trainer.model.training:
                tokens = tokens * steps / trainer.args.steps_per_generation
            counts = {"num_tokens": tokens}
        return factor * aggregate(token_loss, mask, mode, **counts), {"counts": counts, "factor": factor}


@dataclass
class HintChannel(Channel):
    """The divergence from the teacher, whose prompt has the hint, to the policy, whose prompt has not."""

    name, mode = "hint", MEAN
    denominator = "the mean over completions of the mean over their tokens, 0 without a hint"
    source: HintSource
    columns: tuple[str, ...] = field(init=False)  # of the data set
    teacher: Teacher = field(init=False)  # known once TRL has prepared the model
    # Whether TRL's log-probabilities may depend on padding (`may_count_padding`), and the teacher's do not.
    needs_own_student: bool = field(default=False, init=False)
    # Whether the environments of the rollouts have the hints, or the feedback.
    from_environment: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.columns = self.source.columns
        if self.choice.value("ratio_cap") is not None:  # weighs each token by its ratio to the old policy
            self.choice = self.choice.with_optional("student_logprobs", "old_logprobs")

    def check_row(self, trainer: GRPOTrainer, row: Row, training: bool) -> list[str]:
        """Return the notes of a row for `columns.warnings_of`; DataError if the channel cannot use it."""
        return self.source.check_row(trainer, row)

    def tensors(
        self,
        trainer: GRPOTrainer,
        rows: list[dict[str, Any]],
        prompts: list[Any],
        batch: dict[str, Any],
        rewards: Tensor,
    ) -> dict[str, Tensor]:
        """The hint channel's part of a generation batch. `rewards` has the rows of all processes.

        `prompts` are the prompts that the policy saw. An environment may have added to them.

        `hint_prompt_ids`, `hint_prompt_mask` [B, P']: the teacher's prompts, left-padded.
        `hint_mask` [B, T]: the completion tokens that are distilled: those that TRL trains on, in rows with
        a hint. A `rollout_func` may restrict them: if it returns `hint_mask`, one list per completion with a
        0 or 1 per token, only tokens marked 1 count.
        """
        if upstream.changes_rollouts(trainer) and not upstream.has_environments(trainer):
            _check_prompts(trainer, rows, batch)
        if upstream.has_environments(trainer):
            rows = environment_rows(trainer, rows, prompts, batch, hints=self.from_environment)
        teacher, has_hint = self.source.teacher_prompts(trainer, rows, batch, rewards)
        _leave_out_same(trainer, teacher, has_hint, batch)
        ids, attention = upstream.pad_left(trainer, teacher)
        mask = upstream.loss_mask(batch, check=not self._checked)
        mask = mask & torch.tensor(has_hint, device=ids.device).unsqueeze(1)
        for i, row in enumerate(rows):
            if row.get("hint_mask") is not None:
                mask[i] &= _marked_tokens(row["hint_mask"], batch["completion_mask"][i])
        return {"hint_prompt_ids": ids, "hint_prompt_mask": attention, "hint_mask": mask}

    def loss(self, trainer: GRPOTrainer, model: Any, inputs: dict[str, Any], logprobs: Tensor) -> Tensor:
        """The mean over all rows of the mean over `hint_mask` tokens; a row without a hint counts as 0.

        So the denominator depends on neither the micro-batch nor the rank.
        """
        ids, attention, mask = inputs["completion_ids"], inputs["completion_mask"], inputs["hint_mask"]

        def predictions(model: Any, prompt: str) -> Predictions:
            whole = torch.cat([inputs[f"{prompt}_ids"], ids], 1)
            whole_attention = torch.cat([inputs[f"{prompt}_mask"], attention], 1)
            given = whole, whole_attention, ids.shape[1], trainer.temperature
            return completion(trainer, model, *given, fused_linear=self.fused_linear)

        with self.teacher.in_eval_mode() as teaching:
            teacher = predictions(teaching, "hint_prompt")
        tensors = {
            "mask": mask,
            "student_logprobs": logprobs,
            "teacher_logprobs": teacher.logprobs(ids, mask),
        }
        old, student = inputs.get("old_per_token_logps", logprobs), None
        if "student_logits" in self.choice.loss.needs or self.needs_own_student:
            student = predictions(model, "prompt")
        if student is not None and self.needs_own_student:
            old = tensors["student_logprobs"] = student.logprobs(ids, mask)
        tensors["old_logprobs"] = old.detach()
        reduced, metrics = self._reduced(student, teacher, tensors)
        accumulated = upstream.accumulation_steps(trainer)
        reduced = reduced / accumulated
        has_tokens = mask.any(1)
        metrics |= {
            "kl": Metric(tensors["old_logprobs"] - tensors["teacher_logprobs"], mask),
            "row_frac": Metric(has_tokens, torch.ones_like(has_tokens)),
        }
        how = {"loss": reduced, "counts": {"num_sequences": len(mask) * accumulated}}
        self.keep(trainer, reduced, metrics, tensors, how)
        return reduced

    def _reduced(
        self, student: Predictions | None, teacher: Any, tensors: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Metric]]:
        """The mean of the divergence, and its metrics. `tensors` are its inputs without the logits."""
        mask = tensors["mask"]

        def mean(per_token: Tensor) -> Tensor:
            return aggregate(per_token, mask, MEAN, num_sequences=mask.shape[0])

        if student is None:
            token = self.call(tensors)
        elif isinstance(student, HeadInputs) and self.linear_beta is not None:
            weights = torch.func.grad(mean)(torch.ones_like(mask, dtype=wide(student.hidden.dtype)))
            options = {"beta": self.linear_beta, "temperature": self.choice.value("temperature")}
            return student.divergence(teacher, mask, weights, **options).loss, {}
        else:
            token = student.per_token(self.call, teacher, tensors)
        return mean(token.loss), token.metrics

    @property
    def linear_beta(self) -> float | None:
        """The beta with which `kernels.linear.divergence` is this divergence; None if it is another one."""
        name, value = self.choice.loss.name, self.choice.value
        part = value("top_k") is not None or value("entry_clip") is not None
        if name not in LINEAR or part or value("value") == "cross-entropy":
            return None
        return LINEAR[name] if LINEAR[name] is not None else value("beta")


@dataclass
class ReplayChannel(Channel):
    """A preference loss on pairs of replayed completions, each pair with its weight."""

    name, mode = "replay", ""
    columns = SIDES  # of the data set
    temperature: float
    denominator = "the mean over completions of the pair's weight * loss, 0 without a pair"
    reference: Teacher | None = field(default=None, init=False)  # the initial policy, where the loss needs it
    _special_tokens: list[str] | None = field(default=None, init=False)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs the log-probabilities of a reference policy."""
        return "ref_chosen" in self.choice.loss.needs

    def check_row(self, trainer: GRPOTrainer, row: Row, training: bool) -> list[str]:
        """Return `pair_notes`, and "endless" for each pair with a side that does not end.

        DataError unless every pair is complete, will be used, and fits the model.
        """
        pairs, group = pairs_of(row), upstream.generations(trainer, training)
        limit, prompt = longest_input(trainer), prompt_of(row)
        if len(pairs) > group:
            problem = f"the row has {len(pairs)} pairs, and its {group} generations use only the first ones"
            option = "num_generations" if training else "num_generations_eval"
            remedy = f"put the other pairs into a copy of the row, or raise {option}"
            raise DataError(CHOSEN, problem, remedy)
        sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        start, encoded = upstream.encode_replayed(trainer, row, sides) if pairs else ([], [])
        for i, (side, ids) in enumerate(zip(sides, encoded, strict=True)):
            if not isinstance(side, str):
                check_calls_are_shown(side, upstream.tokenizer(trainer).decode(ids))
            if i % 2 and ids == encoded[i - 1] and side != sides[i - 1]:
                problem = f"it differs from {REJECTED}, and their tokens are equal"
                remedy = "set a chat template that shows what differs, or remove the pair"
                raise DataError(CHOSEN, problem, remedy)
            if limit is not None and (length := len(start) + len(ids)) > limit:
                problem = f"with the prompt it has {length} tokens, and the model takes {limit}"
                raise DataError(SIDES[i % 2], problem, "remove the pair")
        if self._special_tokens is None:
            self._special_tokens = special_tokens(upstream.tokenizer(trainer))
        notes = pair_notes(pairs, prompt, self._special_tokens)
        ended = upstream.are_ended(trainer, encoded)
        for pair, *both in zip(pairs, ended[::2], ended[1::2], strict=True):
            if pair.weight > 0 and not all(both):
                names = upstream.tokenizer(trainer).convert_ids_to_tokens(upstream.end_tokens(trainer))
                notes.append(f"endless {', '.join(map(repr, names))}")
        return notes

    def tensors(self, trainer: GRPOTrainer, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """The replay channel's part of a generation batch; S is `chosen` or `rejected`.

        `replay_S_ids`, `replay_S_attention` [B, L]: prompt + completion, left-padded so that all end
        together. `replay_S_mask` [B, C]: which of the last C tokens are the completion's. `replay_ref_S`
        [B]: its log-probability under the reference. `replay_weight` [B]: the pair's weight; 0 in a row
        without a pair.

        Generation g of a prompt takes the row's g-th pair, and starts over after the last pair.
        """
        args, training = trainer.args, trainer.model.training
        group = upstream.generations(trainer, training)
        size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
        first = trainer.accelerator.process_index * len(rows)
        pairs = []
        for i, row in enumerate(rows, start=first):
            row_pairs = pairs_of(row)
            pairs.append(row_pairs[i % group % len(row_pairs)] if row_pairs else None)
        weights = [pair.weight if pair else 0.0 for pair in pairs]
        tensors = {"replay_weight": torch.tensor(weights, device=trainer.accelerator.device)}
        # A row without a pair gets a placeholder, so that every rank runs the same forward passes.
        placeholder = [upstream.tokenizer(trainer).eos_token_id]
        for side in SIDES:
            prompts, completions = [placeholder] * len(rows), [placeholder] * len(rows)
            for i, pair in enumerate(pairs):
                if pair is not None:
                    prompts[i], (completions[i],) = upstream.encode_replayed(
                        trainer, rows[i], [getattr(pair, side)]
                    )
            whole = [start + end for start, end in zip(prompts, completions, strict=True)]
            ids, attention = upstream.pad_left(trainer, whole)
            _, mask = upstream.pad_left(trainer, completions)
            parts = (ids, attention, mask.bool())
            tensors |= {f"replay_{side}_{part}": x for part, x in zip(PARTS, parts, strict=True)}
            if self.reference is not None:
                with self.reference.in_eval_mode() as model:
                    tensors[f"replay_ref_{side}"] = self._scores(trainer, model, parts, size)
        return tensors

    def sort(self, batches: list[dict[str, Tensor]]) -> None:
        """Sort the pairs of one optimizer step over its micro-batches: equal ones are then computed together.

        A pair may go with any completion of the step, because each row counts alike.
        """
        names = [name for name in batches[0] if name.startswith("replay_")]
        whole = {name: torch.cat([batch[name] for batch in batches]) for name in names}
        tokens = torch.cat([whole[f"replay_{side}_{part}"] for side in SIDES for part in PARTS], 1)
        order = torch.unique(tokens, dim=0, return_inverse=True)[1].argsort()
        for name in names:
            for batch, rows in zip(batches, whole[name][order].chunk(len(batches)), strict=True):
                batch[name] = rows

    def loss(self, trainer: GRPOTrainer, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The sum over rows of weight * loss, divided by the number of rows.

        A side that the loss needs no input of gets no forward pass: "sft" needs `chosen_nll` alone.
        """
        has_pair = inputs["replay_weight"] > 0
        used = has_pair.clone()
        used[0] |= ~has_pair.any()  # every rank runs the same forward passes
        batch = {name: tensor[used] for name, tensor in inputs.items() if name.startswith("replay_")}
        needs = self.choice.loss.needs
        tensors = {f"ref_{side}": batch[f"replay_ref_{side}"] for side in SIDES if self.needs_reference}
        for side, inputs_of_side in OF_SIDE.items():
            if inputs_of_side.isdisjoint(needs):
                continue
            parts = tuple(batch[f"replay_{side}_{part}"] for part in PARTS)
            scores = tensors[side] = self._scores(trainer, model, parts, len(has_pair))
            if side == CHOSEN:
                tensors["chosen_nll"] = -(scores if self.choice.average else scores / parts[-1].sum(1))
        tensors = {name: tensor for name, tensor in tensors.items() if name in needs}
        pair = self.call(tensors)
        reduced = (batch["replay_weight"] * pair.loss).sum() / len(has_pair)
        reduced = reduced / upstream.accumulation_steps(trainer)
        metrics = {name: Metric(m.value, m.where & has_pair[used]) for name, m in pair.metrics.items()}
        metrics["row_frac"] = Metric(has_pair, torch.ones_like(has_pair))
        self.keep(trainer, reduced, metrics, tensors | {"mask": has_pair[used]})
        return reduced

    def _scores(self, trainer: GRPOTrainer, model: Any, parts: tuple[Tensor, ...], size: int) -> Tensor:
        """log pi(completion | prompt) [B], summed or averaged over tokens as the loss needs it.

        The model sees each distinct row once, at most `size` rows in one forward pass: generations of one
        prompt share its pairs. Sharded weights are gathered in each pass, so every rank runs as many passes.
        """
        widths, length = [part.shape[1] for part in parts], parts[-1].shape[1]
        distinct, index = torch.unique(torch.cat(parts, 1), dim=0, return_inverse=True)
        scores, batches = [], list(distinct.split(size))
        if len(index) > size:
            passes = torch.tensor([len(batches)], device=trainer.accelerator.device)
            most = int(trainer.accelerator.gather(passes).max())
            batches += batches[-1:] * (most - len(batches))  # no index of a row points to them
        for rows in batches:
            ids, attention, mask = rows.split(widths, 1)
            given = ids, attention, length, self.temperature
            predictions = completion(trainer, model, *given, fused_linear=self.fused_linear)
            logprobs = predictions.logprobs(ids[:, -length:], mask.bool())
            scores.append(sequence_logprobs(logprobs, mask.bool(), average=self.choice.average))
        return torch.cat(scores)[index]


def _marked_tokens(marks: Any, completion_mask: Tensor) -> Tensor:
    """The tokens [T] of one completion that a rollout's `hint_mask` marks."""
    length = int(completion_mask.sum())
    where = torch.zeros_like(completion_mask, dtype=torch.bool)
    if length == 0:  # mask_truncated_completions has masked the whole row out
        return where
    if len(marks) != length or any(mark not in (0, 1) for mark in marks):
        problem = f"it has {len(marks)} entries, {marks[:3]} first, and the completion has {length} tokens"
        raise DataError("hint_mask", problem, "return a 0 or a 1 for each token")
    where[:length] = torch.tensor(marks, device=where.device).bool()
    return where


def _leave_out_same(
    trainer: GRPOTrainer, teacher: list[list[int]], has_hint: list[bool], batch: dict[str, Any]
) -> None:
    """Take the hint from each row whose teacher would see the policy's tokens, and warn of the first."""
    prompts = zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
    same = [ids == own[mask.bool()].tolist() for ids, (own, mask) in zip(teacher, prompts, strict=True)]
    left_out = [i for i, hinted in enumerate(has_hint) if hinted and same[i]]
    for i in left_out:
        has_hint[i] = False
    if left_out:
        problem, remedy = DOUBTS["same"]
        message = f"hint_weight: in {len(left_out)} of {len(same)} rows of a batch {problem}, so they count "
        warn_once(trainer.composer_warned, f"{message}as rows without a hint; {remedy}")


def _check_prompts(trainer: GRPOTrainer, rows: list[dict[str, Any]], batch: dict[str, Any]) -> None:
    """Raise DataError unless the student saw the row's prompt, which the teacher's prompt is made from."""
    ours = upstream.encode_prompts(trainer, [row["prompt"] for row in rows])
    for ids, prompt, mask in zip(ours, batch["prompt_ids"], batch["prompt_mask"], strict=True):
        if prompt[mask.bool()].tolist() != ids:
            problem = "it returned prompt_ids that are not the row's prompt, which the teacher's is made from"
            key = type(trainer).__name__ if trainer.rollout_func is None else "rollout_func"
            raise DataError(key, problem, "keep the rows' order, and put the change into the prompt column")
