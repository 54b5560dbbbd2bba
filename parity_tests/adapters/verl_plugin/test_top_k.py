"""The teacher's largest entries: what verl's worker returns of them, and what half precision costs."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.engine_workers import TrainingWorker

from benchmarks.verl_logits import gathered
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    TEACHER,
    TEACHER_PROMPT,
    TOP_DTYPES,
    TOP_IDS,
    TOP_K,
    TOP_LOGPROBS,
    nested,
    rows_of,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.loss import sum_to_one
from composer_plugins.adapters.verl_plugin.sync_trainer.workers import TopKTrainingWorker
from composer_plugins.kernels import divergences
from composer_plugins.kernels.divergences.supports import log_probs_at
from composer_plugins.testing.assertions import assert_parity

VOCABULARY, K = 40, 3
MICRO_BATCHES = ([3, 0], [2], [1, 4])  # as verl cuts and sorts the rows of a dynamic batch


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """The logits after each token, of an engine that calls its loss function as verl's FSDP engine does."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(VOCABULARY, VOCABULARY, generator=g, dtype=torch.bfloat16)

    def infer_batch(self: Any, data: TensorDict) -> TensorDict:
        tensordict_utils.assign_non_tensor(data, metrics={"seen": sorted(data.keys())})
        for part in MICRO_BATCHES if tensordict_utils.get_non_tensor_data(data, TOP_K, None) else ():
            micro = tensordict_utils.index_select_tensor_dict(data, part)
            packed = logits[torch.cat(rows_of(micro["input_ids"]))]
            assert self.loss_fn(student_logits=packed.unsqueeze(0), data=micro) == {}
            value, logged = self.loss_fn(model_output={}, data=micro, dp_group=None)
            assert float(value) == 0 and logged == {}
        logprobs = [gathered(logits[x].float(), x.roll(-1)) for x in rows_of(data["input_ids"])]
        return tensordict_utils.get_tensordict({"log_probs": nested(logprobs)}, {"metrics": data["metrics"]})

    monkeypatch.setattr(TrainingWorker, "infer_batch", infer_batch)
    return logits


def asked(**more: Any) -> TensorDict:
    """Five rows as TransferQueue hands them to a worker."""
    g = torch.Generator().manual_seed(1)
    lengths = ((2, 4, 3), (1, 1, 1), (3, 2, 5), (2, 5, 2), (1, 3, 4))  # prompt, the teacher's, response
    rows = [[torch.randint(VOCABULARY, (n,), generator=g) for n in row] for row in lengths]
    prompts, teachers, responses = zip(*rows, strict=True)
    fields = {"prompts": prompts, TEACHER_PROMPT: teachers, "responses": responses}
    fields["input_ids"] = [torch.cat([p, r]) for p, r in zip(prompts, responses, strict=True)]
    data = TensorDict({name: nested(values) for name, values in fields.items()}, batch_size=5)
    tensordict_utils.assign_non_tensor(data, temperature=1.0, **more)
    return data


def test_a_worker_returns_the_teachers_entries_in_the_order_of_the_rows(table: Tensor) -> None:
    worker = object.__new__(TopKTrainingWorker)
    worker.loss_fn = "that of the training"
    data = asked(**{TOP_K: K})
    found = worker.infer_batch(data)
    assert worker.loss_fn == "that of the training"
    assert set(found.keys()) == {TEACHER, TOP_LOGPROBS, TOP_IDS, "metrics"} and found.batch_size == (5,)
    pairs = zip(rows_of(data[TEACHER_PROMPT]), rows_of(data["responses"]), strict=True)
    for i, (prompt, response) in enumerate(pairs):
        before = torch.cat([prompt[-1:], response[:-1]])
        logprobs = torch.log_softmax(table[before].float(), -1)  # of probabilities in float32
        wanted = logprobs.topk(K, -1)
        assert torch.equal(rows_of(found[TOP_IDS])[i], wanted.indices.int())
        rest = torch.log1p(-wanted.values.exp().sum(-1, keepdim=True))
        logged = rows_of(found[TOP_LOGPROBS])[i]
        assert torch.equal(logged[:, :K], wanted.values.half())
        assert_parity(logged[:, K:], rest, terms=1, dtype=torch.float16)
        assert torch.equal(rows_of(found[TEACHER])[i], gathered(table[before].float(), response))
    assert {name: found[name].dtype for name in TOP_DTYPES} == TOP_DTYPES


def test_any_other_call_is_verls_own(table: Tensor) -> None:
    worker = object.__new__(TopKTrainingWorker)
    data = asked()
    assert set(worker.infer_batch(data).keys()) == {"log_probs", "metrics"}
    assert "composer_row" not in data


def test_a_rank_that_returns_nothing_returns_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingWorker, "infer_batch", lambda self, data: None)
    worker = object.__new__(TopKTrainingWorker)
    worker.loss_fn = None
    assert worker.infer_batch(asked(**{TOP_K: K})) is None


def gradient(name: str, student: Tensor, top: Tensor, ids: Tensor) -> Tensor:
    """Of the divergence's sum over tokens in the student's logits, as the loss has it of `TOP_LOGPROBS`."""
    leaf = student.clone().requires_grad_()
    mask = torch.ones(len(leaf), dtype=torch.bool)
    pair = log_probs_at(leaf, sum_to_one(top), ids, mask, temperature=1.0, rest="tail")
    loss = getattr(divergences, name)(pair.student, pair.teacher, mask).loss.sum()
    return torch.autograd.grad(loss, leaf)[0]


def error(dtype: torch.dtype, name: str, scale: float) -> float:
    """The relative error of the gradient where the teacher's entries are sent in this dtype."""
    g = torch.Generator().manual_seed(2)
    teacher = torch.log_softmax(scale * torch.randn(200, 2000, generator=g, dtype=torch.float64), -1)
    student = teacher + torch.randn(teacher.shape, generator=g, dtype=torch.float64)
    values, ids = teacher.topk(50, -1)
    rest = teacher.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    top = torch.cat([values, rest], -1)
    exact, rounded = (gradient(name, student, x.double(), ids) for x in (top, top.to(dtype)))
    return float((rounded - exact).abs().sum() / exact.abs().sum())


@pytest.mark.parametrize("scale", [1.0, 3.0, 10.0])
@pytest.mark.parametrize("name", ["jsd", "forward_kl", "reverse_kl"])
def test_half_precision_changes_a_gradient_by_two_thousandths_at_most(name: str, scale: float) -> None:
    half = error(TOP_DTYPES[TOP_LOGPROBS], name, scale)
    assert half < 2e-3
    assert error(torch.bfloat16, name, scale) > 4 * half


def test_a_tail_smaller_than_the_rounding_of_the_entries_stays_what_it_is() -> None:
    """Rounded, these 58 entries sum to 1.002, which would leave nothing for the tail."""
    tail = 1e-4
    logprobs = torch.full((1, 58), (1 - tail) / 58, dtype=torch.float64).log()
    sent = torch.cat([logprobs, torch.tensor([[tail]]).double().log()], -1).half()
    assert float(sent[:, :-1].double().exp().sum()) > 1 + 10 * tail
    assert float(1 - sum_to_one(sent).double().exp().sum()) == pytest.approx(tail, rel=1e-2)
