"""What a user of SkyRL writes: its config, and our options in `trainer.algorithm.composer`."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from composer_plugins.config import ComposerConfig, at, unlikely
from composer_plugins.errors import ConfigError, near, not_available, unknown
from composer_plugins.findings import Finding, Findings, enforce
from composer_plugins.frameworks import skyrl
from composer_plugins.frameworks.contract import NamedLoss, Option, parameters_of
from composer_plugins.frameworks.skyrl import NODE, SKYRL, Key
from composer_plugins.losses.choosing import Choice, choose, find_one
from composer_plugins.losses.row import Kind
from composer_plugins.objective.objective import Behaviour, Objective, behaviours
from composer_plugins.objective.options import SetBy, given_options, only_with, parameters_set
from composer_plugins.objective.rules import (
    advantage_of_another_paper,
    cut_sampling,
    denominator_of_another,
    own_denominator,
)

DEFAULTS = {one.key: one.default for one in SKYRL.options}
CHOOSES: dict[Kind, str] = {"policy": Key.POLICY, "advantage": Key.ESTIMATOR}


class Parsed(NamedTuple):
    """A policy loss or an advantage: what is called, and which of SkyRL's options set its parameters."""

    choice: Choice
    set_by: Mapping[str, SetBy]
    config: ComposerConfig  # our options
    own: NamedLoss | None  # SkyRL's own; None: it is ours


def value_in(table: Mapping[str, Any], key: str) -> Any:
    """The value of an option, or its default where the config has none."""
    found = at(table, key)
    return DEFAULTS.get(key) if found is None else found


def is_ours(name: str) -> bool:
    """Whether a registered name is `composer` or `composer/<name>`."""
    return name == "composer" or name.startswith("composer/")


def parse(table: Mapping[str, Any], kind: Kind, release: str) -> Parsed | None:
    """The policy loss or the advantage that a config names, with its parameters.

    None for cross_entropy, and for a name that the user's own entry point may have registered. Raises
    ConfigError for a misspelt name, and for an option that contradicts the loss.
    """
    name = str(value_in(table, CHOOSES[kind]))
    if is_ours(name):
        return _ours(table, kind, name.removeprefix("composer").removeprefix("/"), release)
    if kind == "policy" and name == skyrl.LIKELIHOOD:
        return None
    chosen = {CHOOSES[kind]: name}
    if name == "dppo":
        chosen[Key.DPPO_TYPE] = value_in(table, Key.DPPO_TYPE)
    of_kind = [one for one in SKYRL.losses if one.kind == kind and release in SKYRL.releases_of(one)]
    own = next((one for one in of_kind if one.options == chosen), None)
    if own is None:
        known = [*(str(one.options[CHOOSES[kind]]) for one in of_kind), "composer"]
        if name == "dppo":
            raise unknown(Key.DPPO_TYPE, str(chosen[Key.DPPO_TYPE]), ("binary_tv", "binary_kl"), noun="type")
        if near(name, known):
            raise unknown(CHOOSES[kind], name, known, noun="loss" if kind == "policy" else "estimator")
        return None
    given = given_options(own.own, lambda key, default: default if at(table, key) is None else at(table, key))
    loss = find_one(own.row, kind).loss
    set_by = parameters_set(SKYRL, loss, {}, given, params_key="")
    params = {**own.params, **{name: one.value for name, one in set_by.items()}}
    return Parsed(choose(kind, own.row, params, option=CHOOSES[kind]), set_by, ComposerConfig.parse({}), own)


def options_of(kind: Kind, release: str) -> list[Option]:
    """SkyRL's options that set parameters of a loss, with the defaults of a release."""
    named_here = (one for one in SKYRL.losses if release in SKYRL.releases_of(one))
    own = {option.key: option for one in named_here for option in one.own}
    return [own.get(one.key, one) for one in SKYRL.options_of(kind) if one.acts_by_parameters]


