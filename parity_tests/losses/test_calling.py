"""`check_inputs` rejects wrong tensors before training. Kernels do not check, to cost no device sync."""

from typing import Any

import numpy as np
import pytest
import torch

from composer_plugins.cli.worked_example import tensors
from composer_plugins.errors import ComposerError, ConfigError, DataError
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.types import Metric, PairLoss, TokenLoss
from composer_plugins.losses.calling import call, check_inputs, check_result
from composer_plugins.losses.choosing import Choice, choose, find_one
from composer_plugins.losses.inputs import INPUTS
from composer_plugins.testing.settings import settings, value_and_gradients
from parity_tests.rigs.every import each

GRPO = choose("policy", "grpo")
CLIP_COV = choose("policy", "clip_cov")
JSD = choose("divergence", "jsd")
TOP_K = choose("divergence", "forward_kl_topk")
TOP_K_TV = choose("policy", "dppo_topk_tv")
DPO, KTO, BCO = (choose("preference", name) for name in ("dpo", "kto", "bco"))
ADVANTAGE, OPO, GDPO, REMAX = (choose("advantage", name) for name in ("grpo", "opo", "gdpo", "remax"))


def check(choice: Choice, **changed: Any) -> None:
    check_inputs(choice, tensors(choice.loss) | changed)


LOSS, WHERE = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
WRONG: list[tuple[Choice, Any, str]] = [
    (GRPO, LOSS, "returned Tensor; return TokenLoss(loss, metrics)"),
    (GRPO, None, "returned NoneType; return TokenLoss(loss, metrics)"),
    (GRPO, TokenLoss(torch.zeros(()), {}), r"returned the shape [], and not [2, 3]; return TokenLoss"),
    (GRPO, TokenLoss(LOSS[:, :1], {}), "returned the shape [2, 1], and not [2, 3]"),
    (GRPO, TokenLoss(LOSS, {"m": 1.0}), "returned the metric 'm' as float; return Metric"),  # type: ignore[dict-item]
    (GRPO, TokenLoss(LOSS, {"m": (LOSS[0], WHERE[0])}), "the metric 'm' with"),  # type: ignore[dict-item]
    (GRPO, TokenLoss(LOSS, {"m": (LOSS, LOSS)}), "both [2, 3], `where` of booleans"),  # type: ignore[dict-item]
    (GRPO, TokenLoss(LOSS, {"loss": Metric(LOSS, WHERE)}), "another name"),
    (GRPO, TokenLoss(LOSS, {}), "has no gradient; compute it from logprobs, not detached"),
    (DPO, PairLoss(torch.zeros(3, 1), {}), "returned the shape [3, 1], and not [3]; return PairLoss"),
    (ADVANTAGE, torch.zeros(6, 1), "returned the shape [6, 1], and not [6]; return a tensor"),
]


@pytest.mark.parametrize(("choice", "result", "message"), WRONG)
def test_a_wrong_result_of_a_loss_is_rejected(choice: Choice, result: Any, message: str) -> None:
    given = tensors(choice.loss) | ({"mask": torch.ones(6, dtype=torch.bool)} if choice is ADVANTAGE else {})
    if choice is not ADVANTAGE:
        given[choice.loss.needs[0]].requires_grad_()
    with pytest.raises(ConfigError) as refused:
        check_result(choice, given, result)
    assert message in str(refused.value)
    check_result(choice, given, call(choice, given, check=True))


@each("policy")
def test_a_loss_that_averages_advantages_over_a_sequence_is_marked_and_rejects_those_that_differ(
    row: Any,
) -> None:
    """Marked is exactly a loss in which a token's gradient depends on another token's advantage."""
    for setting in settings(row, thorough=False):
        if "advantages" not in setting.inputs or "logprobs" not in setting.inputs:
            continue
        batch = setting.draw(size=3, tokens=4, unmasked=1.0, spread=0.01)
        changed = batch | {"advantages": batch["advantages"] + 0.01 * torch.eye(4)[:3].double()}
        gradients = [value_and_gradients(setting, one)[1]["logprobs"] for one in (batch, changed)]
        elsewhere = ~torch.eye(4, dtype=torch.bool)[:3]
        spreads = bool(((gradients[1] - gradients[0])[elsewhere].abs() > 1e-9).any()) and not row.over_batch
        assert row.per_sequence is spreads, setting.label
        if row.per_sequence:
            with pytest.raises(
                DataError, match="advantages: they differ within a sequence, .* or gspo_token"
            ):
                check_inputs(setting.choice, batch)
            check_inputs(setting.choice, batch | {"advantages": batch["advantages"][:, :1]})
            mask = torch.tensor([[True, False, False, False]]).repeat(3, 1)
            check_inputs(setting.choice, batch | {"mask": mask})  # those of masked tokens may differ


