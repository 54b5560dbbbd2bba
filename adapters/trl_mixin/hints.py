"""Where hints come from: a column, the environment, or the successful rollouts of the prompt's group."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.forward import longest_input
from composer_plugins.adapters.trl_mixin.metrics import warn_once
from composer_plugins.columns import HINT, Row, filled_prompt, hint_notes, hint_of, hinted_prompt, prompt_of
from composer_plugins.config import check_template
from composer_plugins.errors import ComposerWarning, ConfigError, DataError

TeacherPrompts = tuple[list[list[int]], list[bool]]  # token ids of each row, and whether they have a hint


@dataclass
class HintColumn:
    """The column privileged_context, filled into `template`."""

    template: str
    columns: ClassVar[tuple[str, ...]] = (HINT,)

    def check_row(self, trainer: GRPOTrainer, row: Row) -> list[str]:
        """Return `hint_notes`; DataError unless prompt, hint and the longest completion fit the model."""
        if (hint := hint_of(row)) is None or upstream.has_environments(trainer):
            return hint_notes(row, row.get("prompt", ""))  # an environment's `reset` completes the prompt
        prompt = prompt_of(row)
        ids, own = upstream.encode_prompts(trainer, [hinted_prompt(prompt, hint, self.template), prompt])
        limit, longest = longest_input(trainer), trainer.max_completion_length
        if limit is not None and longest is not None and len(ids) + longest > limit:
            problem = f"with the prompt it has {len(ids)} tokens, and with max_completion_length={longest}"
            problem += f" it exceeds the {limit} that the model takes"
            raise DataError(HINT, problem, "shorten the hint, or lower max_completion_length")
        return hint_notes(row, prompt) + (["same"] if ids == own else [])

    def teacher_prompts(
        self, trainer: GRPOTrainer, rows: Sequence[Row], batch: dict[str, Any], rewards: Tensor
    ) -> TeacherPrompts:
        """The teacher's prompts of this process's rows.

        A hint that is known after the rollout, and is too long for the model, is left out with a warning.
        """
        hints = [hint_of(row) for row in rows]
        prompts = [hinted_prompt(row["prompt"], h, self.template) for row, h in zip(rows, hints, strict=True)]
        encoded = upstream.encode_prompts(trainer, prompts)
        has_hint = [hint is not None for hint in hints]
        if problem := _leave_out_too_long(trainer, rows, batch, encoded, has_hint):
            message = f"{HINT}: with the prompt it has {problem}; shorten the hint"
            warn_once(trainer.composer_warned, message)
        return encoded, has_hint


@dataclass
class EnvironmentHints(HintColumn):
    """The attribute privileged_context of each rollout's environment, filled into `template`."""

    columns = ()

    def check_row(self, trainer: GRPOTrainer, row: Row) -> list[str]:
        """Return the note that the row's rollouts may have a hint: the environment makes its prompt too."""
        return ["hint"]


