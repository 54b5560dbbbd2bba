"""Helpers that fill `loss_fn_inputs`: advantages by group, log-probabilities of a teacher, pairs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from composer_plugins.adapters.tinker_loss import (
    add_advantages,
    add_ref_logprobs,
    add_teacher_logprobs,
    mark_pairs,
)
from composer_plugins.errors import ComposerError
from parity_tests.rigs.tinker_data import Future, Input, Sampler, batch, changed, without


def entry(datum: Any, name: str) -> list[float]:
    found: list[float] = datum.loss_fn_inputs[name].to_torch().tolist()
    return found


def test_advantages_are_grpos_within_a_group() -> None:
    data, _ = batch()
    data = [without(one, "advantages") for one in data]
    rewards, groups = [1.0, 3.0, 2.0, 2.0], ["a", "b", "a", "b"]
    added = add_advantages(data, rewards, groups, scale="none")
    assert [entry(one, "advantages") for one in added] == [
        [0, 0, -0.5, -0.5, -0.5],
        [0, 0.5, 0.5],
        [0, 0, 0, 0.5, 0.5, 0.5, 0.5],
        [0, -0.5, -0.5, -0.5],
    ]
    assert all("advantages" not in one.loss_fn_inputs for one in data)
    scaled = add_advantages(data, rewards, groups, advantage="grpo@verl")
    expected = -0.5 / (0.5**0.5 + 1e-6)
    assert entry(scaled[0], "advantages")[2] == pytest.approx(expected, rel=1e-6)
    assert entry(add_advantages(data, [1, 1, 1, 1], groups)[0], "advantages") == [0.0] * 5


def test_advantages_that_cannot_be_computed_are_refused() -> None:
    data, _ = batch()
    for rewards, groups, name, message in [
        ([1.0], [0], "grpo", "there are 4 data, 1 rewards and 1 groups"),
        ([1.0, torch.nan, 0.0, 0.0], [0] * 4, "grpo", r"rewards\[1\]: it is nan; leave that"),
        ([1.0] * 4, [0] * 4, "gae", "'gae' needs token_rewards, values"),
        ([1.0] * 4, [0] * 4, "grpoo", "did you mean 'grpo'"),
    ]:
        with pytest.raises(ComposerError, match=message):
            add_advantages(data, rewards, groups, advantage=name)


def test_rewards_and_groups_may_be_tensors() -> None:
    data, _ = batch()
    rewards, groups = [1.0, 3.0, 2.0, 2.0], [7, 8, 7, 8]
    wanted = [entry(one, "advantages") for one in add_advantages(data, rewards, groups)]
    for numbers in (torch.tensor(groups), [torch.tensor(one) for one in groups]):
        added = add_advantages(data, torch.tensor(rewards), numbers)  # type: ignore[arg-type]
        assert [entry(one, "advantages") for one in added] == wanted


def test_a_prompt_may_be_a_model_input_or_a_tensor() -> None:
    data, _ = batch()
    wanted, *others = (
        [entry(one, "teacher_logprobs") for one in add_teacher_logprobs(data, Sampler(), [prompt] * 4)]
        for prompt in ([7, 8], Input([7, 8]), torch.tensor([7, 8]))
    )
    assert all(one == wanted for one in others)


@pytest.mark.parametrize(
    "prompt", ["12", ["1", "2"], [True, 2], {5: 1}, [1.0], torch.tensor([1.5]), []], ids=repr
)
def test_a_prompt_without_tokens_is_named(prompt: Any) -> None:
    problem = r"^prompts\[2\]: it is of type [a-zA-Z]* and has no tokens; pass a"
    with pytest.raises(ComposerError, match=problem):
        add_teacher_logprobs(batch()[0], Sampler(), [[1], [1], prompt, [1]])


class Answering(Sampler):
    """A SamplingClient with another answer."""

    def __init__(self, change: Callable[[list[Any]], list[Any]]) -> None:
        super().__init__()
        self.change = change

    def compute_logprobs(self, prompt: Input) -> Future:
        """What `change` makes of the log-probabilities."""
        return Future(self.change(super().compute_logprobs(prompt).found))


@pytest.mark.parametrize(
    ("change", "count"),
    [(lambda found: [*found, -1.0], 5), (lambda found: found[2:], 2)],
    ids=["more", "fewer"],
)
def test_another_count_of_log_probabilities_than_of_tokens_is_named(change: Any, count: int) -> None:
    problem = rf"^data\[0\]: the SamplingClient returned {count} numbers for 4 tokens"
    with pytest.raises(ComposerError, match=problem):
        add_teacher_logprobs(batch()[0], Answering(change), [[1]] * 4)


def test_a_server_may_leave_out_the_first_token_that_has_no_log_probability() -> None:
    """As SkyRL's does."""
    teachers = Sampler(), Answering(lambda found: found[1:])
    of_tinker, of_skyrl = (add_teacher_logprobs(batch()[0], one, [[1, 2]] * 4) for one in teachers)
    for one, other in zip(of_tinker, of_skyrl, strict=True):
        assert entry(one, "teacher_logprobs") == entry(other, "teacher_logprobs")


def test_the_teacher_sees_the_hint_and_the_completion() -> None:
    """What it says of token t of the completion stands at the target t, whatever the length of its prompt."""
    data, _ = batch()
    data[1] = changed(data[1], mask=torch.tensor([0.0, 1, 0]))  # a tool's answer within the completion
    sampler, prompts = Sampler(), [[7, 7, 7, 7], [5], None, [2, 3]]
    added = add_teacher_logprobs(data, sampler, prompts)
    assert len(sampler.seen) == 3
    for row, prompt in enumerate(prompts):
        targets, start = entry(data[row], "target_tokens"), [2, 1, 3, 1][row]
        found, marks = entry(added[row], "teacher_logprobs"), entry(added[row], "hint_mask")
        if prompt is None:
            assert found == marks == [0.0] * len(targets)
            continue
        assert marks == entry(data[row], "mask")
        for t in range(len(targets)):
            expected = -(targets[t] + (sum(prompt) + sum(targets[start:t])) / 100) if t >= start else 0.0
            assert found[t] == pytest.approx(expected, rel=1e-6)


def test_the_reference_sees_what_the_policy_saw() -> None:
    data, _ = batch()
    sampler = Sampler()
    added = add_ref_logprobs(data, sampler)
    for row, one in enumerate(data):
        whole = [*one.model_input.to_ints(), int(entry(one, "target_tokens")[-1])]
        assert sampler.seen[row] == whole
        last = entry(added[row], "ref_logprobs")[-1]
        assert last == pytest.approx(-(whole[-1] + sum(whole[:-1]) / 100), rel=1e-6)


def test_pairs_are_numbered() -> None:
    data, _ = batch()
    marked = mark_pairs(data[:2], data[2:], [1.0, 0.5])
    assert [entry(one, "pair") for one in marked] == [[1], [-1], [2], [-2]]
    assert [entry(one, "pair_weight") for one in marked] == [[1.0], [1.0], [0.5], [0.5]]
    for weight in (torch.nan, -1.0):
        with pytest.raises(ComposerError, match=r"^weights\[1\]: it is .*; write a finite number of at lea"):
            mark_pairs(data[:2], data[2:], [1.0, weight])


def test_a_datum_without_a_completion_is_refused() -> None:
    data, _ = batch()
    data[0] = changed(data[0], mask=torch.zeros(5))
    prompts: Sequence[list[int] | None] = [[1]] * 4
    with pytest.raises(ComposerError, match=r"data\[0\]: 'mask' is 0 everywhere"):
        add_teacher_logprobs(data, Sampler(), prompts)
