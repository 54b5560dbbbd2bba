"""Everything this adapter relies on inside TRL 1.9 to 1.16: private names, features, internal functions.

To port the adapter to another release, edit this file and the methods that `mixin.py` overrides:
`_prepare_inputs`, `_tokenize_prompts`, `_generate_and_score_completions`, `_calculate_rewards`,
`_compute_loss`, `_get_per_token_logps_and_entropies`, `_inner_training_loop` and `_get_grad_norm`.
Read from trl/trainer/grpo_trainer.py: `_compute_loss` calls `_get_per_token_logps_and_entropies` once, which
returns logps, entropies and the auxiliary loss of MoE models. The logits are divided by the
temperature. TRL scales its loss for gradient accumulation itself. From 1.15 the output head is fused: the
logps are 0 at padding, and the trainer's constructor replaces the model's forward pass. transformers from 5.5
calls `_get_grad_norm` before the optimizer's step.
"""

import copy
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import trl
from packaging.version import Version
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import ProcessorMixin
from trl import GRPOConfig, GRPOTrainer
from trl.models import prepare_deepspeed
from trl.trainer import utils

from composer_plugins.adapters.trl_mixin import sharding
from composer_plugins.columns import (
    HINT,
    Completion,
    Prompt,
    Row,
    after_prompt,
    completion_messages,
    content_text,
    template_messages,
    tools_of,
)
from composer_plugins.errors import ConfigError, DataError, in_a_line
from composer_plugins.frameworks.trl import LOSS_OPTIONS, OWN_POLICY, TESTED
from composer_plugins.losses.masks import boolean_mask

OLDEST = "1.9"
VERSION: str = trl.__version__

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(GRPOConfig)}


MIN_WEIGHT = 1e-8  # below it TRL takes no logarithm of a weight

# The end of a prompt that opens a tag for the model, as DeepSeek-R1's "<think>\n". Its template drops the
# reasoning from an answer, so prompt + completion does not begin with the prompt.
OPENED_TAG = re.compile(r"<(\w+)>\s*$")
THINKING = re.compile("<think>.*?</think>", re.DOTALL)  # what SDPO removes from a demonstration
PREFIX_PRESERVING = (
    "set processing_class.chat_template to a prefix-preserving one: "
    "trl.chat_template_utils.get_training_chat_template(processing_class) has one for many models"
)

# exp(60) times a KL term stays finite in float32.
MAX_LOG_RATIO = 60.0

# The metrics of TRL's policy term. With zero advantages they are 0, or the KL alone.
POLICY_METRICS = ("clip_ratio/", "policy_loss")


def own_policies(cls: type) -> list[type]:
    """The bases of a class that are trainers of TRL with a policy loss of their own, as in `OWN_POLICY`."""
    of_trl = [base for base in cls.__mro__ if base.__module__.startswith("trl.")]
    return [base for base in of_trl if base.__name__ in OWN_POLICY]


def release() -> tuple[int, ...]:
    """The numbers of the installed version; of the newest tested one if it has no numbers, as in a fork."""
    found = re.match(r"\d+(\.\d+)*", VERSION)
    return Version(found[0] if found else TESTED[-1]).release


def require_supported_trl() -> None:
    """Raise ConfigError for a TRL that is older than those that this adapter has been tested with."""
    if release() < Version(OLDEST).release:
        problem = f"the installed version {VERSION} is older than {OLDEST}"
        raise ConfigError("trl", problem, f"install 'trl>={OLDEST},<={TESTED[-1]}'")


def is_newer_than_tested() -> bool:
    """Whether this adapter has not been tested with the installed TRL, because it is newer."""
    return release()[:2] > Version(TESTED[-1]).release[:2]


def leaves_out_unrewarded() -> bool:
    """Whether TRL leaves a completion without a reward out of its group, as from TRL 1.16; before it is 0."""
    return "unscorable_mask" in GRPOTrainer._generate_and_score_completions.__code__.co_varnames


