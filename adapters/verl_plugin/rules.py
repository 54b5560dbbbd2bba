"""Parse the options under `algorithm.composer`, and refuse those that verl cannot provide."""

from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

from composer_plugins.adapters.verl_plugin.upstream import (
    DEFAULT_MODE,
    FORCED_MODES,
    MODES,
    NAMES_HERE,
    NOT_SUPPLIED,
    OPTION_TABLES,
    OPTIONS,
    Key,
    Option,
)
from composer_plugins.config import ComposerConfig, unlikely
from composer_plugins.diagnosis import Finding, enforce, log_info
from composer_plugins.errors import ConfigError, caught, not_available, raise_all, unknown
from composer_plugins.frameworks.verl import VERL
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.derived import row_of_import_path
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import REQUIRED, Loss, of_kind

Value = TypeVar("Value")
LossKind = Literal["policy", "advantage"]
NODE = "algorithm.composer"
TRAINER = "composer_sync"
CHANNELS = ("hint", "replay")
SAMPLED = "or set hint_divergence='sampled_token'"
CORRECTED = "verl corrects for the rollout engine itself, by algorithm.rollout_correction"
NOT_AVAILABLE = {
    "old_policy": "verl keeps old_log_probs itself",
    "rollout_correction": CORRECTED,
    "rollout_correction_params": CORRECTED,
    "hint_ema_rate": "verl keeps no average of the policy's weights",
    "replay_temperature": "verl computes every log-probability at rollout.temperature",
}

_delivered = ContextVar("delivered", default=False)
log_once = cache(log_info)


