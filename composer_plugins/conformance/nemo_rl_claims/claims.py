"""NeMo-RL's own losses compared with ours with the same options, as a checkout of it computes them."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.nemo_rl_loss.loss import ComposerDistillationLoss, ComposerLoss
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.nemo_rl_claims.upstream import Upstream
from composer_plugins.conformance.reductions import in_our_words, kernel
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.nemo_rl import GRPO, LOSS, MAX_RATIO, MIN_RATIO, NEMO_RL, TIS
from composer_plugins.testing.draws import Draw, flag, token_batch

# Its masked_mean adds 1e-8 to every denominator, so what is equal is so up to that. In float64 a rounding of
# float32 is allowed.
NOTE = "its denominators are n + 1e-8"
LOOSE = torch.float32
Options = dict[str, Any]


def drawn_batch(draw: Draw) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probabilities of a batch, which carry the gradient, and NeMo-RL's data of it, one token wider.

    Now and then a row is left out by sample_mask. No row that counts is without an unmasked token.
    """
    batch = token_batch(draw)
    mask, logprobs = batch["mask"].clone(), batch["logprobs"].detach().clone().requires_grad_()
    mask[:, 0] = True
    samples = torch.ones(len(mask), dtype=torch.float64)
    if len(mask) > 1 and flag(draw, "a row is left out"):
        samples[-1] = 0.0

    def shifted(x: Tensor) -> Tensor:
        return torch.nn.functional.pad(x.expand(mask.shape).to(torch.float64), (1, 0))

    g = torch.Generator().manual_seed(draw.integer(0, 2**20, "seed"))

    def near(x: Tensor, spread: float) -> Tensor:
        noise = torch.randn(x.shape, generator=g, dtype=torch.float64)
        return (x.detach() + spread * noise).clamp(max=-1e-4)

    data = {
        "input_ids": torch.zeros(mask.shape[0], mask.shape[1] + 1, dtype=torch.long),
        "token_mask": shifted(mask),
        "sample_mask": samples,
        "advantages": shifted(batch["advantages"]),
        "prev_logprobs": shifted(batch["old_logprobs"]),
        "generation_logprobs": shifted(near(batch["old_logprobs"], draw.choose([0.01, 0.3], "engine"))),
        "reference_policy_logprobs": shifted(near(logprobs, draw.choose([0.3, 3.0], "reference"))),
    }
    return logprobs, data


def counts(data: Mapping[str, Tensor], other: int) -> tuple[Tensor, Tensor]:
    """The valid sequences and tokens of the global batch that contains this part."""
    mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)
    return data["sample_mask"].sum() + other, mask.sum() + 7 * other


def both(upstream: Upstream, theirs: Any, ours: Any, draw: Draw) -> Iterator[Compared]:
    """Value and gradient of two loss functions on one part of a global batch."""
    logprobs, data = drawn_batch(draw)
    seqs, toks = counts(data, draw.integer(0, 3, "other"))
    found = []
    for one in (ours, theirs):
        loss, _ = one(
            next_token_logprobs=logprobs,
            data=upstream.data(data),
            global_valid_seqs=seqs,
            global_valid_toks=toks,
        )
        (gradient,) = torch.autograd.grad(loss, logprobs, materialize_grads=True)
        found.append((loss.detach(), gradient))
    (mine, my_gradient), (want, gradient) = found
    largest = max(float(gradient.abs().max()), 1e-6)
    size = data["token_mask"].numel()
    value = float(want.abs())
    yield Compared(mine, want, 8, max(size * largest, value), dtype=LOOSE, scale=max(value, 1e-3))
    yield Compared(my_gradient, gradient, 8, largest, dtype=LOOSE, what=GRADIENT, scale=largest)


def of_table(named: NamedLoss) -> Options:
    """The options in [loss_fn] that choose a loss."""
    return {key.removeprefix(f"{LOSS}."): value for key, value in named.options.items()}


