"""What a run of verl needs for `algorithm.composer`: its names, its config, and the columns of its data.

`findings` is the one list of rules. `composer-plugins doctor --verl` reports it; the trainer composer_sync
enforces it before it starts a worker. Neither verl nor hydra is needed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from composer_plugins.adapters.verl_plugin.rules import (
    CHANNELS,
    NODE,
    TRAINER,
    Channels,
    is_ours,
    loss_in,
    parse,
    parse_channels,
    parse_choice,
    reduction,
    undelivered,
)
from composer_plugins.adapters.verl_plugin.upstream import (
    ACTOR,
    AGG_MODE,
    BYPASS,
    CRITIC,
    DATASET_CLASS,
    DISTILLATION,
    ENTRY_POINTS,
    ESTIMATOR,
    FUSED_KERNELS,
    KL_COEF,
    KL_IN_REWARD,
    LOSS_MODE,
    LOSS_TARGET,
    MEAN_OVER_ROWS,
    NORM_MODE,
    POLICY_LOSS,
    REF,
    ROLLOUT_LOGPROBS,
    SCALE_FACTOR,
    SHOWS_LOGITS,
    SHUFFLE,
    TRAIN_FILES,
    TRAINER_MODE,
    TRAINER_OPTIONS,
    USE_KL_LOSS,
    USE_V1,
    Release,
    at,
    has_adapter,
    registries,
    release_of,
)
from composer_plugins.catalogue import Choice, Kind, of_kind
from composer_plugins.columns import CHOSEN, HINT, REJECTED
from composer_plugins.config import ComposerConfig
from composer_plugins.diagnosis import Finding, Severity
from composer_plugins.errors import ComposerError, in_a_line, unknown
from composer_plugins.plugins import losses

WORKER_NODE = f"{POLICY_LOSS}.composer"
TARGET = "composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig"
WORKER_OVERRIDES = f"{LOSS_TARGET}={TARGET} +{WORKER_NODE}='${{{NODE}}}'"
ADVANTAGE_OPTIONS = ("advantage", "advantage_params")
POLICY_OPTIONS = ("policy", "policy_params", "policy_weight")
LISTED = "composer-plugins list --framework verl shows ours"
DEFAULTS = ComposerConfig.model_validate({})
SAMPLED = "or set hint_divergence='sampled_token'"


class Run(NamedTuple):
    """A composed config of verl's as plain mappings, and the release of verl that will run it."""

    tree: Mapping[str, Any]
    release: Release = None

    def at(self, path: str) -> Any:
        """Return the entry at a dotted path; None where there is none."""
        return at(self.tree, path)

    @property
    def estimator(self) -> str:
        """The advantage estimator's registered name."""
        return str(self.at(ESTIMATOR))

    @property
    def loss(self) -> str:
        """The policy loss's registered name."""
        return str(self.at(LOSS_MODE))

    @property
    def is_v1(self) -> bool:
        """Whether a trainer of the v1 kind runs; before 0.9 there is none."""
        return bool(self.at(USE_V1)) and (self.release is None or self.release >= ENTRY_POINTS)

    @property
    def trainer(self) -> str:
        """The v1 trainer's registered name; "" with verl's legacy trainer."""
        return str(self.at(TRAINER_MODE)) if self.is_v1 else ""

    @property
    def uses_composer(self) -> bool:
        """Whether an estimator, a policy loss or a trainer of ours is chosen."""
        return is_ours(self.estimator) or is_ours(self.loss) or self.trainer == TRAINER

    def node(self, path: str) -> dict[str, Any]:
        """Return a table of options; {} where there is none."""
        found = self.at(path)
        return {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}