@contextmanager
def during(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Show `value` to our functions in verl's registries while composer_sync calls verl."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def channels_delivered() -> AbstractContextManager[None]:
    """Let our functions in verl's registries accept hint and replay weights, under composer_sync."""
    return during(_delivered, True)


class Channels(NamedTuple):
    """The hint channel and the replay channel of a config; None for a channel without a weight."""

    config: ComposerConfig
    hint: Choice | None
    replay: Choice | None

    @property
    def hint_is_loss(self) -> bool:
        """Whether the hint is a term of the loss, and not a part of the advantages."""
        return self.hint is not None and self.config.hint_estimator != "advantage"

    @property
    def compares_distributions(self) -> bool:
        """Whether the hint needs more of the teacher than the sampled token's log-probability."""
        return self.hint_is_loss and self.hint is not None and "student_logits" in self.hint.loss.needs

    @property
    def uses_reference(self) -> bool:
        """Whether a channel needs verl's reference policy: as the teacher, or for a preference loss."""
        frozen = self.hint is not None and self.config.hint_teacher == "base"
        return frozen or (self.replay is not None and "ref_chosen" in self.replay.loss.needs)


def node_of(config: Any) -> dict[str, Any]:
    """Return the `composer` node of a DictConfig, dataclass or dict of verl's; {} if it has none."""
    from omegaconf import OmegaConf  # here, so that importing this module does not need verl

    node = config.get("composer") if hasattr(config, "get") else getattr(config, "composer", None)
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if node is not None and not isinstance(node, Mapping):
        raise ConfigError(NODE, f"it is {node!r}", "write a table of options")
    return {str(key): value for key, value in (node or {}).items()}


def name_here(kind: str, name: str) -> str | None:
    """Return the row of a loss that has only verl's name for it, "vanilla"; None for every other name."""
    known = of_kind(losses(), "policy" if kind == "policy" else "advantage")
    return None if name in known else NAMES_HERE[kind].get(name)


def is_ours(name: str) -> bool:
    """Whether a registered name is `composer` or `composer/<name>`."""
    return name == "composer" or name.startswith("composer/")


def loss_in(name: str) -> str | None:
    """Return the loss in `composer/<name>`; None if `algorithm.composer` says which it is."""
    return name.removeprefix("composer/") if name.startswith("composer/") else None


def parse(node: Mapping[str, Any], *, in_driver: bool = True) -> ComposerConfig:
    """Return the options as the one config model, or raise ConfigError for one that verl cannot provide.

    The driver does not see the actor's options: with policy=dro, beta may be `policy_loss.dro_beta`. So a
    parameter that is missing is an error only in the actor's workers, if an option of verl's can set it.
    """
    wrong = [not_available(option, reason) for option, reason in NOT_AVAILABLE.items() if option in node]
    for kind in NAMES_HERE:
        if (row := name_here(kind, str(node.get(kind)))) is not None:
            wrong.append(ConfigError(kind, f"{node[kind]!r} is verl's own name", f"set {row}, its name here"))
    missing = _parameters_of_the_workers(node) if in_driver else {}
    params = dict(node.get("policy_params") or {}) if missing else {}
    options = {**node, "policy_params": {**params, **missing}} if missing else node
    try:
        config = ComposerConfig.parse(options)
    except ConfigError as error:
        wrong.append(error)
    raise_all(wrong)
    return config.model_copy(update={"policy_params": params}) if missing else config


def _row(node: Mapping[str, Any], kind: LossKind, name: str | None) -> Loss | None:
    """Return the row of the loss that runs; None for an unknown one, which `parse_choice` refuses."""
    named = name or node.get(kind, ComposerConfig.model_fields[kind].default)
    if not isinstance(named, str):
        return None
    if ":" in named:
        with suppress(ConfigError):
            return row_of_import_path(named, kind, kind, losses())
    return of_kind(losses(), kind).get(named.partition("@")[0])


def _parameter(option: Option, loss: Loss) -> str | None:
    """Return the parameter of the loss that an option of verl sets; None if it has no such parameter."""
    for parameter, accepted in option.parameters.items():
        if parameter in loss.parameters and (not accepted or loss.name in accepted):
            return parameter
    return None


def options_of(loss: Loss, kind: LossKind) -> set[str]:
    """Return the keys of verl's options that set a parameter of this loss."""
    return {option.key for option in OPTIONS[kind] if _parameter(option, loss) is not None}


def with_options(
    node: Mapping[str, Any], kind: LossKind, name: str | None, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the table `composer` with verl's own options among the parameters of its policy or advantage.

    `given` has the options of verl's that are not at their default (`upstream.given_options`). Raises
    ConfigError, at verl's key, for one that the loss does not have, and for one that the table contradicts.
    """
    loss, key = _row(node, kind, name), f"{kind}_params"
    params = node.get(key) or {}
    if not given or loss is None or not isinstance(params, Mapping):
        return dict(node)
    added, wrong = dict[str, Any](), list[ConfigError]()
    for option in OPTIONS[kind]:
        if option.key not in given or option.without_effect or loss.name in option.fulfilled_by:
            continue
        value, at = given[option.key], f"{OPTION_TABLES[kind]}.{option.key}"
        parameter = _parameter(option, loss)
        if parameter is None:
            problem = f"it is {value!r}, and it has no effect on the {kind} {loss.name!r}, which has no such "
            wrong.append(ConfigError(at, f"{problem}parameter", _instead(option, loss, key)))
            continue
        if option.values and (not isinstance(value, Hashable) or value not in option.values):
            known = " or ".join(map(repr, (option.default, *option.values)))
            wrong.append(ConfigError(at, f"it is {value!r}", f"set {known}"))
            continue
        ours = option.values[value] if option.values else value
        default = loss.defaults.get(parameter, REQUIRED)
        if parameter in params and params[parameter] != ours:
            problem = f"it is {value!r}, which sets {parameter} to {ours!r}, and {NODE}.{key}.{parameter} is "
            wrong.append(ConfigError(at, f"{problem}{params[parameter]!r}", "set one of them"))
        wrong += caught(partial(loss.parameters[parameter].check, at, ours, default))
        added[parameter] = ours
    raise_all(wrong)
    return {**node, key: {**params, **added}}


def _instead(option: Option, loss: Loss, key: str) -> str:
    """Return the remedy for an option of verl's that a loss does not have."""
    has = ", ".join(loss.parameters)
    ours = f"set {NODE}.{key}, whose keys are {has}" if has else "name another loss: it has no parameters"
    return f"leave it at verl's default, {option.default!r}, or {option.instead or ours}"


def without_effect(kind: LossKind, given: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a warning for each option of verl's that is set and that verl's own losses do not read either."""
    for option in OPTIONS[kind]:
        if option.key in given and option.without_effect:
            problem = f"it is {given[option.key]!r}, and it has no effect: {option.without_effect}"
            yield Finding("warning", f"{OPTION_TABLES[kind]}.{option.key}", problem, option.instead)


def _parameters_of_the_workers(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the required parameters of the policy that are missing and that verl sets."""
    loss, params = _row(node, "policy", None), node.get("policy_params") or {}
    if loss is None or not isinstance(params, Mapping):
        return {}
    set_by_verl = {_parameter(option, loss) for option in OPTIONS["policy"]} - {None, *params}
    return {
        name: loss.parameters[name].example
        for name in set_by_verl
        if name is not None and loss.defaults[name] is REQUIRED
    }


def parse_choice(node: Mapping[str, Any], kind: LossKind, name: str | None) -> tuple[ComposerConfig, Choice]:
    """Return the config and its loss of this kind. `name` is the loss in a registered name, if it has one."""
    if name is not None and str(node.get(kind, name)).partition("@")[0] != name:
        remedy = f"remove it, or write composer in place of composer/{name}"
        raise ConfigError(kind, f"{node[kind]!r} contradicts the name composer/{name}", remedy)
    config = parse(node if name is None else {kind: name, **node}, in_driver=kind == "advantage")
    choice = config.choose_policy() if kind == "policy" else config.choose_advantage()
    for need in choice.loss.needs if kind == "advantage" else ():
        if need in NOT_SUPPLIED:
            why, remedy = NOT_SUPPLIED[need]
            raise ConfigError(kind, f"{choice.name!r} needs {need}, and {why}", remedy)
    VERL.require(choice)
    return config, choice


def parse_with_options(
    node: Mapping[str, Any], kind: LossKind, name: str | None, given: Mapping[str, Any], table: str = NODE
) -> tuple[ComposerConfig, Choice]:
    """Do what `parse_choice` does, with verl's own options. The keys of errors begin at the config's root."""
    wrong = list[ConfigError]()
    try:
        node = with_options(node, kind, name, given)
    except ConfigError as error:
        wrong.append(error)
    try:
        chosen = parse_choice(node, kind, name)
    except ConfigError as error:
        wrong.append(error.under(table))
    raise_all(wrong)
    return chosen


def parse_registered(
    node: Mapping[str, Any],
    kind: LossKind,
    name: str | None,
    mode: str = "",
    given: Mapping[str, Any] | None = None,
) -> tuple[ComposerConfig, Choice]:
    """Do what `parse_choice` does, for an estimator or a loss that verl calls with these options of its own.

    Under composer_sync every finding is enforced already. Otherwise those that can be seen here are. The log
    says once in each process which values act, where verl's default for an option is not the loss's.
    """
    config, choice = parse_with_options(node, kind, name, given or {})
    reduced = f", {FORCED_MODES.get(choice.name, mode)}" if mode else ""
    log_once(f"{kind} {choice.described}{reduced}")
    if not _delivered.get():
        inert = [one.under(NODE) for one in config.without_effect(config.model_fields_set)]
        findings = [*undelivered(config, delivers=False), *inert, *reduction(choice, mode)]
        enforce([*findings, *unlikely_value(choice, kind, given or {}), *without_effect(kind, given or {})])
    return config, choice


def parse_channels(node: Mapping[str, Any]) -> Channels:
    """Return the channels as composer_sync delivers them."""
    found = channels_of(parse(node))
    chosen = [choice for choice in (found.hint, found.replay) if choice is not None]
    wrong = [one for choice in chosen for one in caught(partial(VERL.require, choice))]
    raise_all([*wrong, *caught(partial(_check_hint, found))])
    return found


def channels_of(config: ComposerConfig) -> Channels:
    """Return the channels that have a weight, not checked."""
    hint = config.choose_hint() if config.hint_weight else None
    return Channels(config, hint, config.choose_replay() if config.replay_weight else None)


def undelivered(config: ComposerConfig, *, delivers: bool) -> Iterator[Finding]:
    """Yield the weights that have no effect. `delivers` says whether the trainer is composer_sync."""
    channels = [channel for channel in CHANNELS if getattr(config, f"{channel}_weight")]
    for channel in channels if not delivers else ():
        weight = f"{channel}_weight"
        problem = f"it is {getattr(config, weight):g}, and only the trainer {TRAINER} has a {channel} channel"
        remedy = (
            f"set {Key.TRAINER_MODE}={TRAINER} (verl 0.9 or later, with {Key.USE_V1}=True), or {weight}=0"
        )
        yield Finding("error", f"{NODE}.{weight}", problem, remedy)
    if config.policy_weight != 1 and not (delivers and channels):
        problem = f"it is {config.policy_weight:g}, and there is no other channel to weigh the policy against"
        remedy = f"remove it, or set a hint_weight or replay_weight, with {Key.TRAINER_MODE}={TRAINER}"
        yield Finding("error", f"{NODE}.policy_weight", problem, remedy)


def compared_with_none(choice: Choice, *, is_zero: bool) -> str:
    """Say what an advantage that compares the rollouts of a prompt is where each prompt has one rollout."""
    what = "is 0" if is_zero else "comes from its own reward alone, without a baseline"
    return f"{choice.name!r} compares a rollout with the others of its prompt, so that every advantage {what}"


def group_of_one(choice: Choice, group_size: Any) -> Iterator[Finding]:
    """Yield a warning where an advantage that compares the rollouts of a prompt gets one of each prompt."""
    if group_size != 1 or "group_ids" not in choice.loss.needs:
        return
    import torch  # which the doctor's own process does not need, nor the next one, which loads it

    from composer_plugins.losses.calling import call

    rewards = torch.tensor([1.0, 2.0])
    alone = {"rewards": rewards, "group_ids": torch.arange(2), "lengths": torch.ones(2)}
    try:
        problem = f"it is 1, and {compared_with_none(choice, is_zero=not call(choice, alone).any())}"
    except Exception:  # a function of the user's own that needs other inputs
        return
    remedy = "set 2 or more (GRPO: 8, for example), or an advantage without groups, as reinforce_pp"
    yield Finding("warning", Key.GROUP_SIZE, problem, remedy)


def unknown_mode(mode: str) -> Finding:
    """Return the error for a loss_agg_mode that verl does not have."""
    return Finding.from_error(unknown(Key.AGG_MODE, mode, MODES, noun="mode"))


def reduction(choice: Choice, mode: str) -> Iterator[Finding]:
    """Yield an unknown loss_agg_mode, and a warning where it is not the reduction that belongs to the loss.

    That is the paper's reduction, or the dialect's where it has one. A dialect of verl with verl's default
    mode (`grpo@verl`) has no reduction of its own: any loss_agg_mode is right. One that verl itself gives a
    fixed reduction keeps it, and the other terms of the loss follow loss_agg_mode.
    """
    if mode and mode not in MODES:
        yield unknown_mode(mode)
        return
    if (forced := FORCED_MODES.get(choice.name)) and mode not in ("", DEFAULT_MODE, forced):
        problem = f"it is {mode!r}, and {choice.name!r} is always reduced by {forced!r}, as in verl"
        remedy = f"set it to {forced!r}, or leave it if it is meant for the other terms of the loss"
        yield Finding("warning", Key.AGG_MODE, problem, remedy)
    own = choice.dialect.mode if choice.dialect else choice.loss.mode
    if choice.upstream == "verl" and own == DEFAULT_MODE:
        own = ""
    if own and mode and mode != own:
        problem, remedy = f"it is {mode!r}, and {choice.name!r} is reduced by {own!r}", f"set it to {own!r}"
        if own not in MODES:
            remedy = f"choose another loss: verl does not have {own!r}"
        theirs = f"{choice.loss.name}@verl"
        modes = [dialect.mode for dialect in choice.loss.dialects if dialect.upstream == "verl"]
        if modes and modes[0] in ("", DEFAULT_MODE) and theirs not in FORCED_MODES:
            remedy += f", or name {theirs}, which is reduced as verl is set to"
        yield Finding("warning", Key.AGG_MODE, problem, remedy)


def unlikely_value(choice: Choice, kind: LossKind, given: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a warning for a value that hardly anyone intends, at verl's option if one of these sets it."""
    keys = {name: f"{NODE}.{choice.params_option}.{name}" for name in choice.loss.parameters}
    for option in OPTIONS[kind]:
        if option.key in given and (name := _parameter(option, choice.loss)):
            keys[name] = f"{OPTION_TABLES[kind]}.{option.key}"
    yield from unlikely(choice, keys)


def _check_hint(found: Channels) -> None:
    config, hint = found.config, found.hint
    if hint is None:
        return
    if config.hint_teacher == "ema":
        problem = "'ema' is not available here, because verl keeps no average of the policy's weights"
        remedy = "set base (the reference policy) or live (the policy itself)"
        raise ConfigError("hint_teacher", problem, remedy)
    if found.compares_distributions:
        if config.hint_top_k is None:
            problem = f"it is not set, and {hint.name!r} compares distributions, of which only the teacher's "
            problem += "largest entries are sent between processes"
            remedy = "set it (SDPO: 100), or set hint_divergence='sampled_token'"
            raise ConfigError("hint_top_k", problem, remedy)
        if "teacher_logits" in hint.loss.needs:
            # It loads torch, which the doctor's own process does not need.
            from composer_plugins.losses.calling import check_top_k

            entries = "entries that are sent: hint_top_k, and one for the rest"
            check_top_k(hint, config.hint_top_k + 1, entries)
        if (temperature := hint.value("temperature")) not in (None, 1):
            problem = f"it is {temperature:g}, and verl's logits are at rollout.temperature already"
            raise ConfigError("hint_params.temperature", problem, "set it to 1")
    elif config.hint_top_k is not None:
        what = repr(hint.name) if found.hint_is_loss else "hint_estimator='advantage'"
        raise ConfigError("hint_top_k", f"{what} uses the sampled token alone", "remove it")
