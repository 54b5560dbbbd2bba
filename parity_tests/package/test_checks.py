"""Bad tensors are refused before a run, by name; a kernel itself checks nothing, to cost no sync."""

from typing import Any

import numpy as np
import pytest
import torch

from composer_plugins.catalogue import choose
from composer_plugins.checks import check_inputs
from composer_plugins.errors import ComposerError
from composer_plugins.plugins import losses
from composer_plugins.worked_example import tensors

GRPO = choose(losses(), "policy", "grpo")
JSD = choose(losses(), "divergence", "jsd")
TOP_K = choose(losses(), "divergence", "forward_kl_topk")
TOP_K_TV = choose(losses(), "policy", "dppo_topk_tv")
DPO = choose(losses(), "preference", "dpo")
KTO = choose(losses(), "preference", "kto")
BCO = choose(losses(), "preference", "bco")
ADVANTAGE = choose(losses(), "advantage", "grpo")
OPO, GDPO, REMAX = (choose(losses(), "advantage", name) for name in ("opo", "gdpo", "remax"))


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
    message = refused(GRPO, logprobs=integers)
    assert "logprobs is torch.int64; wanted floating point: pass log pi(y_t) under the policy" in message
    assert "or logprobs.float() if it is that" in message
    for dtype in (torch.float32, torch.complex64, torch.bool):
        message = refused(ADVANTAGE, group_ids=torch.zeros(6, dtype=dtype))
        assert f"group_ids is {dtype}; wanted integers: group_ids.long()" in message


@pytest.mark.parametrize("need", ["logprobs", "mask"])
def test_none_is_no_input(need: str) -> None:
    assert f"policy 'grpo' needs {need}; given None" in refused(GRPO, **{need: None})


@pytest.mark.parametrize("value", [[[0.1]], 0.1, True, np.zeros((2, 3))], ids=lambda x: type(x).__name__)
def test_what_is_no_tensor_is_not_coerced(value: Any) -> None:
    message = refused(GRPO, advantages=value)
    assert f"advantages is of type {type(value).__name__}; wanted a tensor [*batch, tokens]" in message
    assert "torch.as_tensor(advantages)" in message
    assert "reference_kl is of type float; wanted a tensor []" in refused(KTO, reference_kl=0.1)


def test_a_generator_and_a_count_are_no_tensors() -> None:
    clip_cov = choose(losses(), "policy", "clip_cov")
    assert "generator is of type int; wanted a torch.Generator" in refused(clip_cov, generator=1)
    assert "num_groups is of type Tensor; wanted an int" in refused(ADVANTAGE, num_groups=torch.tensor(3))
    assert "num_groups is of type bool; wanted an int" in refused(ADVANTAGE, num_groups=True)
    check_inputs(ADVANTAGE, tensors(ADVANTAGE.loss) | {"num_groups": 3})


def test_lengths_are_counts_or_sums() -> None:
    given = tensors(OPO.loss)
    for dtype in (torch.int64, torch.int32, torch.float32):
        check_inputs(OPO, given | {"lengths": given["lengths"].to(dtype)})
    assert "lengths is torch.bool; wanted integers or floating" in refused(OPO, lengths=torch.ones(6).bool())


def test_shapes_of_two_batches_are_told_apart() -> None:
    assert "old_logprobs is (2, 4) and logprobs is (2, 3)" in refused(GRPO, old_logprobs=-torch.ones(2, 4))
    assert "advantages (2,) do not broadcast" in refused(GRPO, advantages=torch.ones(2))
    assert "advantages.unsqueeze(-1)" in refused(GRPO, advantages=torch.ones(2))
    assert "vocabularies differ" in refused(JSD, teacher_logits=torch.zeros(2, 3, 6))
    assert "teacher_logits is (2, 5, 5)" in refused(JSD, teacher_logits=torch.zeros(2, 5, 5))
    assert "ref_chosen is (2,)" in refused(DPO, ref_chosen=torch.zeros(2))
    assert "wanted [*batch, tokens, vocab]" in refused(JSD, teacher_logits=torch.zeros(3))


