"""Check a whole config of verl for `algorithm.composer`: registered names, options, columns of the data.

The trainer composer_sync enforces what `findings` finds before it starts a worker, and
`composer-plugins doctor --verl` reports the same. Neither verl nor hydra is needed.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from composer_plugins.adapters.verl_plugin import surface, upstream
from composer_plugins.adapters.verl_plugin.surface import (
    NODE,
    POLICY_OPTIONS,
    SAMPLED,
    TARGET,
    TRAINER,
    WORKER_NODE,
    WORKER_OVERRIDES,
    Channels,
    LossKind,
)
from composer_plugins.adapters.verl_plugin.upstream import Release
from composer_plugins.columns import CHOSEN, HINT, REJECTED
from composer_plugins.config import ADVANTAGE_OPTIONS, ComposerConfig, at, scaled_hint
from composer_plugins.errors import ComposerError, in_a_line, near, unknown
from composer_plugins.findings import Finding, Findings, Severity
from composer_plugins.frameworks import verl
from composer_plugins.frameworks.verl import VERL, Key
from composer_plugins.losses.choosing import Choice, with_plugin_problems
from composer_plugins.losses.registry import registry
from composer_plugins.objective.options import only_with
from composer_plugins.objective.registered import Parsed, is_ours, loss_in, unlikely_value
from composer_plugins.objective.rules import advantage_of_another_paper, cut_sampling

LISTED = "composer-plugins list --framework verl shows ours"
SET_LENGTH = "set it, to data.max_response_length for example"
NOT_OURS = Finding(
    "warning",
    Key.LOSS_MODE,
    "it is 'composer', a name that another package may have too, and none of "
    f"{NODE}, {Key.LOSS_TARGET} and {Key.ESTIMATOR} says that it is ours, so the loss is not known",
    "for ours, write composer/grpo, or composer/ and the name of another loss",
)
MANDATORY = "???"  # hydra's value of an option that has to be set


class Run(NamedTuple):
    """A composed config of verl as plain mappings, and the release of verl that will run it."""

    tree: Mapping[str, Any]
    release: Release = None

    def at(self, path: str) -> Any:
        """Return the entry at a dotted path; None where there is none."""
        return at(self.tree, path)

    @property
    def estimator(self) -> str:
        """The advantage estimator's registered name."""
        return str(self.at(Key.ESTIMATOR))

    @property
    def loss(self) -> str:
        """The policy loss's registered name."""
        return str(self.at(Key.LOSS_MODE))

    @property
    def names_our_loss(self) -> bool:
        """Whether the policy loss is ours; another package may have the name `composer` too."""
        if self.loss != "composer":
            return is_ours(self.loss)
        names_us = is_ours(self.estimator) or self.at(Key.TRAINER_MODE) == TRAINER
        return names_us or self.at(NODE) is not None or self.at(Key.LOSS_TARGET) == TARGET

    @property
    def is_v1(self) -> bool:
        """Whether a v1 trainer runs; before 0.9 verl has none."""
        return bool(self.at(Key.USE_V1)) and upstream.at_least(self.release, upstream.ENTRY_POINTS)

    @property
    def trainer(self) -> str:
        """The v1 trainer's registered name; "" where verl's legacy trainer runs."""
        return str(self.at(Key.TRAINER_MODE)) if self.is_v1 else ""

    @property
    def names_trainer(self) -> bool:
        """Whether the config names a v1 trainer other than verl's default."""
        return self.trainer not in ("", upstream.DEFAULT_TRAINER)

    def node(self, path: str) -> dict[str, Any]:
        """Return a table of options; {} where there is none."""
        found = self.at(path)
        return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def findings(
    run: Run, known: Mapping[str, Collection[str]], columns: Mapping[str, Collection[str]]
) -> list[Finding]:
    """Return the options that would stop the run, have no effect, or train something other than they say.

    `known` has the names in each of verl's registries, `columns` the columns of each local file of the data.
    """
    found: list[Finding] = []
    try:
        for finding in _findings(run, known, columns):
            if finding not in found:  # the driver's options and the workers' are often the same
                found.append(finding)
    except (AttributeError, TypeError, ValueError) as error:  # a list where a number is compared
        problem = f"a value has the wrong type, and what follows was not examined: {in_a_line(error)}"
        found.append(Finding("error", "actor_rollout_ref", problem, "correct it"))
    return found