def _ours(table: Mapping[str, Any], kind: Kind, name: str, release: str) -> Parsed:
    """A loss of ours by its registered name, or for "" by the options in NODE."""
    node = {str(key): one for key, one in (at(table, NODE) or {}).items()}
    wrong, set_by, params_key = Findings(), dict[str, SetBy](), f"{kind}_params"
    with wrong.collected(NODE):
        for option, reason in skyrl.NOT_AVAILABLE.items():
            if node.get(option):
                wrong += [one.under(NODE) for one in Finding.all_from(not_available(option, reason))]
                node.pop(option)
        if name and str(node.get(kind, name)).partition("@")[0] != name.partition("@")[0]:
            remedy = f"remove it, or write composer in place of composer/{name}"
            raise ConfigError(kind, f"{node[kind]!r} contradicts the name composer/{name}", remedy)
        named_here = str(node.get(kind) or name or ComposerConfig.model_fields[kind].default)
        loss = find_one(named_here, kind, kind).loss if ":" not in named_here else None
        if loss is not None and not wrong:
            given = given_options(
                options_of(kind, release),
                lambda key, default: default if at(table, key) is None else at(table, key),
            )
            params = node.get(params_key) or {}
            with wrong.collected():
                set_by = parameters_set(SKYRL, loss, params, given, params_key=f"{NODE}.{params_key}")
            values = {name: one.value for name, one in set_by.items()}
            node = {**node, params_key: {**params, **values}} if values else node
        config = ComposerConfig.parse({kind: named_here, **node})
        choice = config.choose_policy() if kind == "policy" else config.choose_advantage()
        SKYRL.require(choice)
        if kind == "policy":
            check_proportional(choice)
    enforce(wrong)
    return Parsed(choice, set_by, config, None)


def check_proportional(choice: Choice) -> None:
    """Raise ConfigError for a loss with a term that SkyRL's division of the advantages does not reach."""
    from composer_plugins.losses.folding import is_proportional

    if not is_proportional(choice):
        problem = (
            f"{choice.name!r} has a term without the advantages, and SkyRL divides only the advantages by "
        )
        problem += "the number of tokens, so that term would weigh as much more"
        remedy = "switch the term off (kl_tau=0), use SkyRL's own use_kl_loss, or choose another loss"
        raise ConfigError(choice.option, problem, remedy)


def whose(table: Mapping[str, Any], policy: Parsed) -> tuple[Behaviour | None, Behaviour | None]:
    """Whose log-probabilities SkyRL gives a loss as old_logprobs and as rollout_logprobs."""
    name, has_rollout = str(value_in(table, Key.POLICY)), at(table, Key.LOGPROBS) is not None
    has_rollout = has_rollout or Key.LOGPROBS.rpartition(".")[2] not in (
        at(table, Key.LOGPROBS.rpartition(".")[0]) or {}
    )
    old: Behaviour = "trainer"
    if policy.own is not None and name == "cispo" and value_in(table, Key.ANCHOR) == "rollout":
        old = "rollout engine"
    by_trainer = not has_rollout or (policy.own is not None and name == "importance_sampling")
    return behaviours(policy.choice, old, "trainer" if by_trainer else "rollout engine")


