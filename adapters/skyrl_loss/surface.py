"""What a user of SkyRL writes: its config, and our options in `trainer.algorithm.composer`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from composer_plugins.adapters.skyrl_loss.correction import correction_of
from composer_plugins.adapters.skyrl_loss.upstream import release_of
from composer_plugins.config import ADVANTAGE_OPTIONS, ComposerConfig, at, entry
from composer_plugins.errors import ConfigError, near, not_available, unknown
from composer_plugins.findings import Finding, Findings, enforce
from composer_plugins.frameworks import skyrl
from composer_plugins.frameworks.skyrl import NODE, SKYRL, Key
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.row import Kind
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.keys import check_flag, check_tables
from composer_plugins.objective.objective import KL, STAND_IN, Objective, channels_of
from composer_plugins.objective.options import only_with
from composer_plugins.objective.registered import Parsed, is_ours, loss_in, parse_choice, unlikely_value
from composer_plugins.objective.rules import (
    advantage_of_another_paper,
    cut_sampling,
    denominator_of_another,
    own_denominator,
)

CHOOSES: dict[Kind, str] = {"policy": Key.POLICY, "advantage": Key.ESTIMATOR}
NOUNS: dict[Kind, str] = {"policy": "loss", "advantage": "estimator"}
FLAGS = (Key.USE_KL, Key.KL_IN_REWARD, Key.USE_ENTROPY, Key.USE_TIS, Key.STEP_WISE, Key.ASYNC)
TABLES = ("trainer", "generator", skyrl.ALGORITHM, skyrl.CORRECTION, NODE)
DENOMINATORS = {
    "KL": "seq-mean-token-mean",
    "entropy bonus": "the tokens of a micro-batch, then the mean over micro-batches",
    "policy_weight": "the policy loss",
}
AllParsed = Mapping[Kind, Parsed | None]


class Configs(ByTable):
    """SkyRL's configs, from the root: a YAML, or the dotted options of its command line."""

    def __init__(self, version: str | None = None, moved: Mapping[str, Any] | None = None) -> None:
        super().__init__(SKYRL.of_release(release_of(version)))
        self.moved = moved  # from the defaults of the config's class, where it has one
        self.KNOWN |= {NODE, Key.KL_CONTROL}

    def read(self, table: Mapping[str, Any], version: str | None = None) -> tuple[Objective, list[Finding]]:
        """What SkyRL trains with this config, and what does not hold of it."""
        check_tables(table, *TABLES)
        for key in FLAGS:
            if at(table, key) is not None:
                check_flag(key, at(table, key))
        wrong, parsed = Findings(), dict[Kind, Parsed | None]()
        for kind in CHOOSES:
            with wrong.collected():
                parsed[kind] = self.parsed(table, kind)
        enforce(wrong)
        objective = self._what_is_trained(table, parsed)
        return objective, [*self._findings(table, objective, parsed)]

    def parsed(self, table: Mapping[str, Any], kind: Kind) -> Parsed | None:
        """The policy loss or the advantage that a config names, with its parameters.

        None for cross_entropy, and for a name that the user's own entry point may have registered. Raises
        ConfigError for a misspelt name, and for an option that contradicts the loss.
        """
        key = CHOOSES[kind]
        name = str(self.value(key, table))
        if is_ours(name):
            moved = self.given(table, kind) if self.moved is None else self.moved
            return parsed(at(table, NODE) or {}, kind, loss_in(name), moved)
        if (named := self.named(kind, table)) is not None:
            return Parsed(ComposerConfig.parse({}), *self.with_parameters(named, table))
        losses = [one.options for one in self.framework.losses if one.kind == kind]
        if types := [str(one[Key.DPPO_TYPE]) for one in losses if one[key] == name and Key.DPPO_TYPE in one]:
            raise unknown(Key.DPPO_TYPE, str(self.value(Key.DPPO_TYPE, table)), types, noun="type")
        known = [*(str(one[key]) for one in losses), "composer"]
        if name != skyrl.LIKELIHOOD and near(name, known):
            raise unknown(key, name, known, noun=NOUNS[kind])
        return None

    def _what_is_trained(self, table: Mapping[str, Any], parsed: AllParsed) -> Objective:
        value = partial(self.value, table=table)
        policy, advantage, name = parsed["policy"], parsed["advantage"], str(value(Key.POLICY))
        stand_in = choose("policy", STAND_IN)
        found = self.objective(
            table, policy.choice if policy else stand_in, advantage.choice if advantage else None
        )
        correction, dropped = correction_of(value)
        remarks = [*found.remarks, *dropped]
        if value(Key.REDUCTION) == skyrl.LEGACY:
            remarks.append(f"{Key.REDUCTION} = {skyrl.LEGACY!r}: {skyrl.LEGACY_REMARK}")
        kl, in_reward = found.kl, value(Key.KL_IN_REWARD)
        if kl and not value(Key.USE_KL):
            kl = KL(kl.estimator, kl.weight, "reward") if in_reward else None
        if kl and in_reward and value(Key.KL_CONTROL) not in (None, "fixed"):
            remarks.append(f"{Key.KL_CONTROL} = {value(Key.KL_CONTROL)!r}")
        if name in skyrl.FOLDED:
            remarks.append(f"{Key.POLICY} = {name!r}: {skyrl.FOLDED[name]}")
        fields: dict[str, Any] = {"correction": correction, "remarks": tuple(remarks)}
        found = replace(found, kl=kl, denominators=DENOMINATORS, **fields)
        if policy is None:
            why = f"{Key.POLICY} = {name!r} is not SkyRL's own, and what it computes is not known here"
            if name == skyrl.LIKELIHOOD:
                why = f"{name!r} trains on the likelihood alone, without advantages"
            return replace(found, mode="", length=None, old=None, rollout=None, no_policy=why)
        if found.length == 1:
            found = replace(found, mode="seq-mean-token-sum", length=None)
        # SkyRL hands it its own log-probabilities where there are no others.
        if found.rollout and (name == "importance_sampling" or entry(table, Key.LOGPROBS) is None):
            found = replace(found, rollout="trainer")
        return replace(found, channels=channels_of(policy.config))

    def _findings(
        self, table: Mapping[str, Any], objective: Objective, parsed: AllParsed
    ) -> Iterator[Finding]:
        """Yield what does not hold of a config, or is probably not meant."""
        value, policy, advantage = partial(self.value, table=table), parsed["policy"], parsed["advantage"]
        name, reduction = str(value(Key.POLICY)), value(Key.REDUCTION)
        unless = ", unless your entry point registers it"
        checked = (
            "; or, if your entry point registers it, run composer-plugins check FILE.py:FUNCTION --as skyrl"
        )
        for kind, key in CHOOSES.items():
            if parsed[kind] is None and value(key) != skyrl.LIKELIHOOD:
                problem = f"it is {value(key)!r}, which {self.release()} does not have by itself"
                remedy = f"correct it{checked if kind == 'policy' else unless}"
                yield Finding("warning", key, problem, remedy)
        if value(Key.USE_KL) and value(Key.KL_IN_REWARD):
            yield Finding(
                "error", Key.KL_IN_REWARD, f"it is True, and so is {Key.USE_KL}", "set one to false"
            )
        if reduction == skyrl.NORM and value(Key.LENGTH) is None:
            remedy = "set it, to the longest response for example"
            yield Finding("error", Key.LENGTH, f"it is not set, and {reduction} divides by it", remedy)
        if reduction == skyrl.LEGACY:
            problem = f"it is {reduction!r}: {skyrl.LEGACY_REMARK}"
            remedy = "token_mean divides by the tokens of the mini-batch, which trains with other weights"
            yield Finding("warning", Key.REDUCTION, problem, remedy)
        if skyrl.ADVISED.get(name, reduction) != reduction:
            problem = f"it is {reduction!r}, and the paper of {name} takes the mean of each sequence first"
            remedy = f"SkyRL advises {skyrl.ADVISED[name]}, which trains with other weights"
            yield Finding("warning", Key.REDUCTION, problem, remedy)
        corrected = (Key.USE_TIS, Key.TIS, Key.SEQUENCE_MASK, *Key.OUTLIERS, *Key.TOKEN_MASK)
        set_here = next((key for key in corrected if value(key) not in (None, False)), "")
        if set_here and name in skyrl.UNCORRECTED:
            problem = f"it is set, and SkyRL's {name} does not correct for the rollout engine"
            yield Finding("error", set_here, problem, "remove it, or choose another policy_loss_type")
        if value(Key.TIS) and name == "cispo" and value(Key.ANCHOR) == "rollout":
            problem = f"it is {value(Key.TIS)!r}, and with {Key.ANCHOR}=rollout the ratio corrects already"
            yield Finding("error", Key.TIS, f"{problem}, so SkyRL refuses both", "remove one of them")
        yield from self._without_effect(table)
        if name in skyrl.FOLDED:
            yield Finding("warning", Key.POLICY, f"{name!r}: {skyrl.FOLDED[name]}", "choose another loss")
        ours = [key for key in CHOOSES.values() if is_ours(str(value(key)))]
        if ours and value(Key.ENTRYPOINT) != skyrl.ENTRYPOINT:
            problem = f"it is {value(ours[0])!r}, which SkyRL does not know by itself"
            remedy = f"set {Key.ENTRYPOINT}={skyrl.ENTRYPOINT}, or call register() in your own entry point"
            yield Finding("warning", ours[0], problem, remedy)
        is_of_rollout = objective.old == "rollout engine"
        if value(Key.ASYNC) and (name in skyrl.NEEDS_OLD or objective.old == "trainer") and not is_of_rollout:
            problem = f"it is True, and {name!r} compares with the policy before the update, which is not "
            remedy = "choose rollout_is, dppo, or a loss of the rollout policy"
            yield Finding("error", Key.ASYNC, f"{problem}kept then", remedy)
        if objective.rollout == "trainer" and name != "importance_sampling":
            problem = f"it is null, and {objective.policy.name!r} compares with the rollout policy"
            yield Finding("error", Key.LOGPROBS, problem, "set it to 1")
        if advantage is not None:
            yield from self._of_the_advantage(advantage.choice, objective, bool(value(Key.STEP_WISE)))
            if policy and policy.choice.loss.per_sequence and advantage.choice.loss.name == "gae":
                problem = "it is 'gae', whose advantages differ within a sequence, and "
                problem += f"{policy.choice.name!r} averages them over the sequence"
                remedy = "choose another one, or a policy loss with a ratio per token, as gspo_token"
                yield Finding("error", Key.ESTIMATOR, problem, remedy)
        yield from only_with(self.framework, partial(at, table))
        if objective.rollout or objective.correction is not None:
            yield from cut_sampling(partial(at, table), f"{skyrl.GENERATOR}.sampling_params.")
        for one in filter(None, parsed.values()):
            yield from unlikely_value(one, NODE)
        if policy is None:
            return
        if own_denominator(policy.choice, SKYRL) == "seq-mean-token-sum" == objective.mode:
            return
        yield from denominator_of_another(policy.choice, SKYRL, objective.mode, Key.REDUCTION)
        used = advantage.choice.loss.name if advantage else ""
        remedy = f"set {policy.choice.loss.advantage}, or composer/{policy.choice.loss.advantage}"
        yield from advantage_of_another_paper(policy.choice, used, Key.ESTIMATOR, remedy)

    def _without_effect(self, table: Mapping[str, Any]) -> Iterator[Finding]:
        """Yield a warning for each option of ours beside a loss that is SkyRL's own."""
        for option in at(table, NODE) or {}:
            key = CHOOSES["advantage" if option in ADVANTAGE_OPTIONS else "policy"]
            if not is_ours(name := str(self.value(key, table))):
                problem = f"it has no effect, because {key} is {name!r}, which is not ours"
                yield Finding("warning", f"{NODE}.{option}", problem, f"set {key}=composer, or remove it")

    def _of_the_advantage(self, choice: Choice, objective: Objective, by_step: bool) -> Iterator[Finding]:
        if by_step and choice.loss.name in skyrl.BY_TOKEN:
            problem = f"it is True, and {choice.name!r} has an advantage for each token, of which SkyRL "
            remedy = "choose grpo, rloo or maxrl"
            yield Finding("error", Key.STEP_WISE, f"{problem}keeps one for a trajectory", remedy)
        if objective.group_size == 1 and "group_ids" in choice.loss.needs:
            problem = f"it is 1, and {choice.name!r} compares the rollouts of a prompt"
            yield Finding("warning", Key.GROUP_SIZE, problem, "set 2 or more")


