"""Advantages, and the weights of a rollout by another engine, against live GRPO and RLOO trainers.

A tiny trainer runs its own `_generate_and_score_completions` on scripted completions; rewards and
log-probabilities are drawn in float64 and put in where TRL's reward functions and model give them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer, RLOOTrainer

from composer_plugins.testing.assertions import assert_parity
from composer_plugins.testing.strategies import seeds
from parity_tests.support import tiny
from parity_tests.support.dialects import kernel
from parity_tests.support.trl_live import in_float64

few = settings(max_examples=40)
WEIGHTS = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)


@pytest.fixture(scope="module")
def trainer() -> GRPOTrainer:
    made = tiny.trainer(GRPOTrainer, GRPOConfig, dtype=torch.float64)
    made.model.train()
    return made


@contextmanager
def changed(trainer: GRPOTrainer, **attributes: Any) -> Iterator[None]:
    """The trainer with other attributes, and float64 where TRL makes numbers of its own."""
    before = dict(vars(trainer))
    vars(trainer).update(attributes)
    try:
        with in_float64():
            yield
    finally:
        vars(trainer).clear()
        vars(trainer).update(before)


def rollout(ids: list[list[int]], logprobs: list[list[float]] | None = None) -> Callable[..., dict[str, Any]]:
    """A rollout function that answers with these completions."""
    return lambda prompts, trainer: {
        "prompt_ids": [[3]] * len(ids),
        "completion_ids": ids,
        "logprobs": logprobs,
    }


@st.composite
def rewards(draw: st.DrawFn) -> tuple[Tensor, int]:
    """[rows, components], often tied, some NaN (a reward function that returned None); the group's size."""
    g = torch.Generator().manual_seed(draw(seeds, label="seed"))
    groups, size = draw(st.integers(1, 4), label="groups"), draw(st.integers(1, 5), label="group size")
    shape = (groups * size, draw(st.integers(1, 3), label="reward functions"))
    values = torch.randint(0, 5, shape, generator=g).double() / 10 + draw(st.sampled_from([0.0, -3.3]))
    missing = torch.rand(shape, generator=g) < draw(st.sampled_from([0.0, 0.3, 0.9]), label="missing")
    return values.masked_fill(missing, torch.nan), size


def of_trl(
    trainer: GRPOTrainer, values: Tensor, size: int, cls: type = GRPOTrainer, **options: Any
) -> Tensor:
    """What `cls` makes of these rewards, on a live trainer."""
    names = [f"reward {i}" for i in range(values.shape[1])]
    completions = [[4, 1]] * len(values)
    with changed(
        trainer,
        num_generations=size,
        reward_weights=WEIGHTS[: len(names)],
        reward_funcs=names,
        reward_func_names=names,
        rollout_func=rollout(completions),
        _calculate_rewards=lambda *_: values,
        **options,
    ):
        output = cls._generate_and_score_completions(trainer, [{"prompt": "a?"}] * len(values))
    advantages: Tensor = output["advantages"]
    return advantages


def ids(values: Tensor, size: int) -> Tensor:
    return torch.arange(len(values)) // size


def assert_same(ours: Tensor, theirs: Tensor, values: Tensor) -> None:
    """TRL divides the rounding noise of equal rewards by as little as 1e-4, and GDPO that once more."""
    largest = float(values.nan_to_num().abs().max()) + 1
    assert_parity(ours, theirs, terms=len(values), magnitude=largest / 1e-4)


def weighted_sum(values: Tensor) -> tuple[Tensor, Tensor]:
    """One reward per row, and where there is one; a function that returned None adds nothing."""
    scorable = ~values.isnan().all(-1)
    return (values.nan_to_num() * WEIGHTS[: values.shape[1]]).sum(-1).where(scorable, torch.nan), scorable


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@few
@given(drawn=rewards())
def test_advantages_equal_trl(trainer: GRPOTrainer, scale: str, drawn: tuple[Tensor, int]) -> None:
    """A row that no reward function could score counts nowhere, and gets 0."""
    values, size = drawn
    theirs = of_trl(
        trainer, values, size, scale_rewards=scale, multi_objective_aggregation="sum_then_normalize"
    )
    total, scorable = weighted_sum(values)
    row, keywords = ("dr_grpo@trl", {}) if scale == "none" else ("grpo@trl", {"scale": scale})
    ours = kernel("advantage", row)(total, ids(values, size), scorable, **keywords)
    assert_same(ours, theirs, values)


