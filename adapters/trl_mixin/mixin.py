"""`ComposerLossMixin`: the composer loss in front of a GRPOTrainer."""

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import before_training, metrics, sharding, upstream
from composer_plugins.adapters.trl_mixin.channels import Channel, HintChannel, PolicyChannel, ReplayChannel
from composer_plugins.adapters.trl_mixin.finite import finite_norm
from composer_plugins.adapters.trl_mixin.forward import may_count_padding, why_not_linear
from composer_plugins.adapters.trl_mixin.health import TrlHealth
from composer_plugins.adapters.trl_mixin.hints import environments_with_hints
from composer_plugins.adapters.trl_mixin.options import ComposerGRPOConfig
from composer_plugins.adapters.trl_mixin.rewards import checked, treated
from composer_plugins.adapters.trl_mixin.schedule import Weights
from composer_plugins.adapters.trl_mixin.teachers import EmaTeacher, InitialWeights, Teacher
from composer_plugins.columns import template_messages
from composer_plugins.errors import ConfigError, log_info
from composer_plugins.frameworks.trl import OF_MODES, SEQUENCE_LEVEL, TRL
from composer_plugins.kernels.composer import composer
from composer_plugins.objective.options import described

# The mixin works in front of any GRPOTrainer, so at run time it has no base of its own.
if TYPE_CHECKING:
    from trl import GRPOTrainer as _Trainer
else:
    _Trainer = object