class PolicyForward:
    """One call of TRL's `_compute_loss`: the inputs it gets, and the results of its forward pass.

    `without_advantages` zeroes the advantages. TRL's policy term is then 0, and its KL, entropy bonus, MoE
    loss and metrics remain.
    """

    def __init__(
        self, trainer: GRPOTrainer, model: Any, inputs: dict[str, Any], *, without_advantages: bool
    ) -> None:
        self.inputs = inputs
        self._adds_kl = bool(trainer.beta)
        self._trainer, self._model = type(trainer).__name__, model
        self._outputs: list[tuple[Tensor, ...]] = []
        self._without_advantages = without_advantages
        if without_advantages:
            self.inputs = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}

    def record(self, model: Any, outputs: Any) -> None:
        """Keep the log-probabilities and entropies of the policy. TRL's loss is computed after this call."""
        if model is not self._model:
            return  # a subclass may call another model
        self._outputs.append(outputs)
        logprobs = outputs[0]
        old = self.inputs.get("old_per_token_logps")
        if self._without_advantages and old is not None:
            # TRL does not clamp log pi - log old before exp, and an infinite ratio times a zero advantage
            # is NaN. So TRL sees a bounded ratio; our loss reads the original.
            floor = logprobs.detach() - MAX_LOG_RATIO
            self.inputs["old_per_token_logps"] = torch.maximum(old, floor)

    @property
    def logprobs(self) -> Tensor:
        """The policy's log-probabilities [B, T] of the completions."""
        return self._only()[0]

    @property
    def entropies(self) -> Tensor:
        """The entropy [B, T] of each distribution that a token was sampled from."""
        return self._only()[1]

    @property
    def is_one_pass(self) -> bool:
        """Whether `logprobs` and `entropies` are there."""
        return len(self._outputs) == 1

    def own_inputs(self) -> dict[str, Tensor]:
        """What TRL's own terms are computed from, and its KL; empty if a subclass made no forward pass.

        Every token counts: TRL multiplies by its mask, and 0 times infinity is NaN.
        """
        if not self.is_one_pass:
            return {}
        logprobs, entropies, *auxiliary = self._outputs[0]  # the loss of MoE models, or None
        found = policy_tensors(self.inputs, logprobs)
        found["mask"] = torch.ones_like(found["mask"])
        if (reference := found.get("ref_logprobs")) is not None and self._adds_kl:
            log_ratio = reference - logprobs
            found["KL"] = log_ratio.exp() - log_ratio - 1
        if auxiliary and auxiliary[0] is not None:
            found["auxiliary_loss"] = auxiliary[0]
        return found | {"entropies": entropies}

    def _only(self) -> tuple[Tensor, ...]:
        """What the one forward pass returned; ConfigError if a subclass made none, or several."""
        if (calls := len(self._outputs)) != 1:
            problem = (
                f"its _compute_loss calls self._get_per_token_logps_and_entropies {calls} times for the "
            )
            problem += "policy, and the channels read the log-probabilities of one call"
            remedy = "let it call super()._compute_loss(model, inputs), or that method, once"
            raise ConfigError(self._trainer, problem, remedy)
        return self._outputs[0]


def moved(args: GRPOConfig) -> dict[str, Any]:
    """The options of TRL's loss that are not at the default of GRPOConfig, with their values."""
    return {name: x for name in LOSS_OPTIONS if (x := getattr(args, name)) != DEFAULTS[name]}


def accumulation_steps(trainer: GRPOTrainer) -> int:
    """The number of micro-batches of the current optimizer step; 1 in evaluation.

    TRL divides by it, not the Trainer. The last step of an epoch may have fewer micro-batches.
    """
    return trainer.current_gradient_accumulation_steps if trainer.model.training else 1


def at_equal_weights(trainer: GRPOTrainer) -> bool:
    """Whether the weights are those that generated the completions: until the first update after it."""
    every = trainer.args.steps_per_generation * trainer.num_iterations
    return bool(trainer._step % every < trainer.args.gradient_accumulation_steps)


def new_steps(trainer: GRPOTrainer) -> list[list[dict[str, Any]]]:
    """The micro-batches of a generation batch, each group of one optimizer step; empty unless it begins now.

    TRL has shuffled the completions over them. The last step of an epoch may have fewer micro-batches than
    `gradient_accumulation_steps`, but as many times the greatest common divisor.
    """
    args, batches = trainer.args, trainer._buffered_inputs
    if not trainer.model.training or trainer._step % args.steps_per_generation:
        return []
    size = math.gcd(args.gradient_accumulation_steps, args.steps_per_generation)
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def generations(trainer: GRPOTrainer, training: bool) -> int:
    """The number of completions of each prompt; evaluation may have fewer."""
    return trainer.num_generations if training else trainer.num_generations_eval


