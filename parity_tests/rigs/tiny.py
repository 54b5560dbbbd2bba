"""A GRPO run small enough for a test: a character tokenizer, a two-layer Qwen3, and scripted rollouts.

The rollouts are a function of the prompt and of the row's place in the global batch, so that the same
rows come out whatever the micro-batch, the accumulation or the number of processes.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer, probe
from composer_plugins.adapters.trl_mixin.probe import MAX_LENGTH, OPTIONS, SYMBOLS, model
from composer_plugins.adapters.trl_mixin.teachers import EmaTeacher
from composer_plugins.adapters.trl_mixin.upstream import tokenizer as tokenizer_of

FLOAT32 = 1e-6  # sums of a few hundred terms in another order; TRL's fused head computes in float32
# Qwen3 computes its rotary angles in float32 whatever the model's dtype, and padding shifts positions.
ROTARY = 1e-6
GOOD = {"prompt": "a?", "privileged_context": "[12]", "chosen": "12", "rejected": "3"}


def config(**options: Any) -> ComposerGRPOConfig:
    """A config with these options, on the CPU."""
    return ComposerGRPOConfig(**{"output_dir": "unused", "use_cpu": True, "bf16": False, **options})


def tokenizer(chat_template: str = probe.CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character."""
    made = probe.tokenizer()
    made.chat_template = chat_template
    return made


def absolute_model() -> GPT2LMHeadModel:
    """A model whose positions are absolute, with random weights that are far apart, all of it in float64."""
    torch.manual_seed(0)
    sizes = {"n_positions": MAX_LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2, "initializer_range": 0.5}
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 1, "eos_token_id": 1}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(SYMBOLS), **sizes, **no_dropout, **ends)).double()


def rows(count: int = 4) -> list[dict[str, Any]]:
    """Prompts of different lengths; row 1 has no hint, row 2 no pair, row 3 three pairs, the others two."""
    data = []
    for i in range(count):
        pairs = 3 if i % 4 == 3 else 2
        key = "abcd"[i % 4] * (1 + i % 2)
        data.append(
            {
                "prompt": f"{key}?",
                "privileged_context": None if i % 4 == 1 else f"[{7 - i % 4}{i % 4}]",
                "chosen": None if i % 4 == 2 else [f"{i % 4}1", f"{i % 4}23", "5"][:pairs],
                "rejected": None if i % 4 == 2 else ["9", "80", "67"][:pairs],
                "n_teachers_agreeing": None if i % 4 == 2 else [1.0, 2.5, 0.5][:pairs],
            }
        )
    return data


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Scripted completions of one to five tokens, most of them ended by <eos>."""
    first = trainer.accelerator.process_index * len(prompts)
    completions = []
    for i, prompt in enumerate(prompts, start=first):
        digest = hashlib.sha256(f"{prompt} {i}".encode()).digest()
        body = [3 + digest[k] % 10 for k in range(1 + digest[20] % 4)]
        completions.append(body if digest[21] % 5 == 0 else [*body, 1])
    prompt_ids = [tokenizer_of(trainer)(p, add_special_tokens=False)["input_ids"] for p in prompts]
    return {"prompt_ids": prompt_ids, "completion_ids": completions, "logprobs": None}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Non-dyadic, and different within nearly every group."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


class GradientRecorder(TrainerCallback):
    """The flat gradient of every optimizer step, before the step."""

    def __init__(self) -> None:
        self.gradients: list[torch.Tensor] = []

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any
    ) -> None:
        self.record(parameter.grad for parameter in model.parameters())

    def record(self, gradients: Iterable[Any]) -> None:
        """Keep the gradients of one step; None is that of a weight that is not trained."""
        parts = [gradient.flatten() for gradient in gradients if gradient is not None]
        self.gradients.append(torch.cat(parts).detach().double().cpu().clone())


def trainer(
    cls: type = ComposerGRPOTrainer,
    config: type = ComposerGRPOConfig,
    *,
    policy_model: Any = None,
    dataset: Any = None,
    dtype: torch.dtype = torch.float32,
    scripted: bool = True,
    arguments: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A trainer on `rows()`, or on a `dataset` or its rows.

    `options` go to its config, `arguments` to its constructor.
    """
    defaults = {
        **OPTIONS,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 5,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
    }
    if config is ComposerGRPOConfig:  # random rewards of a few rows look like those of a broken run
        defaults["health"] = False
    data = rows() if dataset is None else dataset
    made = cls(
        model=model(dtype) if policy_model is None else policy_model,
        reward_funcs=reward,
        args=config(**{**defaults, **options}),
        train_dataset=Dataset.from_list(data) if isinstance(data, list) else data,
        **{
            "processing_class": tokenizer(),
            **({"rollout_func": rollout} if scripted else {}),
            **(arguments or {}),
        },
    )
    made.remove_callback(PrinterCallback)
    return made


