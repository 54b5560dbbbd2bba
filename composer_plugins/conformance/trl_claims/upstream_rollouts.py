"""TRL's own advantages and rollout corrections: a live trainer with the rewards of a drawn case."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.trl_mixin import probe
from composer_plugins.conformance.trl_claims.upstream import in_float64, load, metrics


@cache
def trainer() -> Any:
    """One live GRPOTrainer, which every case changes and restores."""
    made = probe.tiny_trainer(dtype=torch.float64, rollout_func=scripted([[4, 1]]))
    made.model.train()
    return made


@contextmanager
def changed(**attributes: Any) -> Iterator[Any]:
    """The trainer with other attributes, and float64 where TRL makes numbers of its own."""
    made = trainer()
    before = dict(vars(made))
    vars(made).update(attributes)
    try:
        with in_float64():
            yield made
    finally:
        vars(made).clear()
        vars(made).update(before)


def scripted(ids: list[list[int]], logprobs: list[list[float]] | None = None) -> Callable[..., Any]:
    """A rollout function that answers with these completions."""
    return lambda prompts, trainer: {
        "prompt_ids": [[3]] * len(ids),
        "completion_ids": ids,
        "logprobs": logprobs,
    }


def generated(cls: Any, made: Any, rows: int) -> Any:
    """What a trainer makes of its rollouts."""
    return cls._generate_and_score_completions(made, [{"prompt": "a?"}] * rows)


def advantages(values: Tensor, trainer: str, **options: Any) -> Tensor:
    """The advantages that a trainer makes of rewards [rows, functions]."""
    owner, functions = load(trainer), [f"reward {i}" for i in range(values.shape[1])]
    with changed(
        reward_funcs=functions,
        reward_func_names=functions,
        rollout_func=scripted([[4, 1]] * len(values)),
        _calculate_rewards=lambda *_: values,
        **options,
    ) as made:
        found: Tensor = generated(owner, made, len(values))["advantages"]
    return found


def rloo_options(rows: int, normalised: bool) -> dict[str, Any]:
    """What RLOOTrainer reads of itself and GRPOTrainer lacks."""
    completions = [[[3]] * rows, [[4, 1]] * rows, ["a"] * rows]
    nothing = torch.zeros(rows, 2, dtype=torch.float64)
    return {
        "normalize_advantages": normalised,
        "reward_clip_range": None,
        "_generate": lambda prompts: completions,
        "_get_per_token_logps_and_entropies": lambda *_, **__: (nothing, None, None),
    }


def weights(
    mode: str, old: Tensor, engine: Tensor, lengths: list[int], low: float | None, high: float
) -> Tensor:
    """The importance weights of completions whose log-probabilities an engine gave."""
    logprobs = [row[:n].tolist() for row, n in zip(engine, lengths, strict=True)]
    with changed(
        use_vllm=True,
        _last_loaded_step=trainer().state.global_step,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        num_generations=1,
        rollout_func=scripted([[4] * n for n in lengths], logprobs),
        _get_per_token_logps_and_entropies=lambda *_, **__: (old, None, None),
    ) as made:
        output = generated(load("GRPOTrainer"), made, len(lengths))
    found: Tensor = output["importance_sampling_ratio"]
    return found


def a2po_advantages(rewards: Tensor, reference: Tensor, beta: float) -> Tensor:
    """What A2POTrainer regresses on: its value of each prompt, and the gradient of its loss.

    The completions of its reference policy are empty: the rewards are given.
    """
    owner, prompts = load("A2POTrainer"), [f"prompt {i}" for i in range(len(rewards))]
    drawn = iter(reference)  # the value of one prompt is estimated after the other
    writer: Any = torch.nn.Identity()
    writer.is_gradient_checkpointing = False
    writer.generate = lambda input_ids, **_: input_ids.repeat_interleave(reference.shape[1], 0)
    logprobs = torch.zeros_like(rewards, requires_grad=True)
    made = SimpleNamespace(
        args=SimpleNamespace(
            beta1=beta,
            beta2=1.0,
            num_value_samples=reference.shape[1],
            per_device_train_batch_size=1,
            max_prompt_length=8,
            filter_all_incorrect=False,
        ),
        train_dataset=[{"prompt": prompt} for prompt in prompts],
        eval_dataset=None,
        accelerator=trainer().accelerator,
        processing_class=trainer().processing_class,
        ref_model=writer,
        value_generation_config=None,
        model=SimpleNamespace(training=True),
        _calculate_rewards=lambda prompts, completions, **_: next(drawn),
        _get_sequence_logps=lambda *_: logprobs,
        _metrics=metrics(),
    )
    owner._estimate_optimal_values(made)
    values = torch.tensor([made._optimal_values[prompt] for prompt in prompts], dtype=torch.float64)
    batch = dict.fromkeys(("input_ids", "attention_mask", "logits_to_keep"))
    given = {"rewards": rewards, "v_star": values, "ref_logps": torch.zeros_like(rewards)}
    loss = owner.compute_loss(made, None, batch | given)
    (slope,) = torch.autograd.grad(loss, logprobs)  # of the mean of (log ratio - advantage)^2, at 0
    return -slope * len(rewards) / 2
