"""The convention of `torch.nn.functional`: tensors by name, perhaps a `reduction`, and a loss.

With `reduction`, or with one number per token as its result, the function is a kernel, and all laws of
kernels are run on it. Otherwise it returns one number: the sum over the tokens, or a mean over tokens or
rows, which is found by calling it.
"""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from composer_plugins.calling_convention import Called, Convention, Counts, Function, scalar_problems
from composer_plugins.errors import ConfigError, did_you_mean, near
from composer_plugins.kernels.types import TokenLoss
from composer_plugins.losses.derived import another_than_none
from composer_plugins.testing.law import numbers
from composer_plugins.testing.report import Outcome

# The names of our inputs in functions of this convention.
ALIASES = {
    "logprobs": ("logprobs", "log_probs", "log_prob", "logps", "logp", "input"),
    "old_logprobs": ("old_logprobs", "old_log_probs", "old_log_prob", "old_logps", "old_logp"),
    "rollout_logprobs": ("rollout_logprobs", "rollout_log_probs", "rollout_log_prob"),
    "ref_logprobs": ("ref_logprobs", "ref_log_probs", "ref_log_prob", "ref_logps", "ref_logp"),
    "advantages": ("advantages", "advantage", "adv"),
    "mask": ("mask", "response_mask", "loss_mask", "action_mask", "completion_mask"),
}
REDUCTION = "reduction"
VALUES = (bool, int, float, str)  # defaults of a function's own parameters

# The law that this convention has in addition to the laws of one number or of a loss per token.
REDUCTIONS = (
    "reductions_are_those_of_the_unmasked_tokens",
    'With reduction="sum" or "mean" the function gives the sum or the mean of the unmasked tokens.',
    "loss.mean(), which counts padding",
)


def forward_of(function: Function) -> Function:
    """The forward of a module, which has the parameters; any other function itself."""
    return function.forward if isinstance(function, torch.nn.Module) else function


def signature_of(function: Function) -> inspect.Signature:
    """The signature of a function, or of the forward of a module."""
    return inspect.signature(forward_of(function))


def parameters_of(function: Function) -> tuple[dict[str, str], dict[str, Any]]:
    """Our names of a function's inputs with the function's, and its own parameters with their defaults.

    Its own parameters are numbers, booleans and strings, or None where the annotation is a number. Raises
    ConfigError for a parameter that nothing passes.
    """
    ours = {theirs: name for name, aliases in ALIASES.items() for theirs in aliases}
    found, own = dict[str, str](), dict[str, Any]()
    for name, parameter in signature_of(function).parameters.items():
        if name in ours:
            found[ours[name]] = name
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        ):
            problem = (
                f"the function takes {name!r}, which is not an input of this convention and has no default"
            )
            raise ConfigError("check", problem, f"take inputs among {', '.join(ours)}")
        elif name != REDUCTION and parameter.default is None and _may_be_a_tensor(parameter):
            remedy = f"take inputs among {', '.join(ours)}, or give a parameter of your own a value"
            if nearest := near(name, ours):
                remedy = did_you_mean(nearest)
            raise ConfigError("check", f"nothing passes {name!r} to the function: it stays None", remedy)
        elif name != REDUCTION and (
            isinstance(parameter.default, VALUES) or another_than_none(parameter) is not None
        ):
            own[name] = parameter.default
    if "logprobs" not in found:
        problem = "the function takes no log-probabilities of the policy"
        remedy = f"give it a parameter with the name {' or '.join(ALIASES['logprobs'])}"
        raise ConfigError("check", problem, remedy)
    return found, own


def _may_be_a_tensor(parameter: inspect.Parameter) -> bool:
    return parameter.annotation is parameter.empty or "Tensor" in str(parameter.annotation)


def given_to(names: Mapping[str, str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs by the function's names; of the unmasked tokens alone, where it takes no mask."""
    if "mask" in names:
        return {theirs: tensors[ours] for ours, theirs in names.items()}
    return {theirs: tensors[ours][tensors["mask"]] for ours, theirs in names.items()}


def kernel_of(function: Function, names: Mapping[str, str], own: Iterable[str]) -> Function:
    """The function as one of our kernels, with one loss per token; all but the policy is data.

    `own` are the names of its own parameters.
    """
    keywords = {REDUCTION: "none"} if REDUCTION in signature_of(function).parameters else {}

    called = forward_of(function)  # torch.fx does not trace a module that belongs to no other

    def kernel(*needed: Tensor, **params: Any) -> TokenLoss:
        pairs = zip(names.items(), needed, strict=True)
        given = {theirs: x if name == "logprobs" else x.detach() for (name, theirs), x in pairs}
        return TokenLoss(called(**given, **keywords, **params), {})

    kind = inspect.Parameter
    kernel.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            *(kind(name, kind.POSITIONAL_OR_KEYWORD) for name in names),
            *(signature_of(function).parameters[name].replace(kind=kind.KEYWORD_ONLY) for name in own),
        ]
    )
    for attribute in ("gradient", "over_batch", "exceptions"):
        if hasattr(function, attribute):
            setattr(kernel, attribute, getattr(function, attribute))
    # An object with __call__ and a functools.partial have no name of their own.
    kernel.__name__ = getattr(function, "__name__", type(function).__name__)
    kernel.__module__ = function.__module__
    return kernel


