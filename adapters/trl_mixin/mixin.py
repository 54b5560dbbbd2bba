"""`ComposerLossMixin`: three channels in front of a GRPOTrainer."""

import inspect
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import channels, trl_facts
from composer_plugins.adapters.trl_mixin.config import ComposerGRPOConfig
from composer_plugins.adapters.trl_mixin.guards import (
    check_datasets,
    check_model,
    check_streamed,
    check_trainer,
)
from composer_plugins.adapters.trl_mixin.teachers import (
    EmaTeacher,
    copies_before_patching,
    copy_from_path,
)
from composer_plugins.catalogue import Loss
from composer_plugins.errors import ConfigError
from composer_plugins.kernels.composer import composer

# What the mixin stands in front of; only a type checker is told, so that any GRPOTrainer will do.
if TYPE_CHECKING:
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object


class ComposerLossMixin(_Trainer):
    """Mix in BEFORE a GRPOTrainer; `args` is a `ComposerGRPOConfig`.

    Overrides `_compute_loss` and `_generate_and_score_completions`, and reads the log-probabilities that
    pass through `_get_per_token_logps_and_entropies`. With the default config the loss, the gradient and
    every random number are TRL's own.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls, Trainer):
            return  # a mixin of mixins
        if not issubclass(cls, GRPOTrainer):
            bases = ", ".join(base.__name__ for base in cls.__bases__)
            raise ConfigError(
                f"{cls.__name__}({bases}): the mixin needs a trl.GRPOTrainer; other trainers have no "
                "_compute_loss(model, inputs) of the same contract"
            )
        order = cls.__mro__
        if order.index(ComposerLossMixin) > order.index(GRPOTrainer):
            raise ConfigError(
                f"{cls.__name__}: ComposerLossMixin stands after GRPOTrainer in the bases, where it is "
                f"never called: write class {cls.__name__}(ComposerLossMixin, ...)"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, GRPOTrainer):
            raise ConfigError(f"{type(self).__name__} is no trl.GRPOTrainer: the mixin cannot apply")
        trl_facts.require_supported_trl()
        given = dict(zip(list(inspect.signature(GRPOTrainer).parameters), args, strict=False)) | kwargs
        if not isinstance(given.get("args"), ComposerGRPOConfig):
            raise ConfigError(
                f"args is {type(given.get('args')).__name__}; the weights are read from a ComposerGRPOConfig"
            )
        config = self._composer = given["args"].composer
        self._policy = given["args"].policy_choice()  # None: TRL's own
        self._hint, self._replay = config.choose_hint(), config.choose_replay()
        self._checked: list[Loss] = []  # whose first inputs have been looked at
        self._forward: trl_facts.Forward | None = None

        peft = check_model(given, config, self._asks_base)
        copies = copies_before_patching(given.get("model"), 0 if peft else self._asks_base + self._asks_ema)
        super().__init__(*args, **kwargs)
        check_trainer(self, config)
        check_datasets(self, config)
        self._make_teachers(copies, peft)

    @property
    def _asks_base(self) -> bool:
        """Whether a channel asks the initial, frozen policy."""
        config = self._composer
        references = config.replay_weight > 0 and "ref_chosen" in self._replay.loss.needs
        return references or (config.hint_weight > 0 and config.hint_teacher == "base")

    @property
    def _asks_ema(self) -> bool:
        return self._composer.hint_weight > 0 and self._composer.hint_teacher == "ema"

    def _make_teachers(self, copies: list[torch.nn.Module], peft: bool) -> None:
        config = self._composer

        def make() -> torch.nn.Module:
            teacher = copies.pop() if copies else copy_from_path(self)
            return self.accelerator.prepare_model(teacher, evaluation_mode=True)

        # With PEFT the initial policy is the same model with its adapter switched off.
        self._base = make() if self._asks_base and not peft else None
        self._ema = make() if self._asks_ema else None
        if self._ema is not None:
            self.add_callback(EmaTeacher(self._ema, config.hint_ema_rate))
        if config.hint_weight > 0 and config.hint_teacher == "live":
            warnings.warn(
                "hint_teacher='live': a teacher that moves with its student collapsed to reward 0 in 3 of "
                "3 measured seeds (recipes/codebook); the frozen 'base' learned in all of them",
                stacklevel=3,
            )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        check_streamed(self, self._composer, inputs)
        output = super()._generate_and_score_completions(inputs)
        if self._composer.hint_weight > 0:
            output |= channels.hint_tensors(self, inputs, output)
        if self._composer.replay_weight > 0:
            output |= channels.replay_tensors(self, inputs)
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._forward is not None:
            self._forward.record(outputs)
        return outputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        config, hint, replay = self._composer, None, None
        own = self._policy is not None
        self._forward = forward = trl_facts.Forward(inputs, without_advantages=own)
        try:
            policy = super()._compute_loss(model, forward.inputs)
        finally:
            self._forward = None
        if own:
            policy = policy + channels.policy_loss(self, inputs, forward)
        if config.hint_weight > 0:
            hint = channels.hint_loss(self, model, inputs, forward.logprobs)
        if config.replay_weight > 0:
            replay = channels.replay_loss(self, model, inputs)
        return composer(
            policy,
            hint,
            replay,
            policy_weight=config.policy_weight,
            hint_weight=config.hint_weight,
            replay_weight=config.replay_weight,
        )


class ComposerGRPOTrainer(ComposerLossMixin, GRPOTrainer):
    """`trl.GRPOTrainer` with the composer loss."""
