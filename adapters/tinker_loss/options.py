"""The options of `loss_fn` parsed and checked, and what of them Tinker cannot run."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import Field

from composer_plugins.adapters.tinker_loss.upstream import TARGETS
from composer_plugins.config import ComposerConfig
from composer_plugins.errors import Finding, enforce, error_of, unknown
from composer_plugins.frameworks.tinker import ENTRIES, TINKER
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.row import MODES
from composer_plugins.objective.asking import Asked, ask
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


class Parsed(NamedTuple):
    """What the options ask for, checked."""

    options: Options
    asked: Asked
    mode: str  # the denominator of the policy
    entries: Mapping[str, str]  # by input, the entry of loss_fn_inputs that has it


def parse(given: Mapping[str, Any]) -> Parsed:
    """What these options ask for; one ConfigError with all that is wrong."""
    asked, found = ask(TINKER, given, defaults={"hint_divergence": "sampled_token"}, model=Options)
    if asked is None:
        raise error_of(found)
    options = asked.config
    assert isinstance(options, Options)
    mode = asked.choice.mode if options.denominator is None else options.denominator
    found += _denominator(options, asked.choice, mode)
    found += _entries(options.entries)
    enforce(found)
    return Parsed(options, asked, mode, ENTRIES | options.entries)


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


def _denominator(options: Options, policy: Choice, mode: str) -> Iterator[Finding]:
    """Yield an error for a denominator that is not here, has no effect, or lacks its constant."""
    is_given = options.denominator is not None
    if is_given and not options.policy_weight:
        problem = "it has no effect, because policy_weight is 0"
        yield Finding("error", "denominator", problem, "remove it")
    elif options.policy_weight and mode not in KNOWN_MODES:
        none = f"policy {policy.name!r} has no denominator of its own"
        problem = f"it is {mode!r}" if mode or is_given else none
        problem += ", which needs the prompt of each completion" if mode == BY_PROMPT else ""
        remedy = f"set denominator to one of {', '.join(KNOWN_MODES)}"
        yield Finding("error", "denominator", problem, remedy)
    elif options.policy_weight and mode == NORM and options.max_length is None:
        problem = f"the loss is divided by a constant length ({mode}), and it is not set"
        yield Finding("error", "max_length", problem, "set it to the max_tokens of your SamplingParams")
    if options.max_length is not None and mode != NORM:
        problem = f"it has no effect, because the denominator is {mode!r}"
        yield Finding("error", "max_length", problem, f"remove it, or set denominator to {NORM!r}")
