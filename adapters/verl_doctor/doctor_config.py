"""The names in verl's config, the options under `algorithm.composer`, and whether anything reads them."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.adapters.verl_doctor.run import Run
from composer_plugins.adapters.verl_parts.rules import NODE, TRAINER, named
from composer_plugins.adapters.verl_parts.run import LOSS, LOSS_MODE, SENT, TARGET, is_ours
from composer_plugins.doctor import Finding
from composer_plugins.errors import ConfigError, unknown

ROLLOUT = "actor_rollout_ref.rollout.calculate_log_probs"
BYPASS = "algorithm.rollout_correction.bypass_mode"
LISTED = "composer-plugins list --framework verl shows ours"


def names(run: Run, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Names that verl does not know, which it says after the first rollout; and modules it cannot import."""
    library = "actor_rollout_ref.model.external_lib"
    if facts["library"]:
        what = f"{run.at(library)!r} does not import: {facts['library']}"
        yield Finding("error", library, what, "mend or remove it")
    late = "; verl says so after the first rollout"
    for key, what, name, known, later in (
        ("algorithm.adv_estimator", "estimator", run.estimator, facts["estimators"], late),
        (LOSS_MODE, "policy loss", run.loss, facts["losses"], late),
        ("trainer.v1.trainer_mode", "trainer", run.mode, facts["trainers"], ""),
    ):
        # Where none of ours is known, that is one finding of its own.
        absent = is_ours(name) and not any(map(is_ours, known))
        if not known or not name or name in known or absent:
            continue
        if name == TRAINER:
            yield from _no_trainer(facts)
        else:
            yield _refusal(key, unknown(what, name, known, more=LISTED), later)


def _no_trainer(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Where the losses are registered and the trainer is not; if neither is, another finding says so."""
    if any(map(is_ours, facts["estimators"])):
        what = f"the plugin has registered its losses and no trainer {TRAINER!r}"
        remedy = f'python -W default -c "import verl" says why; {TRAINER} wants verl 0.9 and verl[verl-core]'
        yield Finding("error", "trainer.v1.trainer_mode", what, remedy)


def settings_refused(run: Run, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """What our adapter, or the one config of ours, says against the options."""
    for key, message in settings["refused"]:
        given = run.node if key == NODE else run.worker_node
        spoken = {
            name: found.start() for name in given if (found := re.search(rf"\b{re.escape(name)}\b", message))
        }
        at = f"{key}.{min(spoken, key=spoken.__getitem__)}" if spoken else key
        yield _refusal(at, ConfigError(message))


def _refusal(key: str, error: ConfigError, more: str = "") -> Finding:
    """A complaint, cut where it goes over into what to do."""
    message = str(error)
    for separator in (": did you mean ", ": say ", "; "):
        what, offered, rest = message.partition(separator)
        if offered:
            return Finding("error", key, what + more, (separator + rest).lstrip(":; "))
    return Finding("error", key, message + more, LISTED)


def unread(run: Run) -> Iterator[Finding]:
    """Options that nobody reads: the run trains on, with other ones."""
    choose = "algorithm.adv_estimator=composer"
    if not run.is_ours:
        if run.node:
            what = (
                f"it is set, and read by nobody: adv_estimator is {run.estimator!r}, loss_mode {run.loss!r}"
            )
            yield Finding("error", NODE, what, f"{choose}, or remove it")
        else:
            what = (
                f"{run.estimator!r} with loss_mode {run.loss!r}: verl trains with its own, and none of ours"
            )
            yield Finding("warning", "algorithm.adv_estimator", what, choose)
        return
    yield from _advantage(run)
    yield from _worker(run)


def _advantage(run: Run) -> Iterator[Finding]:
    if is_ours(run.estimator) and run.at("critic.enable"):
        what = f"True, and {run.estimator!r} hands its advantages over as returns, which a critic would learn"
        yield Finding("error", "critic.enable", what, "critic.enable=False, or algorithm.adv_estimator=gae")
    keys = [key for key in ("advantage", "advantage_params") if run.node.get(key)]
    if keys and not is_ours(run.estimator) and not run.carries:  # the trainer says it itself
        what = f"it is set, and not run: algorithm.adv_estimator is {run.estimator!r}"
        yield Finding("error", f"{NODE}.{keys[0]}", what, "algorithm.adv_estimator=composer, or remove it")


def _worker(run: Run) -> Iterator[Finding]:
    """The policy loss runs in the actor's workers, which get what stands in policy_loss and no more."""
    keys = [key for key in ("policy", "policy_params") if run.node.get(key)]
    if run.carries:  # the trainer says it itself
        return
    if not is_ours(run.loss):
        if keys:
            what = f"it is set, and not run: {LOSS_MODE} is {run.loss!r}"
            remedy = f"{LOSS_MODE}=composer {SENT}; or remove it"
            yield Finding("error", f"{NODE}.{keys[0]}", what, remedy)
        return
    target, given = str(run.at(f"{LOSS}._target_")), run.at(f"{LOSS}.composer")
    if given is not None and target != TARGET:
        what = f"policy_loss has a node composer, which {target} does not take: verl ends with a TypeError"
        yield Finding("error", f"{LOSS}._target_", what, f"{LOSS}._target_={TARGET}")
    elif given is None and keys and _adds(run, keys):
        what = f"it is set, and the actor's workers, where {run.loss!r} runs, do not see it"
        yield Finding("error", f"{NODE}.{keys[0]}", what, SENT)


def _adds(run: Run, keys: list[str]) -> bool:
    """Whether the node says more of the policy than the loss mode's own name does."""
    return "policy_params" in keys or run.node["policy"] != (named(run.loss) or "grpo")


def policy(run: Run, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Whose log-probabilities `old_log_probs` are, where the loss asks for the rollout engine's."""
    bypass, kept, anchored = run.at(BYPASS), run.at(ROLLOUT), settings["anchored"]
    if bypass and not run.is_v1 and is_ours(run.loss):
        what = "the legacy trainer then sets loss_mode to its own 'bypass_mode', and none of ours is run"
        yield Finding("error", BYPASS, what, "trainer.use_v1=True, or bypass_mode=False")
    elif bypass and not kept:
        what = "False, and rollout_correction.bypass_mode wants the rollout engine's log-probabilities"
        yield Finding("error", ROLLOUT, what, f"{ROLLOUT}=True")
    elif anchored and not bypass:
        what = f"{anchored} has its region around the policy that sampled, and verl's old_log_probs are the "
        what += "trainer's own recomputation"
        remedy = f"{BYPASS}=True" + ("" if kept else f" {ROLLOUT}=True") + " makes them the rollout engine's"
        yield Finding("info" if kept else "warning", BYPASS if kept else ROLLOUT, what, remedy)
