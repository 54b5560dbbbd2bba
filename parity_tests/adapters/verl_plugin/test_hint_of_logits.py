"""The hint over distributions reads a few of verl's logits, and equals the divergence of all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.verl_logits import LAYOUTS, gathered, overwriting
from composer_plugins.adapters.verl_plugin.options import channels_of_node
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import HINT_MASK, TAID_T, TOP_IDS, TOP_LOGPROBS
from composer_plugins.adapters.verl_plugin.sync_trainer.loss import sum_to_one
from composer_plugins.errors import ConfigError
from composer_plugins.kernels import divergences
from composer_plugins.kernels.divergences.supports import log_probs_at
from composer_plugins.kernels.taid import taid
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.testing.assertions import assert_parity
from parity_tests.rigs.verl_rows import (
    EVERY,
    EXTRA,
    JSD,
    LENGTHS,
    VOCABULARY,
    Drawn,
    called,
    drawn,
    flat,
    loss_of,
    of_responses,
    response_logits,
    with_teacher,
    without_entries,
)

Kernel = Callable[..., TokenLoss]
K = 3
T_NOW = 0.4
RAW: dict[str, Any] = {"rest": "raw", "logprob_floor": -10.0, "non_negative": True, "value_cap": 10.0}
CHOICES: dict[str, tuple[Kernel, dict[str, Any]]] = {
    "jsd": (divergences.jsd, {"beta": 0.3}),
    "jsd clipped": (divergences.jsd, {"entry_clip": 0.05}),
    "jsd of the student's largest": (
        divergences.jsd,
        {"top_k": 2, "top_k_of": "student", "rest": "renormalised"},
    ),
    "reverse_kl": (divergences.reverse_kl, {}),
    "forward_kl": (divergences.forward_kl, {"value": "cross-entropy"}),
    "adaptive_kl": (divergences.adaptive_kl, {}),
    "tv": (divergences.tv, {}),
    "entropy_gated_kl": (divergences.entropy_gated_kl, {"min_entropy": 1.0}),
    "taid": (taid, {"t": 1.0}),  # the t of a step, which the trainer sends, comes before it
    "sdpo": (divergences.sdpo, {"top_k": 4, "rest": "renormalised"}),
    "forward_kl_topk": (divergences.forward_kl_topk, RAW),
    "reverse_kl_topk": (divergences.reverse_kl_topk, {}),
    "generalized_reverse_kl_topk": (divergences.generalized_reverse_kl_topk, {}),
    "symmetric_kl_topk": (divergences.symmetric_kl_topk, {"reverse_weight": 0.2}),
    "alpha_beta": (divergences.alpha_beta, {"alpha": 0.3, "beta": 0.6}),
    "todi": (divergences.todi, {}),
}


def of_all_logits(name: str, rows: Drawn) -> tuple[Tensor, Tensor]:
    """The hint's term of a step and its gradient in the logits of the responses, with a full log-softmax."""
    kernel, params = CHOICES[name]
    student, ids, mask = response_logits(rows), flat(rows, TOP_IDS).long(), flat(rows, HINT_MASK).bool()
    teacher = sum_to_one(flat(rows, TOP_LOGPROBS))
    if name == "taid":
        params = params | {"t": T_NOW}
    if name == "sdpo":
        logprobs = gathered(student, torch.cat(rows.responses)).detach()
        params = params | {"student_logprobs": logprobs, "old_logprobs": flat(rows, "old_log_probs")}
    if name.endswith("_topk"):
        token = kernel(student, teacher, ids, mask, **params)
    else:
        pair = log_probs_at(student, teacher, ids, mask, temperature=1.0, rest="tail")
        token = kernel(pair.student, pair.teacher, mask, **params)
    value = 0.7 * token.loss.sum() / flat(rows, "loss_mask").sum()
    return value.detach(), torch.autograd.grad(value, student)[0]


def node_of(name: str) -> dict[str, Any]:
    """`algorithm.composer` with this choice."""
    node = JSD | {"hint_divergence": name.split()[0], "hint_params": CHOICES[name][1], "hint_top_k": K}
    return node | ({"hint_t_start": 0.1} if name == "taid" else {})


def hinted(rows: Drawn, which: str) -> Drawn:
    """With the hint at all tokens of the responses, at none, or at some tokens of some rows."""
    if which == "some":
        return without_entries(rows)
    masks = [torch.full_like(mask, which == "all") for mask in rows.fields[HINT_MASK]]
    return rows._replace(fields=rows.fields | {HINT_MASK: masks})