class ComposerLossMixin(_Trainer):
    """Mix in BEFORE a GRPOTrainer; `args` is a `ComposerGRPOConfig`.

    Overrides TRL's `_compute_loss` and `_generate_and_score_completions`, and reads what TRL's
    `_get_per_token_logps_and_entropies` and `_calculate_rewards` and the Trainer's `_get_grad_norm` return.
    With the default config the loss, the gradient and every random number are TRL's own.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        before_training.check_class(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(zip(inspect.signature(GRPOTrainer).parameters, args, strict=False)) | kwargs
        options = given.get("args")
        if not isinstance(options, ComposerGRPOConfig):
            remedy = "pass a ComposerGRPOConfig, or derive your config class from it"
            raise ConfigError("args", f"it is of type {type(options).__name__}", remedy)
        asked = options.resolved
        config = self._composer = asked.composer
        before_training.warn_of_defaults(type(self), options)
        before_training.warn_of_new_trl()
        self._policy = self._hint = self._replay = None
        if asked.policy is not None:
            self._policy = PolicyChannel(asked.policy, asked.mode, asked.mode_source)
        if asked.hint is not None:
            self._hint = HintChannel(asked.hint, asked.hints)
        if asked.replay is not None:
            self._replay = ReplayChannel(asked.replay, config.replay_temperature)
        self._data_channels = [channel for channel in (self._hint, self._replay) if channel is not None]
        self._forward: upstream.PolicyForward | None = None
        self._reaches_loss = False  # whether _compute_loss has been called
        self._checks_loss = False  # whether one of our channels was in the last loss
        self._resumed_from: str | None = None  # the checkpoint with which train() has begun

        teacher_kind = config.hint_teacher if self._hint is not None else None
        needs_base = teacher_kind == "base" or (self._replay is not None and self._replay.needs_reference)
        model = given.get("model")
        peft = hasattr(model, "peft_config") or given.get("peft_config") is not None
        self._reads_reference = asked.policy is not None and "ref_logprobs" in asked.policy.loss.needs
        beta = options.beta
        # TRL loads a reference for its KL alone, and from a path, which a model object may not have.
        if beta and isinstance(model, nn.Module) and not (peft or options.sync_ref_model):
            own_reference = not upstream.has_path(model)
        else:
            own_reference = self._reads_reference and not beta
        needs_base = needs_base or own_reference
        if peft and needs_base:
            before_training.check_adapter(given)
        # TRL's constructor patches the model's forward with a closure over the original model. A copy made
        # after it would run the weights of the policy.
        copied = upstream.copied(model) if needs_base and not peft and isinstance(model, nn.Module) else None
        loss_type = options.loss_type
        if loss_type is None and self._policy is None:
            options.loss_type = upstream.DEFAULTS["loss_type"]
        options.beta = 0.0 if own_reference else beta
        try:
            super().__init__(*args, **kwargs)
        finally:  # a constructor that failed is often called again with the same options
            options.loss_type, options.beta = loss_type, beta
        if own_reference:
            self.beta = beta
        self._weights = Weights(self)
        self.add_callback(self._weights)
        self._health = TrlHealth(self, config, [one for one in (self._policy, *self._data_channels) if one])
        self.add_callback(self._health)
        self.composer_warned = set[str]()  # for `warn_once`
        named = zip(self.reward_funcs, self.reward_func_names, strict=True)
        self.reward_funcs: list[Any] = [checked(one, name, config.on_bad_reward) for one, name in named]
        if self._policy is not None:  # TRL's KL gets the denominator of our policy loss
            self.loss_type = OF_MODES.get(self._policy.mode, upstream.DEFAULTS["loss_type"])
            if self._policy.choice.loss.name in SEQUENCE_LEVEL:  # the ratio by which TRL may weigh its KL
                self.importance_sampling_level = "sequence"
        if self._hint is not None:
            if may_count_padding(self):
                before_training.check_ratio(self._hint.choice)
                self._hint.needs_own_student = True
            self._hint.from_environment = environments_with_hints(self, self._hint.source)
        if self._data_channels:
            before_training.check_trainer(self, config)
            before_training.check_datasets(self, self._data_channels)
        if self._data_channels or needs_base:
            if self._data_channels or not peft:
                before_training.check_frozen(self)
            self._make_teachers(copied, peft, needs_base, own_reference)
        self._why_logits = why_not_linear(self) if self._data_channels else None
        for channel in self._data_channels:
            channel.fused_linear = self._why_logits is None
        if self._hint is not None and self._hint.choice.is_third_party:
            self._hint.fused_linear = False  # the function may compare the tokens of a row with each other
        if self.accelerator.is_main_process:
            log_info(self._describe())
            if self._policy is not None:
                log_info(described(TRL, self._policy.choice, self._policy.mode))

    def _make_teachers(
        self, copied: nn.Module | None, peft: bool, needs_base: bool, own_reference: bool
    ) -> None:
        """Give the hint channel its teacher, and the replay channel and the policy loss their reference."""

        policy, config = self.accelerator.unwrap_model(self.model), self._composer
        initial = Teacher(policy, lambda: sharding.without_adapter(self, policy)) if peft else Teacher(policy)
        if needs_base and not peft:
            frozen = upstream.initial_reference(self)
            if frozen is None:
                model = upstream.load_copy(self) if copied is None else copied
                if own_reference:
                    upstream.add_head(self, model)
                frozen = upstream.prepare_frozen(self, model.requires_grad_(False))
            frozen.requires_grad_(False)
            frozen.eval()
            initial = Teacher(frozen)
            if own_reference:
                self.ref_model = frozen
        if needs_base:
            self.add_callback(InitialWeights(self, below_adapter=peft))
        if self._replay is not None and self._replay.needs_reference:
            self._replay.reference = initial
        if self._hint is not None and config.hint_teacher == "ema":
            average = EmaTeacher(self, config.hint_ema_rate)
            self._hint.teacher = average.teacher
            self.add_callback(average)
        elif self._hint is not None:
            self._hint.teacher = initial if config.hint_teacher == "base" else Teacher(policy)

    def _describe(self) -> str:
        """The losses of this run, their weights, parameters and denominators, and why they need logits."""
        trainers = [base.__name__ for base in upstream.own_policies(type(self))]
        own = f"policy {trainers[0]}'s" if trainers else f"policy TRL's own, loss_type={self.loss_type}"
        terms = {"policy": self._policy.describe() if self._policy is not None else own}
        terms |= {channel.name: channel.describe() for channel in self._data_channels}
        weights = {name: getattr(self._composer, f"{name}_weight") for name in terms}
        total = " + ".join(f"{weights[name]:g} * {terms[name]}" for name in terms)
        reason = f" ({self._why_logits})" if self._why_logits else ""
        how = [
            f"; {channel.name} " + ("without logits" if channel.fused_linear else f"from logits{reason}")
            for channel in self._data_channels
        ]
        state = self.accelerator.state
        processes = f"; processes: {state.num_processes} ({state.distributed_type.value})"
        return f"composer loss = {total}{''.join(how)}{processes}"

    def _prepare_inputs(self, generation_batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs = super()._prepare_inputs(generation_batch, *args, **kwargs)
        if self._replay is not None:
            for step in upstream.new_steps(self):
                self._replay.sort(step)
        return inputs

    def _tokenize_prompts(self, prompts: list[Any], *args: Any, **kwargs: Any) -> Any:
        if self._data_channels:  # tool calls are read as in the prompts of pairs and teachers
            prompts = [one if isinstance(one, str) else template_messages(one) for one in prompts]
        return super()._tokenize_prompts(prompts, *args, **kwargs)

    def _generate_and_score_completions(
        self, inputs: list[dict[str, Any]], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        before_training.check_streamed(self, self._data_channels, inputs)
        self._prompts = None
        with upstream.scores_reference(self) if self._reads_reference else nullcontext():
            # It calls _calculate_rewards.
            output = super()._generate_and_score_completions(inputs, *args, **kwargs)
        if self._data_channels:
            before_training.check_rollouts(self, len(inputs), output)
        if self._prompts is not None:
            output |= self._health.of_generation(self._all_rewards, output)
            if self._replay is not None and upstream.has_environments(self):
                before_training.warn_of_reset(self, inputs, self._prompts)
        if self._prompts is None and self._hint is not None:
            raise before_training.not_scored(self)
        if self._hint is not None:
            output |= self._hint.tensors(self, inputs, self._prompts, output, self._rewards)
        if self._replay is not None:
            output |= self._replay.tensors(self, inputs)
        return output

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, *args, **kwargs)
        rewards = treated(self, rewards, prompts, completions, self._composer.on_bad_reward)
        self._rewards, self._prompts = upstream.total_rewards(self, rewards), prompts
        self._all_rewards = rewards
        return rewards

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._forward is not None:
            self._forward.record(args[0] if args else kwargs["model"], outputs)
        return outputs

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._resumed_from = kwargs.get("resume_from_checkpoint")  # a folder, where train() was given True
        return super()._inner_training_loop(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run TRL's step; ConfigError if it does not reach the composer loss."""
        loss = super().training_step(*args, **kwargs)
        changes_loss = self._policy or self._data_channels or self._composer.policy_weight != 1
        if changes_loss and not self._reaches_loss:
            raise before_training.bypassed(self)
        return loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        self._reaches_loss = True
        zeroed = self._policy is not None
        self._forward = forward = upstream.PolicyForward(self, model, inputs, without_advantages=zeroed)
        try:
            policy = super()._compute_loss(model, forward.inputs, *args, **kwargs)
        finally:
            self._forward = None
        weights = self._weights.now()
        hint = replay = None
        ran = list[Channel]()
        if self._policy is not None:
            policy = policy + self._policy.loss(self, inputs, forward)
            ran.append(self._policy)
        if self._hint is not None and weights["hint_weight"]:
            hint = self._hint.loss(self, model, inputs, forward.logprobs)
            ran.append(self._hint)
        if self._replay is not None and weights["replay_weight"]:
            replay = self._replay.loss(self, model, inputs)
            ran.append(self._replay)
        loss = composer(policy, hint, replay, **weights)
        self._checks_loss = bool(ran)  # without a channel that has a weight the loss is TRL's alone
        health = self._health.of_loss(inputs, forward, ran)
        if ran:
            metrics.log(self, [*(channel.logged for channel in ran), *health], loss, forward.own_inputs)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        return finite_norm(self, norm) if self._checks_loss else norm


class ComposerGRPOTrainer(ComposerLossMixin, GRPOTrainer):
    """`trl.GRPOTrainer` with the composer loss."""
