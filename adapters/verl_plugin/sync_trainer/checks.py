"""Check a whole config of verl for `algorithm.composer`: registered names and options.

The trainer composer_sync enforces what `findings` finds before it starts a worker, and
`composer-plugins doctor --verl` reports the same. Neither verl nor hydra is needed.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from composer_plugins.adapters.verl_plugin import options as verl_options
from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.adapters.verl_plugin.options import (
    NODE,
    POLICY_OPTIONS,
    SAMPLED,
    TRAINER,
    WORKER_NODE,
    Channels,
    LossKind,
)
from composer_plugins.config import ComposerConfig, at
from composer_plugins.errors import Finding, Findings, in_a_line, unknown
from composer_plugins.frameworks import verl
from composer_plugins.frameworks.verl import VERL, Key
from composer_plugins.losses.choosing import Choice, with_plugin_problems
from composer_plugins.losses.registry import registry
from composer_plugins.objective.asking import Asked
from composer_plugins.objective.registered import is_ours, loss_in


class Run(NamedTuple):
    """A composed config of verl as plain mappings."""

    tree: Mapping[str, Any]

    def at(self, path: str) -> Any:
        """Return the entry at a dotted path, or None."""
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
    def trainer(self) -> str:
        """The v1 trainer's registered name; "" where verl's legacy trainer runs, as always before 0.9."""
        return str(self.at(Key.TRAINER_MODE)) if self.at(Key.USE_V1) else ""

    @property
    def inputs(self) -> list[str]:
        """The inputs that composer_sync passes to the policy loss of this config, a sound one."""
        if not is_ours(self.loss):
            return []
        asked, _ = verl_options.asked(self.node(WORKER_NODE), "policy", loss_in(self.loss))
        found = verl_options.from_batch(asked.choice) if asked is not None else []
        return found if self.keeps_rollout else [name for name in found if name == "ref_logprobs"]

    @property
    def keeps_rollout(self) -> bool:
        """Whether the batch has the rollout engine's log-probabilities and the trainer's."""
        return bool(self.at(Key.ROLLOUT_LOGPROBS)) and not self.at(Key.BYPASS)

    @property
    def own_kl(self) -> str:
        """The key of the weight of a KL that verl adds; "" where it adds none."""
        kls = (Key.USE_KL_LOSS, Key.KL_COEF), (Key.KL_IN_REWARD, Key.REWARD_KL_COEF)
        return next((weight for switch, weight in kls if self.at(switch) and self.at(weight)), "")

    def node(self, path: str) -> dict[str, Any]:
        """Return a table of options, or {}."""
        found = self.at(path)
        return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def findings(run: Run, known: Mapping[str, Collection[str]]) -> list[Finding]:
    """Return the options that would stop the run, have no effect, or train something other than they say.

    `known` has the names in each of verl's registries.
    """
    found: list[Finding] = []
    try:
        for finding in _findings(run, known):
            if finding not in found:  # the driver's options and the workers' are often the same
                found.append(finding)
    except Exception as error:  # a list where a number is compared, a plugin's loss that does not import
        problem = f"what follows was not examined: {in_a_line(error)}"
        found.append(Finding("error", "actor_rollout_ref", problem, "correct it"))
    return found


def diagnosed(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the doctor's facts: the names in verl's registries, findings, why composer_sync fails to load.

    composer_sync is loaded only if the config names it, or without a config.
    """
    known = upstream.registries()
    found = list[Finding]() if config is None else findings(Run(config), known)
    if config is not None and (error := upstream.validation_error(config)):
        problem = f"verl's validate_config raises {error.rstrip('.')}, and so does main_ppo"
        found.append(Finding("error", "main_ppo", problem, "correct it"))
    failure = upstream.trainer_failure() if config is None or Run(config).trainer == TRAINER else ""
    return {**known, "findings": found, "failure": failure}


