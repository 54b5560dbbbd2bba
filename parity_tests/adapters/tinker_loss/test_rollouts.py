"""Helpers that fill `loss_fn_inputs`: advantages by group, log-probabilities of a teacher, pairs."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from composer_plugins.adapters.tinker_loss import (
    add_advantages,
    add_ref_logprobs,
    add_teacher_logprobs,
    custom_loss,
    inputs_apart,
    loss_fn,
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
        ([1.0, torch.nan, 0.0, 0.0], [0] * 4, "grpo", r"rewards\[1\]: it is nan, and not one finite number"),
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


@pytest.mark.parametrize(
    ("rewards", "groups", "message"),
    [
        ([1.0, "1.0", 0.0, 0.0], [0] * 4, r"rewards\[1\]: it is '1.0', and not one finite number"),
        ([1.0, None, 0.0, 0.0], [0] * 4, r"rewards\[1\]: it is None, and not one finite number"),
        ([1.0, [1.0, 2.0], 0.0, 0.0], [0] * 4, r"rewards\[1\]: it is \[1.0, 2.0\], and not"),
        (torch.ones(4, 2), [0] * 4, r"rewards\[0\]: it is \[1.0, 1.0\], and not one finite number"),
        ([1.0] * 4, [0, [1], 0, 0], r"groups\[1\]: it is of type list, which cannot name a group"),
        ([1.0] * 4, torch.ones(4, 2), r"groups\[0\]: it is of type Tensor, which cannot name a group"),
    ],
    ids=str,
)
def test_a_wrong_reward_or_group_is_named(rewards: Any, groups: Any, message: str) -> None:
    with pytest.raises(ComposerError, match=message):
        add_advantages(batch()[0], rewards, groups)


def test_no_data_are_refused() -> None:
    for function in (
        lambda: add_advantages([], [], []),
        lambda: add_ref_logprobs([], Sampler()),
        lambda: add_teacher_logprobs([], Sampler(), []),
        lambda: inputs_apart([], loss_fn()),
    ):
        with pytest.raises(ComposerError, match="data: it is empty; pass at least one Datum"):
            function()
    assert mark_pairs([], []) == []


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "add_advantages": lambda data: add_advantages(data, [1.0], [0]),
    "add_teacher_logprobs": lambda data: add_teacher_logprobs(data, Sampler(), [[1]]),
    "add_ref_logprobs": lambda data: add_ref_logprobs(data, Sampler()),
    "mark_pairs": lambda data: mark_pairs(data, data),
    "inputs_apart": lambda data: inputs_apart(data, loss_fn()),
    "count": loss_fn().count,
    "custom_loss": custom_loss().data,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_data_are_named_by_every_function(name: str) -> None:
    datum = batch()[0][0]
    for data, message in (
        (datum, "it is of type Datum; pass a list"),
        ([{"mask": [1]}], r"data\[0\]: it is of type dict, which has no loss_fn_inputs"),
        (None, "it is of type NoneType; pass a list"),
    ):
        with pytest.raises(ComposerError, match=message):
            FUNCTIONS[name](data)
    if name != "mark_pairs":
        with pytest.raises(ComposerError, match=r"data\[0\].loss_fn_inputs\['target_tokens'\]: it is absent"):
            FUNCTIONS[name]([without(datum, "target_tokens")])


def test_a_single_thing_is_no_list() -> None:
    data = batch()[0]
    for name, function in (
        ("rewards", lambda: add_advantages(data, 1.0, [0] * 4)),  # type: ignore[arg-type]
        ("groups", lambda: add_advantages(data, [1.0] * 4, 0)),  # type: ignore[arg-type]
        ("prompts", lambda: add_teacher_logprobs(data, Sampler(), Input([1]))),  # type: ignore[arg-type]
        ("weights", lambda: mark_pairs(data[:2], data[2:], 1.0)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ComposerError, match=f"^{name}: it is of type [A-Za-z]*; pass a list"):
            function()


def test_a_prompt_may_be_a_model_input_or_a_tensor() -> None:
    data, _ = batch()
    wanted, *others = (
        [entry(one, "teacher_logprobs") for one in add_teacher_logprobs(data, Sampler(), [prompt] * 4)]
        for prompt in ([7, 8], Input([7, 8]), torch.tensor([7, 8]))
    )
    assert all(one == wanted for one in others)


class Images(Input):
    """A ModelInput with an image."""

    def to_ints(self) -> list[int]:
        """Raise as the SDK does."""
        raise ValueError("to_ints only supports EncodedTextChunks")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("a hint", "it is of type str and has no tokens; pass a ModelInput or a list of tokens"),
        (["a", "hint"], "it is of type list and has no tokens"),
        ([1.0], "it is of type list and has no tokens"),
        (3, "it is of type int and has no tokens"),
        ([], "it is empty; .*; for a datum without a hint pass None"),
        (Input([]), "it is empty"),
        (Images([]), "it has no list of tokens .ValueError: to_ints only"),
    ],
    ids=str,
)
def test_a_wrong_prompt_is_named(prompt: Any, message: str) -> None:
    with pytest.raises(ComposerError, match=rf"^prompts\[2\]: {message}"):
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
    ("teacher", "message"),
    [
        ("base", "teacher: it is of type str, which has no compute_logprobs; pass a SamplingClient: "),
        (Answering(lambda found: found[2:]), r"teacher: it returned 2 numbers for the 4 tokens of data\[0\]"),
        (Answering(lambda found: [*found, -1.0]), r"teacher: it returned 5 numbers for the 4 tokens"),
        (
            Answering(lambda found: [*found[:-1], None]),
            r"teacher, a log-probability of data\[0\]: it is None",
        ),
    ],
    ids=["a name", "fewer", "more", "none"],
)
def test_a_wrong_teacher_is_named(teacher: Any, message: str) -> None:
    with pytest.raises(ComposerError, match=message):
        add_teacher_logprobs(batch()[0], teacher, [[1]] * 4)


def test_a_server_may_leave_out_the_first_token_that_has_no_log_probability() -> None:
    """As SkyRL's does."""
    teachers = (Sampler(), Answering(lambda found: found[1:]))
    of_tinker, of_skyrl = (add_teacher_logprobs(batch()[0], one, [[1, 2]] * 4) for one in teachers)
    for one, other in zip(of_tinker, of_skyrl, strict=True):
        numbers = (x.loss_fn_inputs["teacher_logprobs"].to_torch() for x in (one, other))
        assert torch.equal(*numbers)


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
    for weight in (torch.nan, -1.0, "2"):
        with pytest.raises(
            ComposerError, match=r"^weights\[1\]: it is .*; write one finite number of at lea"
        ):
            mark_pairs(data[:2], data[2:], [1.0, weight])  # type: ignore[list-item]
    with pytest.raises(ComposerError, match="there are 2, 1 rejected and 2 weights"):
        mark_pairs(data[:2], data[2:3])


def test_a_datum_without_a_completion_is_refused() -> None:
    data, _ = batch()
    data[0] = changed(data[0], mask=torch.zeros(5))
    prompts: Sequence[list[int] | None] = [[1]] * 4
    with pytest.raises(ComposerError, match=r"data\[0\]: 'mask' is 0 everywhere"):
        add_teacher_logprobs(data, Sampler(), prompts)
    with pytest.raises(ComposerError, match="prompts: there are 1, and 4 data"):
        add_teacher_logprobs(data, Sampler(), [[1]])
