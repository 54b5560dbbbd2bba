"""What losses do with a recorded step: value, gradient, and the tokens without a gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from composer_plugins.batches import About, Batch, load, steps
from composer_plugins.errors import ConfigError, DataError, in_a_line
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice, choose

# The inputs in which the gradient is taken. Entropies and other entries of the vocabulary are constants here.
LEAVES = {"logprobs", "student_logprobs", "chosen", "rejected", "chosen_nll", "gold_nll", "scores"}
ROUNDING = 1e-5  # of the reduced absolute losses: what sums in float32 may be off by
PAIRS = "mean of pairs"  # the mode of a loss without tokens
SHOWN = 8  # tokens, up to one of the largest weights
REDUCED_WITH = ("num_tokens", "num_sequences", "num_prompts", "max_length", "group_ids", "prompt_tokens")


class Step(NamedTuple):
    """A recorded step, in float64."""

    path: Path
    about: About  # of its first micro-batch
    batches: list[Batch]  # its micro-batches
    whole: dict[str, Tensor]  # all of them as one
    ran: Choice | None  # None where the record does not name the loss, or where it is not installed here

    @classmethod
    def read(cls, path: Path, step: int | None = None, kind: str | None = None) -> "Step":
        """Read this step, or the newest: the losses of this kind, or policy losses, or the only kind."""
        every = load(path, step=max(steps(path), default=None) if step is None else step)
        kinds = [b.about.kind for b in every]
        kind = kind or ("policy" if "policy" in kinds else kinds[0])
        batches = [b for b in every if b.about.kind == kind or not b.about.name]
        if len({(b.about.name, b.about.mode, str(b.about.params)) for b in batches}) != 1:
            problem = f"its step has {'several' if batches else 'no'} losses of the kind {kind}"
            raise DataError(str(path), problem, "name a folder with one of them, or another --kind")
        for tensors in (b.tensors for b in batches):
            tensors |= {name: x.double() for name, x in tensors.items() if x.is_floating_point()}
        whole = joined([b.tensors for b in batches])
        if {"group_ids", "mask"} <= whole.keys():  # a prompt may be in several micro-batches
            lengths = whole["mask"].sum(-1).double()
            for x in (whole, *(b.tensors for b in batches)):
                same = x["group_ids"][:, None] == whole["group_ids"]
                x.setdefault("prompt_tokens", same.double() @ lengths)
        about = batches[0].about
        try:
            ran = replace(choose(about.kind, about.name, about.params), optional=about.optional)
        except ConfigError:
            ran = None
        return cls(path, about, batches, whole, ran)

    def reproduced(self) -> dict[str, Any]:
        """Compute the loss of each micro-batch as its run did; `equal` is None where an input is lacking."""
        found = []
        for about, tensors in self.batches:
            if self.ran is None or about.loss is None or {*self.ran.loss.needs} - tensors.keys():
                return {"equal": None}
            loss, mode = called(self.ran, tensors), mode_of(self.ran, about.mode)
            sums = [about.factor * reduced(x, tensors, mode, about.counts).item() for x in (loss, loss.abs())]
            found.append((sums[0], about.loss, abs(sums[0] - about.loss) <= ROUNDING * abs(sums[1])))
        recomputed, logged, equal = zip(*found, strict=True)
        return {"recomputed": sum(recomputed), "logged": sum(logged), "equal": all(equal)}


def joined(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return micro-batches as one batch, padded with zeros, which the mask leaves out."""
    found = {}
    for name in [name for name in batches[0] if all(name in one for one in batches)]:
        parts = [one[name] for one in batches]
        if parts[0].dim() > 1:
            found[name] = pad_sequence([row for x in parts for row in x], batch_first=True)
        else:
            found[name] = torch.cat(parts) if parts[0].dim() else parts[0]
    return found


def mode_of(choice: Choice, mode: str = "") -> str:
    """Return the mode by which a loss is reduced: the one that is set, or its own."""
    return PAIRS if choice.loss.kind == "preference" else mode or choice.mode or "token-mean"


