"""composer_sync's own steps in the driver: who is asked, about what, and what is written beside each row."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from composer_plugins.adapters.verl_plugin.sync_trainer import batch_layout, hint, replay, scoring
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    HINT_MASK,
    REPLAY,
    TEACHER,
    TOP_IDS,
    TOP_LOGPROBS,
)
from composer_plugins.kernels import preference
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.verl_queue import Queue, rollout, trainer

SAMPLED = {"hint_weight": 0.5, "hint_divergence": "sampled_token"}
TOP = {"hint_weight": 0.5, "hint_divergence": "jsd", "hint_top_k": 4, "hint_teacher": "live"}
HINTS = ["It is 0.", None, "It is 2.", "It is 3."]  # of prompt 0, 1 ...
PAIRS = [("0", "no"), (None, None), (["2", "two"], ["?", "!"]), ("3", "4")]
AGREEING = [1.0, None, [3.0, 0.0], 2.0]
SIDES = ("chosen", "rejected")
Make = Callable[[dict[str, Any]], Any]


@pytest.fixture
def make(folder: Path, queue: Queue) -> Make:
    """A trainer, its queue and a batch: four prompts sampled twice, the last row one of verl's copies."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def made(node: dict[str, Any]) -> Any:
        one = trainer(queue, tokenizer, node)
        g = torch.Generator().manual_seed(3)
        rows = [_row(one, i // 2, 1 + i % 3, g) for i in range(8)]
        rows[7] |= {"uid": "padabc", "response_mask": torch.zeros_like(rows[7]["response_mask"])}
        return one, queue, queue.batch_of(rows)

    return made


def _row(one: Any, i: int, length: int, g: torch.Generator) -> dict[str, Any]:
    mask = torch.ones(length, dtype=torch.long)
    mask[1:2] = 0  # a tool's token
    old = -torch.rand(length, generator=g, dtype=torch.float64)
    responses = torch.randint(5, 260, (length,), generator=g)
    numbers = {"response_mask": mask, "old_log_probs": old, "advantages": torch.ones_like(old)}
    columns = {"privileged_context": HINTS[i], "chosen": PAIRS[i][0], "rejected": PAIRS[i][1]}
    return rollout(one, i, responses, **numbers, **columns, n_teachers_agreeing=AGREEING[i])


def written(queue: Queue, name: str) -> list[Tensor]:
    """A field of the batch's rows."""
    return [queue.rows["train", f"row_{i}"][name] for i in range(8)]


def test_the_reference_is_asked_under_the_hint_and_only_of_rows_that_have_one(make: Make) -> None:
    one, queue, batch = make(SAMPLED)
    metrics: dict[str, Any] = {}
    hint.add_teacher_logprobs(one, batch, metrics)
    model = one.ref_policy_wg
    assert model.asked == [8] and one.actor_rollout_wg.asked == []  # five rows, in whole micro-batches
    for i in range(8):
        row = queue.rows["train", f"row_{i}"]
        hinted = HINTS[i // 2] is not None and i != 7
        assert row[HINT_MASK].tolist() == (row["response_mask"] * hinted).tolist()
        # The table looks back one token: what the hint changes is the prompt, which ends alike.
        wanted = model.of(row["prompts"], row["responses"]) * hinted
        assert_parity(row[TEACHER], wanted, terms=1, dtype=torch.float32)
    assert metrics["actor/composer/hint/row_frac"] == 5 / 7
    assert not [key for key in queue.rows if key[0] != "train"]  # nothing is left behind


def test_the_teachers_entries_are_the_actors_own_largest_where_it_teaches_itself(make: Make) -> None:
    one, queue, batch = make(TOP)
    hint.add_teacher_logprobs(one, batch, {})
    assert one.actor_rollout_wg.asked == [6] and one.ref_policy_wg.asked == []
    for i in range(8):
        row = queue.rows["train", f"row_{i}"]
        before = torch.cat([row["prompts"][-1:], row["responses"][:-1]])
        logprobs = one.actor_rollout_wg.table[before]
        wanted = logprobs.topk(4, -1)
        asked = i not in (3, 7)  # five rows have a hint, and row 2 makes the last micro-batch whole
        assert torch.equal(row[TOP_IDS], wanted.indices[: len(before) * asked])
        rest = torch.log1p(-logprobs.gather(-1, wanted.indices).exp().sum(-1, keepdim=True))
        values = torch.cat([wanted.values, rest], -1)[: len(before) * asked]
        assert_parity(row[TOP_LOGPROBS], values, terms=1, dtype=torch.float16)
        teacher = one.actor_rollout_wg.of(row["prompts"], row["responses"]) * asked
        assert_parity(row[TEACHER], teacher, terms=1, dtype=torch.float32)
        assert (row[TOP_IDS].dtype, row[TOP_LOGPROBS].dtype) == (torch.int32, torch.float16)
        assert bool(row[HINT_MASK].any()) == (i not in (2, 3, 7))


class Driver(Queue):
    """A queue as the driver uses it: how many numbers of each field it got and put."""

    def __init__(self, queue: Queue) -> None:
        self.rows, self.numbers = queue.rows, Counter[str]()

    def kv_batch_get(self, **where: Any) -> Any:
        return self.counted(super().kv_batch_get(**where))

    def kv_batch_put(self, *, fields: Any, **where: Any) -> Any:
        return super().kv_batch_put(fields=self.counted(fields), **where)

    def counted(self, fields: Any) -> Any:
        for name, values in fields.items():
            if isinstance(values, Tensor):
                self.numbers[name] += sum(row.numel() for row in values.unbind())
        return fields


def test_the_teachers_entries_bypass_the_driver(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, queue, batch = make(TOP)
    monkeypatch.setattr(hint, "transfer_queue", driver := Driver(queue))
    monkeypatch.setattr(scoring, "transfer_queue", driver)
    hint.add_teacher_logprobs(one, batch, {})
    assert driver.numbers[TOP_IDS] == driver.numbers[TOP_LOGPROBS] == 0 < driver.numbers[HINT_MASK]
    tokens = sum(len(row) for row in written(queue, "responses"))
    assert max(driver.numbers.values()) < 30 * tokens
    assert sum(row.numel() for row in written(queue, TOP_IDS)) > 2 * tokens


def test_a_model_is_asked_at_the_rollouts_temperature_and_with_lora_without_its_adapter(make: Make) -> None:
    one, _, batch = make(SAMPLED)
    one.config.actor_rollout_ref.rollout.temperature = 0.7
    one.ref_in_actor = True
    hint.add_teacher_logprobs(one, batch, {})
    (extra_info,) = one.actor_rollout_wg.extra_infos
    wanted = {"temperature": 0.7, "no_lora_adapter": True, "compute_loss": False, "calculate_entropy": False}
    assert extra_info == wanted and one.ref_policy_wg.extra_infos == []
    one, _, batch = make(TOP)
    hint.add_teacher_logprobs(one, batch, {})
    (extra_info,) = one.actor_rollout_wg.extra_infos
    assert extra_info == {
        "temperature": 1.0,
        "calculate_entropy": False,
        "compute_loss": True,
        "distillation_use_topk": True,
        "composer_top_k": 4,
    }


def test_a_hint_in_the_advantages_adds_its_log_ratio_where_the_policy_spoke(make: Make) -> None:
    one, queue, batch = make(SAMPLED | {"hint_estimator": "advantage"})
    metrics: dict[str, Any] = {}
    hint.add_teacher_logprobs(one, batch, metrics)
    log_ratios, tokens = 0.0, 0
    for i in range(8):
        row = queue.rows["train", f"row_{i}"]
        teacher = one.ref_policy_wg.of(row["prompts"], row["responses"])
        live = row["response_mask"].bool() & (HINTS[i // 2] is not None and i != 7)
        wanted = 1 + 0.5 * torch.where(live, teacher - row["old_log_probs"], 0.0)
        assert_parity(row["advantages"], wanted, terms=1, dtype=torch.float32)
        assert TEACHER not in row
        log_ratios += float(torch.where(live, teacher - row["old_log_probs"], 0.0).sum())
        tokens += int(live.sum())
    assert metrics["actor/composer/hint/kl"] == pytest.approx(-log_ratios / tokens, rel=1e-6)


def test_a_batch_without_a_hint_asks_nobody(make: Make) -> None:
    for node in (SAMPLED, TOP):
        one, queue, batch = make(node)
        for key in batch.keys:
            queue.rows["train", key]["privileged_context"] = None
        hint.add_teacher_logprobs(one, batch, metrics := {})
        assert one.ref_policy_wg.asked == one.actor_rollout_wg.asked == []
        assert metrics["actor/composer/hint/row_frac"] == 0
        assert not any(row.any() for name in (HINT_MASK, TEACHER) for row in written(queue, name))
    assert not any(len(row) for row in written(queue, TOP_IDS))


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo", "rpo", "sft"])
def test_each_prompts_pairs_are_replayed_once_with_the_slope_of_their_loss(make: Make, name: str) -> None:
    one, queue, batch = make({"replay_weight": 1.0, "replay_loss": name})
    metrics: dict[str, Any] = {}
    found = replay.replayed_rows(one, batch, metrics)
    assert metrics["actor/composer/replay/pairs"] == 4  # of three prompts
    texts = [one.tokenizer.decode(r.sequence.response) for r in found]
    ends = "<|im_end|>\n"
    rejected = () if name == "sft" else ("no", "?", "!", "4")
    assert texts == [s + ends for s in ("0", "2", "two", "3", *rejected)]
    choice, needs = one.channels.replay, one.channels.replay.loss.needs
    lengths = torch.tensor([len(row.sequence.response) for row in found]).split(4)

    def inputs(model: Any, prefix: str = "") -> dict[str, Tensor]:
        sums = torch.stack([model.of(*row.sequence).sum() for row in found]).split(4)
        averages = [total / n for total, n in zip(sums, lengths, strict=True)]
        scores = zip(SIDES, averages if choice.average else sums, strict=False)
        return {prefix + side: x for side, x in scores} | {"chosen_nll": -averages[0]}

    given = inputs(one.ref_policy_wg, "ref_") | inputs(one.actor_rollout_wg)
    leaves = {need: given[need].requires_grad_() for need in needs if not need.startswith("ref_")}
    weights = torch.tensor([1.0, 3.0, 0.0, 2.0], dtype=torch.float64)
    loss = (weights * getattr(preference, name)(*(given[need] for need in needs)).loss).mean()
    slopes = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    per_token = [slopes.get(side, torch.zeros(4)) for side in SIDES]  # of a sum
    if choice.average:
        per_token = [slope / n for slope, n in zip(per_token, lengths, strict=True)]
    if "chosen_nll" in slopes:
        per_token[0] = per_token[0] - slopes["chosen_nll"] / lengths[0]
    for row, slope in zip(found, torch.cat(per_token[: len(lengths)]), strict=True):
        wanted = slope.expand(len(row.sequence.response))
        assert_parity(row.coefficients, wanted, terms=64, dtype=torch.float32)
    assert metrics["actor/composer/replay/loss"] == pytest.approx(loss.item(), rel=1e-6)
    # One call to the policy for all completions, and one to the reference if the loss needs it.
    asked = [len(model.asked) for model in (one.actor_rollout_wg, one.ref_policy_wg)]
    assert asked == [1, "ref_chosen" in needs]


def test_replayed_rows_stand_beside_the_batch_and_count_nowhere_but_by_their_coefficients(make: Make) -> None:
    one, queue, batch = make({"replay_weight": 1.0, "replay_loss": "simpo"})
    found = replay.replayed_rows(one, batch, {})
    assert batch_layout.batch_layout(one) == batch_layout.BatchLayout(ranks=2, mini=4, micro=2)
    _, keys, mini = batch_layout.add_replayed_rows(one, batch, found)
    assert len(keys) == 8 and mini == 8  # two for each rank's part of each of the two mini-batches
    for key, replayed in zip(keys, found, strict=True):
        row = queue.rows["train", key]
        assert not row["response_mask"].any() and not row["loss_mask"].any()
        assert row["input_ids"].tolist() == torch.cat([*replayed.sequence]).tolist()
        assert_parity(row[REPLAY], 2 * replayed.coefficients, terms=1, dtype=torch.float32)  # two updates
        assert row["advantages"].tolist() == [0.0] * len(replayed.coefficients)
    assert not any(zeros.any() for zeros in written(queue, REPLAY))
    # One row, and the rest of the shares filled up.
    _, keys, mini = batch_layout.add_replayed_rows(one, batch, found[:1])
    filled = [queue.rows["train", key][REPLAY] for key in keys[1:]]
    assert len(keys) == 8 and mini == 8 and not torch.cat(filled).any()


def test_no_pair_in_the_batch_replays_nothing(make: Make) -> None:
    one, queue, batch = make({"replay_weight": 1.0, "replay_loss": "simpo"})
    for key in batch.keys:
        queue.rows["train", key].update(chosen=None, rejected=None, n_teachers_agreeing=None)
    assert replay.replayed_rows(one, batch, metrics := {}) == []
    assert metrics == {"actor/composer/replay/pairs": 0} and one.actor_rollout_wg.asked == []