def drawn_options(named: NamedLoss, draw: Draw) -> Options:
    """A loss_fn of a policy loss, a KL or a correction, with other options of its kind drawn."""
    given: Options = {"reference_policy_kl_penalty": 0.0, **of_table(named)}
    by_sequence = given.get("sequence_level_importance_ratios", False)
    if named.kind == "policy":
        given["ratio_clip_min"] = draw.choose([0.2, 0.1], "min")
        given["ratio_clip_max"] = draw.choose([0.2, 0.28], "max")
        if named.row.startswith("grpo"):
            given["ratio_clip_c"] = draw.choose([None, 3.0, 1.2], "c")
            given["force_on_policy_ratio"] = flag(draw, "forced") and given["ratio_clip_c"] is None
        if named.row.startswith("reinforce"):
            given |= {"ratio_clip_min": 0.2, "ratio_clip_max": 0.2}
    given["token_level_loss"] = not by_sequence and (bool(given.get("use_cispo")) or flag(draw, "by token"))
    if named.kind == "kl":
        given["reference_policy_kl_penalty"] = draw.choose([0.01, 0.5], "weight")
        given["kl_input_clamp_value"] = draw.choose([20.0, 1.0, None], "input clamp")
        given["kl_output_clamp_value"] = draw.choose([10.0, 0.5, None], "output clamp")
        given["use_on_policy_kl_approximation"] = flag(draw, "engine")
    if named.kind == "correction" and given[TIS]:
        given[MAX_RATIO] = draw.choose([1.05, 2.0], "cap")
        if given[TIS] != "tis" or flag(draw, "floor"):
            given[MIN_RATIO] = draw.choose([0.5, 0.95], "floor")
    return given


def compare_policy(upstream: Upstream, named: NamedLoss, draw: Draw) -> Iterator[Compared]:
    """A ClippedPGLossFn, and ours with the same config, whose clips are parameters of our loss."""
    drawn = drawn_options(named, draw)
    theirs = upstream.losses.ClippedPGLossFn(upstream.losses.ClippedPGLossConfig(**drawn))
    kept, ours = in_our_words(NEMO_RL, {f"{LOSS}.{key}": value for key, value in drawn.items()})
    config = upstream.losses.ClippedPGLossConfig(**kept[LOSS])
    yield from both(upstream, theirs, ComposerLoss(config, **ours), draw)


def compare_advantage(upstream: Upstream, named: NamedLoss, draw: Draw) -> Iterator[Compared]:
    """A GRPOAdvantageEstimator and the row of the table, on groups of two and more."""
    stem = f"{GRPO}.adv_estimator."
    options = {key.removeprefix(stem): value for key, value in named.options.items()}
    estimator = upstream.advantages.GRPOAdvantageEstimator(
        upstream.advantages.AdvEstimatorConfig(**options), upstream.losses.ClippedPGLossConfig()
    )
    groups, size = draw.integer(1, 4, "groups"), draw.integer(2, 5, "size")
    g = torch.Generator().manual_seed(draw.integer(0, 2**20, "seed"))
    rewards = torch.randint(0, 5, (groups * size,), generator=g).double() / 4
    ids = torch.arange(groups).repeat_interleave(size)
    theirs = estimator.compute_advantage(ids.unsqueeze(-1), rewards.float(), torch.ones(len(ids), 1))
    ours = kernel("advantage", named.row)(rewards, ids)
    # In float32 a deviation is the root of a difference of squares.
    yield Compared(ours, theirs.squeeze(-1).double(), 200, 2.0, dtype=LOOSE)


def compare_distillation(upstream: Upstream, kind: str, draw: Draw) -> Iterator[Compared]:
    """A DistillationLossFn and ours, on the logarithms of k probabilities that add up to 1."""
    g = torch.Generator().manual_seed(draw.integer(0, 2**20, "seed"))
    rows, width, k = draw.integer(1, 3, "rows"), draw.integer(1, 5, "width"), draw.integer(1, 6, "k")
    student = torch.randn(rows, width, k, generator=g, dtype=torch.float64).requires_grad_()
    teacher = torch.randn(rows, width, k, generator=g, dtype=torch.float64).log_softmax(-1)
    mask = torch.rand(rows, width + 1, generator=g) < 0.7
    data = {"input_ids": mask.long(), "token_mask": mask.double(), "sample_mask": torch.ones(rows).double()}
    config = upstream.losses.DistillationLossConfig(kl_type=kind)
    found, toks = [], mask[:, 1:].sum().clamp(min=1) + draw.integer(0, 9, "other")
    for one in (ComposerDistillationLoss(config), upstream.losses.DistillationLossFn(config)):
        loss, _ = one(student.log_softmax(-1), teacher, None, upstream.data(data), None, toks)
        found.append((loss.detach(), torch.autograd.grad(loss, student)[0]))
    for what, (mine, want) in zip(("value", GRADIENT), zip(*found, strict=True), strict=True):
        yield Compared(mine, want, 8 * k, max(float(want.abs().max()), 1.0), dtype=LOOSE, what=what)