@pytest.mark.parametrize(
    ("name", "which"),
    [
        *((name, "some") for name in CHOICES),
        *((name, which) for name in ("sdpo", "forward_kl_topk") for which in ("all", "none")),
    ],
)
def test_each_divergence_has_the_value_and_gradient_of_all_logits(name: str, which: str) -> None:
    """As verl's engine shows them on a GPU, where verl's cross-entropy overwrites them in the backward."""
    full = with_teacher(drawn(LENGTHS), K)
    rows, extra = hinted(full, which), EXTRA | ({TAID_T: T_NOW} if name == "taid" else {})
    wanted = of_all_logits(name, full._replace(fields=full.fields | {HINT_MASK: rows.fields[HINT_MASK]}))
    for dtype in (torch.float64, torch.float32):
        items = rows.fields.items()
        fields = {n: [x.to(dtype) if x.is_floating_point() else x for x in xs] for n, xs in items}
        given = rows._replace(fields=fields, logits=[x.to(dtype) for x in rows.logits])
        loss = loss_of(node_of(name), policy=0.0)
        for layout, logprobs_of in (("view", overwriting), ("new", gathered)):
            made = {"shaped": LAYOUTS[layout], "logprobs_of": logprobs_of}
            value, gradients, _ = called(loss, given, EVERY, extra, **made)
            for found, theirs in zip((value, of_responses(rows, gradients)), wanted, strict=True):
                assert_parity(found, theirs, terms=64, dtype=dtype, magnitude=1.0)
            assert loss.shown is None  # it would keep the graph
            assert not loss.reads_any_entry  # which takes more memory
    assert (float(wanted[0]) == 0) == (which == "none")


def test_a_divergence_of_the_whole_vocabulary_is_an_error() -> None:
    problem = r"hint_divergence: 'uld' compares .* the whole vocabulary, and verl's .*; choose another: "
    with pytest.raises(ConfigError, match=problem):
        channels_of_node(JSD | {"hint_divergence": "uld"})


def test_the_hint_adds_its_gradient_to_verls() -> None:
    """In one layout of the logits; in the others: without_verl/test_logits.py."""
    rows, node = with_teacher(drawn(LENGTHS), K), node_of("jsd")
    whole = called(loss_of(node), rows, EVERY, EXTRA, logprobs_of=overwriting)
    hint = called(loss_of(node, policy=0.0), rows, EVERY, EXTRA)
    policy = called(loss_of({}), rows, EVERY, {})
    assert_parity(whole[0], hint[0] + policy[0], terms=64, magnitude=1.0)
    for found, *parts in zip(whole[1], hint[1], policy[1], strict=True):
        assert_parity(found, parts[0] + parts[1], terms=64, magnitude=1.0)


def test_half_precision_log_probabilities_of_verl_are_an_error() -> None:
    rows = with_teacher(drawn(LENGTHS), K)

    def rounded(logits: Tensor, labels: Tensor) -> Tensor:
        return gathered(logits, labels).bfloat16()

    with pytest.raises(ConfigError, match=r"algorithm\.composer\.hint_divergence: .*bfloat16"):
        called(loss_of(node_of("jsd")), rows, EVERY, EXTRA, logprobs_of=rounded)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_of_the_logits_is_an_error(rank: int) -> None:
    """An engine that cuts a sequence for two ranks shows each of them one half, padded to equal lengths."""
    rows = with_teacher(drawn(LENGTHS), K)
    tokens = sum(map(len, rows.logits))
    half = -(-tokens // 2)

    def of_rank(packed: Tensor) -> Tensor:
        return torch.nn.functional.pad(packed, (0, 0, 0, 2 * half - tokens)).split(half)[rank]

    problem = f"hint_divergence: it needs the logits of all {tokens} tokens .* verl passed {half}; "
    remedy = "set ulysses_sequence_parallel_size and fsdp_config.ulysses_sequence_parallel_size to 1"
    with pytest.raises(ConfigError, match=problem + remedy):
        called(loss_of(node_of("jsd")), rows, EVERY, EXTRA, shaped=of_rank)
    # One token with a hint, in the first half: rank 1 found a row for it, of another token.
    one = [torch.zeros_like(mask) for mask in rows.fields[HINT_MASK]]
    one[0][0] = 1
    rows = rows._replace(fields=rows.fields | {HINT_MASK: one})
    with pytest.raises(ConfigError, match=problem):
        called(loss_of(node_of("jsd")), rows, EVERY, EXTRA, shaped=of_rank)


SEEN: list[tuple[Tensor, Tensor]] = []


def of_someone_else(
    student_logits: Tensor, teacher_topk_logprobs: Tensor, teacher_topk_ids: Tensor, mask: Tensor
) -> TokenLoss:
    """A loss that looks at an entry beyond the teacher's."""
    SEEN.append((student_logits.detach(), teacher_topk_ids))
    return TokenLoss(torch.log_softmax(student_logits, -1)[:, 0] * mask, {})


def test_a_loss_of_someone_else_gets_all_logits_of_the_tokens_with_a_hint() -> None:
    rows = without_entries(with_teacher(drawn(LENGTHS), K))
    node = JSD | {"hint_divergence": f"{__name__}:of_someone_else", "hint_top_k": K}
    SEEN.clear()
    gradients = called(loss_of(node, policy=0.0), rows, EVERY, EXTRA)[1]
    mask, student = flat(rows, HINT_MASK).bool(), response_logits(rows)
    (logits, ids), *_ = SEEN
    assert torch.equal(logits, student.detach()[mask])
    with_entries = torch.cat(
        [x[: len(y)] for x, y in zip(rows.fields[HINT_MASK], rows.fields[TOP_IDS], strict=True)]
    )
    assert torch.equal(ids, flat(rows, TOP_IDS)[with_entries.bool()])
    value = 0.7 * torch.log_softmax(student, -1)[mask, 0].sum() / flat(rows, "loss_mask").sum()
    assert_parity(of_responses(rows, gradients), torch.autograd.grad(value, student)[0], terms=VOCABULARY)