class RolloutOptions(BaseModel):
    """The options of hint_source="successful_rollout", with the names and defaults of TRL's SDPOConfig."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    success_reward_threshold: float = Field(allow_inf_nan=False)
    dont_reprompt_on_self_success: bool
    max_reprompt_len: int = Field(ge=1)
    reprompt_template: str
    solution_template: str
    feedback_template: str
    include_environment_feedback: bool
    environment_feedback_only_without_solution: bool
    remove_thinking_from_demonstration: bool

    def check(self) -> None:
        """Raise ConfigError for a template whose fields are not the ones that it is filled with."""
        shown = {"solution", "feedback"} if self.include_environment_feedback else {"solution"}
        check_template("reprompt_template", self.reprompt_template, shown, {"prompt", "feedback"} - shown)
        check_template("solution_template", self.solution_template, {"successful_previous_attempt"})
        check_template("feedback_template", self.feedback_template, {"feedback_raw"})


@dataclass
class SuccessfulRollouts:
    """The group's first rollout with enough reward, as in TRL's SDPO, and the row's feedback, if it is on."""

    options: RolloutOptions

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that the data set must have."""
        return (HINT,) if self.options.include_environment_feedback else ()

    def check_row(self, trainer: GRPOTrainer, row: Row) -> list[str]:
        """Return the notes of a row, which may get a hint also where it has no feedback."""
        notes = (hint_notes(row, row["prompt"]) if self.columns else []) or ["hint"]
        if upstream.has_environments(trainer):  # whose `reset` completes the prompt
            return notes
        prompt_of(row)  # a DataError without a prompt
        if row.get(HINT) is not None and not self.options.include_environment_feedback:
            message = f"include_environment_feedback: it is False, so the column {HINT} has no effect; set "
            message += "it to True to show the teacher this feedback, or remove the column"
            warn_once(trainer.composer_warned, message)
        return notes

    def teacher_prompts(
        self, trainer: GRPOTrainer, rows: Sequence[Row], batch: dict[str, Any], rewards: Tensor
    ) -> TeacherPrompts:
        """The teacher's prompts of this process's rows. `rewards` has all processes' rows, in order.

        The rows of a group are neighbours in this order, and may be on two processes. A hint that is too long
        for the model is left out with a warning.
        """
        options, group = self.options, upstream.generations(trainer, trainer.model.training)
        demonstrations = self._demonstrations(trainer, rewards.tolist(), group)
        texts = gather_object(self._texts(trainer, batch["completion_ids"]))
        prompts, has_hint = [], []
        first = trainer.accelerator.process_index * len(rows)
        for row, demonstration in zip(rows, demonstrations[first : first + len(rows)], strict=True):
            # From the data set or from a rollout_func; None if it is blank.
            said = row.get(HINT) if options.include_environment_feedback else None
            feedback = None if isinstance(said, str) and not said.strip() else hint_of({HINT: said})
            if demonstration is not None and options.environment_feedback_only_without_solution:
                feedback = None
            has_hint.append(demonstration is not None or feedback is not None)
            text = None if demonstration is None else texts[demonstration]
            prompts.append(self._reprompt(row["prompt"], text, feedback) if has_hint[-1] else row["prompt"])
        ids = upstream.encode_prompts(trainer, prompts)
        if (longest := max(map(len, ids))) > options.max_reprompt_len:
            message = f"max_reprompt_len: a teacher's prompt has {longest} tokens, and only the last "
            message += f"{options.max_reprompt_len} are kept, so its beginning is lost; raise it"
            warn_once(trainer.composer_warned, message)
        ids = [one[-options.max_reprompt_len :] for one in ids]
        if problem := _leave_out_too_long(trainer, rows, batch, ids, has_hint):
            remedy = "shorten the templates or the feedback, or lower max_reprompt_len"
            warn_once(trainer.composer_warned, f"prompt: the teacher's has {problem}; {remedy}")
        return ids, has_hint

    def _demonstrations(self, trainer: GRPOTrainer, rewards: list[float], group: int) -> list[int | None]:
        """For each row of all processes, the first successful row of its group; None if no row succeeded."""
        options = self.options
        threshold = float(torch.tensor(options.success_reward_threshold))  # in float32, as the rewards are
        successful = [reward >= threshold for reward in rewards]
        groups = [any(successful[start : start + group]) for start in range(0, len(rewards), group)]
        upstream.add_to_mean(trainer, "composer/hint/success_group_frac", sum(groups), len(groups))
        found = []
        for i in range(len(rewards)):
            start = i // group * group
            others = (
                j
                for j in range(start, start + group)
                if successful[j] and not (options.dont_reprompt_on_self_success and j == i)
            )
            found.append(next(others, None))
        return found

    def _texts(self, trainer: GRPOTrainer, completions: Tensor) -> list[str]:
        padding = upstream.tokenizer(trainer).pad_token_id
        decode = trainer.processing_class.decode
        texts = [decode(ids[ids != padding], skip_special_tokens=True) for ids in completions]
        if self.options.remove_thinking_from_demonstration:
            return [upstream.THINKING.sub("", text).strip() for text in texts]
        return texts

    def _reprompt(self, prompt: Any, demonstration: str | None, feedback: str | None) -> Any:
        options, solution, said = self.options, "", ""
        if demonstration is not None:
            solution = options.solution_template.format(successful_previous_attempt=demonstration)
        if feedback is not None:
            said = options.feedback_template.format(feedback_raw=feedback)
        return filled_prompt(prompt, options.reprompt_template, solution=solution, feedback=said)


HintSource = HintColumn | SuccessfulRollouts


def environments_with_hints(trainer: GRPOTrainer, source: HintSource) -> bool:
    """Whether the hints, or the feedback, come from the trainer's environments.

    Raises ConfigError if hint_source asks for them and they are not there. Warns if they are not read.
    """
    kinds = upstream.environment_types(trainer)
    without = [kind.__name__ for kind, has_hint in kinds.items() if not has_hint]
    if isinstance(source, EnvironmentHints):
        if not kinds:
            remedy = "pass environment_factory, or set hint_source='column'"
            raise ConfigError("hint_source", "it is 'environment', and the trainer has none", remedy)
        if without:
            problem = f"it is 'environment', and {', '.join(without)} has no attribute {HINT}"
            raise ConfigError("hint_source", problem, "set the attribute in __init__, to None or to the hint")
        return True
    if isinstance(source, SuccessfulRollouts) and source.options.include_environment_feedback:
        return len(without) < len(kinds)
    if len(without) < len(kinds):
        warnings.warn(
            f"hint_source: the environment has the attribute {HINT}, which is not read; "
            "set hint_source='environment'",
            ComposerWarning,
            stacklevel=4,  # the line that constructs the trainer
        )
    return False


def environment_rows(
    trainer: GRPOTrainer, rows: Sequence[Row], prompts: Sequence[Any], batch: dict[str, Any], *, hints: bool
) -> list[dict[str, Any]]:
    """The rows with the prompts that the environments' `reset` completed, and, if `hints`, with their hints.

    An environment's `hint_turn` is the index of the assistant turn that its hint is about, 0 for the first;
    only the tokens of this turn are then distilled. None, or no such attribute: all turns.
    """
    made = []
    for i, environment in enumerate(trainer.environments):
        row = {**rows[i], "prompt": prompts[i]}
        if hints and hasattr(environment, HINT):
            row[HINT] = getattr(environment, HINT)
            turn = getattr(environment, "hint_turn", None)
            if row[HINT] is not None and turn is not None:
                row["hint_mask"] = _turn_mask(turn, batch, i)
        made.append(row)
    return made


def _turn_mask(turn: Any, batch: dict[str, Any], row: int) -> list[int]:
    """1 for each token of one completion in the assistant's `turn`-th turn, otherwise 0."""
    length = int(batch["completion_mask"][row].sum())
    written = [1] * length if "tool_mask" not in batch else batch["tool_mask"][row, :length].tolist()
    turns, last = [], 0
    for i, own in enumerate(written):
        last += bool(own and (i == 0 or not written[i - 1]))
        turns.append(last - 1)  # a tool's tokens count to the turn before them, and are never distilled
    if isinstance(turn, bool) or not isinstance(turn, int) or turn < 0:
        problem = f"it is {turn!r}"
        raise DataError("hint_turn", problem, "set the index of a turn, 0 for the first, or None")
    if length and turn >= last:
        warnings.warn(
            f"hint_turn: it is {turn}, and the completion has {last} assistant turns, so this rollout has no "
            "hint; raise max_completion_length if it was cut off",
            ComposerWarning,
            stacklevel=3,
        )
    return [int(one == turn) for one in turns]


def _leave_out_too_long(
    trainer: GRPOTrainer,
    rows: Sequence[Row],
    batch: dict[str, Any],
    encoded: list[list[int]],
    has_hint: list[bool],
) -> str:
    """Replace each teacher's prompt that does not fit the model by the row's own, which has no hint.

    Returns the problem of the longest of them; "" where all fit.
    """
    limit, completion = longest_input(trainer), int(batch["completion_mask"].sum(1).max())
    if limit is None:
        return ""
    lengths = {i: len(ids) for i, ids in enumerate(encoded) if has_hint[i] and len(ids) + completion > limit}
    if not lengths:
        return ""
    own = upstream.encode_prompts(trainer, [row["prompt"] for row in rows])  # TRL needs all rows of a batch
    for i in lengths:
        encoded[i], has_hint[i] = own[i], False
    return (
        f"{max(lengths.values())} tokens, and with the {completion} tokens of the completions it exceeds the "
        f"{limit} that the model takes, so this rollout has no hint"
    )
