"""Forward passes of the channels: plain calls of the model, which TRL's fused head leaves unchanged."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOTrainer

from composer_plugins.adapters.trl_mixin.predictions import HeadInputs, Logits, Predictions
from composer_plugins.adapters.trl_mixin.sharding import is_sharded
from composer_plugins.adapters.trl_mixin.teachers import Teacher
from composer_plugins.errors import ConfigError
from composer_plugins.kernels.linear.tiles import autocast

PROBE = 8  # tokens of the row on which a model is tried out

# Where torch keeps the hooks of a module.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextmanager
def head_keeps_input(head: Any) -> Iterator[list[list[Any]]]:
    """Let an output head keep its input, weight and bias, and return one column in the place of the logits.

    Weight and bias are what the call used: the ema teacher runs the policy with other weights, which `detach`
    keeps.
    They are in the dtype of autocast. The column has a gradient of 0 in the weight and the bias, so that
    DDP, which searches the outputs for unused parameters, finds them used.
    """
    kept: list[list[Any]] = []

    def keep(hidden: Tensor) -> Tensor:
        weights = [head.weight, getattr(head, "bias", None)]
        if not torch.is_grad_enabled():
            weights = [x if x is None else x.detach() for x in weights]
        kept.append(autocast(hidden, *weights))
        column = hidden[..., :1]
        for x in weights:
            if x is not None and x.requires_grad:
                column = column + 0 * x[(0,) * x.dim()]
        return column

    head.forward = keep  # the instance's attribute stands before the method of the class
    try:
        yield kept
    finally:
        del head.forward


def completion(
    trainer: GRPOTrainer,
    model: Any,
    ids: Tensor,
    attention_mask: Tensor,
    length: int,
    temperature: float,
    *,
    fused_linear: bool,
) -> Predictions:
    """What predicts the last `length` tokens of each row, with logits or without (`fused_linear`).

    The logits are divided by `temperature`. At the sampling temperature, which TRL's own log-probabilities
    have, they belong to the distributions that completions are sampled from.
    """
    predicting = slice(-length - 1, -1)
    if not fused_linear:
        return Logits(_call(trainer, model, ids, attention_mask, length)[:, predicting] / temperature)
    core = _core(trainer, model)
    with head_keeps_input(core.get_output_embeddings()) as kept:
        _call(trainer, model, ids, attention_mask, length)
    if len(kept) != 1:
        problem = f"its forward pass calls the output head {len(kept)} times"
        raise ConfigError("model", problem, "set fused_linear=False")
    ((hidden, weight, bias),) = kept
    return HeadInputs(hidden[:, predicting], weight, bias, *_after_head(core.config), temperature)


def _call(
    trainer: GRPOTrainer, model: Any, ids: Tensor, attention_mask: Tensor, completion_length: int
) -> Tensor:
    """What the model returns as logits: those at t predict the token at t + 1."""
    # A model with absolute positions would otherwise count the padding on the left.
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    options = {"logits_to_keep": completion_length + 1, "position_ids": positions}
    # Some models have no such argument.
    accepted = inspect.signature(type(_core(trainer, trainer.model)).forward).parameters
    options = {name: value for name, value in options.items() if name in accepted}
    with trainer.accelerator.autocast():
        called = model(input_ids=ids, attention_mask=attention_mask, use_cache=False, **options)
    logits: Tensor = called.logits
    return logits


def _core(trainer: GRPOTrainer, model: Any) -> Any:
    """The model without the wrappers of Accelerate and PEFT."""
    core = trainer.accelerator.unwrap_model(model, keep_torch_compile=False)
    return core.get_base_model() if hasattr(core, "get_base_model") else core


def _after_head(config: Any) -> tuple[float | None, float]:
    """The softcap of the logits (Gemma) and their factor (Cohere's logit_scale, 1 / Granite's scaling)."""
    config = config.get_text_config()
    factor = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return getattr(config, "final_logit_softcapping", None), factor


def why_not_linear(trainer: GRPOTrainer) -> str | None:
    """Why the hint and replay channels compute from logits, in words; None where `HeadInputs` has the same.

    The logits of a short row are compared with the model's own.
    """
    if not trainer.args.fused_linear:
        return "fused_linear is False"
    if trainer.args.torch_compile:
        return "torch_compile compiles the model together with its output head"
    if is_sharded(trainer):
        return "its weights are sharded, and the head's are gathered during a forward pass only"
    core = _core(trainer, trainer.model)
    head = core.get_output_embeddings()
    if type(head) is not nn.Linear:
        return f"its output head is a {type(head).__module__}.{type(head).__name__}, not a torch.nn.Linear"
    if "forward" in vars(head) or type(head.weight) is not nn.Parameter:
        return "another library has replaced the forward pass or the weight of its output head"
    if any(getattr(head, name) for name in HOOKS):
        return "its output head has hooks"
    row = torch.arange(PROBE, device=trainer.accelerator.device)[None] % text_config(trainer).vocab_size
    arguments = (trainer, core, row, torch.ones_like(row), PROBE - 1, 1.0)
    with Teacher(core).in_eval_mode():
        own = _call(*arguments[:-1])[0, :-1]
        try:
            states = completion(*arguments, fused_linear=True)
        except Exception as error:  # whatever it raises, it cannot do without the logits
            return f"its forward pass cannot do without the logits ({error})"
        assert isinstance(states, HeadInputs)
        found = states.logits(states.hidden[0])
    # Roundings are small compared with the eps of the dtype in the norm; a factor or a softcap is not.
    own, found = own.double(), found.double()
    impossible = own == -torch.inf
    if found.shape == own.shape and torch.equal(impossible, found == -torch.inf):
        gap, size = (torch.where(impossible, 0.0, x).norm() for x in (found - own, own))
        if gap / size <= max(torch.finfo(states.hidden.dtype).eps / 4, 1e-5):
            return None
    return "its logits are not the output of its output head"


def may_count_padding(trainer: GRPOTrainer) -> bool:
    """Whether padding on the left may move the positions of a row in TRL's forward pass of this model.

    TRL passes no position_ids. A model with absolute positions, such as GPT-2, then counts the padding, and
    the log-probabilities of a row depend on the longest prompt of its batch. Rotary positions are relative.
    """
    policy: Any = trainer.model
    kinds = {type(module).__name__.lower() for module in policy.modules()}
    return "rotary" not in " ".join(kinds)


def text_config(trainer: GRPOTrainer) -> Any:
    """The config of the language model. It is kept, because unwrapping the model for each row takes long."""
    if (found := vars(trainer).get("composer_text_config")) is None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        found = trainer.composer_text_config = model.config.get_text_config()
    return found


def longest_input(trainer: GRPOTrainer) -> int | None:
    """The number of tokens that the model takes; None where its config does not say."""
    return getattr(text_config(trainer), "max_position_embeddings", None)
