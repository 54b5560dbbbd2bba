"""What a user of verl writes, parsed once: `algorithm.composer`, and verl's own options."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from functools import cache
from typing import Any, Literal, NamedTuple

from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.config import ADVANTAGE_OPTIONS, ComposerConfig
from composer_plugins.errors import ConfigError, Finding, Findings, enforce, log_info
from composer_plugins.frameworks import verl
from composer_plugins.frameworks.contract import NOTHING
from composer_plugins.frameworks.verl import VERL, Key
from composer_plugins.losses.choosing import Choice
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Kind, of_kind
from composer_plugins.objective import registered
from composer_plugins.objective.asking import Asked, ask
from composer_plugins.objective.options import described, for_a_shell
from composer_plugins.objective.rules import denominator_of_another

LossKind = Literal["policy", "advantage"]
NODE = "algorithm.composer"
TRAINER = "composer_sync"
# The copy of NODE that the actor's workers read, and what makes it.
WORKER_NODE = f"{Key.POLICY_LOSS}.composer"
TARGET = "composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig"
WORKER_OVERRIDES = f"{Key.LOSS_TARGET}={TARGET} ++{WORKER_NODE}='${{{NODE}}}'"
POLICY_OPTIONS = ("policy", "policy_params", "policy_weight")
DEFAULTS = ComposerConfig.model_validate({})
CHANNELS = ("hint", "replay")
SAMPLED = "or set hint_divergence='sampled_token'"
# The keys `{uid}_{session}_{output}` of the batch's rows, while composer_sync calls verl.
BATCH_KEYS = ContextVar[Sequence[str] | None]("BATCH_KEYS", default=None)
# By input of a policy loss, what only composer_sync passes to it of a micro-batch (`from_batch`).
INPUTS = ContextVar[Mapping[str, Any]]("INPUTS", default=NOTHING)
log_once = cache(log_info)


@contextmanager
def under_composer_sync(keys: Sequence[str] = (), inputs: Mapping[str, Any] = NOTHING) -> Iterator[None]:
    """Let our functions in verl's registries accept hint and replay weights, and see keys and `inputs`."""
    tokens = BATCH_KEYS.set(keys), INPUTS.set(inputs)
    try:
        yield
    finally:
        BATCH_KEYS.reset(tokens[0])
        INPUTS.reset(tokens[1])


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


def is_known(name: str, kind: Kind) -> bool:
    """Whether a registered name is ours and its loss exists."""
    named = registered.loss_in(name)
    return registered.is_ours(name) and (named is None or named in of_kind(losses(), kind))


def check_name() -> None:
    """Raise ConfigError where verl has another package's function under our name `composer`.

    verl replaces a policy loss that is registered a second time, and does not say so.
    """
    for key, registry in ((Key.LOSS_MODE, "losses"), (Key.ESTIMATOR, "estimators")):
        function = upstream.registry(registry).get("composer")
        module = str(getattr(function, "__module__", None))
        if function is not None and module.partition(".")[0] != "composer_plugins":
            place = f"{module}.{getattr(function, '__qualname__', function)}"
            problem = f"'composer' is {place} in verl's registry, and not the function of composer-plugins"
            raise ConfigError(key, problem, "register that one under another name, or do not load it")


def asked(
    node: Mapping[str, Any],
    kind: LossKind,
    name: str | None,
    moved: Mapping[str, Any] = NOTHING,
    table: str = NODE,
) -> tuple[Asked | None, Findings]:
    """Return what an estimator or a loss is asked for. `name` is the loss in its registered name, if any.

    `moved` has verl's options of its own losses that are not at their default (`upstream.moved`): the error
    for them has what to paste, also what makes our options known to the actor's workers. `table` is where
    `node` stands, so that the keys of findings begin at the config's root.
    """
    more = f" {WORKER_OVERRIDES}" if kind == "policy" and not node else ""
    write = for_a_shell(f"++{NODE}")  # hydra then takes it whether the key is there or not
    return ask(
        VERL, node, moved, kind=kind, name=name, at=table, write=lambda key, value: write(key, value) + more
    )


def required(
    node: Mapping[str, Any], kind: LossKind, name: str | None = None, moved: Mapping[str, Any] = NOTHING
) -> Asked:
    """Do what `asked` does, and raise ConfigError for what is wrong with the options."""
    found, findings = asked(node, kind, name, moved)
    findings.refuse()
    assert found is not None
    return found


