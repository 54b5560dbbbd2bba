"""The replay channel: its pairs, scores, weights and denominator."""

import copy
from typing import Any

import pytest
import torch

from composer_plugins.adapters.trl_mixin.channels import ReplayChannel
from composer_plugins.adapters.trl_mixin.upstream import encode_replayed
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs import by_rows, tiny

REPLAY_ONLY = {"policy_weight": 0.0, "replay_weight": 1.0, "dtype": torch.float64}


@pytest.mark.parametrize("temperature", [{}, {"replay_temperature": 1.3}], ids=["1", "1.3"])
@pytest.mark.parametrize("loss", by_rows.REPLAY)
def test_replay_loss_and_gradient_equal_a_loop_over_rows(loss: str, temperature: dict[str, float]) -> None:
    """And metrics; at replay_temperature, which is not the sampling temperature."""
    policy = tiny.model(torch.float64)
    initial = copy.deepcopy(policy).eval()
    params = {} if loss == "sft" else {"beta": 0.3}
    options = {"replay_loss": loss, "replay_params": params, **temperature}
    made = tiny.trainer(policy_model=policy, **REPLAY_ONLY, **options, max_steps=3, temperature=0.7)
    made.train()  # so that the policy is no longer the reference
    inputs = tiny.batch(made)
    made._metrics["train"].clear()
    expected, means = by_rows.replay(made, initial, loss)
    tiny.assert_computes(made, inputs, expected)
    means |= {"loss": expected.item(), "row_frac": 0.75}  # row 2 of 4 has no pair
    logged = {name: values[0] for name, values in made._metrics["train"].items() if "replay" in name}
    assert logged == pytest.approx({f"composer/replay/{name}": x for name, x in means.items()}, rel=1e-5)


def rows_seen(model: Any, call: Any) -> list[int]:
    """The number of rows in each forward pass of ours while `call` runs; TRL's own have no position_ids."""
    seen: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(len(kwargs["input_ids"])) if "position_ids" in kwargs else None,
        with_kwargs=True,
    )
    call()
    hook.remove()
    return seen


def test_each_distinct_completion_is_scored_once() -> None:
    """Of the 16 rows 4 have no pair, and the others are 4 generations of prompts with 2, 2 and 3 pairs."""
    made = tiny.trainer(**REPLAY_ONLY)
    inputs = tiny.batch(made)
    assert rows_seen(made.model, lambda: made._replay.loss(made, made.model, inputs)) == [7, 7]
    rows = [row for row in tiny.rows() for _ in range(4)]
    reference = made._replay.reference.model
    made.args.per_device_train_batch_size = 6  # the reference sees at most this many rows at a time
    scored = rows_seen(reference, lambda: made._replay.tensors(made, rows))
    assert scored == [6, 2, 6, 2]  # one placeholder stands for all rows without a pair


@pytest.mark.parametrize(
    ("loss", "sides", "is_asked"), [("sft", 1, False), ("orpo", 2, False), ("rpo", 2, True)]
)
def test_only_completions_that_the_loss_needs_are_scored(loss: str, sides: int, is_asked: bool) -> None:
    made = tiny.trainer(**REPLAY_ONLY, replay_loss=loss)
    inputs = tiny.batch(made)
    assert rows_seen(made.model, lambda: made._replay.loss(made, made.model, inputs)) == [7] * sides
    assert (made._replay.reference is not None) == is_asked


def test_a_micro_batch_without_a_pair_still_has_its_forward_passes() -> None:
    """Every rank runs the same number of forward passes of the policy, whatever its rows are."""
    made = tiny.trainer(**REPLAY_ONLY)
    inputs = tiny.batch(made)
    without = inputs["replay_weight"] == 0
    inputs = {name: x[without] for name, x in inputs.items() if name.startswith("replay_")}
    assert rows_seen(made.model, lambda: made._replay.loss(made, made.model, inputs)) == [1, 1]


