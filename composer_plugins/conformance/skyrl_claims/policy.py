"""SkyRL's policy losses: value, gradient, and the fraction that it logs as clipped.

Each is called with advantages that SkyRL's own code has divided. Ours is called in two ways: its kernel on
the advantages as they were, reduced by the denominator that the table names; and what is registered in
SkyRL, on the divided ones. SkyRL computes a ratio in float32, whatever it is given.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from composer_plugins.adapters.skyrl_loss.loss import PolicyLoss
from composer_plugins.conformance.batches import Batch, policy_batch
from composer_plugins.conformance.claims import GRADIENT, VALUE, Claim, Compared, Place
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.skyrl_claims import upstream
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.skyrl import NODE, NORM, SKYRL, Key
from composer_plugins.losses.choosing import find_one
from composer_plugins.testing.draws import Draw, assume, flag
from composer_plugins.testing.inputs import with_junk

POLICY = "policy losses"  # the registry
FLOAT32 = torch.float32
LENGTHS = [1, 10, 4096]
# By key below the algorithm, the values to draw.
VALUES: dict[str, list[float]] = {
    "eps_clip_low": [3e-4, 0.1, 0.3, 0.9],
    "eps_clip_high": [4e-4, 0.28, 3.0],
    "clip_ratio_c": [1.5, 2.0, 10.0],
    "cispo.cispo_eps_clip_low": [0.0, 0.2, 1.0],
    "cispo.cispo_eps_clip_high": [0.2, 4.0, 9.0],
    "sapo.tau_pos": [0.5, 1.0, 2.0],
    "sapo.tau_neg": [0.5, 1.05, 4.0],
    "clip_cov.clip_ratio": [2e-4, 0.1, 0.5],
    "clip_cov.clip_cov_lb": [0.0, 1e-3, 0.1],
    "clip_cov.clip_cov_ub": [0.05, 5.0, 1e3],
    "kl_cov.kl_cov_frac": [2e-4, 0.1, 0.5],
    "kl_cov.ppo_kl_coef": [0.0, 0.1, 1.0],
    "dppo.delta_low": [0.01, 0.15, 0.9],
    "dppo.delta_high": [0.01, 0.3, 1.0],
}
ON_DIVIDED = ("clip_cov", "kl_cov")  # not proportional to the advantages
WITHOUT_CLIP = (
    "sapo",
    "importance_sampling",
    *ON_DIVIDED,
)  # whose clip_ratio is 0, absent, or of another thing


class Case(NamedTuple):
    """A batch with the log-probabilities of the rollout policy, and how SkyRL reduces it."""

    batch: Batch
    rollout: Tensor
    reduction: str
    length: int
    prompts: list[int]

    def tensors(self, *, junk: bool = False) -> dict[str, Tensor]:
        """The inputs of a loss; with `junk`, anything stands at the masked tokens."""
        found = {
            "logprobs": self.batch.logprobs,
            "old_logprobs": self.batch.old_logprobs,
            "rollout_logprobs": self.rollout,
            "advantages": self.batch.advantages,
        }
        mask = self.batch.mask
        return {name: with_junk(x, mask) if junk else x for name, x in found.items()} | {"mask": mask}

    def divided(self) -> Tensor:
        """The advantages as SkyRL's trainer hands them on."""
        return upstream.divided(
            self.batch.advantages, self.batch.mask, self.reduction, self.length, self.prompts
        )

    def reduced(self, token_loss: Tensor) -> Tensor:
        """A loss per token, by the aggregation mode that the table names for the reduction."""
        mode, mask, params = SKYRL.denominators[self.reduction], self.batch.mask, dict[str, Any]()
        if mode == "prompt-mean":
            ids = torch.repeat_interleave(torch.arange(len(self.prompts)), torch.tensor(self.prompts))
            found: Tensor = kernel("aggregation", f"{mode}@skyrl")(token_loss, mask, ids)
            return found
        if mode.startswith("seq-mean"):
            params["num_sequences"] = len(mask)
        if mode == SKYRL.denominators[NORM]:
            params["max_length"] = self.length
        found = kernel("aggregation", f"{mode}@skyrl", **params)(token_loss, mask)
        return found