def _findings(run: Run, known: Mapping[str, Collection[str]]) -> Iterator[Finding]:
    yield from _unknown_names(run, known)
    delivers = run.trainer == TRAINER
    if not (delivers or is_ours(run.estimator) or is_ours(run.loss)):
        yield _nothing_of_ours(run)
        return
    for key in (NODE, WORKER_NODE):
        if run.at(key) is not None and not isinstance(run.at(key), Mapping):
            yield Finding("error", key, f"it is {run.at(key)!r}", "write a table of options")
    node, seen = run.node(NODE), run.node(WORKER_NODE)
    found = Findings()

    def chosen(table: dict[str, Any], kind: LossKind, registered: str) -> Asked | None:
        if not verl_options.is_known(registered, kind):  # `_unknown_names` reports it
            return None
        key = NODE if table in ({}, node) else WORKER_NODE
        moved = upstream.moved(kind, run.at(VERL.tables[kind]))
        asked, more = verl_options.asked(table, kind, loss_in(registered), moved, key)
        found.extend(more)
        return asked

    chosen(node, "advantage", run.estimator)
    nameless = any(verl_options.unnamed(run.loss, seen))
    of_tokens = None if nameless else chosen(seen, "policy", run.loss)
    named = loss_in(run.loss) if verl_options.is_known(run.loss, "policy") else None
    whole, more = verl_options.asked(node, "policy", named)
    found += more
    channels = None
    if whole is not None and delivers and not more.errors:
        with found.collected(NODE):
            channels = verl_options.delivered(whole)
    yield from found
    if is_ours(run.estimator) and run.at(Key.CRITIC):
        problem = f"it is True, and {run.estimator!r} has no returns for a critic to learn"
        yield Finding("error", Key.CRITIC, problem, f"set {Key.CRITIC}=False, or {Key.ESTIMATOR}=gae")
    if whole is not None:
        yield from verl_options.without_effect(whole.config, "advantage", run.estimator)
        yield from verl_options.without_effect(whole.config, "policy", run.loss)
        yield from _read_elsewhere(run, seen)
        if not more.errors:
            yield from verl_options.different_in_the_workers(whole.config, node, run.loss, seen)
        if not delivers:
            yield from verl_options.undelivered(whole.config)
    if of_tokens is not None:
        yield from verl_options.reduction(of_tokens.choice, str(run.at(Key.AGG_MODE)))
        has_reference = upstream.needs_reference(run.tree)
        yield from verl_options.reference(
            of_tokens.choice, delivers=delivers, loaded=has_reference, kl=run.own_kl
        )
        yield from _old_policy(run, of_tokens.choice, delivers=delivers)
    if channels is not None:
        yield from _channel_conflicts(run, channels)


def _unknown_names(run: Run, known: Mapping[str, Collection[str]]) -> Iterator[Finding]:
    """Yield our names that verl does not know; verl notices them only after the first rollout."""
    for key, noun, name, kind in (
        (Key.ESTIMATOR, "advantage estimator", run.estimator, "estimators"),
        (Key.LOSS_MODE, "policy loss", run.loss, "losses"),
    ):
        # If none of our names is registered, the doctor reports that once, as a finding of the environment.
        ours = [one for one in known[kind] if is_ours(one)]
        if ours and is_ours(name) and name not in ours:
            more = "composer-plugins list --framework verl shows ours"
            error = unknown(key, name, ours, noun=noun, more=more)
            yield Finding.from_error(with_plugin_problems(error, name.removeprefix("composer/"), registry()))


def _nothing_of_ours(run: Run) -> Finding:
    """Return the finding for a config in which no estimator, loss or trainer of this package runs."""
    names = f"{Key.ESTIMATOR} is {run.estimator!r}, {Key.LOSS_MODE} is {run.loss!r}"
    choose = f"set {Key.ESTIMATOR}=composer, {Key.LOSS_MODE}=composer, or both"
    if run.node(NODE):
        return Finding("error", NODE, f"it is set, and nothing reads it: {names}", f"{choose}, or remove it")
    return Finding("warning", Key.ESTIMATOR, f"verl trains with its own losses only: {names}", choose)


