"""SkyRL's advantage estimators, reductions, KL estimators and truncated importance weights."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_plugins.adapters.skyrl_loss.loss import AdvantageEstimator
from composer_plugins.adapters.skyrl_loss.options import Configs
from composer_plugins.conformance.batches import FLOAT64, Rollouts, policy_batch, rollouts
from composer_plugins.conformance.claims import GRADIENT, Claim, Compared, Place
from composer_plugins.conformance.reductions import kernel
from composer_plugins.conformance.skyrl_claims import policy, upstream
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.skyrl import BY_STD, GAMMA, KL_ESTIMATORS, LAMBDA, NODE, SKYRL, Key
from composer_plugins.losses.choosing import find_one
from composer_plugins.objective.by_table import nested
from composer_plugins.testing.draws import Draw, assume, flag
from composer_plugins.testing.inputs import with_junk

ADVANTAGES, REDUCTIONS, KL, CORRECTIONS = (
    "advantage estimators",
    "reductions",
    "KL estimators",
    "off-policy corrections",
)
FLOAT32 = torch.float32
BY_TOKEN = ("gae", "reinforce++")
CHOICES: dict[str, list[Any]] = {BY_STD.key: [False], GAMMA.key: [0.0, 0.9, 0.99], LAMBDA.key: [0.0, 0.95]}


def whole_responses(batch: Rollouts) -> Rollouts:
    """The rollouts with SkyRL's mask, which has no hole, and with the reward on a response's last token."""
    lengths = batch.mask.sum(-1).clamp(min=1)
    mask = torch.arange(batch.mask.shape[1]) < lengths.unsqueeze(-1)
    last = (lengths - 1).unsqueeze(-1)
    rewards = torch.zeros_like(batch.token_rewards).scatter(1, last, batch.rewards.unsqueeze(-1))
    return Rollouts(batch.rewards, rewards, batch.ids, mask)


def estimator(own: NamedLoss, draw: Draw) -> Iterator[Compared]:
    """An estimator of the registry, and ours with the same options, as it is registered and as a kernel."""
    name, batch = str(own.options[Key.ESTIMATOR]), whole_responses(rollouts(draw))
    if name == "maxrl":  # ours is 0 where the mean is not above 0
        batch = whole_responses(batch._replace(rewards=batch.rewards.abs() + 0.01))
    drawn = (
        {} if flag(draw, "defaults") else {one.key: draw.choose(CHOICES[one.key], one.key) for one in own.own}
    )
    values = None
    if name == "gae":
        g = torch.Generator().manual_seed(draw.integer(0, 2**31, "values"))
        values = torch.where(batch.mask, torch.randn(batch.mask.shape, generator=g, dtype=FLOAT64), 0.0)
    if name in BY_TOKEN:
        assume(int(batch.mask.sum()) > 1)
    theirs, returns = upstream.estimated(name, batch, upstream.algorithm({**own.options, **drawn}), values)
    params = SKYRL.parameters(find_one(own.row, "advantage").loss, drawn)
    node = {"advantage": own.row, "advantage_params": params}
    config = upstream.algorithm({Key.ESTIMATOR: "composer", NODE: node})
    given = batch.token_rewards.clone(), batch.mask.long(), batch.ids.tolist(), values, config
    found, ours_returned = AdvantageEstimator()(*given)
    theirs = torch.where(batch.mask, theirs, 0.0)
    yield from by_group(found, theirs, batch, name)
    if name == "gae":
        returns = torch.where(batch.mask, returns, 0.0)
        largest = float(batch.rewards.abs().max() + (values.abs().max() if values is not None else 0.0))
        yield Compared(ours_returned, returns, 4 * batch.mask.numel(), largest, what="returns")


def by_group(found: Tensor, theirs: Tensor, batch: Rollouts, name: str) -> Iterator[Compared]:
    """Advantages per token, group by group, or at once where the batch is whitened."""
    if name in BY_TOKEN:
        unmasked = theirs[batch.mask]
        assume(float(unmasked.std()) > 1e-3)
        scale = max(1.0, float(batch.rewards.abs().max()))
        yield Compared(
            found, theirs, 8 * batch.mask.numel(), scale * float(theirs.abs().max()) * 1e3, FLOAT64
        )
        return
    for i in batch.ids.unique():
        group = batch.ids == i
        rewards = batch.rewards[group]
        if len(rewards) > 1 and name == "grpo":
            # SkyRL takes the deviation in float32, where a small one of large rewards is rounding.
            assume(float(rewards.std()) == 0 or float(rewards.std()) > 1e-2 * float(rewards.abs().max()))
            divisor = min(1.0, float(rewards.std()) + 1e-6)
            divisor = 1.0 if float(rewards.std()) == 0 else divisor
            if float(rewards.std()) == 0:
                assume(bool((rewards == rewards[0]).all()) and float(rewards.float()[0]) == float(rewards[0]))
        elif name == "maxrl":
            divisor = min(1.0, float(rewards.mean()))
        else:
            divisor = 1.0
        magnitude = float(rewards.abs().max()) ** (2 if name == "maxrl" else 1) / divisor**2
        yield Compared(found[group], theirs[group], 2 * int(group.sum()), max(magnitude, 1e-30), FLOAT32)


def reduction(name: str, draw: Draw) -> Iterator[Compared]:
    """What SkyRL's division makes of the sum of a loss that is proportional to the advantages."""
    case = policy.draw_case(draw)._replace(reduction=name)
    x = case.batch.logprobs.clone().requires_grad_()
    theirs = (case.divided() * x * case.batch.mask).sum()
    token = with_junk((case.batch.advantages * case.batch.logprobs), case.batch.mask).requires_grad_()
    ours = case.reduced(token)
    (gradient,) = torch.autograd.grad(ours, token)
    (wanted,) = torch.autograd.grad(theirs, x)
    largest = float((gradient * torch.where(case.batch.mask, token.detach(), 0.0)).abs().max())
    yield Compared(ours, theirs, token.numel(), largest)
    yield Compared(
        gradient * torch.where(case.batch.mask, case.batch.advantages, 0.0), wanted, 2, what=GRADIENT
    )