def draw_case(draw: Draw) -> Case:
    """A mini-batch of one to five rows, which belong to one or two prompts."""
    batch = policy_batch(draw)
    rows = len(batch.mask)
    first = draw.integer(1, rows, "rows of the first prompt")
    spread = draw.choose([0.0, 0.1, 1.0], "rollout spread")
    g = torch.Generator().manual_seed(draw.integer(0, 2**31, "rollout"))
    noise = spread * torch.randn(batch.mask.shape, generator=g, dtype=batch.logprobs.dtype)
    return Case(
        batch,
        (batch.old_logprobs + noise).clamp(max=0.0),
        draw.choose(list(SKYRL.denominators), "loss_reduction"),
        draw.choose(LENGTHS, "max_seq_len"),
        [first, rows - first] if first < rows else [rows],
    )


def draw_options(draw: Draw, own: NamedLoss) -> dict[str, Any]:
    """SkyRL's defaults, or each option that sets a parameter of the loss drawn."""
    if flag(draw, "defaults"):
        return {}
    keys = [one.key for one in own.own if one.sets]
    return {key: draw.choose(VALUES[key.partition(".algorithm.")[2]], key) for key in keys}


def our_params(own: NamedLoss, drawn: dict[str, Any]) -> dict[str, Any]:
    """The parameters of our row, through the table that users run."""
    return {**own.params, **SKYRL.parameters(find_one(own.row, "policy").loss, drawn)}


def config_of(own: NamedLoss, case: Case, drawn: dict[str, Any]) -> Any:
    """SkyRL's config for its loss."""
    length = {Key.LENGTH: case.length} if case.reduction == NORM else {}
    return upstream.algorithm({**own.options, Key.REDUCTION: case.reduction, **length, **drawn})


def largest_term(share: Tensor, token_loss: Tensor) -> float:
    """The largest term of the sum behind a reduced loss."""
    return float((share * token_loss.detach()).abs().max())


def compare(own: NamedLoss, draw: Draw, *, is_anchored: bool = False) -> Iterator[Compared]:
    """A loss that is proportional to the advantages.

    With `is_anchored`, SkyRL's cispo_anchor is rollout: the rollout policy takes the place of the old one.
    """
    case, drawn = draw_case(draw), draw_options(draw, own)
    options = {Key.ANCHOR: "rollout"} if is_anchored else {}
    replaced = {"old_logprobs": "rollout_logprobs"} if is_anchored else {}
    if own.options[Key.POLICY] == "importance_sampling":  # SkyRL compares with its old log-probabilities
        replaced = {"rollout_logprobs": "old_logprobs"}
    config, params = config_of(own, case, drawn | options), our_params(own, drawn)
    loss = find_one(own.row, "policy").loss
    name = str(own.options[Key.POLICY])
    divided = {**case.tensors(), "advantages": case.divided()}
    theirs, wanted, logged = upstream.policy_loss(name, config, divided)

    given = case.tensors(junk=True)
    given |= {name: given[other] for name, other in replaced.items()}
    given["logprobs"] = given["logprobs"].requires_grad_()
    token = kernel("policy", own.row, **params)(*(given[need] for need in loss.needs)).loss
    ours = case.reduced(token)
    share, gradient = torch.autograd.grad(ours, [token, given["logprobs"]])
    largest, terms = largest_term(share, token), token.numel()
    slope = float(wanted.abs().max())
    yield Compared(ours, theirs, terms, largest, FLOAT32)
    yield Compared(gradient, wanted, token.shape[-1], slope, FLOAT32, GRADIENT)

    config = upstream.algorithm(
        {**own.options, Key.POLICY: "composer", NODE: {"policy": own.row, "policy_params": params}}
    )
    junk = {**case.tensors(junk=True), "advantages": with_junk(divided["advantages"], case.batch.mask)}
    junk |= {name: junk[other] for name, other in replaced.items()}
    value, gradient, metrics = upstream.called(PolicyLoss(), config, junk)
    yield Compared(value, theirs, terms, largest, FLOAT32, f"{VALUE} in SkyRL")
    yield Compared(gradient, wanted, token.shape[-1], slope, FLOAT32, f"{GRADIENT} in SkyRL")
    # DPPO masks no token without an advantage there, and here one that gets no gradient either.
    of_tokens = bool(case.batch.advantages[case.batch.mask].all()) or name != "dppo"
    if name not in WITHOUT_CLIP and of_tokens:
        clipped, wanted = (torch.tensor(one["clip_ratio"]) for one in (metrics, logged))
        yield Compared(clipped, wanted, 1, 1.0, FLOAT32, "clip_ratio")