@few
@given(drawn=rewards())
def test_gdpo_equals_trl(trainer: GRPOTrainer, drawn: tuple[Tensor, int]) -> None:
    values, size = drawn
    theirs = of_trl(trainer, values, size, multi_objective_aggregation="normalize_then_sum")
    ours = kernel("advantage", "gdpo@trl")(
        values,
        ids(values, size),
        component_weights=WEIGHTS[: values.shape[1]],
        component_mask=~values.isnan(),
    )
    assert_same(ours, theirs, values)


@pytest.mark.parametrize("normalised", [False, True])
@few
@given(drawn=rewards())
def test_rloo_equals_trl(trainer: GRPOTrainer, normalised: bool, drawn: tuple[Tensor, int]) -> None:
    """Normalised, it is GRPO's over the batch, of the rows that had another to be compared with."""
    values, size = drawn
    generated = [[[3]] * len(values), [[4, 1]] * len(values), ["a"] * len(values)]
    nothing = torch.zeros(len(values), 2, dtype=torch.float64)
    theirs = of_trl(
        *(trainer, values, size, RLOOTrainer),
        normalize_advantages=normalised,
        reward_clip_range=None,
        _generate=lambda prompts: generated,
        _get_per_token_logps_and_entropies=lambda *_, **__: (nothing, None, None),
    )
    total, scorable = weighted_sum(values)
    ours = kernel("advantage", "rloo@trl")(total, ids(values, size), scorable)
    if normalised and size > 1:
        compared = scorable & (scorable.view(-1, size).sum(1) > 1).repeat_interleave(size)
        ours = kernel("advantage", "grpo@trl")(ours, torch.zeros_like(ids(values, size)), compared)
    assert_same(ours, theirs, values)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    """log-probabilities under the trainer and under the engine, which did not know all; lengths."""
    g = torch.Generator().manual_seed(draw(seeds, label="seed"))
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4), label="lengths")
    shape = (len(lengths), max(lengths))
    old = -4 * torch.rand(shape, generator=g, dtype=torch.float64)
    spread = draw(st.sampled_from([0.1, 2.0]), label="spread")
    engine = old + spread * torch.randn(shape, generator=g, dtype=torch.float64)
    return old, engine.masked_fill(torch.rand(shape, generator=g) < 0.1, torch.nan), lengths


MODES = {
    "token_truncate": ("tis@trl", "token", ("cap", "floor")),
    "sequence_truncate": ("tis@trl", "sequence", ("cap", "floor")),
    "token_mask": ("mis@trl", "token", ("high", "low")),
    "sequence_mask": ("mis@trl", "sequence", ("high", "low")),
}


@pytest.mark.parametrize("mode", MODES)
@few
@given(drawn=rollouts(), low=st.sampled_from([None, 0.5]))
def test_rollout_weights_equal_trl(
    trainer: GRPOTrainer, mode: str, drawn: tuple[Tensor, Tensor, list[int]], low: float | None
) -> None:
    """A log-probability that the engine did not give counts as the trainer's own."""
    old, engine, lengths = drawn
    mask = torch.arange(old.shape[1]) < torch.tensor(lengths).unsqueeze(1)
    logprobs = [row[:n].tolist() for row, n in zip(engine, lengths, strict=True)]
    with changed(
        trainer,
        use_vllm=True,
        _last_loaded_step=trainer.state.global_step,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=3.0,
        num_generations=1,
        rollout_func=rollout([[4] * n for n in lengths], logprobs),
        _get_per_token_logps_and_entropies=lambda *_, **__: (old, None, None),
    ):
        output = trainer._generate_and_score_completions([{"prompt": "a?"}] * len(lengths))
    theirs = output["importance_sampling_ratio"].expand(mask.shape).where(mask, 0.0)
    row, level, (high_name, low_name) = MODES[mode]
    known = torch.where(engine.isnan(), old, engine)
    keywords = {"level": level, high_name: 3.0, low_name: low}
    ours = kernel("correction", row)(old, known, mask, **keywords)
    assert_parity(ours, theirs, terms=old.shape[1], magnitude=10.0)