def total_rewards(trainer: GRPOTrainer, rewards: Tensor) -> Tensor:
    """The weighted sum [B] of the reward functions' rewards [B, R], on the rows of all processes.

    A function that does not apply to a row has NaN there, and is left out of its sum. A row that no function
    applies to has the total NaN.
    """
    totals = (rewards * trainer.reward_weights.to(rewards.device)).nansum(1)
    return totals.masked_fill(rewards.isnan().all(1), torch.nan)


def rewards(trainer: GRPOTrainer, rows: Sequence[Row], completions: list[Any], ids: list[Any]) -> list[float]:
    """The weighted sum of the rewards of the completions of these rows, by the trainer's own functions."""
    rows = [dict(row) for row in rows]
    found = trainer._calculate_rewards(rows, [row["prompt"] for row in rows], completions, ids)
    return total_rewards(trainer, found).tolist()


def loss_mask(inputs: dict[str, Any], *, check: bool) -> Tensor:
    """The completion tokens [B, T] that TRL trains on: those that no tool wrote.

    With `check`, DataError if a mask holds another number than 0 and 1.
    """
    mask = boolean_mask("completion_mask", inputs["completion_mask"], check=check)
    if "tool_mask" not in inputs:
        return mask
    return mask & boolean_mask("tool_mask", inputs["tool_mask"], check=check)


def policy_tensors(inputs: dict[str, Any], logprobs: Tensor, *, check: bool = False) -> dict[str, Tensor]:
    """The inputs of a policy loss, by their names in the catalogue.

    TRL leaves out the old policy's log-probabilities where they equal the present ones. The rollout
    policy's are vLLM's where TRL has them; where vLLM has none for a token (NaN), the old policy's are used.
    TRL has `log_weights` with vllm_importance_sampling_correction only, and `ref_logprobs` with a KL or
    under `scores_reference`. `check` is the argument of `loss_mask`.
    """
    advantages, old = inputs["advantages"], inputs.get("old_per_token_logps")
    old = logprobs.detach() if old is None else old
    rollout = inputs.get("sampling_per_token_logps", old)
    weights = inputs.get("importance_sampling_ratio")
    more = {} if weights is None else {"log_weights": weights.clamp(min=MIN_WEIGHT).log()}
    if (reference := inputs.get("ref_per_token_logps")) is not None:
        more["ref_logprobs"] = reference
    return more | {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": torch.where(rollout.isnan(), old, rollout),
        "advantages": advantages if advantages.dim() > 1 else advantages.unsqueeze(1),
        "mask": loss_mask(inputs, check=check),
    }


def corrects_rollouts(args: GRPOConfig) -> bool:
    """Whether TRL computes importance weights for the difference between the trainer and vLLM."""
    return bool(args.use_vllm and args.vllm_importance_sampling_correction)


