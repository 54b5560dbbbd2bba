"""Divergences of the trainers GKD, GOLD, IW-OPD, server and plain distillation, on drawn logits."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.claims import GRADIENT, Compared, with_gradients
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.trl_claims import upstream
from composer_plugins.conformance.trl_claims.names import claim
from composer_plugins.kernels.divergences import jsd
from composer_plugins.testing.assertions import largest_term
from composer_plugins.testing.draws import Draw, assume, generator, logit_pair

Pair = dict[str, Tensor]

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]  # 0.5 alone cannot see a swapped mixture
TEMPERATURES = [0.7, 1.0, 1.3]
RESTS = ["tail", "renormalised"]
aggregate = kernel("aggregation", "token-mean")


def parity(
    ours: Tensor, theirs: Tensor, pair: Pair, temperature: float = 1.0, magnitude: float = 0.0
) -> list[Compared]:
    """Two losses, and their gradients in the student's logits, up to the rounding of their terms."""
    logits = pair["student_logits"], pair["teacher_logits"]
    largest = largest_term(*logits, temperature) / temperature
    terms, magnitude = logits[0].numel(), max(magnitude, largest)
    return with_gradients(ours, theirs, logits[0], terms=terms, magnitude=magnitude, scale=largest)


def draw_pair(draw: Draw) -> Pair:
    """Logits of a student, which have a gradient, and of a teacher; no entry is forbidden."""
    pair = logit_pair(draw, forbid=False)
    pair["student_logits"].requires_grad_()
    return pair


def inputs(pair: Pair) -> tuple[Tensor, Tensor, Tensor]:
    """In the order of a divergence."""
    return pair["student_logits"], pair["teacher_logits"], pair["mask"]


def generalized_jsd(trainer: str, draw: Draw) -> Iterator[Compared]:
    """The mean over unmasked tokens, or their sum / `num_items_in_batch`; an empty batch gives 0."""
    pair, beta, temperature = draw_pair(draw), draw.choose(BETAS, "beta"), draw.choose(TEMPERATURES)
    num_items = draw.choose([None, 1.0, 7.0], "num_items_in_batch")
    student, teacher, mask = inputs(pair)
    theirs = upstream.load(trainer).generalized_jsd_loss(
        student, teacher, upstream.labels(mask), beta, temperature, num_items_in_batch=num_items
    )
    row = kernel("divergence", "jsd@trl", beta=beta, temperature=temperature)
    loss = aggregate(row(student, teacher, mask).loss, mask, num_tokens=num_items)
    yield from parity(loss, theirs, pair, temperature)


def without_labels(draw: Draw) -> Iterator[Compared]:
    """Without labels GKD divides by the number of sequences."""
    pair, beta = draw_pair(draw), draw.choose(BETAS, "beta")
    student, teacher, _ = inputs(pair)
    everywhere = torch.ones_like(pair["mask"])
    theirs = upstream.load("GKDTrainer").generalized_jsd_loss(student, teacher, None, beta)
    token_loss = jsd(student, teacher, everywhere, beta=beta).loss
    yield from parity(aggregate(token_loss, everywhere, num_tokens=float(len(everywhere))), theirs, pair)


def distilled(row: str, betas: list[float], draw: Draw) -> Iterator[Compared]:
    """DistillationTrainer goes from hidden states through the head, in float32."""
    g, temperature = generator(draw), draw.choose(TEMPERATURES, "temperature")
    num_items, beta = draw.choose([None, 5.0], "num_items_in_batch"), draw.choose(betas, "beta")
    hidden, teacher_hidden = torch.randn(2, 2, 4, 3, generator=g)
    head, teacher_head = torch.randn(2, 7, 3, generator=g)
    mask = torch.rand(2, 4, generator=g) < 0.7
    hidden.requires_grad_()
    function = upstream.load("DistillationTrainer", "_chunked_divergence_loss")
    states = (hidden, teacher_hidden, head, teacher_head)
    theirs, _, count = function(*states, mask.long(), beta, num_items, temperature=temperature)
    assert count == mask.sum()
    student, teacher = hidden @ head.T, teacher_hidden @ teacher_head.T
    params = {"beta": beta} if row == "jsd@trl" else {}
    token_loss = kernel("divergence", row, temperature=temperature, **params)(student, teacher, mask).loss
    loss = aggregate(token_loss, mask, num_tokens=num_items)
    largest = largest_term(student, teacher, temperature) / temperature
    terms = 7 * mask.numel()
    yield Compared(loss, theirs, terms, largest, torch.float32)
    mine, want = (torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (loss, theirs))
    yield Compared(mine, want, terms, largest * float(head.abs().max()), torch.float32, GRADIENT)


def tokens(pair: Pair) -> Tensor:
    """A token per position, any will do."""
    return pair["teacher_logits"].argmin(-1)


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """log pi of the tokens."""
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None]).squeeze(-1)


def rounding(pair: Pair, rest: str) -> float:
    """How large the terms are on a part of the vocabulary.

    A tail of nearly nothing is 1 less nearly 1, rounding alone: such pairs are not compared.
    """
    largest = max(float(pair[name].detach().abs().max()) for name in ("student_logits", "teacher_logits"))
    if rest == "renormalised":
        return 8 * largest
    assume(largest < 5)
    return 1000.0


