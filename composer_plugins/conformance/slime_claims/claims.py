"""slime's own losses compared with ours with the same arguments, as a checkout's dispatcher computes both."""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.reductions import in_our_words
from composer_plugins.conformance.slime_claims.upstream import Upstream
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.slime import ESTIMATOR, ICEPOP_OF_MILES, OPSM, SLIME
from composer_plugins.testing.draws import Draw, flag

OURS = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "composer_plugins.adapters.slime_loss.loss_fn",
}
NOTE = "in float32, which slime asserts"
VOCAB = 11
Options = dict[str, Any]
# The defaults of slime's arguments that its loss reads, except those that the table has.
ARGUMENTS: Options = {
    **{"loss_type": "policy_loss", "recompute_loss_function": False, "allgather_cp": False},
    **{"log_probs_chunk_size": -1, "rollout_top_p": 1.0, "get_mismatch_metrics": False},
    **{"custom_pg_loss_reducer_function_path": None, "qkv_format": "thd", "use_opd": False},
}


def arguments(**given: Any) -> Namespace:
    """slime's arguments, as its parser and its checks leave them."""
    found: Options = {one.key: one.default for one in SLIME.options} | {ESTIMATOR: "grpo"} | ARGUMENTS | given
    if found["eps_clip_high"] is None:
        found["eps_clip_high"] = found["eps_clip"]
    return Namespace(**found)


def drawn_batch(draw: Draw) -> tuple[Tensor, dict[str, Any]]:
    """Packed logits [1, T, V], which carry the gradient, and slime's batch of one to four responses."""
    g = torch.Generator().manual_seed(draw.integer(0, 2**20, "seed"))
    rows, spread = draw.integer(1, 4, "rows"), draw.choose([0.02, 0.3], "drift")
    responses = [draw.integer(1, 6, f"response {i}") for i in range(rows)]
    totals = [one + draw.integer(1, 4, f"prompt {i}") for i, one in enumerate(responses)]
    logits = torch.randn(1, sum(totals), VOCAB, generator=g)
    tokens = [torch.randint(0, VOCAB, (n,), generator=g) for n in totals]
    own, start = [], 0
    for ids, total, response in zip(tokens, totals, responses, strict=True):
        log_p = logits[0, start : start + total].log_softmax(-1)
        own.append(log_p[-response - 1 : -1].gather(-1, ids[-response:, None]).squeeze(-1))
        start += total

    def near(scale: float) -> list[Tensor]:
        return [(x + scale * torch.randn(x.shape, generator=g)).clamp(max=-1e-3) for x in own]

    masks = [(torch.rand(n, generator=g) < 0.8).float() for n in responses]
    sums = torch.stack([x.sum() for x in masks])
    if rows > 1 and flag(draw, "one rollout of two samples"):
        sums[:2] = sums[:2].sum()
    batch = {
        "unconcat_tokens": tokens,
        "total_lengths": totals,
        "response_lengths": responses,
        "loss_masks": masks,
        "rollout_mask_sums": sums,
        "log_probs": near(spread),
        "rollout_log_probs": near(spread),
        "ref_log_probs": near(draw.choose([0.3, 2.0], "reference")),
        "advantages": [torch.randn(1, generator=g).expand(n) for n in responses],
    }
    return logits.requires_grad_(), batch


def drawn_options(named: NamedLoss, draw: Draw) -> Options:
    """The arguments of a policy loss, a KL or a correction, with others of its kind drawn."""
    given: Options = dict(named.options)
    given["calculate_per_token_loss"] = flag(draw, "per token")
    if named.kind == "policy":
        given["eps_clip"] = draw.choose([0.2, 0.1], "eps")
        given["eps_clip_high"] = draw.choose([None, 0.28], "high")
        given["entropy_coef"] = draw.choose([0.0, 0.01], "entropy")
        if given[ESTIMATOR] not in ("gspo", "cispo") and not given[OPSM]:
            given["eps_clip_c"] = draw.choose([None, 3.0, 1.2], "c")
        if given[OPSM]:
            given["opsm_delta"] = draw.choose([1e-4, 0.1], "delta")
        given["use_rollout_logprobs"] = flag(draw, "rollout") and not given[OPSM]
    if named.kind == "kl":
        given |= {"use_kl_loss": True, "kl_loss_coef": draw.choose([0.01, 0.5], "weight")}
    if named.kind == "correction":
        given |= {
            "tis_clip": draw.choose([1.05, 2.0], "cap"),
            "tis_clip_low": draw.choose([0.0, 0.9], "floor"),
        }
    return given


def ours(options: Options) -> Options:
    """The same arguments for our loss: its clips are parameters of our loss."""
    kept, own = in_our_words(SLIME, options)
    return {**kept, **OURS, "composer": own}


def compare(upstream: Upstream, named: NamedLoss, draw: Draw) -> Iterator[Compared]:
    """One micro-batch of a step, through slime's dispatcher with both losses."""
    options, (logits, batch) = drawn_options(named, draw), drawn_batch(draw)
    parts, size, found = draw.integer(1, 3, "parts"), draw.integer(4, 9, "size"), []
    for which in (ours(options), options):
        args = arguments(**which)
        loss, count = upstream.loss_of(args, batch, logits, parts, size)
        (gradient,) = torch.autograd.grad(loss / count, logits)
        found.append(((loss / count).detach(), gradient))
    (mine, my_gradient), (want, gradient) = found
    terms, largest = 4 * VOCAB, max(float(gradient.abs().max()), 1e-3)
    bound = max(float(want.abs()), largest * len(batch["loss_masks"]))
    yield Compared(mine, want, terms, bound, dtype=torch.float32)
    yield Compared(my_gradient, gradient, terms, largest, dtype=torch.float32, what=GRADIENT)


def claims(upstream: Upstream) -> list[Claim]:
    """The claims about this checkout: each policy loss, KL and correction of the table."""
    found = []
    for named in SLIME.losses:
        of_miles = ICEPOP_OF_MILES in named.options.values()
        if named.kind != "advantage" and not of_miles:  # recorded numbers have slime's advantages
            theirs = ", ".join(f"{key}={str(x).rpartition('.')[2]}" for key, x in named.options.items() if x)
            compared = partial(compare, upstream, named)
            found.append(Claim(named.kind, named.row, theirs, Place(named.kind), compared, NOTE))
    return found
