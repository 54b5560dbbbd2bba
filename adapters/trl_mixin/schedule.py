"""The weights of the channels, which a callback may change during training."""

import json
from typing import Any

from transformers import TrainerCallback

from composer_plugins.adapters.trl_mixin.options import OWN, ComposerGRPOConfig
from composer_plugins.adapters.trl_mixin.teachers import add_to_checkpoint, resumed_checkpoint
from composer_plugins.errors import ConfigError

WEIGHTS = ("policy_weight", "hint_weight", "replay_weight")
WEIGHTS_FILE = "composer_weights.json"


class Weights(TrainerCallback):
    """Reads the weights anew for each loss, saves those that were changed, and sets them on resuming.

    A config or a callback that sets other weights before the resumed training begins keeps its own.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, options = trainer, trainer.args
        self.first = _of(options, WEIGHTS)
        self.fixed = _of(options, [name for name in OWN if name not in WEIGHTS])

    def now(self) -> dict[str, float]:
        """The weights of this step. ConfigError for one without a channel, and for another changed option."""
        options: ComposerGRPOConfig = self.trainer.args
        for name, value in _of(options, self.fixed).items():
            if value != (was := self.fixed[name]):
                problem = f"it was {was!r} when the trainer was made, and was changed to {value!r}"
                remedy = f"make a new trainer; only {', '.join(WEIGHTS)} act when they are changed later"
                raise ConfigError(name, problem, remedy)
        weights = _of(options, WEIGHTS)
        if weights != self.first:
            for name in ("hint_weight", "replay_weight"):
                if (weight := weights[name]) and not self.first[name]:
                    problem = f"it was 0 when the trainer was made, without this channel, and is {weight}"
                    remedy = "make it with a weight above 0, and set 0 in a callback's on_train_begin"
                    raise ConfigError(name, problem, remedy)
            return _of(options.resolved.composer, WEIGHTS)  # this checks them
        return weights

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        last = _of(args, WEIGHTS)
        if last != self.first:
            text = json.dumps({"first": self.first, "last": last})
            add_to_checkpoint(args, state, WEIGHTS_FILE, lambda path: path.write_text(text))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            return
        path = resumed_checkpoint(self.trainer) / WEIGHTS_FILE
        if path.exists() and (saved := json.loads(path.read_text()))["first"] == _of(args, WEIGHTS):
            vars(args).update(saved["last"])


def _of(options: Any, names: Any) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names}