def findings(
    run: Run, known: Mapping[str, Collection[str]], columns: Mapping[str, Collection[str]]
) -> list[Finding]:
    """Return what in this config ends the run, is ignored, or trains something other than it says.

    `known` are the names in verl's registries, `columns` those of each local file of the data.
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


def examined(config: Mapping[str, Any] | None, version: str | None) -> dict[str, Any]:
    """Return what the doctor's probe asks for: the names in verl's registries, the findings in a config."""
    known: dict[str, Any] = registries()
    if config is None:
        return known
    columns = parquet_columns(at(config, TRAIN_FILES))
    return known | {"findings": findings(Run(config, release_of(version)), known, columns)}


def _findings(
    run: Run, known: Mapping[str, Collection[str]], columns: Mapping[str, Collection[str]]
) -> Iterator[Finding]:
    yield from _names(run, known)
    if not run.uses_composer:
        yield _unused(run)
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
            errors.append(Finding.from_error(error.under(key)))
        except Exception as error:  # a plugin's loss that does not import
            errors.append(Finding("error", key, in_a_line(error), "correct or remove the loss that is named"))

    policy: Choice | None = None
    if _is_known(run.estimator, "advantage"):
        parsed(NODE, parse_choice, node, "advantage", loss_in(run.estimator))
    if _is_known(run.loss, "policy"):
        key = NODE if seen in ({}, node) else WORKER_NODE
        _, policy = parsed(key, parse_choice, seen, "policy", loss_in(run.loss)) or (None, None)
    delivers = run.trainer == TRAINER
    channels: Channels | None = parsed(NODE, parse_channels, node) if delivers else None
    config: ComposerConfig | None = channels.config if channels else parsed(NODE, parse, node)
    yield from errors
    if is_ours(run.estimator) and run.at(CRITIC):
        problem = f"it is True, and {run.estimator!r} has no returns for a critic to learn"
        yield Finding("error", CRITIC, problem, f"set {CRITIC}=False, or {ESTIMATOR}=gae")
    if config is not None:
        yield from _not_run(run, config)
        yield from _not_seen(run, config, seen)
        yield from _without_weight(config)
        yield from undelivered(config, delivers=delivers)
    yield from _old_policy(run, policy)
    if policy is not None:
        yield from reduction(policy, str(run.at(AGG_MODE) or ""))
    if channels is not None:
        yield from _of_channels(run, channels)
        yield from missing_columns(channels, columns if not run.at(DATASET_CLASS) else {})


def _is_known(name: str, kind: Kind) -> bool:
    """Whether a registered name is ours; that there is no such loss is a finding of `_names`."""
    return is_ours(name) and (loss_in(name) is None or loss_in(name) in of_kind(losses(), kind))


def _names(run: Run, registered: Mapping[str, Collection[str]]) -> Iterator[Finding]:
    """The names that verl does not know. It would say so after the first rollout."""
    for key, noun, name, known in (
        (ESTIMATOR, "advantage estimator", run.estimator, registered["estimators"]),
        (LOSS_MODE, "policy loss", run.loss, registered["losses"]),
        (TRAINER_MODE, "trainer", run.trainer, registered["trainers"]),
    ):
        # Where none of ours is registered, that is one finding about the environment.
        if not known or not name or name in known or (is_ours(name) and not any(map(is_ours, known))):
            continue
        if name != TRAINER:
            yield Finding.from_error(unknown(key, name, known, noun=noun, more=LISTED))
        elif any(map(is_ours, registered["estimators"])):
            problem = f"the plugin has registered its losses, and no trainer {TRAINER!r}"
            remedy = f'see python -W default -c "import verl": {TRAINER} needs verl 0.9 and verl[verl-core]'
            yield Finding("error", key, problem, remedy)


def _unused(run: Run) -> Finding:
    """Nothing of ours runs."""
    names, choose = f"{ESTIMATOR} is {run.estimator!r}, {LOSS_MODE} {run.loss!r}", f"set {ESTIMATOR}=composer"
    if run.node(NODE):
        return Finding("error", NODE, f"it is set, and nothing reads it: {names}", f"{choose}, or remove it")
    return Finding("warning", ESTIMATOR, f"verl trains with its own losses alone: {names}", choose)


def _not_run(run: Run, config: ComposerConfig) -> Iterator[Finding]:
    """Options of the advantage or the policy, where one of verl's own runs."""
    for key, name, options, remedy in (
        (ESTIMATOR, run.estimator, ADVANTAGE_OPTIONS, f"{ESTIMATOR}=composer"),
        (LOSS_MODE, run.loss, POLICY_OPTIONS, f"{LOSS_MODE}=composer {WORKER_OVERRIDES}"),
    ):
        if not is_ours(name) and (given := [one for one in options if one in config.model_fields_set]):
            problem = f"it is set, and it has no effect, because {key} is {name!r}"
            yield Finding("error", f"{NODE}.{given[0]}", problem, f"set {remedy}, or remove it")