def findings(
    table: Mapping[str, Any], objective: Objective, parsed: Mapping[Kind, Parsed | None], release: str
) -> Iterator[Finding]:
    """Yield what does not hold of a config, or is probably not meant."""

    def value(key: str) -> Any:
        return value_in(table, key)

    policy, advantage = parsed["policy"], parsed["advantage"]
    name, reduction = str(value(Key.POLICY)), value(Key.REDUCTION)
    if policy is None and name != skyrl.LIKELIHOOD:
        problem = f"it is {name!r}, which SkyRL {release} does not have by itself"
        remedy = "correct it; or, if your entry point registers it, run composer-plugins check "
        yield Finding("warning", Key.POLICY, problem, f"{remedy}FILE.py:FUNCTION --as skyrl")
    if advantage is None:
        problem = f"it is {value(Key.ESTIMATOR)!r}, which SkyRL {release} does not have by itself"
        remedy = "correct it, unless your entry point registers it"
        yield Finding("warning", Key.ESTIMATOR, problem, remedy)
    if value(Key.USE_KL) and value(Key.KL_IN_REWARD):
        yield Finding("error", Key.KL_IN_REWARD, f"it is True, and so is {Key.USE_KL}", "set one to false")
    if reduction == skyrl.NORM and value(Key.LENGTH) is None:
        remedy = "set it, to the longest response for example"
        yield Finding("error", Key.LENGTH, f"it is not set, and {reduction} divides by it", remedy)
    if reduction == skyrl.LEGACY:
        remedy = "set token_mean"
        yield Finding("warning", Key.REDUCTION, f"it is {reduction!r}: {skyrl.LEGACY_REMARK}", remedy)
    if policy is not None and policy.own is not None and skyrl.ADVISED.get(name, reduction) != reduction:
        problem = f"it is {reduction!r}, and the paper of {name} takes the mean of each sequence first"
        yield Finding("warning", Key.REDUCTION, problem, f"set {skyrl.ADVISED[name]}, as SkyRL advises")
    corrected = (Key.TIS, Key.SEQUENCE_MASK, *Key.OUTLIERS, *Key.TOKEN_MASK)
    set_here = next((key for key in (Key.USE_TIS, *corrected) if value(key) not in (None, False)), "")
    if set_here and name in skyrl.UNCORRECTED:
        problem = f"it is set, and SkyRL's {name} does not correct for the rollout engine"
        yield Finding("error", set_here, problem, "remove it, or choose another policy_loss_type")
    if policy is not None and policy.own is not None and name in skyrl.FOLDED:
        yield Finding("warning", Key.POLICY, f"{name!r}: {skyrl.FOLDED[name]}", "choose another loss")
    for one in parsed.values():
        if one is not None and one.own is None and value(Key.ENTRYPOINT) != skyrl.ENTRYPOINT:
            key = CHOOSES[one.choice.loss.kind]
            problem = f"it is {value(key)!r}, which SkyRL does not know by itself"
            remedy = f"set {Key.ENTRYPOINT}={skyrl.ENTRYPOINT}, or call register() in your own entry point"
            yield Finding("warning", key, problem, remedy)
            break
    if value(Key.ASYNC) and (name in skyrl.NEEDS_OLD or objective.old == "trainer"):
        problem = (
            f"it is True, and {name!r} compares with the policy before the update, which is not kept then"
        )
        yield Finding("error", Key.ASYNC, problem, "choose rollout_is, dppo, or a loss of the rollout policy")
    needs_rollout = policy is not None and "rollout_logprobs" in policy.choice.loss.needs
    if needs_rollout and objective.rollout == "trainer" and name != "importance_sampling":
        problem = f"it is null, and {policy.choice.name!r} compares with the rollout policy" if policy else ""
        yield Finding("error", Key.LOGPROBS, problem, "set it to 1")
    if advantage is not None and value(Key.STEP_WISE) and advantage.choice.loss.name in skyrl.BY_TOKEN:
        problem = (
            f"it is True, and {advantage.choice.name!r} has an advantage for each token, of which SkyRL "
        )
        problem += "keeps one for a trajectory"
        yield Finding("error", Key.STEP_WISE, problem, "choose grpo, rloo or maxrl")
    if objective.group_size == 1 and advantage and "group_ids" in advantage.choice.loss.needs:
        problem = f"it is 1, and {advantage.choice.name!r} compares the rollouts of a prompt"
        yield Finding("warning", Key.GROUP_SIZE, problem, "set 2 or more")
    yield from only_with(SKYRL, lambda key: value(key) if at(table, key) is not None else DEFAULTS.get(key))
    if needs_rollout or objective.correction is not None:
        yield from cut_sampling(lambda key: at(table, key), f"{skyrl.GENERATOR}.sampling_params.")
    for one in parsed.values():
        if one is not None:
            yield from unlikely(one.choice, keys_of(one))
    if policy is None:
        return
    yield from not_read(table, policy)
    if own_denominator(policy.choice, SKYRL) == "seq-mean-token-sum" == objective.mode:
        return
    yield from denominator_of_another(policy.choice, SKYRL, objective.mode, Key.REDUCTION)
    used = advantage.choice.loss.name if advantage else ""
    remedy = f"set {policy.choice.loss.advantage}, or composer/{policy.choice.loss.advantage}"
    yield from advantage_of_another_paper(policy.choice, used, Key.ESTIMATOR, remedy)


def keys_of(parsed: Parsed) -> dict[str, str]:
    """By parameter, the key at which a user sets it."""
    kind, own = parsed.choice.loss.kind, parsed.own
    if own is None:
        keys = {name: f"{NODE}.{kind}_params.{name}" for name in parsed.choice.loss.parameters}
    else:
        sets = ((option, parameters_of(option.sets, parsed.choice.loss)) for option in own.own)
        keys = {name: option.key for option, names in sets for name in names}
    return keys | {name: one.key for name, one in parsed.set_by.items()}


def not_read(table: Mapping[str, Any], policy: Parsed) -> Iterator[Finding]:
    """Yield a warning for each option of a loss that is set and that SkyRL's own loss does not read."""
    if policy.own is None:
        return
    read = {one.key for one in policy.own.own}
    for option in SKYRL.options_of("policy"):
        found = at(table, option.key)
        if option.sets and option.key not in read and found not in (None, option.default):
            problem = f"it is {found!r}, and SkyRL's {value_in(table, Key.POLICY)} does not read it"
            yield Finding("warning", option.key, problem, "remove it")