def reductions_outcome(function: Function, names: Mapping[str, str]) -> Outcome:
    """Whether "sum" and "mean" are the sum and the mean of what "none" gives at the unmasked tokens."""
    name, _, usual = REDUCTIONS
    cause = f"usual cause: {usual}"
    if REDUCTION not in signature_of(function).parameters:
        return Outcome(name, "not applicable", "the function takes no reduction")
    given = probe(names)
    wanted = function(**given_to(names, given), reduction="none").detach()
    tokens = int(given["mask"].sum())
    for reduction, divisor in (("sum", 1), ("mean", tokens)):
        try:
            found = function(**given_to(names, given), reduction=reduction).detach()
        except Exception as error:
            return Outcome(name, "failed", f"reduction={reduction!r}: {type(error).__name__}: {error}", cause)
        if found.dim() or not torch.isclose(found, wanted.sum() / divisor, rtol=1e-9):
            what = f"it gives {numbers(found)}, and the {reduction} over the {tokens} unmasked tokens is"
            problem = f"reduction={reduction!r}: {what} {float(wanted.sum() / divisor):.6g}"
            return Outcome(name, "failed", problem, cause)
    return Outcome(name, "passed")


def probe(names: Mapping[str, str]) -> dict[str, Tensor]:
    """Two rows of different lengths, with other numbers everywhere, and advantages of both signs."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: -torch.rand(2, 4, generator=generator, dtype=torch.float64) for name in names}
    if "advantages" in drawn:
        drawn["advantages"] = drawn["advantages"] * torch.tensor([-1.0, 1.0, -1.0, 1.0])
    mask = torch.tensor([[True, True, True, True], [True, False, False, False]])
    return drawn | {"mask": mask, "logprobs": drawn["logprobs"].requires_grad_()}


def specialised(function: Function) -> Convention:
    """The convention for one function: which inputs it takes, and what its one number is divided by."""
    names, parameters = parameters_of(function)
    takes_reduction = REDUCTION in signature_of(function).parameters
    whole = probe(names)
    try:
        result = function(**given_to(names, whole), **({REDUCTION: "none"} if takes_reduction else {}))
    except Exception:  # the first law calls it again and reports the error
        result = None
    per_token = isinstance(result, Tensor) and result.dim() > 0
    if per_token and "mask" in names and result.shape != whole["mask"].shape:
        per_token = False  # the first law reports the shape
    needs = (*(name for name in names if name != "mask"), "mask")
    own = replace(TORCH, needs=needs, names=dict(names), parameters=parameters)
    if per_token and "mask" in names:
        ordered = {name: names[name] for name in needs}
        return replace(
            own,
            kernel=lambda function: kernel_of(function, ordered, parameters),
            more=lambda function: (reductions_outcome(function, ordered),),
        )
    divides = "sum" if per_token else _divides(function, names, whole)

    def call(
        function: Function, tensors: Mapping[str, Tensor], counts: Counts, options: Mapping[str, Any]
    ) -> Called:
        """Call it with the tensors that it takes, and weigh a mean by what it is a mean over."""
        mask, reduction = tensors["mask"], {REDUCTION: "none"} if takes_reduction else {}
        loss = function(**given_to(names, tensors), **reduction, **options)
        loss = loss.sum() if per_token else loss
        problems = scalar_problems(loss)
        share = {"sum": 1.0, "tokens": int(mask.sum()) / counts.tokens, "rows": len(mask) / counts.rows}
        return Called(loss * share[divides], problems)

    return replace(own, call=call)


def _divides(function: Function, names: Mapping[str, str], whole: Mapping[str, Tensor]) -> str:
    """What the one number is: the sum of its rows, or a mean over tokens or rows; the sum if neither fits."""
    rows = [{name: x[i : i + 1] for name, x in whole.items()} for i in range(2)]
    try:
        total, *parts = [function(**given_to(names, one)).detach() for one in (whole, *rows)]
        if total.dim() or not total.is_floating_point():
            return "sum"
    except Exception:  # the first law calls it again and reports the error
        return "sum"
    tokens = [int(one["mask"].sum()) / int(whole["mask"].sum()) for one in rows]
    for divides, shares in (("sum", [1.0, 1.0]), ("tokens", tokens), ("rows", [0.5, 0.5])):
        if torch.isclose(sum(p * s for p, s in zip(parts, shares, strict=True)), total, rtol=1e-9):
            return divides
    return "tokens"


TORCH = Convention(
    framework="torch",
    signature='fn(logprobs, old_logprobs, advantages, mask, reduction="mean")',
    returns="a tensor: one loss per token, or one number, the sum or the mean of the unmasked tokens",
    specialise=specialised,
)
