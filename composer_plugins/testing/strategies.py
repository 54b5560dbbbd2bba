"""Hypothesis strategies: log-probabilities, masks with empty rows, advantages, logits, groups of rewards."""

import hypothesis.strategies as st
import torch
from torch import Tensor

seeds = st.integers(0, 2**32 - 1)
betas = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])  # 0.5 alone cannot see a swapped mixture


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@st.composite
def token_batches(draw: st.DrawFn, max_rows: int = 5, max_tokens: int = 7) -> dict[str, Tensor]:
    """Draw logprobs, old_logprobs, advantages [B, 1] and a mask, in float64; any row may be masked out."""
    g = _generator(draw(seeds, label="seed"))
    rows, tokens = (
        draw(st.integers(1, max_rows), label="rows"),
        draw(st.integers(1, max_tokens), label="tokens"),
    )
    spread = draw(st.sampled_from([0.01, 0.3, 3.0]), label="log-ratio spread")
    logprobs = -torch.rand(rows, tokens, generator=g, dtype=torch.float64) * 4
    old = (logprobs + spread * torch.randn(rows, tokens, generator=g, dtype=torch.float64)).clamp(max=0)
    advantages = torch.randn(rows, 1, generator=g, dtype=torch.float64)
    unmasked = draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]), label="unmasked fraction")
    mask = torch.rand(rows, tokens, generator=g) < unmasked
    return {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages, "mask": mask}


@st.composite
def logit_pairs(
    draw: st.DrawFn, max_tokens: int = 4, max_vocab: int = 9, *, forbid: bool = True
) -> dict[str, Tensor]:
    """Draw student and teacher logits [B, T, V] and a mask; `forbid` allows an entry of -inf in both."""
    g = _generator(draw(seeds, label="seed"))
    rows, tokens = draw(st.integers(1, 3), label="rows"), draw(st.integers(1, max_tokens), label="tokens")
    vocab = draw(st.integers(1, max_vocab), label="vocab")
    scale = draw(st.sampled_from([0.1, 1.0, 10.0]), label="logit scale")
    student = scale * torch.randn(rows, tokens, vocab, generator=g, dtype=torch.float64)
    teacher = scale * torch.randn(rows, tokens, vocab, generator=g, dtype=torch.float64)
    if forbid and vocab > 1 and draw(st.booleans(), label="a forbidden entry"):
        student[..., 0] = teacher[..., 0] = -torch.inf
    mask = torch.rand(rows, tokens, generator=g) < draw(
        st.sampled_from([0.0, 0.6, 1.0]), label="unmasked fraction"
    )
    return {"student_logits": student, "teacher_logits": teacher, "mask": mask}


@st.composite
def grouped_rewards(draw: st.DrawFn, max_groups: int = 5) -> tuple[Tensor, Tensor]:
    """Draw rewards [rows] in float64, non-dyadic and often tied, with unsorted ids of groups of any size."""
    g = _generator(draw(seeds, label="seed"))
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=max_groups), label="group sizes")
    ids = torch.repeat_interleave(torch.arange(len(sizes)) * 7 - 3, torch.tensor(sizes))
    order = torch.randperm(len(ids), generator=g)
    rewards = torch.randint(0, 5, (len(ids),), generator=g).to(torch.float64) / 10 + draw(
        st.sampled_from([0.0, 0.1, -3.3, 1e6]), label="offset"
    )
    return rewards, ids[order]
