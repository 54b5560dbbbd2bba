"""The options of `loss_fn` parsed and checked, and what of them Tinker cannot run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import Field

from composer_plugins.config import ComposerConfig, scaled_hint, unlikely
from composer_plugins.errors import unknown
from composer_plugins.findings import Finding, Findings, enforce
from composer_plugins.frameworks.tinker import DECIDED_ELSEWHERE, ENTRIES, TINKER
from composer_plugins.losses.row import MODES
from composer_plugins.objective.channels import Channels, chosen, decided_elsewhere
from composer_plugins.objective.objective import NORM

BY_PROMPT = "prompt-mean"
KNOWN_MODES = [mode for mode in MODES if mode != BY_PROMPT]


class Options(ComposerConfig):
    """The options of all frameworks, and those that only Tinker's call needs."""

    denominator: str | None = None  # an aggregation mode of the policy; None: the loss's own
    max_length: float | None = Field(None, gt=0, allow_inf_nan=False)
    calls_per_step: int = Field(1, ge=1)  # of forward_backward_custom before one optim_step
    entries: dict[str, str] = Field(default_factory=dict)  # other names of the entries of loss_fn_inputs


class Parsed(NamedTuple):
    """What the options ask for, checked."""

    options: Options
    channels: Channels
    mode: str  # the denominator of the policy
    entries: Mapping[str, str]  # by input, the entry of loss_fn_inputs that has it


def parse(given: Mapping[str, Any]) -> Parsed:
    """The channels that these options ask for; one ConfigError with all that is wrong."""
    wrong = Findings(decided_elsewhere(given, DECIDED_ELSEWHERE))
    rest = {name: x for name, x in given.items() if name not in DECIDED_ELSEWHERE}
    with wrong.collected():
        options = Options.parse({"hint_divergence": "sampled_token", **rest})
    enforce(wrong)
    assert isinstance(options, Options)
    channels, found = chosen(TINKER, options, given)
    mode = options.denominator or channels.policy.mode
    found += _denominator(options, channels, mode)
    for name in options.entries:
        if name not in ENTRIES:
            found.add(unknown(f"entries.{name}", name, ENTRIES, noun="input"))
    enforce([*found, *unlikely(channels.policy), *scaled_hint(options, channels.policy)])
    return Parsed(options, channels, mode, ENTRIES | options.entries)


def _denominator(options: Options, channels: Channels, mode: str) -> Iterator[Finding]:
    """Yield an error for a denominator that does not exist here, and for one that lacks its constant."""
    known = f"set denominator to one of {', '.join(KNOWN_MODES)}"
    if not options.policy_weight:
        if options.denominator:
            problem = "it has no effect, because policy_weight is 0"
            yield Finding("error", "denominator", problem, "remove it")
    elif mode == BY_PROMPT:
        yield Finding("error", "denominator", f"{mode!r} needs the prompt of each completion", known)
    elif not mode:
        problem = f"policy {channels.policy.name!r} has no denominator of its own"
        yield Finding("error", "denominator", problem, known)
    elif mode not in MODES:
        yield Finding("error", "denominator", f"it is {mode!r}", known)
    elif mode == NORM and options.max_length is None:
        problem = f"the loss is divided by a constant length ({mode}), and it is not set"
        yield Finding("error", "max_length", problem, "set it to the max_tokens of your SamplingParams")
    if options.max_length is not None and mode != NORM:
        problem = f"it has no effect, because the denominator is {mode!r}"
        yield Finding("error", "max_length", problem, f"remove it, or set denominator to {NORM!r}")