def _not_seen(run: Run, config: ComposerConfig, seen: Mapping[str, Any]) -> Iterator[Finding]:
    """Options of the policy that the actor's workers, where a loss of ours runs, have otherwise."""
    if not is_ours(run.loss):
        return
    target, named = run.at(LOSS_TARGET), loss_in(run.loss)
    if run.at(WORKER_NODE) is not None and target != TARGET:
        problem = f"{target} does not take the node composer, and ends with a TypeError"
        yield Finding("error", LOSS_TARGET, problem, f"set it to {TARGET}")
        return
    theirs = ({"policy": named} if named else {}) | dict(seen)
    for option in sorted(config.model_fields_set & set(POLICY_OPTIONS)):
        value, worker = getattr(config, option), theirs.get(option, getattr(DEFAULTS, option))
        if worker != value:
            problem = f"it is {value!r}, and the actor's workers, which run {run.loss!r}, have {worker!r}"
            yield Finding("error", f"{NODE}.{option}", problem, f"set {WORKER_OVERRIDES}")


def _without_weight(config: ComposerConfig) -> Iterator[Finding]:
    """Options of a channel that has no weight."""
    for channel in CHANNELS:
        weight = f"{channel}_weight"
        given = [option for option in sorted(config.model_fields_set) if option.startswith(f"{channel}_")]
        given = [option for option in given if option != weight]
        if given and not getattr(config, weight):
            remedy = f"set {weight} and {TRAINER_MODE}={TRAINER}, or remove it"
            yield Finding("error", f"{NODE}.{given[0]}", f"it has no effect without a {weight}", remedy)


def _old_policy(run: Run, policy: Choice | None) -> Iterator[Finding]:
    """Whose log-probabilities `old_log_probs` are, where the loss needs the rollout policy's."""
    bypass, kept = run.at(BYPASS), run.at(ROLLOUT_LOGPROBS)
    if bypass and not run.is_v1 and is_ours(run.loss):
        problem = "it is True, and the legacy trainer then sets loss_mode to its own 'bypass_mode'"
        yield Finding("error", BYPASS, problem, f"set {USE_V1}=True, or {BYPASS}=False")
    elif bypass and not kept:
        problem = f"it is {kept}, and {BYPASS} needs the rollout engine's log-probabilities"
        yield Finding("error", ROLLOUT_LOGPROBS, problem, f"set {ROLLOUT_LOGPROBS}=True")
    elif policy is not None and "rollout_logprobs" in policy.loss.needs and not bypass:
        problem = f"{policy.name!r} compares with the rollout policy, and verl's old_log_probs are the "
        remedy = f"set {BYPASS}=True" + ("" if kept else f" {ROLLOUT_LOGPROBS}=True")
        remedy += ", which makes them the rollout engine's"
        severity: Severity = "info" if kept else "warning"
        key = BYPASS if kept else ROLLOUT_LOGPROBS
        yield Finding(severity, key, f"{problem}trainer's own recomputation", remedy)


def _of_channels(run: Run, channels: Channels) -> Iterator[Finding]:
    """What in the config keeps composer_sync from delivering a channel."""
    if channels.uses_reference and not (run.at(USE_KL_LOSS) or run.at(KL_IN_REWARD) or has_adapter(run.tree)):
        teacher = channels.hint is not None and channels.config.hint_teacher == "base"
        what = "hint_teacher 'base'" if teacher else f"replay_loss {channels.config.replay_loss!r}"
        remedy = f"set {USE_KL_LOSS}=True, with {KL_COEF}=0 if no KL is wanted"
        problem = f"{what} needs the reference policy, and this run has none"
        yield Finding("error", USE_KL_LOSS, problem, remedy)
    if (channels.hint or channels.replay) and run.at(DISTILLATION):
        problem = "it is True, and verl's distillation sets its own loss where hint and replay set theirs"
        yield Finding("error", DISTILLATION, problem, f"set {DISTILLATION}=False")
    if channels.compares_distributions:
        yield from _of_logits(run)
    if channels.replay:
        yield from _of_replay(run)
    if run.at(f"{TRAINER_OPTIONS}.{TRAINER}") is not None:
        problem = "verl does not read these options"
        yield Finding(
            "error", f"{TRAINER_OPTIONS}.{TRAINER}", problem, f"set those of {TRAINER_OPTIONS}.sync"
        )