def _read_elsewhere(run: Run, seen: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield options in the workers' table that only the driver reads, where the driver's table differs."""
    node, read = run.node(NODE), POLICY_OPTIONS if is_ours(run.loss) else ()
    for option, value in seen.items():
        if option in ComposerConfig.model_fields and option not in read and node.get(option) != value:
            problem = f"it is {value!r}, and it has no effect here: it is read from {NODE}"
            remedy = f"set {NODE}.{option}, and {WORKER_NODE}='${{{NODE}}}'"
            yield Finding("error", f"{WORKER_NODE}.{option}", problem, remedy)


def _old_policy(run: Run, policy: Choice, *, delivers: bool) -> Iterator[Finding]:
    """Yield a warning where a loss that needs the rollout policy's gets the trainer's `old_log_probs`.

    Where it gets the rollout policy's, an error if verl's own correction would count the ratio a second time.
    """
    from_batch = delivers and "rollout_logprobs" in verl_options.from_batch(policy)
    if from_batch and run.keeps_rollout:
        if run.at(Key.CORRECTED):
            problem = f"{policy.name!r} contains the ratio to the rollout engine already, and would be "
            yield Finding("error", Key.CORRECTED, f"{problem}corrected twice", f"set {Key.CORRECTED}=null")
    elif "rollout_logprobs" in policy.loss.needs and not run.at(Key.BYPASS):
        problem = f"{policy.name!r} compares with the rollout policy, and verl's old_log_probs are the "
        problem += "trainer's own recomputation"
        key, kept = Key.BYPASS, run.at(Key.ROLLOUT_LOGPROBS)
        remedy = f"set {key}=True {Key.ROLLOUT_LOGPROBS}=True, which makes them the rollout engine's"
        if from_batch:
            key = Key.ROLLOUT_LOGPROBS
            remedy = f"set {key}=True, with which the loss gets the rollout engine's too"
        yield Finding("info" if kept else "warning", key, problem, remedy)


def _channel_conflicts(run: Run, channels: Channels) -> Iterator[Finding]:
    """Yield the options of verl with which composer_sync cannot deliver a channel."""
    if (channels.hint or channels.replay) and run.at(Key.DISTILLATION):
        problem = "it is True, and verl's distillation sets its own loss where hint and replay set theirs"
        yield Finding("error", Key.DISTILLATION, problem, f"set {Key.DISTILLATION}=False")
    has_reference = upstream.needs_reference(run.tree) or upstream.has_adapter(run.tree)
    if channels.uses_reference and not has_reference:
        teacher = channels.hint is not None and channels.config.hint_teacher == "base"
        what = "hint_teacher 'base'" if teacher else f"replay_loss {channels.config.replay_loss!r}"
        remedy = f"set {Key.USE_KL_LOSS}=True, with {Key.KL_COEF}=0 if no KL is wanted"
        problem = f"{what} needs the reference policy, and this run has none"
        yield Finding("error", Key.USE_KL_LOSS, problem, remedy)
    if channels.hint and not channels.hint_is_loss and run.loss == verl.MEAN_OVER_ROWS:
        problem = f"'advantage' gives each token its own advantage, and {run.loss!r} averages them"
        yield Finding("error", f"{NODE}.hint_estimator", problem, "set 'score', or name another loss_mode")
    if channels.compares_distributions:
        yield from _logit_conflicts(run)
    if channels.replay:
        yield from _replay_conflicts(run)


def _logit_conflicts(run: Run) -> Iterator[Finding]:
    """Yield the options with which an engine does not pass whole logits to the loss function."""
    if run.at(Key.FUSED_KERNELS):
        problem = "it is True, and fused kernels never hold the logits of hint_divergence"
        yield Finding("error", Key.FUSED_KERNELS, problem, f"set it to False, {SAMPLED}")
    for key in (f"{Key.ACTOR}.strategy", f"{Key.REF}.strategy"):
        if (engine := run.at(key)) not in (*verl.SHOWS_LOGITS, None):
            problem = f"it is {engine!r}, and verl's engine then shows a loss function no logits"
            yield Finding("error", key, problem, f"set it to {verl.SHOWS_LOGITS[0]!r}, {SAMPLED}")


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
        remedy = "set it, to data.max_response_length for example"
        yield Finding("error", Key.SCALE_FACTOR, problem, remedy)
