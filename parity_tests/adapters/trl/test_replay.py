"""The replay channel: its pairs, scores, weights and denominator."""

import copy
from typing import Any

import pytest
import torch
from datasets import Dataset

from composer_plugins.adapters.trl_mixin.upstream import encode_completion
from composer_plugins.kernels.preference import dpo, simpo
from parity_tests.support import tiny

REPLAY_ONLY = {"policy_weight": 0.0, "replay_weight": 1.0, "dtype": torch.float64}
# Qwen3 computes its rotary angles in float32 whatever the model's dtype, and padding shifts positions.
ROTARY = 1e-6


def score(model: Any, prompt: str, answer: str, temperature: float) -> torch.Tensor:
    """Log-probabilities of answer + <eos> after prompt, without padding."""
    encode = tiny.tokenizer()
    start = encode(prompt, add_special_tokens=False)["input_ids"]
    end = [*encode(answer, add_special_tokens=False)["input_ids"], 1]
    logits = model(torch.tensor([start + end])).logits[0, len(start) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(end)[:, None])[:, 0]


def by_rows(made: Any, base: Any, loss: str) -> torch.Tensor:
    """The replay loss of one generation batch, row by row: generation g of a prompt takes the g-th pair."""
    total = torch.zeros((), dtype=torch.float64)
    data, generations = tiny.rows(), made.num_generations
    for row in data:
        for g in range(generations):
            if row["chosen"] is None:
                continue
            pick = g % len(row["chosen"])
            answers = row["chosen"][pick], row["rejected"][pick]
            temperature = made.args.replay_temperature
            mine = [score(made.model, row["prompt"], a, temperature) for a in answers]
            if loss == "simpo":
                pair = simpo(*(m.mean()[None] for m in mine))
            else:
                with torch.no_grad():
                    ref = [score(base, row["prompt"], a, temperature).sum()[None] for a in answers]
                pair = dpo(*(m.sum()[None] for m in mine), *ref, beta=0.3)
            total = total + row["n_teachers_agreeing"][pick] * pair.loss[0]
    return total / (len(data) * generations)


@pytest.mark.parametrize("temperature", [{}, {"replay_temperature": 1.3}], ids=["1", "1.3"])
@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_replay_loss_and_gradient_equal_a_loop_over_unpadded_rows(
    loss: str, temperature: dict[str, float]
) -> None:
    """At replay_temperature, which is not the sampling temperature."""
    policy = tiny.model(torch.float64)
    initial = copy.deepcopy(policy).eval()
    params = {"beta": 0.3} if loss == "dpo" else {}
    made = tiny.trainer(
        policy_model=policy,
        **REPLAY_ONLY,
        replay_loss=loss,
        replay_params=params,
        max_steps=3,
        temperature=0.7,
        **temperature,
    )
    made.train()  # so that the policy is no longer the reference
    inputs = tiny.batch(made)
    value, gradient = tiny.loss_and_gradient(made, inputs)
    expected = by_rows(made, initial, loss)
    flat = tiny.flat_gradient(made, expected)
    assert float(value) == pytest.approx(expected.item(), rel=ROTARY)
    assert tiny.relative_difference(flat, gradient) <= ROTARY


def test_simpo_needs_no_frozen_copy() -> None:
    assert tiny.trainer(**REPLAY_ONLY, replay_loss="simpo")._replay.reference is None


@pytest.mark.filterwarnings("ignore:train_dataset. none of its 4 rows")
@pytest.mark.parametrize(
    "change",
    [{"chosen": None, "rejected": None, "n_teachers_agreeing": None}, {"n_teachers_agreeing": 0}],
    ids=["no pair", "weight 0"],
)
def test_rows_without_a_pair_or_with_weight_0_count_nowhere(change: dict[str, Any]) -> None:
    data = Dataset.from_list(
        [{"prompt": f"{key}?", "chosen": "12", "rejected": "3"} | change for key in "abcd"]
    )
    made = tiny.trainer(**REPLAY_ONLY, dataset=data)
    loss, gradient = tiny.loss_and_gradient(made, tiny.batch(made))
    assert loss == 0 and not gradient.any()
    assert not any(key.startswith("composer/replay/rewards") for key in made._metrics["train"])


def test_a_single_pair_serves_every_generation() -> None:
    data = [{"prompt": f"{key}?", "chosen": "12", "rejected": "3"} for key in "abcd"]
    made = tiny.trainer(**REPLAY_ONLY, dataset=Dataset.from_list(data))
    inputs = tiny.batch(made)
    assert (inputs["replay_weight"] == 1).all()
    decoded = made._tokenizer.batch_decode(inputs["replay_chosen_ids"], skip_special_tokens=True)
    assert {text[-2:] for text in decoded} == {"12"}


def test_generation_g_takes_the_gth_pair_also_when_a_group_spans_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 of two holds generations 4 to 7 of the only prompt."""
    row = {"prompt": "a?", "chosen": [f"{g}1" for g in range(8)], "rejected": ["9"] * 8}
    made = tiny.trainer(**REPLAY_ONLY, dataset=Dataset.from_list([row] * 2), num_generations=8)
    monkeypatch.setattr(type(made.accelerator), "process_index", 1)
    tensors = made._replay.tensors(made, [row] * 4)
    decoded = made._tokenizer.batch_decode(tensors["replay_chosen_ids"], skip_special_tokens=True)
    assert [text[-2:] for text in decoded] == ["41", "51", "61", "71"]


def test_a_string_completion_ends_with_one_eos() -> None:
    made = tiny.trainer(**REPLAY_ONLY)
    assert encode_completion(made, "a?", "12") == [4, 5, 1]
    assert encode_completion(made, "a?", "12<eos>") == [4, 5, 1]


def test_a_chat_completion_is_what_the_template_adds_to_the_prompt() -> None:
    made = tiny.trainer(**REPLAY_ONLY)
    prompt = [{"role": "user", "content": "a?"}]
    assert encode_completion(made, prompt, "12") == [4, 5, 1]
    assert encode_completion(made, prompt, [{"role": "assistant", "content": "12"}]) == [4, 5, 1]


def test_chat_pairs_train() -> None:
    data = [
        {
            "prompt": [{"role": "user", "content": f"{key}?"}],
            "chosen": [{"role": "assistant", "content": "12"}],
            "rejected": [{"role": "assistant", "content": "3"}],
        }
        for key in "abcd"
    ]
    options = {"policy_weight": 0.0, "replay_weight": 1.0, "dataset": Dataset.from_list(data)}
    made = tiny.trainer(scripted=False, max_steps=3, **options)
    made.train()
    losses = [e["composer/replay/loss"] for e in made.state.log_history if "loss" in e]
    assert float(losses[-1]) < float(losses[0])


def test_metrics_count_only_rows_that_have_a_pair() -> None:
    made = tiny.trainer(replay_weight=1.0)
    made.train()
    entry = made.state.log_history[0]
    # Before the first step the policy is the reference: every margin is 0, whatever the dummy rows hold.
    assert float(entry["composer/replay/rewards/margins"]) == pytest.approx(0, abs=1e-5)
    assert float(entry["composer/replay/rewards/chosen"]) == pytest.approx(0, abs=1e-5)
