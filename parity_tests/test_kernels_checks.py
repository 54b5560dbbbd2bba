"""Bad tensors are refused before a run, by name; a kernel itself checks nothing, to cost no sync."""

from typing import Any

import pytest
import torch

from composer_plugins.catalogue import choose
from composer_plugins.checks import check_inputs
from composer_plugins.errors import ComposerError
from composer_plugins.plugins import losses
from composer_plugins.worked_example import tensors

GRPO = choose(losses(), "policy", "grpo")
JSD = choose(losses(), "divergence", "jsd")
DPO = choose(losses(), "preference", "dpo")
ADVANTAGE = choose(losses(), "advantage", "grpo")


def refused(choice: Any, **changed: Any) -> str:
    with pytest.raises(ComposerError) as error:
        check_inputs(choice, tensors(choice.loss) | changed)
    return str(error.value)


@pytest.mark.parametrize("choice", [GRPO, JSD, DPO, ADVANTAGE], ids=lambda c: f"{c.loss.kind}-{c.loss.name}")
def test_a_sound_batch_passes(choice: Any) -> None:
    check_inputs(choice, tensors(choice.loss))


@pytest.mark.parametrize("loss", losses(), ids=lambda row: f"{row.kind}-{row.name}")
def test_the_worked_example_of_every_row_is_sound(loss: Any) -> None:
    example = {name: p.example for name, p in loss.parameters.items() if p.example is not None}
    example |= {"top_k": 3} if "top_k" in loss.parameters else {}
    check_inputs(choose(losses(), loss.kind, loss.name, example), tensors(loss))


def test_a_missing_input_is_named() -> None:
    given = tensors(GRPO.loss)
    del given["old_logprobs"]
    with pytest.raises(
        ComposerError, match="policy 'grpo' needs old_logprobs; given: logprobs, advantages, mask"
    ):
        check_inputs(GRPO, given)


def test_a_float_mask_and_integer_logprobs_are_not_coerced() -> None:
    mask = tensors(GRPO.loss)["mask"]
    assert "mask is torch.float32; wanted booleans: mask.bool()" in refused(GRPO, mask=mask.float())
    integers = torch.zeros(2, 3, dtype=torch.long)
    assert "logprobs is torch.int64; wanted floating point" in refused(GRPO, logprobs=integers)
    ids = torch.zeros(6)
    assert "group_ids is torch.float32; wanted integers" in refused(ADVANTAGE, group_ids=ids)


def test_shapes_of_two_batches_are_told_apart() -> None:
    assert "old_logprobs is (2, 4) and logprobs is (2, 3)" in refused(GRPO, old_logprobs=-torch.ones(2, 4))
    assert "advantages (2,) do not broadcast" in refused(GRPO, advantages=torch.ones(2))
    assert "advantages.unsqueeze(-1)" in refused(GRPO, advantages=torch.ones(2))
    assert "vocabularies differ" in refused(JSD, teacher_logits=torch.zeros(2, 3, 6))
    assert "teacher_logits is (2, 5, 5)" in refused(JSD, teacher_logits=torch.zeros(2, 5, 5))
    assert "ref_chosen is (2,)" in refused(DPO, ref_chosen=torch.zeros(2))
    assert "wanted [*batch, tokens, vocab]" in refused(JSD, teacher_logits=torch.zeros(3))


def test_a_positive_log_probability_is_refused_only_where_it_counts() -> None:
    given = tensors(GRPO.loss)
    positive = given["old_logprobs"].clone()
    positive[0, 0] = 0.25
    message = refused(GRPO, old_logprobs=positive)
    assert "old_logprobs holds 0.25 at a live token" in message and "never positive" in message
    positive[0, 0] = 1e-15  # rounding
    positive[1, 2] = 5.0  # masked
    check_inputs(GRPO, given | {"old_logprobs": positive})


def test_nan_passes_because_the_loss_must_show_it() -> None:
    check_inputs(GRPO, tensors(GRPO.loss) | {"logprobs": torch.full((2, 3), torch.nan)})


def test_an_empty_batch_passes() -> None:
    empty = torch.zeros(0, 3)
    check_inputs(
        GRPO,
        {"logprobs": empty, "old_logprobs": empty, "advantages": empty, "mask": empty.bool()},
    )


def test_k_beyond_the_vocabulary_is_refused() -> None:
    top = choose(losses(), "divergence", "jsd", {"top_k": 6})
    assert "jsd's parameter 'top_k' is 6, and the vocabulary has 5 entries" in refused(top)