def policy_factor(
    trainer: GRPOTrainer,
    inputs: dict[str, Any],
    tensors: dict[str, Tensor],
    entropies: Tensor,
    *,
    takes_log_weights: bool,
) -> Tensor | float:
    """The product of the masks and weights that TRL's options multiply a policy loss with.

    These are the off-policy sequence mask of DeepSeek-V3.2, the top-entropy mask, and the importance ratio
    between the trainer and vLLM, unless the loss takes that ratio itself as `log_weights`. The factor is 1.0
    where none of these options is set.
    """
    factor: Tensor | float = 1.0
    mask = tensors["mask"].to(entropies)
    if trainer.off_policy_mask_threshold is not None:
        factor = factor * trainer.get_off_policy_mask(
            advantages=tensors["advantages"],
            per_token_logps=tensors["logprobs"],
            sampling_per_token_logps=inputs.get("sampling_per_token_logps", tensors["old_logprobs"]),
            mask=mask,
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    if trainer.top_entropy_quantile < 1.0:
        factor = factor * trainer.get_high_entropy_mask(entropies, mask, 1 - trainer.top_entropy_quantile)
    if not takes_log_weights and "importance_sampling_ratio" in inputs:
        factor = factor * inputs["importance_sampling_ratio"]
    return factor


def is_async_callable(function: Any) -> bool:
    """Whether TRL awaits what a reward function returns."""
    # TRL before 1.14 awaits functions alone, and not objects with an asynchronous __call__.
    return bool(getattr(utils, "is_async_callable", inspect.iscoroutinefunction)(function))


def metrics(trainer: GRPOTrainer) -> dict[str, list[float]]:
    """The values of each metric since the last log, of training or of evaluation. TRL logs their mean."""
    return trainer._metrics["train" if trainer.model.training else "eval"]


class Mean(list[float]):
    """The mean of a metric since TRL's last log, in the place of the list whose mean TRL logs and drops."""

    total = number = 0.0

    def add(self, total: float, number: float) -> None:
        self.total, self.number = self.total + total, self.number + number
        self[:] = [self.total / self.number]


def add_to_mean(trainer: GRPOTrainer, name: str, total: float, number: float) -> None:
    """Add so many values, which add up to `total`, to the mean of a metric that TRL logs next."""
    logged = metrics(trainer)
    mean = logged.get(name)
    if not isinstance(mean, Mean):
        mean = logged[name] = Mean()
    mean.add(total, number)


def tokenizer(trainer: GRPOTrainer) -> Any:
    """The tokenizer, also where TRL was given a processor."""
    processing = trainer.processing_class
    return processing.tokenizer if isinstance(processing, ProcessorMixin) else processing


def environment_types(trainer: GRPOTrainer) -> dict[type, bool]:
    """The types of the trainer's environments, and whether an instance has the attribute of a hint."""
    found = [pool[0] for pool in trainer._environment_pool.values()] if has_environments(trainer) else []
    return {type(one): hasattr(one, HINT) for one in found}


def has_environments(trainer: GRPOTrainer) -> bool:
    """Whether the trainer was given an environment_factory."""
    return bool(trainer.environment_factories)


def changes_rollouts(trainer: GRPOTrainer) -> bool:
    """Whether a rollout_func or a subclass may make rollouts of other prompts than the rows have."""
    name = "_generate_and_score_completions"
    overrides = [base for base in type(trainer).__mro__ if name in vars(base)]
    return trainer.rollout_func is not None or any(
        not base.__module__.startswith(("trl.", "composer_plugins.")) for base in overrides
    )


def encode_prompts(trainer: GRPOTrainer, prompts: list[Prompt]) -> list[list[int]]:
    """Token ids of prompts, with the chat template, tools and special tokens that TRL itself uses."""
    return trainer._tokenize_prompts(prompts)[0] if prompts else []


def encode_replayed(
    trainer: GRPOTrainer, row: Row, completions: Sequence[Completion]
) -> tuple[list[int], list[list[int]]]:
    """Token ids of the row's prompt, and of replayed completions of it, each with the end of sequence.

    Those of a conversation are what the chat template makes of it, with the tools of the row, or, if it does
    not say, those that the policy sees.
    """
    prompt = row["prompt"]
    tools = tools_of(row, prompt)
    if isinstance(prompt, str):
        texts = [one for one in completions if isinstance(one, str)]
        if len(texts) < len(completions):
            raise DataError("prompt", "it is a string, and a completion is messages", "write both alike")
        return encode_prompts(trainer, [prompt])[0], _encode_generated(trainer, texts)
    messages = template_messages(prompt)
    tools = (_policy_tools(trainer, row) if tools is None else tools) or None
    start = _render(trainer, messages, tools, add_generation_prompt=True)
    return start, [_completion_after(trainer, start, messages, one, tools) for one in completions]


def _policy_tools(trainer: GRPOTrainer, row: Row) -> Any:
    """The tools of the trainer, and of the row's environment."""
    if trainer.environment_factories is None:
        return trainer.tools
    return trainer._env_tools[row.get("environment") if trainer._multi_environment else None]


def _render(trainer: GRPOTrainer, messages: Prompt, tools: Any, **options: Any) -> list[int]:
    """Token ids of a conversation; raises DataError if the chat template does not take it."""
    try:
        rendered: Any = trainer.processing_class.apply_chat_template(
            conversation=[messages],
            tools=tools,
            chat_template=trainer.chat_template,
            tokenize=True,
            return_dict=True,
            **options,
            **trainer.chat_template_kwargs,
        )
    except Exception as error:  # a template is a program of the model's author
        problem = f"it does not take this conversation ({in_a_line(error)})"
        remedy = "write the messages as this template wants them, leave the row out, or set another template"
        raise DataError("chat template", problem, remedy) from error
    ids: list[int] = rendered["input_ids"][0]
    return ids


def _completion_after(
    trainer: GRPOTrainer, start: list[int], prompt: list[dict[str, Any]], completion: Completion, tools: Any
) -> list[int]:
    """What the chat template adds to a prompt, whose token ids are `start`, for a completion."""
    messages = completion_messages(completion)
    whole = _render(trainer, [*prompt, *messages], tools)
    try:
        return after_prompt(whole, start)
    except DataError as error:
        opened = OPENED_TAG.search(tokenizer(trainer).decode(start))
        if opened is None or len(messages) > 1:
            raise DataError(error.key, error.problem, PREFIX_PRESERVING) from None
        text, tag = content_text(messages[0]["content"]), opened[1]
        if messages[0].get("tool_calls"):
            problem = f"its prompt ends with <{tag}>, and it drops the reasoning from a completion with tool "
            problem += "calls, so the tokens of the completion are not known"
            raise DataError(error.key, problem, PREFIX_PRESERVING) from None
        if f"</{tag}>" not in text:
            problem = f"its prompt ends with <{tag}>, and the completion has no </{tag}>"
            remedy = f"write it as the model does after this prompt: the reasoning, </{tag}>, the answer"
            raise DataError(error.key, problem, remedy) from None
        return _encode_generated(trainer, [text.removeprefix(opened[0]).removeprefix(f"<{tag}>")])[0]


def _encode_generated(trainer: GRPOTrainer, texts: Iterable[str]) -> list[list[int]]:
    """Token ids of what the model generates after a prompt, each with the end of sequence."""
    tokenize, ends, made = tokenizer(trainer), end_tokens(trainer), []
    for text in texts:
        ids = tokenize(text, add_special_tokens=False)["input_ids"]
        made.append(ids if ids and ids[-1] in ends else [*ids, tokenize.eos_token_id])
    return made


def end_tokens(trainer: GRPOTrainer) -> list[int]:
    """The tokens that end a rollout: the tokenizer's, and from TRL 1.16 also the model config's."""
    found: list[int] | None = getattr(trainer, "eos_token_ids", None)
    return [tokenizer(trainer).eos_token_id] if found is None else found


def are_ended(trainer: GRPOTrainer, completions: Sequence[list[int]]) -> list[bool]:
    """Whether each ends with a token that ends a rollout, and maybe white space, as in Qwen's templates."""
    ends, found = end_tokens(trainer), []
    for ids in completions:
        last = len(ids) - 1
        while last > 0 and ids[last] not in ends and not tokenizer(trainer).decode([ids[last]]).strip():
            last -= 1
        found.append(ids[last] in ends)
    return found


def pad_left(trainer: GRPOTrainer, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of token ids, padded on the left to one width, and a mask [B, width] that is 0 on padding."""
    tensors, device = [torch.tensor(row, dtype=torch.long) for row in rows], trainer.accelerator.device
    ids = utils.pad(tensors, tokenizer(trainer).pad_token_id, padding_side="left")
    mask = utils.pad([torch.ones_like(row) for row in tensors], 0, padding_side="left")
    return ids.to(device), mask.to(device)


def initial_reference(trainer: GRPOTrainer) -> nn.Module | None:
    """TRL's reference model (beta > 0), if it has the weights of the policy and keeps them; otherwise None.

    TRL loads it from the path in the model's config. A model object may have other weights than that path.
    """
    if trainer.ref_model is None or trainer.args.sync_ref_model:
        return None
    policy, reference = (trainer.accelerator.unwrap_model(m) for m in (trainer.model, trainer.ref_model))
    mine, theirs = dict(policy.named_parameters()), dict(reference.named_parameters())
    same = mine.keys() == theirs.keys()
    for name in mine if same else ():  # all processes compare all weights, because comparing may gather them
        with sharding.gathered(mine[name]), sharding.gathered(theirs[name]):
            weight = theirs[name].full_tensor() if isinstance(theirs[name], DTensor) else theirs[name]
            alike = mine[name].dtype == weight.dtype and not mine[name].is_meta
            same &= alike and torch.equal(mine[name], weight.to(mine[name].device))
    found = trainer.accelerator.gather(torch.tensor([same], device=trainer.accelerator.device))
    return trainer.ref_model if bool(found.all()) else None


def has_path(model: Any) -> bool:
    """Whether the config of a model says from where TRL may load its reference (`beta` above 0)."""
    return bool(utils.get_config_model_id(model.config))


@contextmanager
def scores_reference(trainer: GRPOTrainer) -> Iterator[None]:
    """Let TRL compute the reference's log-probabilities of a generation batch, as it does for its own KL."""
    beta, trainer.beta = trainer.beta, trainer.beta or 1.0
    try:
        yield
    finally:
        trainer.beta = beta


def add_head(trainer: GRPOTrainer, model: nn.Module) -> None:
    """Let a copy of the policy compute log-probabilities itself, as TRL from 1.15 asks of its reference."""
    if (add := getattr(utils, "add_fused_lm_head", None)) is not None:
        add(model, temperature=trainer.temperature)


def prepare_frozen(trainer: GRPOTrainer, model: nn.Module) -> Any:
    """Prepare a frozen model as TRL prepares its reference model: sharded if the policy is.

    TRL's `prepare_fsdp` cuts what each process has loaded, as one unit. Accelerate's function, which prepares
    the policy, cuts layer by layer, and with `cpu_ram_efficient_loading` sends the main process's weights.
    """
    if trainer.is_deepspeed_enabled:
        return prepare_deepspeed(model, trainer.accelerator)
    if trainer.is_fsdp_enabled:
        from accelerate.utils import fsdp2_prepare_model  # an accelerate before 1.6 has no FSDP2

        return fsdp2_prepare_model(trainer.accelerator, model).eval()
    return trainer.accelerator.prepare_model(model, evaluation_mode=True)


def copied(model: nn.Module) -> nn.Module | None:
    """A copy of a model, which an earlier trainer may have had; None if ZeRO-3 has cut it already.

    TRL replaces a model's forward by `_fused_forward`, which calls the original model: a copy would run its
    weights. The function has the name of the one that it replaces.
    """
    if sharding.is_partitioned(model):
        return None
    made = copy.deepcopy(model)
    function = getattr(vars(made).get("forward"), "__func__", None)
    if function is not None and function.__code__.co_name == "_fused_forward":
        del made.forward
    return made


def load_copy(trainer: GRPOTrainer) -> nn.Module:
    """A second model from the path that the policy was loaded from, with the weights that TRL holds now."""
    policy = trainer.accelerator.unwrap_model(trainer.model)
    options = dict(trainer.args.model_init_kwargs or {})
    options.setdefault("trust_remote_code", trainer.args.trust_remote_code)
    options |= {"dtype": policy.dtype, "device_map": None}
    with torch.random.fork_rng():  # loading may initialise weights; the run's random numbers stay TRL's
        loaded = utils.create_model_from_path(utils.get_config_model_id(policy.config), **options)
    if sharding.is_partitioned(policy):  # both are cut alike
        for mine, theirs in zip(policy.parameters(), loaded.parameters(), strict=True):
            sharding.shard(theirs).copy_(sharding.shard(mine))
    else:
        loaded.load_state_dict(policy.state_dict())
    return loaded


def loss_of_logprobs(trainer: GRPOTrainer, inputs: dict[str, Any], logprobs: Tensor) -> Any:
    """What the trainer's `_compute_loss` gives for these log-probabilities of the policy."""
    found = (logprobs, torch.ones_like(logprobs), None)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: found
    return trainer._compute_loss(trainer.model, inputs)


require_supported_trl()  # an older TRL may lack what the other modules import