@each()
def test_the_worked_example_of_every_row_passes(row: Any) -> None:
    example = {name: p.example for name, p in row.parameters.items() if p.example is not None}
    example |= {"top_k": 3} if "top_k" in row.parameters else {}
    check(choose(row.kind, row.name, example))


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


def ids(*shape: int) -> torch.Tensor:
    return zeros(*shape).long()


TOP_K_IDS = tensors(TOP_K.loss)["teacher_topk_ids"]


def with_id(wrong: int, *place: int) -> torch.Tensor:
    changed = TOP_K_IDS.clone()
    changed[place] = wrong
    return changed


@pytest.mark.parametrize(
    ("choice", "changed", "error"),
    [
        # presence
        (GRPO, {"old_logprobs": None}, "it needs old_logprobs, and the batch has logprobs, advantages,"),
        # types, which are not converted
        (GRPO, {"mask": zeros(2, 3)}, "mask: it is torch.float32; pass booleans: mask.bool()"),
        (GRPO, {"logprobs": ids(2, 3)}, "logprobs: it is torch.int64; pass floating-point numbers: log"),
        (ADVANTAGE, {"group_ids": zeros(6)}, "group_ids: it is torch.float32; pass integers:"),
        (ADVANTAGE, {"group_ids": zeros(6).cfloat()}, "group_ids: it is torch.complex64; pass integers"),
        (ADVANTAGE, {"group_ids": zeros(6).bool()}, "group_ids: it is torch.bool; pass integers"),
        (OPO, {"lengths": zeros(6).bool()}, "lengths: it is torch.bool; pass integers or floating-point"),
        (GRPO, {"advantages": [[0.1]]}, "advantages: it is of type list; pass a tensor [*batch, tokens]:"),
        (GRPO, {"advantages": True}, "advantages: it is of type bool; pass a tensor"),
        (GRPO, {"advantages": np.zeros((2, 3))}, "advantages: it is of type ndarray; pass a tensor"),
        (KTO, {"reference_kl": 0.1}, "reference_kl: it is of type float; pass a tensor []:"),
        (CLIP_COV, {"generator": 1}, "generator: it is of type int; pass a torch.Generator"),
        (ADVANTAGE, {"num_groups": torch.tensor(3)}, "num_groups: it is of type Tensor; pass an int"),
        (ADVANTAGE, {"num_groups": True}, "num_groups: it is of type bool; pass an int"),
        # the number of axes
        (DPO, dict.fromkeys(DPO.loss.needs, zeros(2, 3)), "chosen: its shape is (2, 3); pass [pairs], 1"),
        (OPO, {"rewards": zeros(2, 2)}, "rewards: its shape is (2, 2); pass [rows]"),
        (ADVANTAGE, {"mask": zeros(6, 1).bool()}, "mask: its shape is (6, 1); pass [rows]"),
        (KTO, {"reference_kl": zeros(1)}, "reference_kl: its shape is (1,); pass [], a tensor without axes"),
        (BCO, {"reward_shift": zeros(1)}, "reward_shift: its shape is (1,); pass [], a tensor without axes"),
        (JSD, {"student_logits": zeros(5)}, "pass [*batch, tokens, vocab], 2 axes at least"),
        # axes of one name have one size
        (GRPO, {"old_logprobs": zeros(2, 4)}, "old_logprobs: it is (2, 4), and logprobs is (2, 3); pass"),
        (JSD, {"teacher_logits": zeros(2, 5, 5)}, "teacher_logits: it is (2, 5, 5), and student_logits is"),
        (DPO, {"ref_chosen": zeros(2)}, "ref_chosen: it is (2,), and chosen is (3,); pass [pairs] and"),
        (GDPO, {"group_ids": ids(5)}, "group_ids: it is (5,), and reward_components is (6, 2)"),
        (GDPO, {"component_mask": zeros(6, 3).bool()}, "component_mask: it is (6, 3), and"),
        (GDPO, {"component_weights": zeros(3)}, "component_weights: it is (3,), and reward_components is"),
        (REMAX, {"baselines": zeros(3)}, "baselines: it is (3,), and token_rewards is (2, 3); pass"),
        (TOP_K_TV, {"rollout_topk_logprobs": zeros(2, 3, 2)}, "(2, 3, 2), and topk_logprobs is (2, 3, 3)"),
        (TOP_K, {"teacher_topk_ids": ids(2, 3, 2)}, "(2, 3, 2), and teacher_topk_logprobs is (2, 3, 3)"),
        (GRPO, {"advantages": zeros(2)}, "advantages: (2,) does not broadcast against logprobs (2, 3); pass "
         "one per sequence as [B, 1]: advantages.unsqueeze(-1)"),
        # the vocabulary
        (JSD, {"teacher_logits": zeros(2, 3, 6)}, "its vocabulary has 6 entries, and the vocabulary of "
         "student_logits 5; pad the smaller one with -inf logits"),
        (TOP_K, {"teacher_topk_logprobs": zeros(2, 3, 6), "teacher_topk_ids": ids(2, 3, 6)},
         "teacher_topk_logprobs: it has 6 entries, and the vocabulary of student_logits 5; pass no more"),
        (choose("divergence", "jsd", {"top_k": 6}, option="hint_divergence"), {},
         "hint_params.top_k: 6 is more than the 5 entries of the vocabulary; set it"),
        (TOP_K, {"teacher_topk_ids": with_id(-1, 0, 0, 0)}, "teacher_topk_ids: they go from -1 to "),
        (TOP_K, {"teacher_topk_ids": with_id(5, 0, 0, 0)}, " to 5, and student_logits has 5 entries; use a "
         "teacher with the student's tokenizer"),
    ],
)  # fmt: skip
def test_a_wrong_tensor_is_an_error_with_a_remedy(choice: Choice, changed: Any, error: str) -> None:
    with pytest.raises(ComposerError) as refused:
        check(choice, **changed)
    assert error in str(refused.value)
    if error.partition(":")[0] in INPUTS:
        assert str(refused.value).startswith(f"{choice.loss.kind} {choice.loss.name!r}, {error}")