def test_the_rank_is_what_the_catalogue_says() -> None:
    scores = {name: torch.zeros(2, 3) for name in DPO.loss.needs}
    assert "chosen has shape (2, 3); wanted [pairs], 1 axes" in refused(DPO, **scores)
    square = {
        "rewards": torch.zeros(2, 2),
        "group_ids": torch.zeros(2, 2).long(),
        "lengths": torch.ones(2, 2),
    }
    assert "rewards has shape (2, 2); wanted [rows]" in refused(OPO, **square)
    assert "mask has shape (6, 1); wanted [rows]" in refused(ADVANTAGE, mask=torch.ones(6, 1).bool())
    for choice, name in ((KTO, "reference_kl"), (BCO, "reward_shift")):
        message = refused(choice, **{name: torch.zeros(1)})
        assert f"{name} has shape (1,); wanted [], a tensor without axes" in message
    assert "wanted [*batch, tokens, vocab], 2 axes at least" in refused(JSD, student_logits=torch.zeros(5))


def test_axes_of_one_name_have_one_size() -> None:
    assert "rollout_topk_logprobs is (2, 3, 2) and topk_logprobs is (2, 3, 3)" in refused(
        TOP_K_TV, rollout_topk_logprobs=-torch.ones(2, 3, 2)
    )
    ids = torch.zeros(2, 3, 2).long()
    assert "teacher_topk_ids is (2, 3, 2) and teacher_topk_logprobs is (2, 3, 3)" in refused(
        TOP_K, teacher_topk_ids=ids
    )
    few = {"teacher_topk_logprobs": -torch.ones(2, 3, 6), "teacher_topk_ids": torch.zeros(2, 3, 6).long()}
    message = refused(TOP_K, **few)
    assert "teacher_topk_logprobs has 6 entries, and the vocabulary of student_logits 5" in message
    assert "group_ids is (5,) and reward_components is (6, 2)" in refused(
        GDPO, group_ids=torch.zeros(5).long()
    )
    for name, wrong in (("component_mask", torch.ones(6, 3).bool()), ("component_weights", torch.ones(3))):
        assert f"{name} is {tuple(wrong.shape)} and reward_components is (6, 2)" in refused(
            GDPO, **{name: wrong}
        )
    check_inputs(GDPO, tensors(GDPO.loss) | {"component_weights": torch.ones(2)})
    message = refused(REMAX, baselines=torch.ones(3))
    assert "baselines is (3,) and token_rewards is (2, 3)" in message and "[*batch] and" in message


def test_ids_of_live_tokens_are_within_the_vocabulary() -> None:
    given = tensors(TOP_K.loss)
    for wrong, span in ((-1, "-1 to "), (5, " to 5,")):
        ids = given["teacher_topk_ids"].clone()
        ids[0, 0, 0] = wrong
        message = refused(TOP_K, teacher_topk_ids=ids)
        assert span in message and "teacher and student must share a tokenizer" in message
        check_inputs(TOP_K, given | {"teacher_topk_ids": ids}, values=False)
        ids = given["teacher_topk_ids"].clone()
        ids[1, 2, 0] = wrong  # masked
        check_inputs(TOP_K, given | {"teacher_topk_ids": ids})


def test_values_are_not_looked_at_where_none_may_be() -> None:
    """On the meta device there are none to look at."""
    given = {name: x.to("meta") for name, x in tensors(GRPO.loss).items()}
    check_inputs(GRPO, given, values=False)
    with pytest.raises((RuntimeError, NotImplementedError)):
        check_inputs(GRPO, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_above_zero_by_rounding_is_that_of_the_dtype_and_never_much(dtype: torch.dtype) -> None:
    most = min(64 * torch.finfo(dtype).eps, 0.05)
    for above, is_sound in ((0.9 * most, True), (1.2 * most, False), (0.45, False), (float("inf"), False)):
        x = torch.full((2, 3), above, dtype=dtype)
        if is_sound:
            check_inputs(GRPO, tensors(GRPO.loss) | {"logprobs": x})
        else:
            assert f"logprobs holds {float(x[0, 0]):.4g} at" in refused(GRPO, logprobs=x)


def test_top_k_log_probabilities_may_be_anything_at_a_masked_token() -> None:
    given = tensors(TOP_K_TV.loss)
    x = given["topk_logprobs"].clone()
    x[1, 2] = 3.0
    check_inputs(TOP_K_TV, given | {"topk_logprobs": x})
    x[1, 1, 2] = 3.0
    assert "topk_logprobs holds 3 at a live token" in refused(TOP_K_TV, topk_logprobs=x)


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