def top_k(draw: Draw) -> Iterator[Compared]:
    """Forward KL on the teacher's top k, reverse on the student's; between, TRL takes the union of both."""
    pair, beta = draw_pair(draw), draw.choose([0.0, 1.0], "beta")
    temperature, rest = draw.choose(TEMPERATURES, "temperature"), draw.choose(RESTS, "rest")
    student, teacher, mask = inputs(pair)
    largest = rounding(pair, rest)
    k = (student.shape[-1] + 1) // 2
    assume(k < student.shape[-1])
    theirs = upstream.load("IWOPDTrainer").generalized_jsd_loss(
        student, teacher, upstream.labels(mask), beta, temperature, top_k=k, add_tail=rest == "tail"
    )
    support = {"top_k": k, "top_k_of": "student" if beta else "teacher", "rest": rest}
    token_loss = jsd(student, teacher, mask, beta=beta, temperature=temperature, **support).loss  # type: ignore[arg-type]
    yield from parity(aggregate(token_loss, mask), theirs, pair, temperature, magnitude=largest)


def server(method: str, beta: float, *, add_tail: bool) -> Any:
    """A method of ServerDistillationTrainer, which gets the teacher's log-probabilities from a server."""
    name = "ServerDistillationTrainer"
    reduce = upstream.load(name)._reduce_divergence_loss
    return upstream.method(name, method, beta=beta, loss_add_tail=add_tail, _reduce_divergence_loss=reduce)


def forward_kl_topk(draw: Draw) -> Iterator[Compared]:
    """The server's teacher answers with its k largest log-probabilities."""
    pair, rest = draw_pair(draw), draw.choose(RESTS, "rest")
    student, teacher, mask = inputs(pair)
    largest = rounding(pair, rest)
    top = torch.log_softmax(teacher, -1).topk((student.shape[-1] + 1) // 2, -1)
    given = {"topk_logprobs": top.values, "topk_token_ids": top.indices}
    loss = server("_compute_server_forward_kl_loss", beta=0.0, add_tail=rest == "tail")
    theirs = loss(given, torch.log_softmax(student, -1), upstream.labels(mask))
    row = kernel("divergence", "forward_kl_topk@trl", rest=rest)
    token_loss = row(student, top.values, top.indices, mask).loss
    yield from parity(aggregate(token_loss, mask), theirs, pair, magnitude=largest)


def reverse_kl_topk(draw: Draw) -> Iterator[Compared]:
    """beta = 1: a distribution of two entries, the sampled token and the rest."""
    pair = draw_pair(draw)
    student, teacher, mask = inputs(pair)
    assume(student.shape[-1] > 1)
    largest = rounding(pair, "tail")
    ids = tokens(pair)
    given = token_logprobs(teacher, ids)
    loss = server("_compute_sparse_top_1_divergence_loss", beta=1.0, add_tail=True)
    theirs = loss(torch.log_softmax(student, -1), ids, given, ids, given, upstream.labels(mask))
    row = kernel("divergence", "reverse_kl_topk@trl", rest="tail")
    token_loss = row(student, given[..., None], ids[..., None], mask).loss
    yield from parity(aggregate(token_loss, mask), theirs, pair, magnitude=largest)


def uld(draw: Draw) -> Iterator[Compared]:
    """The mean over the tokens of a completion, and then over all rows; a row without any has 0.

    Without the cross-entropy and the alignment of two tokenizers.
    """
    pair, temperature = draw_pair(draw), draw.choose(TEMPERATURES, "temperature")
    student, teacher, mask = inputs(pair)
    mask = torch.arange(mask.shape[-1]) < mask.sum(-1, keepdim=True)  # a completion has no holes
    assume(bool(mask.any()))
    config = SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=temperature,
        uld_teacher_temperature=temperature,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        uld_token_merge_strategy="observed",
        use_extended_uld=False,
    )
    labels, ids = upstream.labels(mask), torch.zeros_like(mask, dtype=torch.long)
    theirs = upstream.load("GOLDTrainer", "ULDLoss")(config)(student, teacher, labels, labels, ids, ids)
    token_loss = kernel("divergence", "uld@trl", temperature=temperature)(student, teacher, mask).loss
    mean = kernel("aggregation", "seq-mean-token-mean", num_sequences=float(len(mask)))
    yield from parity(mean(token_loss, mask), theirs, pair, temperature)


divergence = partial(claim, "divergence")
CLAIMS = [
    divergence("jsd@trl", "GKDTrainer", "", partial(generalized_jsd, "GKDTrainer")),
    divergence("jsd@trl", "GKDTrainer", "without labels", without_labels),
    divergence("jsd@trl", "GOLDTrainer", "", partial(generalized_jsd, "GOLDTrainer")),
    divergence("jsd@trl", "IWOPDTrainer", "beta", partial(generalized_jsd, "IWOPDTrainer")),
    divergence("jsd@trl", "IWOPDTrainer", "top_k, beta 0 or 1", top_k),
    *(
        divergence(row, "DistillationTrainer", name, partial(distilled, row, betas), "in float32")
        for row, name, betas in (("jsd@trl", "beta", BETAS), ("reverse_kl@trl", "", [1.0]))
    ),
    divergence("uld@trl", "GOLDTrainer", "use_uld_loss", uld),
    divergence("forward_kl_topk@trl", "ServerDistillationTrainer", "beta=0", forward_kl_topk),
    divergence("reverse_kl_topk@trl", "ServerDistillationTrainer", "beta=1", reverse_kl_topk),
]
