"""Laws of trainers alone: the steps of a generation batch, and options that must have an effect."""

from functools import partial

import torch

from composer_plugins.errors import ConfigError, with_place
from composer_plugins.testing.law import TRAINER, Law, NotApplicable, law, require
from composer_plugins.testing.trainer_options import MOVES, NOT_MOVED, Move, other_values
from composer_plugins.testing.trainer_runs import GRADIENT, Trainer, difference

MOVED = 1e-6


@law(
    TRAINER,
    cause="a denominator that counts the tokens of the generation batch, as num_items_in_batch does, and not "
    "those of one step: multiply num_items_in_batch by self.current_gradient_accumulation_steps / "
    "self.args.steps_per_generation",
)
def steps_per_generation_leaves_the_gradient_alone(trainer: Trainer) -> None:
    """The mean gradient of the two steps of a generation batch is that of one step with all its rows."""
    for parts in (1, 2):
        mean = torch.stack(trainer.gradients(**trainer.step(parts, generations=2))).mean(0)
        what = f"{{}} of 2 steps of one generation batch, each of {parts} micro-batches, in the mean"
        trainer.compare({GRADIENT: mean}, trainer.run(trainer.rows), what)


def option_law(option: str) -> Law:
    """The law of one option of the loss."""
    return Law(
        name=f"option_{option}_moves_the_gradient",
        summary=f"Another value of the option {option} gives another gradient. Each option of the loss has "
        "this law.",
        kinds=(TRAINER,),
        cause="an overridden _compute_loss that does not read it: raise an error for it, or use it",
        check=partial(require_moved, option=option),
    )


def require_moved(trainer: Trainer, option: str) -> None:
    """Require that another value of an option gives another gradient, where the option acts."""
    if option in NOT_MOVED:
        raise NotApplicable(NOT_MOVED[option])
    own, move = getattr(trainer.args, option), MOVES.get(option) or Move(())
    if move.loss_types and trainer.args.loss_type not in move.loss_types:
        raise NotApplicable(f"it acts with loss_type {', '.join(move.loss_types)} alone")
    values = [value for value in move.values or other_values(own) if value != own]
    if not values:
        raise NotApplicable(f"no other value of {own!r} is known")
    beside = {name: value for name, value in move.beside.items() if not getattr(trainer.args, name)}
    step = trainer.step(1) | beside
    try:
        before = trainer.gradients(**step)[0] if beside else trainer.whole
        after = trainer.gradients(**step | {option: values[0]})[0]
    except (ConfigError, NotImplementedError, ValueError) as error:
        problem = error.problem if isinstance(error, ConfigError) else with_place(error)
        raise NotApplicable(f"the trainer refuses {option}={values[0]!r}: {problem}") from None
    problem = f"{option}={own!r} and {option}={values[0]!r} give the same gradient"
    require(difference(after, before) > MOVED, problem)