def parsed(node: Mapping[Any, Any], kind: Kind, name: str | None, moved: Mapping[str, Any]) -> Parsed:
    """What a loss or an advantage of ours is asked for, by the options in `node`; see `parse_choice`."""
    ours = {str(key): one for key, one in node.items()}
    return parse_choice(SKYRL, ours, kind, name, moved=moved, node_key=NODE, parse=parse_node, check=require)


def parse_node(node: Mapping[str, Any]) -> ComposerConfig:
    """Our options as a config; ConfigError for one that SkyRL cannot provide."""
    wrong, available = Findings(), dict(node)
    for option, reason in skyrl.NOT_AVAILABLE.items():
        if available.pop(option, None):
            wrong.add(not_available(option, reason))
    with wrong.collected():
        config = ComposerConfig.parse(available)
    enforce(wrong)
    return config


def require(choice: Choice) -> None:
    """Raise ConfigError for a loss that SkyRL cannot run."""
    SKYRL.require(choice)
    if choice.loss.kind == "policy" and choice.is_third_party:  # of ours, the row says it
        from composer_plugins.losses.folding import is_proportional  # loads torch

        if not is_proportional(choice):
            problem = f"{choice.name!r} has a term without the advantages, and {SKYRL.divides_advantages}"
            raise ConfigError(choice.option, problem, "remove the term, or use SkyRL's own use_kl_loss")
