"""What the hint reads of verl's logits: exact, in any layout, in the memory of the entries that it reads."""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.verl_logits import LAYOUTS, gathered, overwriting
from composer_plugins.adapters.verl_plugin.sync_trainer import logits as adapter
from composer_plugins.testing.assertions import assert_parity

TOKENS, VOCABULARY, K = 9, 40, 3
WHERE = torch.tensor([1, 2, 3, 6, 8])  # the tokens with a hint

Logprobs = Callable[[Tensor, Tensor], Tensor]


def drawn(vocabulary: int = VOCABULARY) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, sampled tokens, and the teacher's entries; every other sampled token is one of them."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, vocabulary, generator=g, dtype=torch.float64)
    ids = torch.stack([torch.randperm(vocabulary, generator=g)[: K + 1] for _ in range(TOKENS)])
    labels = torch.where(torch.arange(TOKENS) % 2 == 0, ids[:, 0], ids[:, K])
    return logits, labels, ids[:, :K]


def student(logits: Tensor, labels: Tensor, ids: Tensor, logprobs_of: Logprobs) -> tuple[Tensor, Tensor]:
    """The log-probabilities of all sampled tokens, and those of the entries at WHERE."""
    odds = adapter.log_odds(logits.unsqueeze(0), WHERE, labels[WHERE], ids[WHERE])
    logprobs = logprobs_of(logits, labels)
    return logprobs, odds + logprobs[WHERE].unsqueeze(-1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("logprobs_of", [gathered, overwriting])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_students_entries_have_the_value_and_gradient_of_a_log_softmax(
    layout: str, logprobs_of: Logprobs, dtype: torch.dtype
) -> None:
    """Beside a policy loss, whose gradient stays."""
    logits, labels, ids = drawn()
    g = torch.Generator().manual_seed(1)
    slopes, policy = torch.randn(len(WHERE), K, generator=g), torch.randn(TOKENS, generator=g)
    leaf, exact = logits.to(dtype).requires_grad_(), logits.clone().requires_grad_()
    logprobs, entries = student(LAYOUTS[layout](leaf), labels, ids, logprobs_of)
    full = torch.log_softmax(exact, -1)
    wanted = full[WHERE].gather(-1, ids[WHERE])
    assert_parity(entries, wanted, terms=VOCABULARY, dtype=dtype)
    found = (entries.exp() * slopes).sum() + (policy * logprobs).sum()
    theirs = (wanted.exp() * slopes).sum() + (policy * gathered(exact, labels)).sum()
    own = torch.autograd.grad(theirs, exact)[0]
    for _ in range(2 if logprobs_of is gathered else 1):  # the logits that are overwritten serve once
        mine = torch.autograd.grad(found, leaf, retain_graph=logprobs_of is gathered)[0]
        assert_parity(mine, own, terms=VOCABULARY, dtype=dtype)


def test_a_confident_token_has_a_gradient_below_the_rounding_of_its_probability() -> None:
    """In bfloat16: the slopes of the others sum to some 1 - p at the sampled token, which is about 2 %."""
    logits, labels, _ = drawn()
    logits[torch.arange(TOKENS), labels] += 8.0
    leaf = logits.bfloat16().requires_grad_()
    ids = leaf.detach().topk(K).indices
    assert torch.equal(ids[:, 0], labels)
    teacher = torch.log_softmax(torch.randn(len(WHERE), K, generator=torch.Generator().manual_seed(2)), -1)

    def found(of: Tensor) -> tuple[Tensor, Tensor]:
        entries = student(of * 1, labels, ids, overwriting)[1]
        loss = (entries.exp() * (entries - teacher)).sum()
        return entries, torch.autograd.grad(loss, of)[0].detach().double()

    (entries, gradient), (exact, wanted) = found(leaf), found(leaf.detach().double().requires_grad_())
    assert_parity(entries, exact, terms=VOCABULARY, dtype=torch.float32)
    assert float((gradient - wanted).abs().sum()) < 0.005 * float(wanted.abs().sum())


class Largest(TorchDispatchMode):
    """The elements of the largest new tensor that an operator returns."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.known, self.elements = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() != self.known:
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("layout", ["new", "view"])
def test_no_tensor_is_larger_than_a_row_of_the_logits_also_in_the_backward(layout: str) -> None:
    """Beside verl's loss where that overwrites the logits: the hint takes some numbers per entry."""
    logits, labels, ids = drawn(5000)
    made = LAYOUTS[layout](logits.float().requires_grad_())
    whole = made if made._base is None else made._base
    with Largest(whole) as seen:
        logprobs, entries = student(made, labels, ids, overwriting)
        torch.autograd.grad((entries**2).sum() + logprobs.sum(), whole)
    assert len(WHERE) * K <= seen.elements <= 5000


@pytest.mark.parametrize("tile", [1, 3 * 40 + 1, 10**9])
def test_the_teachers_top_k_is_the_same_in_tiles_of_any_size(
    tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no tensor is larger than a tile, or than a row."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(1, 19, 40, generator=g, dtype=torch.bfloat16)
    positions = torch.tensor([2, 3, 4, 7, 8, 11, 12, 13, 17, 18, 18])
    monkeypatch.setattr(adapter, "TILE", tile)
    with Largest(logits) as seen:
        values, ids = adapter.top_k(logits, positions, 5)
    logprobs = torch.log_softmax(logits[0, positions].float(), -1)
    assert torch.equal(values[:, :5], logprobs.gather(-1, ids)) and values.shape == (11, 6)
    assert torch.equal(values[:, :5], logprobs.topk(5, -1).values)
    rest = logprobs.scatter(-1, ids, -torch.inf).logsumexp(-1)
    assert_parity(values[:, 5], rest, terms=40, dtype=torch.float32)
    assert seen.elements <= max(40, min(tile, 11 * 40), 11 * 6)


def test_the_logits_are_freed_with_the_graph() -> None:
    """The hook has no reference to them: they would stay until Python's garbage collection."""
    array = np.zeros((6, 50), dtype=np.float32)
    freed = weakref.ref(array)
    whole = torch.from_numpy(array).requires_grad_()
    one = torch.tensor([1])
    odds = adapter.log_odds(whole.unsqueeze(0), one, one, one.unsqueeze(0))
    (odds.sum() + whole.sum()).backward()
    del array, whole, odds
    assert freed() is None