def on_divided(own: NamedLoss, draw: Draw) -> Iterator[Compared]:
    """One that is not: our kernel on the advantages that SkyRL has divided, summed."""
    case, drawn = draw_case(draw), draw_options(draw, own)
    config, name = config_of(own, case, drawn), str(own.options[Key.POLICY])
    given = {**case.tensors(), "advantages": case.divided()}
    more, mask = dict[str, Tensor](), case.batch.mask
    if name == "kl_cov":
        a, log_p = given["advantages"][mask], given["logprobs"][mask]
        covariance = ((a - a.mean()) * (log_p - log_p.mean())).sort(descending=True).values
        count = max(1, int(config.kl_cov.kl_cov_frac * len(covariance)))
        tie = 1e-6 * float(covariance.abs().max())
        assume(count == len(covariance) or bool(covariance[count - 1] - covariance[count] > tie))
    else:  # the first tokens, and no random ones
        more["uniform"] = torch.linspace(0, 0.99, mask.numel(), dtype=given["logprobs"].dtype).view(
            mask.shape
        )
    with mock.patch("torch.randperm", torch.arange):
        theirs, wanted, _ = upstream.policy_loss(name, config, given)
    junk = {name: with_junk(x, mask) for name, x in given.items() if name != "mask"} | {"mask": mask}
    logprobs = junk["logprobs"].requires_grad_()
    ours = kernel("policy", own.row, **our_params(own, drawn))(
        logprobs, junk["old_logprobs"], junk["advantages"], mask, **more
    ).loss
    (gradient,) = torch.autograd.grad(ours.sum(), logprobs)
    largest = float(ours.detach().abs().max())
    yield Compared(ours.sum(), theirs, ours.numel(), largest, FLOAT32)
    yield Compared(gradient, wanted, ours.shape[-1], float(wanted.abs().max()), FLOAT32, GRADIENT)


def note_of(name: str, own: NamedLoss) -> str:
    """What a reader of the table should know."""
    if name in ON_DIVIDED:
        return "on the divided advantages, and the loss is not a multiple of them"
    return f"dppo_type {own.options[Key.DPPO_TYPE]}" if Key.DPPO_TYPE in own.options else ""


def claim(own: NamedLoss, compare: Any, note: str = "") -> Claim:
    """About one policy loss of the registry, in the releases that have it."""
    name = str(own.options[Key.POLICY])
    return Claim(
        "policy",
        own.row,
        name,
        Place(POLICY, {"name": name, "since": own.since, "until": own.until}),
        compare,
        note,
    )


OWN = [one for one in SKYRL.losses if one.kind == "policy"]
CLAIMS = [
    *(
        claim(own, partial(on_divided if name in ON_DIVIDED else compare, own), note_of(name, own))
        for own in OWN
        for name in (str(own.options[Key.POLICY]),)
    ),
    *(
        claim(own, partial(compare, own, is_anchored=True), "cispo_anchor rollout")
        for own in OWN
        if own.row == "cispo@skyrl"
    ),
]