def _of_logits(run: Run) -> Iterator[Finding]:
    """What keeps an engine from showing the loss function its logits."""
    if run.at(FUSED_KERNELS):
        problem = "it is True, and fused kernels never hold the logits that hint_divergence compares"
        yield Finding("error", FUSED_KERNELS, problem, f"set it to False, {SAMPLED}")
    for model in (ACTOR, REF):
        strategy, ulysses = f"{model}.strategy", f"{model}.ulysses_sequence_parallel_size"
        padded = f"{model}.fsdp_config.pad_to_length"
        if (engine := run.at(strategy) or "fsdp") not in SHOWS_LOGITS:
            problem = f"it is {engine!r}, and only verl's FSDP engine shows a loss function the logits"
            yield Finding("error", strategy, problem, f"set fsdp or fsdp2, {SAMPLED}")
        if run.at(padded):
            problem = "it is True, and verl's engine then shows a loss function no logits"
            yield Finding("error", padded, problem, f"set it to False, {SAMPLED}")
        if (run.at(ulysses) or 1) > 1:
            problem = f"it is {run.at(ulysses)}, and each rank then has a part of every sequence only"
            yield Finding("error", ulysses, problem, f"set it to 1, {SAMPLED}")


def _of_replay(run: Run) -> Iterator[Finding]:
    """Where replayed rows would change the policy's term."""
    if run.at(SHUFFLE):
        problem = "it is True, and mini-batches must keep their shares of the replayed pairs"
        yield Finding("error", SHUFFLE, problem, f"set {SHUFFLE}=False")
    if run.at(LOSS_MODE) == MEAN_OVER_ROWS:
        problem = f"{MEAN_OVER_ROWS!r} averages over all rows of a micro-batch, replayed ones too"
        yield Finding(
            "error", LOSS_MODE, problem, "name composer/gmpo, which averages over rows with a response"
        )
    if run.at(AGG_MODE) == NORM_MODE and run.at(SCALE_FACTOR) is None:
        problem = f"it is not set, and {NORM_MODE!r} then divides by a width that replayed rows may change"
        yield Finding("error", SCALE_FACTOR, problem, "set it, to data.max_response_length for example")


def wanted_columns(channels: Channels) -> dict[str, str]:
    """Return the data set's columns that the channels need, each with the weight that needs it."""
    hint = {HINT: "hint_weight"} if channels.hint else {}
    return hint | (dict.fromkeys((CHOSEN, REJECTED), "replay_weight") if channels.replay else {})


def missing_columns(channels: Channels, columns: Mapping[str, Collection[str]]) -> Iterator[Finding]:
    """Yield, for each file, the first column that a channel needs and the file does not have."""
    for file, present in columns.items():
        for column, weight in wanted_columns(channels).items():
            if column not in present:
                problem = (
                    f"{weight} > 0 needs the column {column!r}, and {file} has {', '.join(sorted(present))}"
                )
                remedy = f"add the column (None in rows without one), or set {weight}=0"
                yield Finding("error", TRAIN_FILES, problem, remedy)
                break


def parquet_columns(files: Any) -> dict[str, list[str]]:
    """Return the columns of each parquet file of the training data that is on this machine."""
    found = {}
    for name in [files] if isinstance(files, str) else files if isinstance(files, list) else ():
        path = Path(str(name)).expanduser()
        if path.suffix == ".parquet" and path.is_file():
            try:
                found[str(name)] = import_module("pyarrow.parquet").read_schema(path).names
            except Exception:  # verl says what is wrong with it, before it loads a model
                continue
    return found
