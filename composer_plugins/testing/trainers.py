"""`check_trainer`: whether a GRPOTrainer's gradient depends on what it must not depend on.

    def make_trainer(**overrides):
        options = {"output_dir": "out", "loss_type": "dapo", ...}
        return MyTrainer(model=..., args=GRPOConfig(**{**options, **overrides}), ...)

Every call must return a new trainer with the same weights and the same data, and with `overrides` set over
its own options. Use a small model: the trainer is made about 25 times, and does one step each time.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from composer_plugins.errors import ConfigError, unknown, with_place
from composer_plugins.losses.derived import function_of_import_path
from composer_plugins.testing.report import Outcome, Report
from composer_plugins.testing.trainer_options import MOVES, NOT_MOVED, Move, option_check, other_values
from composer_plugins.testing.trainer_runs import PARTS, MakeTrainer, Subject, padded, poisoned

CLOSE = 1e-4  # of the norm: sums in float32 in another order
MOVED = 1e-6
OTHER_SEED = 20_260  # of the second run's random numbers

SAME, CUT = "two_runs_give_the_same_gradient", "micro_batches_leave_the_gradient_alone"
GENERATED = "steps_per_generation_leaves_the_gradient_alone"
COUNTED = "every_unmasked_token_has_a_gradient"
SIGN = "descent_raises_the_tokens_with_positive_advantages"
MASKED, PADDED = "masked_tokens_have_no_influence", "more_padding_changes_nothing"
RANKS = "ranks_leave_the_gradient_alone"


class TrainerLaw(NamedTuple):
    """One property of a trainer's gradient."""

    summary: str
    cause: str  # what usually breaks it, and what to write instead


LAWS = {
    SAME: TrainerLaw(
        "Two runs on the same rows have the same gradient, whatever the state of the random numbers.",
        "random numbers in the loss, or dropout: make_trainer must give the same weights at each call, with "
        "every dropout set to 0",
    ),
    COUNTED: TrainerLaw(
        "The log-probability of every unmasked token has a gradient where the policies are equal.",
        "a mask that is shifted by one, or that leaves out tokens: multiply with completion_mask as it is",
    ),
    SIGN: TrainerLaw(
        "Descent raises a row more with a positive advantage than with its negative.",
        "a sign: the loss is minimised, so it is -advantage * ratio",
    ),
    CUT: TrainerLaw(
        "A batch that is cut into 1, 2 or 4 micro-batches has the same gradient.",
        "a mean over the tokens of the micro-batch: divide a mean over rows by "
        "self.current_gradient_accumulation_steps, and a sum over tokens by inputs['num_items_in_batch']",
    ),
    GENERATED: TrainerLaw(
        "The mean gradient of the two steps of a generation batch is that of one step with all its rows.",
        "a denominator that counts the tokens of the generation batch, as num_items_in_batch does, and not "
        "those of one step: multiply num_items_in_batch by self.current_gradient_accumulation_steps / "
        "self.args.steps_per_generation",
    ),
    MASKED: TrainerLaw(
        "Other tokens where completion_mask is 0 leave the gradient as it is.",
        "the mask left out of a sum or a mean: multiply with completion_mask (and tool_mask) before both",
    ),
    PADDED: TrainerLaw(
        "Masked columns at the end of every row leave the gradient as it is.",
        "a mean over the padded row: divide by completion_mask.sum(-1)",
    ),
}
OF_AN_OPTION = TrainerLaw(
    "Another value of the option NAME gives another gradient. Each option of the loss has this law.",
    "an overridden _compute_loss that does not read it: raise an error for it, or use it",
)
NOT_RUN = {RANKS: "the check runs in one process"}

NO_LOGPROBS = "the loss does not call the trainer's _get_per_token_logps_and_entropies for its rows"


def difference(ours: Tensor, wanted: Tensor) -> float:
    """|a - b| / |b|."""
    return float((ours - wanted).norm() / wanted.norm().clamp(min=1e-30))


def check_trainer(named: str | MakeTrainer, only: Iterable[str] = ()) -> Report:
    """Run every check on what `make_trainer(**overrides) -> GRPOTrainer` returns, or `only` those named.

    `named` is an import path or the function itself.
    Raises ConfigError for a function that cannot be found, or that is not of this contract.
    """
    make = function_of_import_path(named, "--trainer") if isinstance(named, str) else named
    name = named if isinstance(named, str) else getattr(named, "__qualname__", repr(named))
    subject, only = Subject(make), tuple(only)
    options = {option_check(option): option for option in options_of(subject)}
    for one in only:
        if one not in (known := [*LAWS, *NOT_RUN, *options]):
            raise unknown("only", one, known, noun="check")
    outcomes = list(_laws(subject, only))
    if not any(one.check == SAME and one.status == "failed" for one in outcomes):
        wanted = {check: option for check, option in options.items() if not only or check in only}
        outcomes += [
            _raised(check, partial(_option, subject, check, option)) for check, option in wanted.items()
        ]
    return Report(f"{name} ({subject.args.loss_type})", tuple(outcomes))


def _compare(subject: Subject, name: str, runs: Callable[[], Iterable[tuple[str, Tensor]]]) -> Outcome:
    found = [(what, difference(gradient, subject.whole)) for what, gradient in runs()]
    wrong = [
        f"{what}: |difference| / |gradient| = {error:.3g}" for what, error in found if not error <= CLOSE
    ]
    if wrong:
        return Outcome(name, "failed", "\n".join(wrong), f"usual cause: {LAWS[name].cause}")
    return Outcome(name, "passed")


