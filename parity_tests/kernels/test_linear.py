"""Losses from hidden states and an output head: against logits and autograd, however they are cut."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.autograd import grad

from composer_plugins.kernels.divergences import jsd
from composer_plugins.kernels.entropy import entropy as entropy_of
from composer_plugins.kernels.linear import divergence, log_probs, tiles, top_k
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.compiled import ran_by_a_link

Numbers = dict[str, Any]
PLAIN: Numbers = {}
CAPPED = {"softcap": 3.0, "temperature": 0.7}  # Gemma
SCALED = {"logit_scale": 0.25, "temperature": 1.3}  # Cohere; Granite's is a divisor
every_head = pytest.mark.parametrize("numbers", [PLAIN, CAPPED, SCALED], ids=["plain", "softcap", "scale"])
every_vocabulary = pytest.mark.parametrize("vocabulary", [1, 2, 37])
# Elements of a tile: less than a row, a size that divides neither the tokens nor the vocabulary, everything.
every_tile = pytest.mark.parametrize("tile", [5, 46, 10**6])


class Batch(NamedTuple):
    """Hidden states, a head and tokens; 12 of the 15 tokens count."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    mask: Tensor

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weight, self.bias]

    def logits(
        self, *, softcap: float | None = None, temperature: float = 1.0, logit_scale: float = 1.0
    ) -> Tensor:
        logits = (self.hidden @ self.weight.t() + self.bias) * logit_scale
        return (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature

    def of_targets(self, logits: Tensor) -> Tensor:
        """The log-probabilities of the targets, 0 where masked."""
        log_p = torch.log_softmax(logits, -1).gather(-1, self.targets[..., None])[..., 0]
        return log_p.where(self.mask, 0.0)


def batch(
    vocabulary: int = 37, hidden: int = 8, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> Batch:
    g = torch.Generator().manual_seed(vocabulary + hidden)
    drawn = [
        torch.randn(*s, generator=g, dtype=torch.float64)
        for s in ((3, 5, hidden), (vocabulary, hidden), (vocabulary,))
    ]
    leaves = [(x * scale).to(dtype).requires_grad_() for x in drawn]
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[0, 1] = mask[1, 3] = mask[2, 0] = False
    return Batch(*leaves, torch.randint(0, vocabulary, (3, 5), generator=g), mask)


def assert_same_gradients(
    ours: Any, theirs: Any, leaves: list[Tensor], incoming: list[Tensor] | None = None, **scale: Any
) -> None:
    __tracebackhide__ = True
    found, want = grad(ours, leaves, incoming), grad(theirs, leaves, incoming)
    for name, x, y in zip(("hidden", "weight", "bias"), found, want, strict=False):
        assert_parity(x, y, **scale, what=f"gradient of {name}")


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the size of a tile, and record the number of rows of each tile of logits."""

    def to(tile: int) -> list[int]:
        computed: list[int] = []
        logits = tiles.Head.logits

        def recorded(head: tiles.Head, hidden: Tensor) -> Tensor:
            found = logits(head, hidden)
            assert found.numel() <= max(tile, found.shape[0], found.shape[1])
            computed.append(len(hidden))
            return found

        monkeypatch.setattr(tiles, "CPU_TILE", tile)
        monkeypatch.setattr(tiles, "CPU_PRODUCT", tile)
        monkeypatch.setattr(tiles, "CPU_PART", max(1, tile // 2))
        monkeypatch.setattr(tiles, "BLOCK", (7, 7))
        monkeypatch.setattr(tiles.Head, "logits", recorded)
        return computed

    return to


def upstream_gradients(shape: torch.Size, count: int) -> Iterator[Tensor]:
    """Gradients that arrive at the tokens, some of them 0."""
    for i in range(count):
        g = torch.linspace(-2, 3, math.prod(shape), dtype=torch.float64).roll(i).view(shape).clone()
        g[0, 2 + i] = 0.0
        yield g


@every_tile
@every_vocabulary
@every_head
@pytest.mark.parametrize("with_entropy", [False, True])
def test_log_probs_equal_those_of_the_logits(
    cut: Any, tile: int, vocabulary: int, numbers: Numbers, with_entropy: bool
) -> None:
    b = batch(vocabulary)
    cut(tile)
    logits = b.logits(**numbers)
    want = [b.of_targets(logits)]
    ours = log_probs(b.hidden, b.weight, b.targets, b.mask, bias=b.bias, entropy=with_entropy, **numbers)
    found = list(ours) if with_entropy else [ours]
    want += [entropy_of(logits, b.mask)] * with_entropy
    incoming = list(upstream_gradients(b.mask.shape, len(want)))
    scale = {"terms": vocabulary * 8, "magnitude": 4.0 * float(logits.detach().abs().max())}
    for name, x, y in zip(("log p", "entropy"), found, want, strict=False):
        assert_parity(x, y, **scale, what=name)
        assert not x[~b.mask].any()
    assert_same_gradients(found, want, b.leaves, incoming, **scale)


@every_tile
@every_vocabulary
@every_head
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_equals_that_of_the_logits(
    cut: Any, tile: int, vocabulary: int, numbers: Numbers, beta: float
) -> None:
    student, teacher = batch(vocabulary), batch(vocabulary, hidden=6)
    cut(tile)
    (weights,) = upstream_gradients(student.mask.shape, 1)
    own = {name: x for name, x in numbers.items() if name != "temperature"}
    theirs = {f"teacher_{name}": x for name, x in own.items()}
    sides = student.hidden, student.weight, teacher.hidden, teacher.weight, student.mask
    options = {"beta": beta, "temperature": numbers.get("temperature", 1.0)}
    biases = {"bias": student.bias, "teacher_bias": teacher.bias}
    ours = divergence(*sides, token_weight=weights, **options, **biases, **own, **theirs)
    want = jsd(student.logits(**own), teacher.logits(**own), student.mask, **options).loss
    largest = float(student.logits(**numbers).detach().abs().max())
    scale = {"terms": vocabulary * 8, "magnitude": 4.0 * largest}
    assert_parity(ours.per_token, want, **scale)
    assert_parity(ours.loss, (weights * want).sum(), **scale, what="loss")
    assert_same_gradients(2 * ours.loss, 2 * (weights * want).sum(), student.leaves, **scale)


@every_tile
@every_vocabulary
@every_head
def test_the_top_k_are_those_of_the_logits(cut: Any, tile: int, vocabulary: int, numbers: Numbers) -> None:
    b, k = batch(vocabulary), min(vocabulary, 6)
    cut(tile)
    logprobs, ids = top_k(b.hidden, b.weight, k, bias=b.bias, **numbers)
    want = torch.log_softmax(b.logits(**numbers), -1).topk(k, -1)
    assert torch.equal(ids, want.indices) and not logprobs.requires_grad
    assert_parity(logprobs, want.values, terms=vocabulary * 8)


def test_a_masked_token_is_zero_whatever_it_holds_and_gets_no_gradient() -> None:
    b, teacher = batch(), batch()
    with torch.no_grad():
        b.hidden[~b.mask] = math.nan
        teacher.hidden[~b.mask] = math.inf
    b.targets[~b.mask] = -100
    for mask in (b.mask, torch.zeros_like(b.mask)):
        pair = log_probs(b.hidden, b.weight, b.targets, mask, entropy=True)
        share = mask / mask.sum() + torch.where(mask, 0.0, math.nan)  # of no token it is 0 / 0
        sides = b.hidden, b.weight, teacher.hidden, teacher.weight
        total = divergence(*sides, mask, token_weight=share.double())
        assert total.loss.isfinite() and (mask.any() or total.loss == 0)
        assert not torch.stack([*pair, total.per_token])[:, ~mask].any()
        gradients = torch.autograd.grad(pair[0].sum() + pair[1].sum() + total.loss, [b.hidden, b.weight])
        assert not gradients[0][~mask].any() and all(x.isfinite().all() for x in gradients)


def test_a_number_that_is_not_one_is_not_hidden() -> None:
    b = batch()
    with torch.no_grad():
        b.hidden[0, 0] = math.nan
    pair = log_probs(b.hidden, b.weight, b.targets, b.mask, entropy=True)
    total = divergence(b.hidden, b.weight, b.hidden.detach().nan_to_num(), b.weight, b.mask)
    assert all(x[0, 0].isnan() and x[1:].isfinite().all() for x in (*pair, total.per_token))
    assert torch.autograd.grad(pair[0].sum(), b.hidden, retain_graph=True)[0][0, 0].isnan().all()
    assert torch.autograd.grad(pair[0], b.hidden, torch.full_like(pair[0], math.nan))[0][1].isnan().any()


def test_tokens_that_are_masked_or_have_no_gradient_are_not_computed(cut: Any) -> None:
    b = batch()
    rows = cut(10**6)
    found = log_probs(b.hidden, b.weight, b.targets, b.mask)
    divergence(b.hidden, b.weight, b.hidden, b.weight.clone(), b.mask)
    assert rows == [7, 5, 12, 12]
    rows.clear()
    divergence(b.hidden, b.weight, b.hidden, b.weight, b.mask)
    assert rows == [24]  # one product for both sides, which share a head
    (incoming,) = upstream_gradients(b.mask.shape, 1)
    incoming[1] = 0.0
    rows.clear()
    found.backward(incoming)
    assert sum(rows) == int((b.mask & (incoming != 0)).sum()) < 12


def test_a_frozen_head_gets_no_gradient() -> None:
    b = batch()
    b.weight.requires_grad_(False)
    b.bias.requires_grad_(False)
    found = log_probs(b.hidden, b.weight, b.targets, b.mask, bias=b.bias).sum()
    found = found + divergence(b.hidden, b.weight, b.hidden, b.weight.roll(1, 0), b.mask, bias=b.bias).loss
    found.backward()
    assert b.hidden.grad is not None and b.weight.grad is None and b.bias.grad is None


@pytest.mark.parametrize("other", [{}, {"teacher_softcap": 2.0}, {"teacher_bias": True}], ids=str)
def test_a_shared_head_gives_the_numbers_of_two_equal_heads(other: Numbers) -> None:
    b, teacher = batch(), batch()
    options = {name: b.bias.detach() if x is True else x for name, x in other.items()}
    found, want = (
        divergence(b.hidden, b.weight, teacher.hidden.detach() + 1, head, b.mask, beta=0.3, **options).loss
        for head in (b.weight, b.weight.clone())
    )
    assert_parity(found, want, terms=37 * 8)
    assert_same_gradients(found, want, b.leaves[:2], terms=37 * 8)


@pytest.mark.slow  # the compiler takes seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # torch 2.13 warns of its own jit
@pytest.mark.usefixtures("without_annotation_checks")
def test_a_compiled_tile_gives_the_numbers_of_an_eager_one(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if ran_by_a_link(request, tmp_path):
        return
    b, teacher = batch(dtype=torch.float32), batch(dtype=torch.float32, hidden=6)
    monkeypatch.setattr(tiles, "CPU_PART", 5 * 37)  # of the 12 tokens two parts are compiled
    sides = b.hidden, b.weight, teacher.hidden.detach(), teacher.weight.detach(), b.mask
    found, want = (divergence(*sides, compiled=compiled).loss for compiled in (True, False))
    scale = {"terms": 37 * 8, "magnitude": 10.0, "dtype": torch.float32}
    assert_parity(found, want, **scale)
    assert_same_gradients(found, want, b.leaves[:2], **scale)


def test_forbidden_entries_have_no_probability_and_no_gradient() -> None:
    b = batch()
    with torch.no_grad():
        b.bias[3:30] = -torch.inf
    b.targets.clamp_(max=2)
    logits = b.logits().detach()
    pair = log_probs(b.hidden, b.weight, b.targets, b.mask, bias=b.bias, entropy=True)
    assert_parity(pair[0], b.of_targets(logits), terms=37)
    assert_parity(pair[1], entropy_of(logits, b.mask), terms=37)
    sides = b.hidden, b.weight, b.hidden, b.weight, b.mask
    total = divergence(*sides, bias=b.bias, teacher_bias=b.bias).loss
    for x in grad(pair[0].sum() - 3 * pair[1].sum() + total, b.leaves):
        assert x.isfinite().all() and (x.shape[0] != 37 or not x[3:30].any())


def test_a_second_derivative_is_refused() -> None:
    b = batch()
    for loss in (
        log_probs(b.hidden, b.weight, b.targets, b.mask).sum(),
        divergence(b.hidden, b.weight, b.hidden, b.weight.roll(1, 0), b.mask).loss,
    ):
        (gradient,) = torch.autograd.grad(loss, b.hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            gradient.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("confidence", [0.0, 2.0, 6.0])
def test_half_precision_keeps_the_log_probs_of_float32_and_the_gradient_of_confident_tokens(
    dtype: torch.dtype, confidence: float
) -> None:
    """`confidence` moves each hidden state towards the weight of its target: at 6, 1 - p is small."""
    exact = batch(997, hidden=32)
    with torch.no_grad():
        exact.hidden.add_(confidence * exact.weight[exact.targets] / 4)
    low = [x.detach().to(dtype).requires_grad_() for x in exact.leaves[:2]]
    high = [x.detach().double().requires_grad_() for x in low]
    found = log_probs(*low, exact.targets, exact.mask)
    logits = high[0] @ high[1].t()
    want, largest = exact.of_targets(logits), float(logits.detach().abs().max())
    assert found.dtype == torch.float32
    assert_parity(found, want, terms=32, dtype=torch.float32, magnitude=largest)
    ours, theirs = (torch.autograd.grad(x.sum(), y) for x, y in ((found, low), (want, high)))
    assert all(x.dtype == dtype for x in ours)
    if dtype == torch.bfloat16:  # float16 has no number below 6e-8
        error = (ours[0].double() - theirs[0]).norm(dim=-1) / theirs[0].norm(dim=-1)
        sure = exact.mask & (want < -1e-10)  # of the others autograd's own 1 - p is not accurate in float64
        assert float(error[sure].max()) < torch.finfo(dtype).eps
        assert float((ours[1].double() - theirs[1]).norm() / theirs[1].norm()) < torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "weight"), [(1.0, 1e-7), (0.1, 1 / 2048)])
def test_a_scaled_loss_keeps_a_small_gradient(dtype: torch.dtype, size: float, weight: float) -> None:
    """A small weight, or that of a mean and nearly uniform distributions, gives 0 in float16."""
    exact = batch(9973 if size < 1 else 97, hidden=32)
    exact.hidden.data.mul_(size)
    low = [x.detach().to(dtype).requires_grad_() for x in exact.leaves[:2]]
    high = [x.detach().double().requires_grad_() for x in low]
    found, want = [], []
    for leaves, gradients in ((low, found), (high, want)):
        teacher = leaves[0].detach().roll(1, 0)
        weights = torch.full(
            exact.mask.shape, weight, dtype=torch.float32 if leaves is low else torch.float64
        )
        loss = divergence(*leaves, teacher, leaves[1].detach(), exact.mask, token_weight=weights).loss
        gradients += torch.autograd.grad(2.0**16 * loss, leaves)
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == dtype
        assert float((ours.double() - theirs).norm() / theirs.norm()) < torch.finfo(dtype).eps


def test_autocast_converts_the_operands_as_a_linear_layer_does() -> None:
    b = batch(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = log_probs(b.hidden, b.weight, b.targets, b.mask)
        total = divergence(b.hidden, b.weight, b.hidden.roll(1, 0), b.weight, b.mask).loss
    halves = [x.detach().bfloat16().requires_grad_() for x in (b.hidden, b.weight)]
    assert torch.equal(found, log_probs(*halves, b.targets, b.mask))
    (gradient,) = torch.autograd.grad(found.sum() + total, b.weight)
    assert gradient.dtype == torch.float32


@pytest.mark.thorough
@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize("frozen", [pytest.param(False, marks=pytest.mark.slow), True])
def test_each_operator_is_registered_as_torch_wants_it(frozen: bool) -> None:
    """Its schema, its result without numbers (a fake tensor), its derivative, and both under a tracer."""
    b, teacher = batch(11), batch(11, hidden=6)
    weight, bias = (x.detach().requires_grad_(not frozen) for x in (b.weight, b.bias))
    hidden, targets, mask = b.hidden.detach().flatten(0, 1), b.targets.flatten(), b.mask.flatten()
    numbers, tokens, wanted = [1.0, 3.0, 0.7], mask.double(), [True, not frozen, not frozen]
    leaf, ops = hidden.clone().requires_grad_(), torch.ops.composer_plugins
    forward = leaf, weight, bias, targets, mask, numbers, True
    torch.library.opcheck(ops.linear_log_probs, forward)
    kept = [x.detach() for x in ops.linear_log_probs(*forward)]
    plain = tokens, tokens, hidden, weight.detach(), bias.detach(), targets, mask, kept[2], kept[3], kept[1]
    torch.library.opcheck(ops.linear_log_probs_backward, (*plain, numbers, wanted))
    sides = (leaf, weight, bias, teacher.hidden.detach().flatten(0, 1), teacher.weight.detach(), None)
    torch.library.opcheck(ops.linear_divergence, (*sides, mask, tokens, numbers, numbers, 0.3, wanted, False))
    torch.library.opcheck(ops.linear_divergence_backward, (hidden, tokens.sum(), torch.float32))


@pytest.mark.usefixtures("without_annotation_checks")
def test_torch_compile_keeps_each_as_one_node_with_the_same_numbers() -> None:
    b, teacher = batch(11), batch(11, hidden=6)
    nodes: list[str] = []

    def losses(hidden: Tensor, weight: Tensor) -> Tensor:
        pair = log_probs(hidden, weight, b.targets, b.mask, entropy=True, softcap=3.0)
        sides = hidden, weight, teacher.hidden.detach(), teacher.weight.detach()
        return pair[0].sum() - 3 * pair[1].sum() + divergence(*sides, b.mask).loss

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    found, want = (
        f(b.hidden, b.weight) for f in (torch.compile(losses, fullgraph=True, backend=backend), losses)
    )
    for name in ("linear_log_probs", "linear_divergence"):
        assert sum(name in node for node in nodes) == 1
    assert torch.equal(found, want)
    leaves = [b.hidden, b.weight]
    for x, y in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(want, leaves), strict=True):
        assert torch.equal(x, y)


STATES, HEAD, MASK = torch.zeros(1, 2, 4), torch.zeros(7, 4), torch.ones(1, 2, dtype=torch.bool)
TARGETS, BOTH = torch.zeros(1, 2, dtype=torch.long), (log_probs, divergence)
SIDES = {"hidden": STATES, "weight": HEAD, "teacher_hidden": STATES, "teacher_weight": HEAD}
POSITIONAL: dict[Any, dict[str, Any]] = {
    log_probs: {"hidden": STATES, "weight": HEAD, "targets": TARGETS, "mask": MASK},
    divergence: SIDES | {"mask": MASK},
    top_k: {"hidden": STATES, "weight": HEAD, "k": 1},
}


@pytest.mark.usefixtures("without_annotation_checks")
@pytest.mark.parametrize(
    ("functions", "change", "message"),
    [
        (BOTH, {"weight": HEAD[:, :3]}, "hidden .* and .*weight .* do not belong"),
        (BOTH, {"bias": torch.zeros(1)}, r"bias has the shape \[1\], not \[vocab\], \[7\]"),
        (BOTH, {"weight": HEAD.double()}, "hidden is torch.float32 and .*weight"),
        (BOTH, {"mask": MASK.float()}, "mask is torch.float32; pass mask.bool()"),
        ([log_probs], {"targets": TARGETS[:, :1]}, "do not belong together"),
        ([log_probs], {"targets": TARGETS - 100}, r"outside of the vocabulary, \[0, 7\)"),
        ([log_probs], {"targets": TARGETS + 7}, r"outside of the vocabulary, \[0, 7\)"),
        ([divergence], {"teacher_weight": HEAD[:, :3]}, "teacher_hidden .* and teacher_weight .* do not"),
        ([divergence], {"teacher_weight": HEAD[:6]}, "7 entries and the teacher's 6"),
        ([divergence], {"teacher_hidden": STATES[:, :1]}, "do not belong together"),
        ([divergence], {"teacher_bias": torch.zeros(8)}, r"teacher_bias has the shape \[8\]"),
        ([divergence], {"token_weight": torch.ones(1)}, "token_weight .* and mask .* differ in shape"),
        ([divergence], {"beta": 1.5}, "beta is 1.5"),
        *(([top_k], {"k": k}, r"\[1, 7\]") for k in (0, 8)),
        ((log_probs, top_k), {"softcap": 0.0}, "softcap is"),
        ((log_probs, top_k), {"temperature": 0.0}, "temperature is"),
        ((log_probs, top_k), {"temperature": math.nan}, "temperature is"),
    ],
)
def test_inputs_that_do_not_belong_together_are_refused_by_name(
    functions: Any, change: dict[str, Any], message: str
) -> None:
    for function in functions:
        inputs = POSITIONAL[function]
        options = {name: x for name, x in change.items() if name not in inputs}
        with pytest.raises(ValueError, match=message):
            function(*(change.get(name, x) for name, x in inputs.items()), **options)