def examined(config: Mapping[str, Any], version: str | None = None) -> dict[str, Any]:
    """Return the names in verl's registries, and the findings in a config."""
    run = Run(config, upstream.release_of(version))
    known: dict[str, Any] = upstream.registries(trainers=run.names_trainer)
    wrong = Findings()
    if known["losses"]:
        with wrong.collected():
            surface.check_names()
    found = [*wrong, *findings(run, known, file_columns(run.at(Key.TRAIN_FILES)))]
    for key, text in upstream.refused_values(config):
        problem = f"it is {run.at(key)!r}, and verl raises {text.rstrip(' .:')}, after the first rollout"
        found.append(Finding("error", key, problem, "correct it"))
    return known | {"findings": [*found, *absent_files(config)]}


def _findings(
    run: Run, known: Mapping[str, Collection[str]], columns: Mapping[str, Collection[str]]
) -> Iterator[Finding]:
    yield from _unknown_names(run, known)
    delivers, registered = _delivers(run, known["trainers"]), any(map(is_ours, known["estimators"]))
    if not (delivers or is_ours(run.estimator) or run.names_our_loss):
        yield _nothing_of_ours(run)
        return
    for key in (NODE, WORKER_NODE):
        if run.at(key) is not None and not isinstance(run.at(key), Mapping):
            yield Finding("error", key, f"it is {run.at(key)!r}", "write a table of options")
    node, seen = run.node(NODE), run.node(WORKER_NODE)
    errors: list[Finding] = []

    def parsed(key: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except ComposerError as error:
            errors.extend(Finding.all_from(error.under(key) if key else error))
        except Exception as error:  # a plugin's loss that does not import
            remedy = "correct or remove the loss that is named"
            errors.append(Finding("error", key or NODE, in_a_line(error), remedy))

    def chosen(table: dict[str, Any], kind: LossKind, registered: str) -> Parsed | None:
        if not surface.is_known(registered, kind):  # `_unknown_names` reports it
            return None
        key = NODE if table in ({}, node) else WORKER_NODE
        moved = upstream.moved(kind, run.at(VERL.tables[kind]))
        found = cast(
            Parsed | None,
            parsed("", surface.parse_choice, table, kind, loss_in(registered), moved, key),
        )
        if found is not None and found.choice.is_third_party:
            parsed(key, surface.check_its_result, found.choice)
        return found

    of_rewards, of_tokens = chosen(node, "advantage", run.estimator), chosen(seen, "policy", run.loss)
    advantage, policy = of_rewards and of_rewards.choice, of_tokens and of_tokens.choice
    channels: Channels | None = parsed(NODE, surface.parse_channels, node) if delivers else None
    config: ComposerConfig | None = channels.config if channels else parsed(NODE, surface.parse, node)
    yield from errors
    if is_ours(run.estimator) and run.at(Key.CRITIC):
        problem = f"it is True, and {run.estimator!r} has no returns for a critic to learn"
        yield Finding("error", Key.CRITIC, problem, f"set {Key.CRITIC}=False, or {Key.ESTIMATOR}=gae")
    if config is not None:
        yield from _without_effect(run, config)
        yield from _read_elsewhere(run, seen)
        policy_loss = run.node(Key.POLICY_LOSS)
        yield from surface.different_in_the_workers(config, node, policy_loss, seen)
        for finding in config.without_effect(config.model_fields_set):
            yield finding.under(NODE)
        yield from surface.undelivered(config, delivers=delivers)
    if registered and (config is None or not (config.hint_weight or config.replay_weight)):
        yield from _unused_trainer(run)
    if advantage is not None and (config is None or config.policy_weight):
        yield from surface.group_of_one(advantage, run.at(Key.GROUP_SIZE))
    yield from _advantages_by_token(run, advantage, policy, channels)
    yield from _advantage_of_the_paper(run, advantage, policy)
    yield from _old_policy(run, policy)
    yield from inert_correction(run)
    yield from _sampling(run, policy)
    yield from _reference(run, channels)
    yield from _only_with(run)
    yield from _distillation(run, channels)
    mode = str(run.at(Key.AGG_MODE) or "")
    replays = channels is not None and channels.replay is not None  # for which it is an error
    if mode == verl.NORM_MODE and run.at(Key.SCALE_FACTOR) is None and not replays:
        problem = (
            f"it is not set, and {mode!r} then divides by the padded width of each micro-batch, so that "
        )
        problem += "the weight of a token depends on how verl cuts the batch"
        yield Finding("warning", Key.SCALE_FACTOR, problem, SET_LENGTH)
    yield from _mandatory(run)
    if run.at(Key.FILTER_GROUPS) and not run.is_v1:
        problem = "it is True, and verl's legacy trainer does not read it: no group is dropped"
        yield Finding("warning", Key.FILTER_GROUPS, problem, f"set {Key.USE_V1}=True (verl 0.9), or False")
    yield from surface.reduction(policy, mode)
    if of_tokens is not None:
        yield from unlikely_value(of_tokens, NODE)
        if config is not None:
            yield from (one.under(NODE) for one in scaled_hint(config, of_tokens.choice))
    if channels is not None:
        yield from _channel_conflicts(run, channels)
        yield from missing_columns(channels, columns if not run.at(Key.DATASET_CLASS) else {})


def _delivers(run: Run, known: Collection[str]) -> bool:
    """Whether the trainer is composer_sync, or a name unknown to verl that does not stand for another one.

    So that a misspelt trainer is one finding, and the options of the channels are examined all the same.
    """
    if not run.trainer or not known or run.trainer in known:
        return run.trainer == TRAINER
    return TRAINER in (near(run.trainer, known) or [TRAINER])


def _unknown_names(run: Run, registered: Mapping[str, Collection[str]]) -> Iterator[Finding]:
    """Yield the names that verl does not know; verl itself notices them only after the first rollout."""
    for key, noun, name, known in (
        (Key.ESTIMATOR, "advantage estimator", run.estimator, registered["estimators"]),
        (Key.LOSS_MODE, "policy loss", run.loss, registered["losses"]),
        (Key.TRAINER_MODE, "trainer", run.trainer, registered["trainers"]),
    ):
        # If none of our names is registered, the doctor reports that once, as a finding of the environment.
        absent = key != Key.TRAINER_MODE and is_ours(name) and not any(map(is_ours, known))
        if not known or not name or name in known or absent:
            continue
        option: LossKind = "advantage" if key == Key.ESTIMATOR else "policy"
        bare = name.removeprefix("composer/")
        here = None if key == Key.TRAINER_MODE else surface.name_here(option, bare)
        if here is not None:
            problem = f"verl has no {noun} {name!r}: {bare!r} is verl's own name"
            remedy = f"set {key}=composer, and {NODE}.{option}={here}, its name here"
            yield Finding("error", key, problem, remedy)
        elif key != Key.TRAINER_MODE and ("@" in name or ":" in name):  # of algorithm.composer's options
            problem = f"verl has no {noun} {name!r}: its name has neither a dialect nor an import path"
            remedy = f"set {key}=composer, and {NODE}.{option}={bare}"
            yield Finding("error", key, problem, remedy)
        elif name != TRAINER:
            error = unknown(key, name, known, noun=noun, more=LISTED)
            yield Finding.from_error(with_plugin_problems(error, bare, registry()))
        elif any(map(is_ours, registered["estimators"])):
            problem = f"the plugin has registered its losses, and no trainer {TRAINER!r}"
            remedy = f'see python -W default -c "import verl": {TRAINER} needs verl 0.9 and verl[verl-core]'
            yield Finding("error", key, problem, remedy)
    distilled = run.at(Key.DISTILLATION_LOSS)
    if run.at(Key.DISTILLATION) and distilled not in (None, "vanilla"):
        problem = f"it is {distilled!r}, and verl's distillation takes only its own loss 'vanilla'"
        remedy = f"set it to 'vanilla'; the loss of the task's rewards is {Key.LOSS_MODE}"
        yield Finding("error", Key.DISTILLATION_LOSS, problem, remedy)


def _unused_trainer(run: Run) -> Iterator[Finding]:
    """Yield a warning for composer_sync beside the legacy trainer, of which nothing else is said."""
    if not run.is_v1 and run.at(Key.TRAINER_MODE) == TRAINER:
        problem = f"it is {TRAINER!r}, and verl's legacy trainer runs, which does not read it"
        remedy = f"set {Key.USE_V1}=True (verl 0.9 or later), or remove it"
        yield Finding("warning", Key.TRAINER_MODE, problem, remedy)


def _nothing_of_ours(run: Run) -> Finding:
    """Return the finding for a config in which no estimator, loss or trainer of this package runs."""
    if is_ours(run.loss):
        return NOT_OURS
    names = f"{Key.ESTIMATOR} is {run.estimator!r}, {Key.LOSS_MODE} is {run.loss!r}"
    choose = f"set {Key.ESTIMATOR}=composer"
    if run.node(NODE):
        return Finding("error", NODE, f"it is set, and nothing reads it: {names}", f"{choose}, or remove it")
    return Finding("warning", Key.ESTIMATOR, f"verl trains with its own losses only: {names}", choose)


def _without_effect(run: Run, config: ComposerConfig) -> Iterator[Finding]:
    """Yield options of the advantage or the policy where verl's own estimator or loss runs."""
    for key, name, options, remedy in (
        (Key.ESTIMATOR, run.estimator, ADVANTAGE_OPTIONS, f"{Key.ESTIMATOR}=composer"),
        (Key.LOSS_MODE, run.loss, POLICY_OPTIONS, f"{Key.LOSS_MODE}=composer {WORKER_OVERRIDES}"),
    ):
        if not is_ours(name) and (given := [one for one in options if one in config.model_fields_set]):
            problem = f"it is set, and it has no effect, because {key} is {name!r}"
            yield Finding("error", f"{NODE}.{given[0]}", problem, f"set {remedy}, or remove it")


def _read_elsewhere(run: Run, seen: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield options in the workers' table that only the driver reads, where the driver's table differs."""
    node, read = run.node(NODE), POLICY_OPTIONS if is_ours(run.loss) else ()
    for option, value in seen.items():
        if option in ComposerConfig.model_fields and option not in read and node.get(option) != value:
            problem = f"it is {value!r}, and it has no effect here: it is read from {NODE}"
            remedy = f"set {NODE}.{option}, and {WORKER_NODE}='${{{NODE}}}'"
            yield Finding("error", f"{WORKER_NODE}.{option}", problem, remedy)


def _advantages_by_token(
    run: Run, advantage: Choice | None, policy: Choice | None, channels: Channels | None
) -> Iterator[Finding]:
    """Yield an error for a policy loss that takes one advantage per response, beside those of each token."""
    averages = policy is not None and policy.loss.per_sequence
    by_hint = channels is not None and channels.hint is not None and not channels.hint_is_loss
    if by_hint and (averages or run.loss == verl.MEAN_OVER_ROWS):
        problem = f"'advantage' gives each token its own advantage, and {run.loss!r} averages them"
        remedy = "set 'score', or a policy per token (gspo_token)"
        yield Finding("error", f"{NODE}.hint_estimator", problem, remedy)
    if policy is None or not averages:
        return
    by_return = advantage is not None and "token_rewards" in advantage.loss.needs
    gamma = run.at("algorithm.gamma") if advantage is None else advantage.value("gamma")
    if run.estimator in verl.BY_TOKEN or (
        (by_return or run.estimator in verl.BY_RETURN)
        and (gamma not in (None, 1) or run.at(Key.KL_IN_REWARD))
    ):
        problem = f"{policy.name!r} takes one advantage per response, and {run.estimator!r} computes another "
        problem += "one for each token"
        yield Finding("error", Key.LOSS_MODE, problem, "choose another policy loss, gspo_token for example")


def _advantage_of_the_paper(run: Run, advantage: Choice | None, policy: Choice | None) -> Iterator[Finding]:
    """Yield a warning for a policy loss whose paper has an advantage of its own, beside another one."""
    if policy is None:
        return
    if advantage is None:
        row = VERL.row_of(**{verl.CHOOSES["advantage"]: run.estimator}) or run.estimator
        used = row.partition("@")[0]
        without_deviation = run.at("algorithm.norm_adv_by_std_in_grpo") is False
    else:
        used, without_deviation = advantage.loss.name, advantage.value("scale") == "none"
    if used == "grpo" and without_deviation:
        used = "dr_grpo"
    wanted, in_node = policy.loss.advantage, run.estimator == "composer"
    key, value = (f"{NODE}.advantage", wanted) if in_node else (Key.ESTIMATOR, f"composer/{wanted}")
    yield from advantage_of_another_paper(policy, used, key, f"set {key}={value}")


def _only_with(run: Run) -> Iterator[Finding]:
    """Yield options that verl reads only beside another one, which has not the value that they need."""
    wrong = Findings()
    with wrong.collected():
        surface.check_scale_factor(run.at(Key.SCALE_FACTOR))
    yield from wrong
    yield from only_with(VERL, run.at)


def _old_policy(run: Run, policy: Choice | None) -> Iterator[Finding]:
    """Yield what makes `old_log_probs` the trainer's where the loss needs the rollout policy's."""
    bypass, kept = run.at(Key.BYPASS), run.at(Key.ROLLOUT_LOGPROBS)
    if bypass and not kept:
        problem = f"it is {kept}, and {Key.BYPASS} needs the rollout engine's log-probabilities"
        yield Finding("error", Key.ROLLOUT_LOGPROBS, problem, f"set {Key.ROLLOUT_LOGPROBS}=True")
    elif policy is not None and "rollout_logprobs" in policy.loss.needs and not bypass:
        problem = f"{policy.name!r} compares with the rollout policy, and verl's old_log_probs are the "
        remedy = f"set {Key.BYPASS}=True" + ("" if kept else f" {Key.ROLLOUT_LOGPROBS}=True")
        remedy += ", which makes them the rollout engine's"
        severity: Severity = "info" if kept else "warning"
        key = Key.BYPASS if kept else Key.ROLLOUT_LOGPROBS
        yield Finding(severity, key, f"{problem}trainer's own recomputation", remedy)


def inert_correction(run: Run) -> Iterator[Finding]:
    """Yield the options of verl's rollout correction that the loss does not read."""
    without, bypass = run.at(Key.ROLLOUT_LOGPROBS) is False, run.at(Key.BYPASS)
    for name in verl.SWITCHES:
        key = f"{Key.CORRECTION}.{name}"
        value = run.at(key)
        if value in (None, verl.DEFAULTS[key]):
            continue
        of_the_loss = name in verl.OF_THE_LOSS
        if run.loss != verl.OWN_BYPASS and (bypass or of_the_loss):
            problem = f"it is {value!r}, and only verl's own loss {verl.OWN_BYPASS!r} reads it"
            remedy = "remove it"
            if not of_the_loss:
                problem, remedy = f"{problem} with {Key.BYPASS}", f"set {Key.BYPASS}=False, or remove it"
            yield Finding("error", key, problem, remedy)
        elif without and not (of_the_loss or bypass):
            problem = (
                f"it is {value!r}, and it has no effect without the rollout engine's log-probabilities: "
            )
            problem += f"{Key.ROLLOUT_LOGPROBS} is False"
            yield Finding("error", key, problem, f"set {Key.ROLLOUT_LOGPROBS}=True, or remove it")


def _sampling(run: Run, policy: Choice | None) -> Iterator[Finding]:
    """Yield options that cut the rollout policy's distribution where a ratio to it is computed."""
    uses_ratio = policy is not None and "rollout_logprobs" in policy.loss.needs
    if not (uses_ratio or run.at(Key.BYPASS) or run.at(Key.CORRECTED) or run.at(Key.REJECTED)):
        return
    yield from cut_sampling(run.at, f"{Key.ROLLOUT}.")


def _reference(run: Run, channels: Channels | None) -> Iterator[Finding]:
    """Yield a reference policy that is not the one that training begins with, and a KL without a pull."""
    in_loss = run.at(Key.USE_KL_LOSS) and run.at(Key.KL_COEF) != 0
    used = in_loss or run.at(Key.KL_IN_REWARD) or (channels is not None and channels.uses_reference)
    for key in Key.ADAPTERS if used else ():
        if run.at(key):
            problem = f"it is {run.at(key)!r}, and verl's reference policy is the model without the adapter, "
            problem += "not the policy that training begins with"
            remedy = "merge the adapter into the model first, if its policy is to be the reference"
            yield Finding("warning", key, problem, remedy)
    if in_loss and (kind := run.at(Key.KL_TYPE)) in verl.WITHOUT_PULL:
        problem = f"it is {kind!r}, whose gradient in a loss is the same at every token, whatever the "
        problem += "reference: it does not hold the policy near it"
        yield Finding("warning", Key.KL_TYPE, problem, "set low_var_kl, or k1+, whose gradient is that of k2")


def _mandatory(run: Run) -> Iterator[Finding]:
    """Yield options that verl leaves to the user and that are not set; a reward model's only with one."""
    for key in upstream.options(run.tree):
        of_a_model = key.startswith("reward.reward_model.") and not run.at("reward.reward_model.enable")
        if run.at(key) == MANDATORY and not of_a_model and not key.startswith("distillation."):
            remedy = "set it: vllm or sglang" if key == f"{Key.ROLLOUT}.name" else "set it"
            yield Finding("error", key, f"it is {MANDATORY}, which verl leaves for you to set", remedy)


def _distillation(run: Run, channels: Channels | None) -> Iterator[Finding]:
    """Yield an error where verl's distillation and a loss of ours cannot both train."""
    if not run.at(Key.DISTILLATION):
        return
    if channels is not None and (channels.hint or channels.replay):
        problem = "it is True, and verl's distillation sets its own loss where hint and replay set theirs"
        yield Finding("error", Key.DISTILLATION, problem, f"set {Key.DISTILLATION}=False")
    elif (is_ours(run.estimator) or is_ours(run.loss)) and run.at(Key.TASK_REWARDS) is False:
        problem = f"it is {run.at(Key.TASK_REWARDS)!r}, and verl's distillation then sets the policy loss to "
        problem += "0, so that neither the advantage nor the policy loss trains the model"
        yield Finding("error", Key.TASK_REWARDS, problem, f"set it to True, or set {Key.DISTILLATION}=False")


def _channel_conflicts(run: Run, channels: Channels) -> Iterator[Finding]:
    """Yield the options of verl with which composer_sync cannot deliver a channel."""
    has_reference = upstream.needs_reference(run.tree) or upstream.has_adapter(run.tree)
    if channels.uses_reference and not has_reference:
        teacher = channels.hint is not None and channels.config.hint_teacher == "base"
        what = "hint_teacher 'base'" if teacher else f"replay_loss {channels.config.replay_loss!r}"
        remedy = f"set {Key.USE_KL_LOSS}=True, with {Key.KL_COEF}=0 if no KL is wanted"
        problem = f"{what} needs the reference policy, and this run has none"
        yield Finding("error", Key.USE_KL_LOSS, problem, remedy)
    if (channels.hint or channels.replay) and run.at(Key.FILTER_GROUPS):
        problem = "it is True, and verl then drops groups of equal rewards, which only hint and replay train"
        yield Finding("warning", Key.FILTER_GROUPS, problem, f"set {Key.FILTER_GROUPS}=False")
    if channels.compares_distributions:
        yield from _logit_conflicts(run)
    if channels.replay:
        yield from _replay_conflicts(run)
    if run.at(options := f"{Key.TRAINER_OPTIONS}.{TRAINER}") is not None:
        remedy = f"set those of {Key.TRAINER_OPTIONS}.sync"
        yield Finding("error", options, "verl does not read these options", remedy)


def _logit_conflicts(run: Run) -> Iterator[Finding]:
    """Yield the options with which an engine does not pass its logits to the loss function."""
    if run.at(Key.FUSED_KERNELS):
        problem = "it is True, and fused kernels never hold the logits that hint_divergence compares"
        yield Finding("error", Key.FUSED_KERNELS, problem, f"set it to False, {SAMPLED}")
    for model in (Key.ACTOR, Key.REF):
        strategy, padded = f"{model}.strategy", f"{model}.fsdp_config.pad_to_length"
        if (engine := run.at(strategy) or "fsdp") not in verl.SHOWS_LOGITS:
            problem = f"it is {engine!r}, and only verl's FSDP engine shows a loss function the logits"
            yield Finding("error", strategy, problem, f"set fsdp or fsdp2, {SAMPLED}")
        if run.at(padded):
            problem = "it is True, and verl's engine then shows a loss function no logits"
            yield Finding("error", padded, problem, f"set it to False, {SAMPLED}")
        for ulysses in (f"{model}.{name}" for name in verl.ULYSSES):
            if (run.at(ulysses) or 1) > 1:
                problem = f"it is {run.at(ulysses)}, and each rank then has only a part of every sequence"
                yield Finding("error", ulysses, problem, f"set it to 1, {SAMPLED}")


def _replay_conflicts(run: Run) -> Iterator[Finding]:
    """Yield the options with which replayed rows would change the policy's term."""
    if run.at(Key.SHUFFLE):
        problem = "it is True, and mini-batches must keep their shares of the replayed pairs"
        yield Finding("error", Key.SHUFFLE, problem, f"set {Key.SHUFFLE}=False")
    if run.at(Key.LOSS_MODE) == verl.MEAN_OVER_ROWS:
        problem = f"{verl.MEAN_OVER_ROWS!r} averages over all rows of a micro-batch, replayed ones too"
        remedy = "name composer/gmpo, which averages over rows with a response"
        yield Finding("error", Key.LOSS_MODE, problem, remedy)
    if run.at(Key.AGG_MODE) == verl.NORM_MODE and run.at(Key.SCALE_FACTOR) is None:
        mode = verl.NORM_MODE
        problem = f"it is not set, and {mode!r} then divides by a width that replayed rows may change"
        yield Finding("error", Key.SCALE_FACTOR, problem, SET_LENGTH)


def wanted_columns(channels: Channels) -> dict[str, str]:
    """Return the data set's columns that the channels need, each with the weight that needs it."""
    hint = {HINT: "hint_weight"} if channels.hint else {}
    return hint | (dict.fromkeys((CHOSEN, REJECTED), "replay_weight") if channels.replay else {})


def missing_columns(channels: Channels, columns: Mapping[str, Collection[str]]) -> Iterator[Finding]:
    """Yield, for each file, the first column that a channel needs and the file does not have."""
    for file, present in columns.items():
        for column, weight in wanted_columns(channels).items():
            if column not in present:
                has = ", ".join(sorted(present))
                problem = f"{weight} > 0 needs the column {column!r}, and {file} has {has}"
                remedy = f"add the column (None in rows without one), or set {weight}=0"
                yield Finding("error", Key.TRAIN_FILES, problem, remedy)
                break


def local_files(files: Any) -> dict[str, Path]:
    """Return the data files that are named by a path of this machine, and not by a URL."""
    names = [files] if isinstance(files, str) else files if isinstance(files, list) else ()
    return {str(name): Path(str(name)).expanduser() for name in names if name and "://" not in str(name)}


def absent_files(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the data files that are not on this machine; verl's default files count as not set."""
    for key in (Key.TRAIN_FILES, Key.VAL_FILES):
        for name, path in local_files(at(config, key)).items():
            if not path.exists() and not name.startswith(verl.DEFAULT_DATA):
                problem = f"there is no {name}, looked for from {Path.cwd()} on this machine"
                yield Finding("warning", key, problem, "correct the path, or write it as an absolute path")


def file_columns(files: Any) -> dict[str, list[str]]:
    """Return the columns of each parquet or JSON file of the training data that is on this machine."""
    readers = {".parquet": _parquet_columns, ".jsonl": _json_columns, ".json": _json_columns}
    found = {}
    for name, path in local_files(files).items():
        if path.suffix in readers and path.is_file():
            try:
                found[name] = readers[path.suffix](path)
            except Exception:  # verl says what is wrong with it, before it loads a model
                continue
    return found


def _parquet_columns(path: Path) -> list[str]:
    return list(import_module("pyarrow.parquet").read_schema(path).names)


def _json_columns(path: Path) -> list[str]:
    """Return the keys of a file's rows, in the order in which they appear: a list, or one object per line."""
    with path.open(encoding="utf-8") as lines:
        listed = next((line for line in lines if line.strip()), "").lstrip().startswith("[")
        lines.seek(0)
        rows = json.load(lines) if listed else map(json.loads, filter(str.strip, lines))
        return list(dict.fromkeys(key for row in rows for key in row))