def _raised(name: str, run: Callable[[], Outcome]) -> Outcome:
    """The outcome of a check; a failed one with the error, if the trainer raises one."""
    try:
        return run()
    except ConfigError:
        raise
    except Exception as error:  # of the user's trainer
        return Outcome(name, "failed", with_place(error))


def _same(subject: Subject) -> Outcome:
    if not subject.whole.any():
        return Outcome(SAME, "failed", "the gradient is 0", "usual cause: a loss that is detached")
    again = subject.gradient(seed=OTHER_SEED, **subject.cut(1))
    return _compare(subject, SAME, lambda: [("a second run with other random numbers", again)])


def _counted(subject: Subject) -> Outcome:
    """Whether the log-probability of every unmasked token has a gradient where the policies are equal.

    A token may count with one sign of its advantage only.
    """
    if subject.both_signs is None:
        return Outcome(COUNTED, "not applicable", NO_LOGPROBS)
    ours, flipped = subject.both_signs
    mask = ours.mask
    left = mask & (ours.gradient == 0) & (flipped.gradient == 0)
    if not left.any():
        return Outcome(COUNTED, "passed")
    places = sorted({token for _, token in left.nonzero().tolist()})
    problem = (
        f"the gradient of {int(left.sum())} of {int(mask.sum())} unmasked tokens is 0 with either sign of "
        f"the advantages: {', '.join(map(str, places[:8]))} of their completions, counted from 0"
    )
    return Outcome(COUNTED, "failed", problem, f"usual cause: {LAWS[COUNTED].cause}")


def _sign(subject: Subject) -> Outcome:
    """Whether descent raises a row more with a positive advantage than with its negative.

    The policies are equal, and only the sum over the tokens of a row is looked at.
    """
    if subject.both_signs is None:
        return Outcome(SIGN, "not applicable", NO_LOGPROBS)
    ours, flipped = subject.both_signs
    sign = ours.advantages.reshape(len(ours.mask), -1).sign()
    raised = ((flipped.gradient - ours.gradient) * sign * ours.mask).sum(-1)
    if not raised.any():
        return Outcome(SIGN, "not applicable", "the gradient is the same with either sign of the advantages")
    wrong = ~(raised >= 0)
    if not wrong.any():
        return Outcome(SIGN, "passed")
    problem = (
        f"gradient descent raises {int(wrong.sum())} of {len(raised)} rows less with a positive advantage "
        "than with its negative"
    )
    return Outcome(SIGN, "failed", problem, f"usual cause: {LAWS[SIGN].cause}")


def _laws(subject: Subject, only: tuple[str, ...]) -> Iterator[Outcome]:
    cut = subject.cut(1)
    again = _raised(SAME, lambda: _same(subject))
    if not only or SAME in only or again.status == "failed":
        yield again
    if again.status == "failed":
        return
    checks: dict[str, Callable[[], list[tuple[str, Tensor]]]] = {
        CUT: lambda: [
            (f"{parts} micro-batches of {subject.size} rows", subject.gradient(**subject.cut(parts)))
            for parts in PARTS[1:]
        ],
        GENERATED: lambda: [
            (
                f"the mean of 2 steps of one generation batch, each of {parts} micro-batches",
                torch.stack(subject.gradients(**subject.cut(parts, generations=2))).mean(0),
            )
            for parts in (1, 2)
        ],
        MASKED: lambda: [("other tokens where masked", subject.gradient(poisoned(subject.rows), **cut))],
        PADDED: lambda: [("3 more columns", subject.gradient(padded(subject.rows), **cut))],
    }
    for name, check in ((COUNTED, _counted), (SIGN, _sign)):
        if not only or name in only:
            yield _raised(name, partial(check, subject))
    for name, runs in checks.items():
        if not only or name in only:
            yield _raised(name, partial(_compare, subject, name, runs))
    for name, reason in NOT_RUN.items():
        if not only or name in only:
            yield Outcome(name, "not applicable", reason)


def options_of(subject: Subject) -> list[str]:
    """The options of TRL's loss that this config has, and those that the user's own config adds."""
    names = {field.name for field in fields(subject.args)}
    theirs = [name for name in subject.probe.LOSS_OPTIONS if name in names]
    return [*theirs, *sorted(names - subject.probe.TRL_FIELDS)]


def _option(subject: Subject, check: str, option: str) -> Outcome:
    if option in NOT_MOVED:
        return Outcome(check, "not applicable", NOT_MOVED[option])
    own = getattr(subject.args, option)
    move = MOVES.get(option) or Move(())
    if move.loss_types and subject.args.loss_type not in move.loss_types:
        types = ", ".join(move.loss_types)
        return Outcome(check, "not applicable", f"it acts with loss_type {types} alone")
    values = [value for value in move.values or other_values(own) if value != own]
    if not values:
        return Outcome(check, "not applicable", f"no other value of {own!r} is known")
    beside = {name: value for name, value in move.beside.items() if not getattr(subject.args, name)}
    cut = subject.cut(1) | beside
    try:
        before = subject.gradient(**cut) if beside else subject.whole
        after = subject.gradient(**cut | {option: values[0]})
    except (ConfigError, NotImplementedError, ValueError) as error:
        problem = error.problem if isinstance(error, ConfigError) else with_place(error)
        return Outcome(check, "not applicable", f"the trainer refuses {option}={values[0]!r}: {problem}")
    if difference(after, before) > MOVED:
        return Outcome(check, "passed")
    problem = f"{option}={own!r} and {option}={values[0]!r} give the same gradient"
    return Outcome(check, "failed", problem, f"usual cause: {OF_AN_OPTION.cause}")
