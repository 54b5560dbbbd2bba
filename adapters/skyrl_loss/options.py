"""What a user of SkyRL writes: its config, and our options in `trainer.algorithm.composer`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from composer_plugins.adapters.skyrl_loss.correction import correction_of
from composer_plugins.adapters.skyrl_loss.upstream import release_of
from composer_plugins.config import ADVANTAGE_OPTIONS, ComposerConfig, at, entry
from composer_plugins.errors import ConfigError, Finding, Findings, near, unknown
from composer_plugins.frameworks import skyrl
from composer_plugins.frameworks.skyrl import NODE, SKYRL, Key
from composer_plugins.losses.choosing import Choice, choose
from composer_plugins.losses.row import Kind
from composer_plugins.objective.asking import Asked, ask
from composer_plugins.objective.by_table import ByTable
from composer_plugins.objective.keys import check_flag, check_tables
from composer_plugins.objective.objective import KL, STAND_IN, Objective, channels_of
from composer_plugins.objective.options import for_a_shell
from composer_plugins.objective.registered import is_ours, loss_in
from composer_plugins.objective.rules import denominator_of_another, own_denominator

CHOOSES: dict[Kind, str] = {"policy": Key.POLICY, "advantage": Key.ESTIMATOR}
NOUNS: dict[Kind, str] = {"policy": "loss", "advantage": "estimator"}
FLAGS = (Key.USE_KL, Key.KL_IN_REWARD, Key.USE_ENTROPY, Key.USE_TIS, Key.STEP_WISE, Key.ASYNC)
TABLES = ("trainer", "generator", skyrl.ALGORITHM, skyrl.CORRECTION, NODE)
DENOMINATORS = {
    "KL": "seq-mean-token-mean",
    "entropy bonus": "the tokens of a micro-batch, then the mean over micro-batches",
    "policy_weight": "the policy loss",
}
AllAsked = Mapping[Kind, Asked | None]


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
        wrong, asked = Findings(), dict[Kind, Asked | None]()
        for kind in CHOOSES:
            with wrong.collected():
                asked[kind], found = self.asked(table, kind)
                wrong += found
        wrong.refuse()
        objective = self._what_is_trained(table, asked)
        return objective, [*self._findings(table, objective, asked), *wrong]

    def asked(self, table: Mapping[str, Any], kind: Kind) -> tuple[Asked | None, Findings]:
        """The policy loss or the advantage that a config names, with its parameters.

        None for cross_entropy, and for a name that the user's own entry point may have registered. Raises
        ConfigError for a misspelt name.
        """
        key = CHOOSES[kind]
        name = str(self.value(key, table))
        if is_ours(name):
            if (named := loss_in(name)) and not named.isidentifier():
                problem = f"it is {name!r}, and a registered name has neither a dialect nor an import path"
                raise ConfigError(key, problem, f"set {key}=composer, and {NODE}.{kind}={named}")
            moved = self.given(table, kind) if self.moved is None else self.moved
            return asked(at(table, NODE) or {}, kind, loss_in(name), moved)
        if (own := self.named(kind, table)) is not None:
            choice = self.with_parameters(own, table)
            return Asked(ComposerConfig.parse({}), choice, None, None, None), Findings()
        losses = [one.options for one in self.framework.losses if one.kind == kind]
        if types := [str(one[Key.DPPO_TYPE]) for one in losses if one[key] == name and Key.DPPO_TYPE in one]:
            raise unknown(Key.DPPO_TYPE, str(self.value(Key.DPPO_TYPE, table)), types, noun="type")
        known = [*(str(one[key]) for one in losses), "composer"]
        if name != skyrl.LIKELIHOOD and near(name, known):
            raise unknown(key, name, known, noun=NOUNS[kind])
        return None, Findings()

    def _what_is_trained(self, table: Mapping[str, Any], asked: AllAsked) -> Objective:
        value = partial(self.value, table=table)
        policy, advantage, name = asked["policy"], asked["advantage"], str(value(Key.POLICY))
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
        # Without rollout log-probabilities SkyRL passes the loss its own.
        if found.rollout and (name == "importance_sampling" or entry(table, Key.LOGPROBS) is None):
            found = replace(found, rollout="trainer")
        return replace(found, channels=channels_of(policy.config))

    def _findings(self, table: Mapping[str, Any], objective: Objective, asked: AllAsked) -> Iterator[Finding]:
        """Yield what SkyRL does not say of our loss, or of a name that it does not have by itself."""
        value, names = partial(self.value, table=table), {}
        for kind, key in CHOOSES.items():
            names[kind] = str(value(key))
            if asked[kind] is None and names[kind] != skyrl.LIKELIHOOD:
                problem = f"it is {names[kind]!r}, which {self.release()} does not have by itself"
                yield Finding("warning", key, problem, "correct it, unless your entry point registers it")
        for option in at(table, NODE) or {}:
            kind = "advantage" if option in ADVANTAGE_OPTIONS else "policy"
            if not is_ours(names[kind]):
                problem = f"it has no effect, because {CHOOSES[kind]} is {names[kind]!r}, which is not ours"
                remedy = f"set {CHOOSES[kind]}=composer, or remove it"
                yield Finding("warning", f"{NODE}.{option}", problem, remedy)
        ours = {kind: one for kind, one in asked.items() if one is not None and is_ours(names[kind])}
        if ours and value(Key.ENTRYPOINT) != skyrl.ENTRYPOINT:
            kind = next(iter(ours))
            problem = f"it is {names[kind]!r}, which SkyRL does not know by itself"
            remedy = f"set {Key.ENTRYPOINT}={skyrl.ENTRYPOINT}, or call register() in your own entry point"
            yield Finding("warning", CHOOSES[kind], problem, remedy)
        if policy := ours.get("policy"):
            yield from self._of_the_policy(policy.choice, objective, table)
        if advantage := ours.get("advantage"):
            yield from self._of_the_advantage(advantage.choice, objective, bool(value(Key.STEP_WISE)))

    def _of_the_policy(
        self, choice: Choice, objective: Objective, table: Mapping[str, Any]
    ) -> Iterator[Finding]:
        value = partial(self.value, table=table)
        if value(Key.ASYNC) and objective.old == "trainer":
            problem = f"it is True, and {choice.name!r} compares with the policy before the update, which is "
            remedy = "choose rollout_is, dppo, or a loss of the rollout policy"
            yield Finding("error", Key.ASYNC, f"{problem}not kept then", remedy)
        if objective.rollout == "trainer":
            problem = f"it is null, and {choice.name!r} compares with the rollout policy"
            yield Finding("error", Key.LOGPROBS, problem, "set it to 1")
        if not own_denominator(choice, SKYRL) == "seq-mean-token-sum" == objective.mode:
            yield from denominator_of_another(choice, SKYRL, objective.mode, Key.REDUCTION)

    def _of_the_advantage(self, choice: Choice, objective: Objective, by_step: bool) -> Iterator[Finding]:
        if by_step and choice.loss.name in skyrl.BY_TOKEN:
            problem = f"it is True, and {choice.name!r} has an advantage for each token, of which SkyRL "
            remedy = "choose grpo, rloo or maxrl"
            yield Finding("error", Key.STEP_WISE, f"{problem}keeps one for a trajectory", remedy)


def asked(
    node: Mapping[Any, Any], kind: Kind, name: str | None, moved: Mapping[str, Any]
) -> tuple[Asked | None, Findings]:
    """Parse the options in `node` of one of our losses or advantages."""
    ours = {str(key): one for key, one in node.items()}
    found, wrong = ask(SKYRL, ours, moved, kind=kind, name=name, at=NODE, write=for_a_shell(NODE))
    if found is not None and kind == "policy" and found.choice.is_third_party:  # our rows say it
        from composer_plugins.losses.folding import is_proportional  # loads torch

        choice = found.choice
        if not is_proportional(choice):
            problem = f"{choice.name!r} has a term without the advantages, and {SKYRL.divides_advantages}"
            remedy = "remove the term, or use SkyRL's own use_kl_loss"
            wrong.append(Finding("error", f"{NODE}.{choice.option}", problem, remedy))
    return found, wrong
