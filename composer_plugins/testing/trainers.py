"""`check_trainer`: whether a GRPOTrainer's gradient depends on what it must not depend on.

    def make_trainer(**overrides):
        options = {"output_dir": "out", "loss_type": "dapo", ...}
        return MyTrainer(model=..., args=GRPOConfig(**{**options, **overrides}), ...)

Every call must return a new trainer with the same weights and the same data, and with `overrides` set over
its own options. Use a small model: the trainer is made about 25 times, and does one step each time.
"""

from collections.abc import Iterable

from composer_plugins.errors import ConfigError
from composer_plugins.testing.checking import function_named, require_known, run_on
from composer_plugins.testing.laws import NOT_RUN, TRAINER, laws_for
from composer_plugins.testing.laws.of_trainers import option_law
from composer_plugins.testing.report import Outcome, Report
from composer_plugins.testing.trainer_runs import MakeTrainer, Trainer


def check_trainer(named: str | MakeTrainer, only: Iterable[str] = ()) -> Report:
    """Run every check on what `make_trainer(**overrides) -> GRPOTrainer` returns, or `only` those named.

    The first law, that two runs are equal, is always run: without it no other one means anything.
    `named` is an import path or the function itself.
    Raises ConfigError for a function that cannot be found, or that is not of this contract.
    """
    make = function_named(named, "--trainer") if isinstance(named, str) else named
    name = named if isinstance(named, str) else getattr(named, "__qualname__", repr(named))
    trainer, only, not_run = Trainer(make), tuple(only), NOT_RUN[TRAINER]
    laws = laws_for(TRAINER) | {law.name: law for law in map(option_law, trainer.options())}
    require_known(only, [*laws, *not_run])
    chosen = [law for law in laws.values() if law.first or not only or law.name in only]
    found = [
        *run_on(chosen, lambda law: [trainer], passed_on=ConfigError),
        *(Outcome(one, "not applicable", reason) for one, reason in not_run.items()),
    ]
    kept = (one for one in found if not only or one.check in only or one.status == "failed")
    return Report(f"{name} ({trainer.args.loss_type})", tuple(kept))