def asked_in_a_run(
    node: Mapping[str, Any],
    kind: LossKind,
    name: str | None,
    mode: str = "",
    moved: Mapping[str, Any] = NOTHING,
) -> Asked:
    """Do what `asked` does, for an estimator or a loss that verl calls, and enforce what is found.

    Under composer_sync every finding is enforced already. Otherwise those that can be seen here are. The log
    says once in each process which values train, and that verl's own options for them do not.
    """
    found, findings = asked(node, kind, name, moved)
    if kind == "policy":
        findings += unnamed("composer" if name is None else name, node)
    findings.refuse()
    assert found is not None
    choice = found.choice
    log_once(described(VERL, choice, mode and verl.FORCED_MODES.get(choice.name, mode)))
    if BATCH_KEYS.get() is None:
        without = reference(choice, delivers=False)
        enforce([*undelivered(found.config), *findings, *without, *reduction(choice, mode)])
    return found


def unnamed(loss: str, seen: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield an error where the table of the actor's workers, `seen`, does not say which loss `composer` is.

    Another package may have that name too.
    """
    if loss == "composer" and not seen:
        problem = "it is not set where the loss runs, so nothing says which loss 'composer' is"
        remedy = f"set {NODE}.policy, and {WORKER_OVERRIDES}; or name composer/grpo, or another loss"
        yield Finding("error", WORKER_NODE, problem, remedy)


def different_in_the_workers(
    config: ComposerConfig, node: Mapping[str, Any], loss: str, seen: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield what our policy loss does not get as the driver has it, in the actor's workers.

    `node` has the driver's options, which `config` is made of, and `seen` those of the workers. `loss` is the
    name of the policy loss.
    """
    if not registered.is_ours(loss):
        return
    if nameless := [*unnamed(loss, seen)]:
        yield from nameless
        return
    named = registered.loss_in(loss)
    theirs = ({"policy": named} if named else {}) | dict(seen)
    for option in sorted(node.keys() & set(POLICY_OPTIONS)):
        value, worker = getattr(config, option), theirs.get(option, getattr(DEFAULTS, option))
        if worker != value:
            problem = f"it is {value!r}, and the actor's workers, which run {loss!r}, have {worker!r}"
            yield Finding("error", f"{NODE}.{option}", problem, f"set {WORKER_OVERRIDES}")


def without_effect(config: ComposerConfig, kind: LossKind, name: str) -> Iterator[Finding]:
    """Yield an error where an option of our policy or advantage is set and verl runs its own, `name`."""
    options, key, workers = POLICY_OPTIONS, Key.LOSS_MODE, f" {WORKER_OVERRIDES}"
    if kind == "advantage":
        options, key, workers = ADVANTAGE_OPTIONS, Key.ESTIMATOR, ""
    given = [one for one in options if one in config.model_fields_set]
    if given and not registered.is_ours(name):
        problem = f"it is set, and it has no effect, because {key} is {name!r}"
        yield Finding("error", f"{NODE}.{given[0]}", problem, f"set {key}=composer{workers}, or remove it")


class AskedOnce:
    """The options of a registered estimator or loss, read at its first call and after a change only."""

    def __init__(self, kind: LossKind, name: str | None) -> None:
        self.kind, self.name = kind, name
        self.state: Any = None  # the values that were read last
        self.asked: Asked | None = None

    def __call__(self, config: Any, table: Any, mode: str = "") -> tuple[Asked, bool]:
        """Return what `config`, with verl's options, and its `table` with ours ask for; and if it is new."""
        # An estimator runs in the driver, which has the whole config.
        workers = upstream.beside(config, Key.POLICY_LOSS) if self.kind == "advantage" else None
        state = mode, values_of(config), workers and values_of(workers)
        if is_new := self.asked is None or self.state != state:
            node, moved = node_of(table), upstream.moved(self.kind, config)
            self.asked = asked_in_a_run(node, self.kind, self.name, mode, moved)
            if workers is not None:
                ours, loss = self.asked.config, str(workers.get("loss_mode"))
                enforce(without_effect(ours, "policy", loss))
                enforce(different_in_the_workers(ours, node, loss, node_of(workers)))
            self.state = state
        assert self.asked is not None
        return self.asked, is_new


def values_of(config: Any) -> Any:
    """Return a config's values, which are unequal to later ones after an option has been changed.

    verl's dataclasses are frozen, except for sizes of batches. What it changes in place at each micro-batch
    is the table `global_batch_info`, which stays one object and holds no option. Equality begins with
    identity, so that no option is read to compare such a dataclass with itself.
    """
    from omegaconf import OmegaConf  # as in node_of

    if OmegaConf.is_config(config):
        return OmegaConf.to_container(config, resolve=True)
    values = dict(config if isinstance(config, dict) else getattr(config, "__dict__", {}))
    table = getattr(values.get("policy_loss"), "__dict__", None)
    if table is not None:  # ours stand in a dict, which may be changed in place
        values["policy_loss"] = {**table, "composer": deepcopy(table.get("composer"))}
    return values


def channels_of_node(node: Mapping[str, Any]) -> Channels:
    """Return the channels as composer_sync delivers them."""
    return delivered(required(node, "policy"))


def undelivered(config: ComposerConfig) -> Iterator[Finding]:
    """Yield the weights of channels in another trainer than composer_sync, where they have no effect."""
    for channel in CHANNELS:
        if weight := getattr(config, f"{channel}_weight"):
            problem = f"it is {weight:g}, and only the trainer {TRAINER} has a {channel} channel"
            remedy = f"set {Key.TRAINER_MODE}={TRAINER} (verl 0.9 or later, with {Key.USE_V1}=True), "
            yield Finding("error", f"{NODE}.{channel}_weight", problem, f"{remedy}or {channel}_weight=0")


def from_batch(choice: Choice) -> list[str]:
    """Return the inputs that only composer_sync has. A dialect of verl is called as verl calls its own."""
    named = () if choice.upstream == VERL.name else (*choice.loss.needs, *choice.optional)
    return [name for name in verl.BATCH_INPUTS if name in named]


def reference(choice: Choice, *, delivers: bool, loaded: bool = False, kl: str = "") -> Iterator[Finding]:
    """Yield an error for a policy loss without its ref_logprobs, or a warning where verl adds a KL too.

    `loaded` says whether verl has a reference policy, and `kl` is the key of a KL of its own.
    """
    leave_out = f"leave the KL out of the loss, and set {Key.USE_KL_LOSS}=True and {Key.KL_COEF}"
    load = f"{Key.USE_KL_LOSS}=True {Key.KL_COEF}=0"
    needs = f"{choice.name!r} needs ref_logprobs"
    if "ref_logprobs" in choice.loss.needs and not delivers:
        problem = f"{needs}, which only the trainer {TRAINER} passes to a policy loss"
        remedy = f"set {Key.TRAINER_MODE}={TRAINER} (verl 0.9 or later, with {Key.USE_V1}=True) and {load}"
        yield Finding("error", f"{NODE}.policy", problem, f"{remedy}; or {leave_out}")
    elif "ref_logprobs" in choice.loss.needs and not loaded:
        yield Finding(
            "error", f"{NODE}.policy", f"{needs}, and this run has no reference policy", f"set {load}"
        )
    elif delivers and kl and "ref_logprobs" in from_batch(choice):
        problem = f"verl adds its own KL, and {choice.name!r} takes ref_logprobs, so a KL in it counts too"
        yield Finding("warning", kl, problem, f"set {kl}=0, or leave the KL out of the loss")


def reduction(choice: Choice, mode: str) -> Iterator[Finding]:
    """Yield a warning where loss_agg_mode is not the reduction that belongs to the loss.

    One that verl itself gives a fixed reduction keeps it, and the other terms of the loss follow
    loss_agg_mode. An unknown mode is left to verl.
    """
    if mode not in verl.MODES:
        return
    if (forced := verl.FORCED_MODES.get(choice.name)) and mode not in (verl.DEFAULT_MODE, forced):
        problem = f"it is {mode!r}, and {choice.name!r} is always reduced by {forced!r}, as in verl"
        remedy = f"set it to {forced!r}, or leave it if it is meant for the other terms of the loss"
        yield Finding("warning", Key.AGG_MODE, problem, remedy)
    yield from denominator_of_another(choice, VERL, mode, Key.AGG_MODE)


def delivered(asked: Asked) -> Channels:
    """Return the channels that have a weight. ConfigError for a hint that composer_sync cannot deliver."""
    config, hint = asked.config, asked.hint
    found = Channels(config, hint, asked.replay)
    if hint is None:
        return found
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
    return found