def test_equal_completions_of_an_optimizer_step_are_scored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL shuffles 8 generations of each of 4 prompts over 8 micro-batches, which are two optimizer steps."""
    data = [{"prompt": f"{key}?", "chosen": f"{i}2", "rejected": "3"} for i, key in enumerate("abcd")]
    options = {"dataset": data, "num_generations": 8, "per_device_train_batch_size": 4}
    options |= {"gradient_accumulation_steps": 4, "steps_per_generation": 8, "max_steps": 2}

    def train() -> tuple[list[int], list[torch.Tensor]]:
        made = tiny.trainer(**REPLAY_ONLY, **options, policy_model=tiny.absolute_model(), learning_rate=0.0)
        gradients: list[torch.Tensor] = []
        return rows_seen(made.model, lambda: gradients.extend(tiny.gradients(made))), gradients

    seen, gradients = train()
    # A step has 4 prompts at most, so of the 4 micro-batches 3 borders at most cut the rows of one.
    assert len(seen) == 2 * 2 * 4 and sum(seen) <= 2 * 2 * (4 + 3)
    monkeypatch.setattr(ReplayChannel, "sort", lambda *_: None)
    shuffled, expected = train()
    assert sum(shuffled) > sum(seen)
    for mine, theirs in zip(gradients, expected, strict=True):
        assert_parity(mine, theirs, terms=16 * len(tiny.SYMBOLS))


@pytest.mark.filterwarnings("ignore:train_dataset. none of its 4 rows")
@pytest.mark.parametrize(
    "change",
    [{"chosen": None, "rejected": None, "n_teachers_agreeing": None}, {"n_teachers_agreeing": 0}],
    ids=["no pair", "weight 0"],
)
def test_rows_without_a_pair_or_with_weight_0_count_nowhere(change: dict[str, Any]) -> None:
    data = [{"prompt": f"{key}?", "chosen": "12", "rejected": "3"} | change for key in "abcd"]
    made = tiny.trainer(**REPLAY_ONLY, dataset=data)
    loss, gradient = tiny.loss_and_gradient(made, tiny.batch(made))
    assert loss == 0 and not gradient.any()
    assert not any(key.startswith("composer/replay/rewards") for key in made._metrics["train"])


def test_a_single_pair_serves_every_generation() -> None:
    data = [{"prompt": f"{key}?", "chosen": "12", "rejected": "3"} for key in "abcd"]
    made = tiny.trainer(**REPLAY_ONLY, dataset=data)
    inputs = tiny.batch(made)
    assert (inputs["replay_weight"] == 1).all()
    decoded = made.processing_class.batch_decode(inputs["replay_chosen_ids"], skip_special_tokens=True)
    assert {text[-2:] for text in decoded} == {"12"}


def test_generation_g_takes_the_gth_pair_also_across_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two holds generations 4 to 7 of the only prompt."""
    row = {"prompt": "a?", "chosen": [f"{g}1" for g in range(8)], "rejected": ["9"] * 8}
    made = tiny.trainer(**REPLAY_ONLY, dataset=[row] * 2, num_generations=8)
    monkeypatch.setattr(type(made.accelerator), "process_index", 1)
    tensors = made._replay.tensors(made, [row] * 4)
    decoded = made.processing_class.batch_decode(tensors["replay_chosen_ids"], skip_special_tokens=True)
    assert [text[-2:] for text in decoded] == ["41", "51", "61", "71"]


CHAT = [{"role": "user", "content": "a?"}]


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("a?", "12"),
        ("a?", "12<eos>"),
        (CHAT, "12"),
        (CHAT, [{"role": "assistant", "content": "12"}]),  # what the template adds to the prompt
    ],
)
def test_a_completion_ends_with_one_eos(prompt: Any, completion: Any) -> None:
    made = tiny.trainer(**REPLAY_ONLY)
    assert encode_replayed(made, {"prompt": prompt}, [completion])[1][0] == [4, 5, 1]