def kl(name: str, draw: Draw) -> Iterator[Compared]:
    """A KL estimator, and its gradient in the policy."""
    batch = policy_batch(draw)
    x = batch.logprobs.clone().requires_grad_()
    theirs = upstream.approx_kl(x, batch.old_logprobs, batch.mask, name)
    (wanted,) = torch.autograd.grad(theirs.sum(), x)
    junk = with_junk(batch.logprobs, batch.mask).requires_grad_()
    row = SKYRL.row_of(**{Key.KL_TYPE: name}) or ""
    ours = kernel("kl", row)(junk, with_junk(batch.old_logprobs, batch.mask), batch.mask)
    (gradient,) = torch.autograd.grad(ours.sum(), junk)
    largest = max(1.0, float(theirs.detach().abs().max()), float(wanted.abs().max()))
    yield Compared(ours, theirs.detach(), 3, largest)
    yield Compared(gradient, wanted, 3, largest, what=GRADIENT)


def tis(level: str, draw: Draw) -> Iterator[Compared]:
    """The weights of tis_ratio_type, and ours by the table's reading of the options."""
    batch, key = policy_batch(draw), {"token": Key.TOKEN_CAP, "sequence": Key.SEQUENCE_CAP}[level]
    options: dict[str, Any] = {Key.TIS: level}
    if not flag(draw, "default cap"):
        options[key] = draw.choose([1.1, 2.5, 100.0], "cap")
    theirs = upstream.tis(batch.logprobs, batch.old_logprobs, batch.mask, upstream.algorithm(options))
    read = Configs().read(nested(options))[0]
    chosen = read.correction
    assert chosen is not None and not read.remarks
    given = with_junk(batch.logprobs, batch.mask), with_junk(batch.old_logprobs, batch.mask), batch.mask
    ours = kernel("correction", chosen.name, **chosen.params)(*given)
    wanted = torch.where(batch.mask, theirs, 0.0)
    yield Compared(ours, wanted, batch.mask.shape[1], max(1.0, float(wanted.max())), FLOAT32)


CLAIMS = [
    *(
        Claim("advantage", own.row, name, Place(ADVANTAGES, {"name": name}), partial(estimator, own))
        for own in SKYRL.losses
        if own.kind == "advantage"
        for name in (str(own.options[Key.ESTIMATOR]),)
    ),
    *(
        Claim("aggregation", f"{mode}@skyrl", name, Place(REDUCTIONS), partial(reduction, name))
        for name, mode in SKYRL.denominators.items()
    ),
    *(Claim("kl", row, name, Place(KL), partial(kl, name)) for name, row in KL_ESTIMATORS.items()),
    *(
        Claim("correction", "tis@skyrl", f"tis_ratio_type {level}", Place(CORRECTIONS), partial(tis, level))
        for level in ("token", "sequence")
    ),
]