@pytest.mark.parametrize(
    ("choice", "changed"),
    [
        (ADVANTAGE, {"num_groups": 3}),
        (GDPO, {"component_weights": torch.ones(2)}),
        (OPO, {"lengths": torch.ones(6, dtype=torch.int32)}),  # a count
        (OPO, {"lengths": torch.ones(6, dtype=torch.float32)}),  # a sum of weights
        (TOP_K, {"teacher_topk_ids": with_id(-1, 1, 2, 0)}),  # masked
        (GRPO, {"logprobs": torch.full((2, 3), torch.nan)}),  # the loss must show it
        (GRPO, dict.fromkeys(GRPO.loss.needs, zeros(0, 3)) | {"mask": zeros(0, 3).bool()}),
    ],
)  # fmt: skip
def test_an_unusual_batch_passes(choice: Choice, changed: Any) -> None:
    check(choice, **changed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_log_probability_may_exceed_zero_by_the_rounding_of_bfloat16(dtype: torch.dtype) -> None:
    for rounded in (0.03125, 0.0625, 0.125):  # what engines that compute in bfloat16 returned
        check(GRPO, logprobs=torch.full((2, 3), rounded, dtype=dtype))
    for above in (0.126, 0.45, float("inf")):
        x = torch.full((2, 3), above, dtype=dtype)
        message = f"it holds {float(x[0, 0]):.4g} at an unmasked token, and a log-"
        with pytest.raises(ComposerError, match=message):
            check(GRPO, logprobs=x)


def test_a_positive_log_probability_is_rejected_only_where_it_is_unmasked() -> None:
    for choice, name in ((GRPO, "old_logprobs"), (TOP_K_TV, "topk_logprobs")):
        x = tensors(choice.loss)[name].clone()
        x[1, 2] = 3.0  # masked
        check(choice, **{name: x})
        x[1, 1] = 3.0
        with pytest.raises(ComposerError, match=f"{name}: it holds 3 at an unmasked token"):
            check(choice, **{name: x})


def test_a_name_alone_finds_a_loss_and_of_two_kinds_the_policy_loss(caplog: Any) -> None:
    assert find_one("dapo@trl").name == "dapo@trl"
    assert find_one("dro").params == {}  # a required parameter may be missing
    assert find_one("grpo", kind="advantage").loss.kind == "advantage"
    assert not caplog.messages and find_one("grpo").loss.kind == "policy"
    assert caplog.messages == ["grpo: taken as a policy loss; set kind (--kind) to advantage for the other"]
    with pytest.raises(ConfigError, match="unknown loss 'dapoo'; did you mean 'dapo'"):
        find_one("dapoo")


def test_a_token_loss_is_not_reduced_and_the_error_says_what_to_pass() -> None:
    given = tensors(GRPO.loss)
    result = call(GRPO, given)
    with pytest.raises(TypeError, match="pass its field loss, result.loss"):
        aggregate(result, given["mask"], "token-mean")
    assert aggregate(result.loss, given["mask"], "token-mean").dim() == 0
