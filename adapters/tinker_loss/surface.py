"""The options of `loss_fn` parsed and checked, and what of them Tinker cannot run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import Field

from composer_plugins.adapters.tinker_loss.upstream import TARGETS
from composer_plugins.config import ComposerConfig, scaled_hint, unknown_option, unlikely, what_to_set
from composer_plugins.errors import ConfigError, near, unknown, with_place
from composer_plugins.findings import Finding, Findings, enforce
from composer_plugins.frameworks.tinker import DECIDED_ELSEWHERE, ENTRIES, TINKER
from composer_plugins.losses.by_token import drawn
from composer_plugins.losses.calling import call
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import MODES, of_kind
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


DEFAULT_POLICY: str = Options.model_fields["policy"].default
KNOWN = [name for name in Options.model_fields if name not in DECIDED_ELSEWHERE]


class Parsed(NamedTuple):
    """What the options ask for, checked."""

    options: Options
    channels: Channels
    mode: str  # the denominator of the policy
    entries: Mapping[str, str]  # by input, the entry of loss_fn_inputs that has it


def parse(given: Mapping[str, Any]) -> Parsed:
    """The channels that these options ask for; one ConfigError with all that is wrong."""
    policy = of_kind(losses(), "policy").get(str(given.get("policy")).partition("@")[0])
    found = Findings()
    for name in given:
        of_policy = policy is not None and (name in policy.parameters or what_to_set(policy, name))
        if name in DECIDED_ELSEWHERE and not of_policy:
            found += decided_elsewhere([name], DECIDED_ELSEWHERE)
        elif name not in KNOWN:
            found.add(unknown_option(name, KNOWN, given.get("policy"), TINKER))
    rest = {name: x for name, x in given.items() if name in KNOWN}
    rest = _sound(rest, [name for name in given if name not in Options.model_fields])
    with found.collected():
        _parsed(rest)
    rest = _sound(rest, [one.key.partition(".")[0] for one in found])
    options = _parsed(rest)
    channels, more = chosen(TINKER, options, rest)
    found += more
    mode = options.denominator or channels.policy.mode
    found += _denominator(options, channels, mode)
    found += _entries(options.entries)
    for choice in filter(None, (channels.policy, channels.hint, channels.replay)):
        found += _result(choice)
    enforce([*found, *unlikely(channels.policy), *scaled_hint(options, channels.policy)])
    return Parsed(options, channels, mode, ENTRIES | options.entries)


def _sound(given: Mapping[str, Any], wrong: Sequence[str]) -> dict[str, Any]:
    """The options without those that one of the wrong keys bears on, so that the others are examined too."""
    groups = {name.partition("_")[0] for key in wrong for name in (key, *near(key, KNOWN))}
    kept = {name: x for name, x in given.items() if name.partition("_")[0] not in groups}
    if groups and kept.get("policy_weight") == 0:  # the weight of another channel may be the wrong option
        del kept["policy_weight"]
    if "policy" in groups:
        kept.pop("max_length", None)
    return kept


def _parsed(given: Mapping[str, Any]) -> Options:
    options = Options.parse({"hint_divergence": "sampled_token", **given})
    assert isinstance(options, Options)
    return options


def _entries(entries: Mapping[str, str]) -> Iterator[Finding]:
    """Yield an error for an input that does not exist, and for an entry that would be read as two inputs."""
    readers = {TARGETS: "the targets"}
    for name, entry in {**ENTRIES, **entries}.items():
        if name not in ENTRIES:
            yield Finding.from_error(unknown(f"entries.{name}", name, ENTRIES, noun="input"))
        elif (other := readers.setdefault(entry, name)) != name:
            key = name if name in entries else other
            problem = f"{entry!r} would be read as {other} and as {name}"
            yield Finding("error", f"entries.{key}", problem, "name an entry that no other input has")


def _result(choice: Choice) -> Iterator[Finding]:
    """Yield an error where a function of a user's returns what is no loss, on drawn log-probabilities."""
    if not (choice.is_third_party and TINKER.runs(choice.loss)):
        return
    tensors = drawn(choice)
    if choice.loss.kind == "preference":
        tensors = {name: x[:, 0] for name, x in tensors.items()}
    first = tensors[choice.loss.needs[0]]
    first.requires_grad_(first.is_floating_point())
    try:
        call(choice, tensors)
    except ConfigError as error:
        yield Finding.from_error(error)
    except Exception as error:
        problem = f"{choice.name!r} raises an error for drawn log-probabilities: {with_place(error)}"
        yield Finding("warning", choice.option, problem, "make sure that it runs on a CPU: loss.count(data)")


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