def called(choice: Choice, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a loss per token or pair. Raises DataError for an input that the record lacks."""
    if absent := [name for name in choice.loss.needs if name not in tensors]:
        problem = f"the record has no {' and no '.join(absent)}"
        raise DataError(choice.name, problem, "compare losses of the recorded inputs")
    choice = choice.with_optional("uniform" if "uniform" in tensors else "generator")
    given = {**tensors, "generator": torch.Generator().manual_seed(0)}
    loss: Tensor = call(choice, given, check=True).loss
    return loss


def reduced(loss: Tensor, tensors: Mapping[str, Tensor], mode: str, counts: Mapping[Any, float]) -> Tensor:
    """Reduce a loss by this mode, with these counts of the whole batch."""
    if mode == PAIRS:
        return loss.sum() / counts.get("num_pairs", len(loss))
    known: dict[str, Any] = {"max_length": loss.shape[-1], **tensors, **counts}
    given = {name: known[name] for name in REDUCED_WITH if name in known}
    return aggregate(loss, tensors["mask"], mode, **given)  # type: ignore[arg-type]


class Measured(NamedTuple):
    """A loss on a recorded step. Tensors are [rows, tokens]; without tokens, [pairs, scores]."""

    label: str
    mode: str
    value: Tensor
    mask: Tensor
    gradient: Tensor  # of the value
    advantages: Tensor
    weight: Tensor  # |d loss / d log pi| / |A|, before the reduction
    ratios: Tensor

    def numbers(self, reference: "Measured | None") -> dict[str, Any]:
        """Return what `compare` prints; None for what is 0 / 0 and for the cosine to another kind of row."""
        dead, zero, count = self.gradient == 0, self.advantages == 0, self.mask.sum().double()
        clipped, masked = self.mask & dead & ~zero, ~self.mask
        clipped_rows, masked_rows = dead.all(-1) & clipped.any(-1), masked.all(-1)
        sizes, weights = self.gradient.abs().flatten(), self.weight[self.mask & ~zero]
        found = {
            "value": self.value,
            "gradient_norm": self.gradient.norm(),
            "cosine": torch.tensor(torch.nan),
            "largest_weight": weights.amax() if len(weights) else weights.sum(),
            "ESS": weights.sum() ** 2 / weights.square().sum() / len(weights),
            "clipped_tokens": clipped.sum() / count,
            "zero_advantage_tokens": (self.mask & dead & zero).sum() / count,
            "masked_tokens": masked.double().mean(),
            "clipped_rows": clipped_rows.double().mean(),
            "zero_advantage_rows": (dead.all(-1) & ~clipped_rows & ~masked_rows).double().mean(),
            "masked_rows": masked_rows.double().mean(),
            "largest_1_percent": sizes.topk(-(-int(count) // 100))[0].sum() / sizes.sum(),
        }
        if reference is not None and reference.gradient.shape == self.gradient.shape:
            both = self.gradient.flatten(), reference.gradient.flatten()
            found["cosine"] = torch.cosine_similarity(*both, dim=0)
        known = {name: None if x.isnan() else x.item() for name, x in found.items()}
        return {"loss": self.label, "denominator": self.mode, **known}

    def largest(self, number: int, ids: Tensor, text: Callable[[list[int]], str]) -> list[dict[str, Any]]:
        """Return the tokens with the largest weights, each with the text that ends in it."""
        found, weight = [], torch.where(self.mask, self.weight, 0.0)
        largest, order = weight.flatten().topk(min(number, weight.numel()))
        for row, at in (divmod(i, weight.shape[-1]) for i in order[largest > 0].tolist()):
            before = ids[row, : at + 1][self.mask[row, : at + 1]].tolist()
            one: dict[str, Any] = {"loss": self.label, "row": row, "position": len(before) - 1}
            tensors = {"advantage": self.advantages, "ratio": self.ratios, "weight": weight}
            one |= {name: x[row, at].item() for name, x in tensors.items()}
            found.append(one | {"text": text(before[-SHOWN:])})
        return found


def measure(step: Step, choice: Choice, mode: str = "", label: str = "") -> Measured:
    """Compute a loss and its gradient on a step."""
    mode, x = mode_of(choice, mode), {name: tensor.detach() for name, tensor in step.whole.items()}
    leaves = [x[name].requires_grad_() for name in choice.loss.needs if name in LEAVES & x.keys()]
    loss = called(choice, x)
    value = reduced(loss, x, mode, step.about.counts)
    gradients = torch.autograd.grad(value, leaves, retain_graph=True)
    parts = (leaves, gradients, torch.autograd.grad(loss.sum(), leaves))
    now, gradient, slope = (
        one[0].detach() if "mask" in x else torch.stack([*one], -1).detach() for one in parts
    )
    one = torch.ones_like(now)
    paid = x["advantages"].expand_as(now) if "advantages" in choice.loss.needs else one
    olds = [name for name in ("old_logprobs", "rollout_logprobs") if name in x]
    olds.sort(key=lambda name: name not in choice.loss.needs)
    ratios = (now - x[olds[0]]).exp() if olds else one
    weight = torch.where(paid == 0, 0.0, slope.abs() / paid.abs())
    return Measured(
        label or choice.name, mode, value.detach(), x.get("mask", one.bool()), gradient, paid, weight, ratios
    )


def compare(step: Step, chosen: Mapping[str, Choice]) -> tuple[list[Measured], list[dict[str, Any]]]:
    """Measure the loss that ran and these, by their labels; one that cannot be measured has its `problem`."""
    measured, rows, reference = list[Measured](), list[dict[str, Any]](), None
    ran = [(f"{step.ran.name} (ran)", step.ran, step.about.mode)] if step.ran else []
    for label, choice, mode in [*ran, *((label, one, "") for label, one in chosen.items())]:
        try:
            measured.append(one := measure(step, choice, mode, label))
            reference = reference or (one if choice is step.ran else None)
            rows.append(one.numbers(reference))
        except Exception as error:  # the record lacks an input, or a user's own kernel fails
            problem = str(error) if isinstance(error, DataError) else f"{label}: {in_a_line(error)}"
            rows.append({"loss": label, "problem": problem})
    return measured, rows