def with_rollout(change: Callable[[dict[str, Any]], dict[str, Any]], **options: Any) -> Any:
    """A trainer whose rollout_func returns what `change` makes of the scripted rollout."""

    def changed(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = rollout(prompts, trainer)
        return made | change(made)

    return trainer(arguments={"rollout_func": changed}, **{"hint_weight": 1.0, **options})


def gradients(made: Any) -> list[torch.Tensor]:
    """Train `made`; the gradient of each optimizer step."""
    recorder = GradientRecorder()
    made.add_callback(recorder)
    made.train()
    return recorder.gradients


def averages(made: Any) -> dict[str, torch.Tensor]:
    """The weights of the ema teacher, by name."""
    (callback,) = (one for one in made.callback_handler.callbacks if isinstance(one, EmaTeacher))
    return callback.averages


def averages_at_the_last_step(made: Any, checkpoint: Any = None) -> dict[str, torch.Tensor]:
    """Train `made`; the weights of its ema teacher when the last step begins."""
    seen: dict[str, torch.Tensor] = {}

    class Recorder(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            seen.update({name: weight.clone() for name, weight in averages(made).items()})

    made.add_callback(Recorder())
    made.train(resume_from_checkpoint=checkpoint)
    return seen


def batch(made: Any) -> dict[str, Any]:
    """One prepared micro-batch, as `_compute_loss` gets it in training."""
    made.model.train()
    made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps
    return made._prepare_inputs(next(iter(made.get_train_dataloader())))


def shown(made: Any, inputs: dict[str, Any], name: str, row: int = 0) -> str:
    """The text of the tokens of a row, such as its "hint_prompt" or its "replay_chosen", without padding."""
    attention = inputs[f"{name}_attention" if name.startswith("replay") else f"{name}_mask"]
    return str(tokenizer_of(made).decode(inputs[f"{name}_ids"][row][attention[row].bool()]))


def loss_and_gradient(made: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """`_compute_loss` on `inputs`, and its flat gradient."""
    loss = made._compute_loss(made.model, inputs)
    return loss.detach(), flat_gradient(made, loss)


def flat_gradient(made: Any, loss: torch.Tensor) -> torch.Tensor:
    """The gradient of `loss` in the parameters of the policy."""
    made.model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in made.model.parameters() if p.grad is not None])


def assert_computes(
    made: Any, inputs: dict[str, Any], expected: Any, *, value: float = ROTARY, gradient: float = ROTARY
) -> None:
    """The loss that `_compute_loss` gives for `inputs`, and its gradient, are those of `expected`."""
    loss, found = loss_and_gradient(made, inputs)
    assert math.isclose(float(loss), expected.item(), rel_tol=value), (float(loss), expected.item())
    assert relative_difference(flat_gradient(made, expected), found) <= gradient


def logged(made: Any, name: str) -> list[float]:
    """Train `made`; the values of a metric that it has logged."""
    made.train()
    return [float(entry[name]) for entry in made.state.log_history if name in entry]


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |a|, of flat gradients; both must be non-zero."""
    assert a.norm() > 0 and b.norm() > 0, "a gradient is zero: the comparison would say nothing"
    return float((a - b).norm() / a.norm())