def compare_dpo(upstream: Upstream, average: bool, draw: Draw) -> Iterator[Compared]:
    """A DPOLossFn and the mean over pairs of our loss, perhaps with the log-likelihood of the chosen side."""
    g = torch.Generator().manual_seed(draw.integer(0, 2**20, "seed"))
    pairs, width = draw.integer(1, 4, "pairs"), draw.integer(1, 6, "width")
    logprobs = (-4 * torch.rand(2 * pairs, width, generator=g, dtype=torch.float64)).requires_grad_()
    ref = (logprobs.detach() + 0.3 * torch.randn(logprobs.shape, generator=g).double()).clamp(max=-1e-3)
    mask = torch.rand(logprobs.shape, generator=g) < 0.7
    beta, weight = draw.choose([0.05, 0.5], "beta"), draw.choose([0.0, 0.3], "sft")
    config = upstream.losses.DPOLossConfig(
        reference_policy_kl_penalty=beta,
        preference_average_log_probs=average,
        sft_loss_weight=weight,
        sft_average_log_probs=average,
    )
    data = {
        "input_ids": torch.zeros(2 * pairs, width + 1),
        "token_mask": torch.nn.functional.pad(mask.double(), (1, 0)),
        "sample_mask": torch.ones(2 * pairs).double(),
        "reference_policy_logprobs": torch.nn.functional.pad(ref, (0, 1)),  # one to the left of GRPO's
    }
    sequences, tokens = torch.tensor(2.0 * pairs), mask.sum()
    theirs, _ = upstream.losses.DPOLossFn(config)(logprobs, upstream.data(data), sequences, tokens)
    lengths = mask.sum(-1).clamp(min=1) if average else 1
    scores, ref_scores = ((x * mask).sum(-1) / lengths for x in (logprobs, ref))
    row = kernel("preference", f"{'sigmoid_norm' if average else 'dpo'}@nemo-rl", beta=beta)
    pair = row(scores[::2], scores[1::2], ref_scores[::2], ref_scores[1::2])
    ours = (pair.loss - weight * scores[::2]).mean()
    largest = max(1.0, float(theirs.detach().abs()))
    yield Compared(ours, theirs, 8, largest, dtype=LOOSE)
    mine, want = (torch.autograd.grad(x, logprobs, materialize_grads=True)[0] for x in (ours, theirs))
    yield Compared(mine, want, 8, 1.0, dtype=LOOSE, what=GRADIENT)


def claims(upstream: Upstream) -> list[Claim]:
    """The claims about this checkout: all losses of the table, and distillation."""
    found = []
    for named in NEMO_RL.losses:
        options = named.options.items()
        theirs = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in options if value)
        compare, note = partial(compare_policy, upstream, named), NOTE
        if named.kind == "advantage":
            compare, note = partial(compare_advantage, upstream, named), "in float32"
        name = theirs or "ClippedPGLossFn"
        found.append(Claim(named.kind, named.row, name, Place(named.kind), compare, note))
    for name, average in (("dpo", False), ("sigmoid_norm", True)):
        theirs = f"DPOLossFn preference_average_log_probs={average}"
        compare = partial(compare_dpo, upstream, average)
        found.append(Claim("preference", f"{name}@nemo-rl", theirs, Place("preference"), compare, NOTE))
    for kind in ("forward", "reverse"):
        compare = partial(compare_distillation, upstream, kind)
        name, row = f"DistillationLossFn kl_type={kind}", f"{kind}_kl@nemo-rl"
        found.append(Claim("divergence", row, name, Place("divergence"), compare, NOTE))
    return found
