"""What the rollouts, the loss and the weights of a TRL run show of its state."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin import upstream
from composer_plugins.adapters.trl_mixin.channels import KERNEL_MODES, Channel
from composer_plugins.adapters.trl_mixin.metrics import Logged
from composer_plugins.batches import Recorder
from composer_plugins.config import ComposerConfig
from composer_plugins.frameworks.trl import LOSS_OPTIONS, TRL
from composer_plugins.health.watch import OURS, Health, equal_groups, rollouts
from composer_plugins.health.weights import Sample


class TrlHealth(TrainerCallback):
    """Measures each generation, each micro-batch and each update, without a wait of its own."""

    def __init__(self, trainer: GRPOTrainer, config: ComposerConfig, channels: Sequence[Any]) -> None:
        self.trainer, where = trainer, (config.record_batches, config.record_every)
        choices: dict[str, tuple[Any, str]] = {one.name: (one.choice, one.mode) for one in channels}
        self.measured = Health(choices.get("policy", (None,))[0], on=config.health)
        if "policy" not in choices:  # TRL's own; it has a name here if its parameters are a dialect's
            moved = [name for name in upstream.moved(trainer.args) if LOSS_OPTIONS[name].sets]
            level = trainer.args.importance_sampling_level
            row = TRL.row_of(loss_type=trainer.loss_type, importance_sampling_level=level)
            choices["policy"] = ("" if moved else row or "", "")
        self.recorders = {
            name: Recorder.of(
                *where, choice, framework="trl", version=upstream.VERSION, mode=KERNEL_MODES.get(mode, mode)
            )
            for name, (choice, mode) in choices.items()
        }
        self._sample: Sample | None = None

    def of_generation(self, rewards: Tensor, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Measure the rollouts of this process, and return what `of_loss` reads; `rewards` are of all."""
        trainer, own = self.trainer, len(batch["completion_ids"])
        size, first = upstream.generations(trainer, training=True), trainer.accelerator.process_index * own
        groups = [(first + row) // size for row in range(own)]
        whole = [row for row, group in enumerate(groups) if groups.count(group) == size]
        if not (whole and self.measured.on and trainer.model.training):
            return {}
        ids = batch["completion_ids"].masked_fill(batch["completion_mask"] == 0, -1).tolist()
        scores = rewards[first : first + own, (trainer.reward_weights != 0).to(rewards.device)]
        ended = [groups[row] for row in whole], [ids[row] for row in whole]
        self.measured.step("rollouts", rollouts(scores[whole], *ended))
        alike = torch.zeros(own, dtype=torch.bool)
        alike[[row for rows in equal_groups(scores, groups) for row in rows if row in whole]] = True
        return {"composer_alike": alike.to(rewards.device)}

    def of_loss(
        self, inputs: Mapping[str, Any], forward: upstream.PolicyForward, ran: list[Channel]
    ) -> list[Logged]:
        """Measure a micro-batch; return what is logged of it with the channels that ran, or log it itself."""
        trainer, is_read = self.trainer, self.measured.on or any(self.recorders.values())
        if not (is_read and trainer.model.training and forward.is_one_pass):
            return []
        tensors: dict[str, Any] = upstream.policy_tensors(dict(inputs), forward.logprobs)
        named = {one.name: one.logged for one in ran}
        ids = {"ids": inputs["completion_ids"], "prompt_ids": inputs["prompt_ids"]}
        for name, one in {"policy": Logged("policy", {}, tensors, {}), **named}.items():
            if (recorder := self.recorders[name]) is not None:
                recorder({**one.inputs, **ids}, step=trainer.state.global_step, **one.how)
        if not self.measured.on:
            return []
        if "sampling_per_token_logps" not in inputs:
            del tensors["rollout_logprobs"]
        tensors |= {"entropies": forward.entropies, "ref_logprobs": inputs.get("ref_per_token_logps")}
        tensors["alike"] = inputs.get("composer_alike")
        self.measured.facts |= dict.fromkeys(("expects hint", "sees hints"), float("hint" in named))
        if trainer.mask_truncated_completions:  # a completion that has ended is not a random sample
            tensors["entropies"] = None
        if "hint" in named:
            of_hint = named["hint"].inputs
            tensors |= {"teacher_logprobs": of_hint["teacher_logprobs"], "hint_mask": of_hint["mask"]}
        metrics = named["policy"].metrics if "policy" in named else {}
        self.measured.judge.has_ended_one |= trainer._resumed_from is not None
        equal, update = upstream.at_equal_weights(trainer), trainer.state.global_step
        found = self.measured.micro_batch(tensors, metrics, equal=equal, update=update)
        if "replay" in named and "rewards/margins" in named["replay"].parts:
            self.measured.margin(*named["replay"].parts["rewards/margins"])
        if not ran:
            for name, value in zip(found, torch.stack([*found.values()]).tolist(), strict=True):
                upstream.add_to_mean(trainer, OURS + name, value, 1)
        parts = {name.removeprefix("health/"): (x, torch.ones_like(x)) for name, x in found.items()}
        return [Logged("health", parts, {}, {})]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.measured.on:
            self._sample = Sample(self.trainer.model.parameters())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if self._sample is not None:
            rate = max(group["lr"] for group in optimizer.param_groups) if optimizer is not None else 1.0
            self.measured.step("weights", {"learning rate": rate, **self._sample.compared()})
            self._sample = None
