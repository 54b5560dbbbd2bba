"""How a loss is named in each framework: the section "Use it" of its page."""

from typing import Any

import yaml

from composer_plugins.adapters.nemo_rl_loss import loss as nemo_rl
from composer_plugins.adapters.skyrl_loss.options import CHOOSES
from composer_plugins.adapters.slime_loss import options as slime
from composer_plugins.adapters.verl_plugin.options import TARGET
from composer_plugins.cli.recorded import examples
from composer_plugins.frameworks import registry as frameworks
from composer_plugins.frameworks.skyrl import ENTRYPOINT, NODE, SKYRL, Key
from composer_plugins.frameworks.slime import SLIME
from composer_plugins.losses.row import KINDS, Loss
from composer_plugins.objective.objective import NORM

WEIGHTS = {"hint_divergence": {"hint_weight": 1.0}, "replay_loss": {"replay_weight": 0.5}}
# By the kind of a loss, what a program calls.
CALLS = {
    "advantage": "add_advantages(data, rewards, groups, {})",
    "divergence": "loss_fn({})",
    "policy": "loss_fn({})",
    "preference": "loss_fn(policy_weight=0.0, {})",
}
NEMO = {"policy": "ComposerLoss", "divergence": "ComposerDistillationLoss"}
LENGTH = 512  # an example of the longest completion
LANGUAGES = {"verl": "yaml", "PRIME-RL": "toml", "SkyRL": "sh", "slime": "yaml"}


def section(loss: Loss) -> str:
    """A tab for the function, and one for each framework that runs the loss by name."""
    tabs = {"Function": _function(loss)}
    running = [one.name for one in frameworks.running() if one.runs(loss)]
    named = options(loss)
    if named and "trl" in running:
        given = named | ({"scale_rewards": "none"} if loss.advantage else {})
        tabs["TRL"] = f"ComposerGRPOConfig({_arguments(given)})"
    if named and "verl" in running:
        tabs["verl"] = _verl(loss, named)
    if named and "prime-rl" in running:
        kwargs = named | ({"old_policy": "rollout"} if "old_logprobs" in loss.needs else {})
        lines = [f"{name} = {_toml(value)}" for name, value in kwargs.items()]
        tabs["PRIME-RL"] = "\n".join(["[trainer.loss.kwargs]", *lines])
    if loss.kind in CHOOSES and "skyrl" in running:
        tabs["SkyRL"] = _skyrl(loss, named)
    length = {"max_length": LENGTH} if loss.mode == NORM else {}
    if loss.kind in CALLS and "tinker" in running:
        given = named | length
        given |= given.pop("advantage_params", {})
        tabs["Tinker"] = CALLS[loss.kind].format(_arguments(given))
    if loss.kind in NEMO and "nemo-rl" in running:
        own = {key: value for key, value in named.items() if not key.endswith("_weight")}
        own |= {"mode": loss.mode} if loss.mode in nemo_rl.MODES else {}
        tabs["NeMo-RL"] = f"{NEMO[loss.kind]}(master_config.loss_fn, {_arguments(own | length)})"
    if loss.kind == "policy" and "slime" in running:
        tree = {"loss_type": "custom_loss", "custom_loss_function_path": SLIME.path.replace(":", ".")}
        tree |= {"calculate_per_token_loss": True} if loss.mode == "token-mean" else {}
        own = named | ({"mode": loss.mode} if loss.mode in slime.BY_ROLLOUT else {}) | length
        tabs["slime"] = yaml.safe_dump({**tree, "composer": own}, sort_keys=False).rstrip()
    if loss.kind == "policy" and "torchtitan" in running:
        tabs["torchtitan"] = f"ComposerLoss.Config({_arguments(named)})"
    blocks = []
    for name, text in tabs.items():
        block = f"```{LANGUAGES.get(name, 'python')}\n{text}\n```".replace("\n", "\n    ")
        blocks.append(f'=== "{name}"\n\n    {block}')
    if named and (own := [f"{loss.name}@{one.upstream}" for one in loss.dialects if one.params]):
        blocks.append(f"This is the loss of its paper. [`{own[0]}`](#dialects) has other numbers.")
    return "## Use it\n\n" + "\n\n".join(blocks)


def options(loss: Loss) -> dict[str, Any]:
    """The options that name the loss in the config of a framework; none for a kind that no option names."""
    option = KINDS[loss.kind].option
    if not option:
        return {}
    required = examples(loss)
    params = {f"{option.partition('_')[0]}_params": required} if required else {}
    return WEIGHTS.get(option, {}) | {option: loss.name} | params


def _arguments(given: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in given.items())


def _skyrl(loss: Loss, named: dict[str, Any]) -> str:
    params = named.get(f"{loss.kind}_params", {})
    options = {CHOOSES[loss.kind]: f"composer/{loss.name}", Key.ENTRYPOINT: ENTRYPOINT}
    reductions = {mode: name for name, mode in SKYRL.denominators.items()}
    options |= {Key.REDUCTION: reductions[loss.mode]} if loss.mode in reductions else {}
    options |= {Key.LENGTH: LENGTH} if loss.mode == NORM else {}
    options |= {f"{NODE}.{loss.kind}_params.{name}": value for name, value in params.items()}
    return " \\\n".join(f"{key}={value}" for key, value in options.items())


def _function(loss: Loss) -> str:
    module, _, function = loss.path.partition(":")
    if loss.kind == "aggregation":
        module, function = "composer_plugins.kernels.aggregation", "aggregate"
    return f"from {module} import {function}"


def _verl(loss: Loss, named: dict[str, Any]) -> str:
    composer = ({"advantage": loss.advantage} if loss.advantage else {}) | named
    tree: dict[str, Any] = {"algorithm": {"adv_estimator": "composer", "composer": composer}}
    if loss.kind == "policy":  # verl's workers read it in another part of the config
        node = {"loss_mode": "composer", "_target_": TARGET, "composer": "${algorithm.composer}"}
        tree["actor_rollout_ref"] = {"actor": {"policy_loss": node}}
    if loss.kind in ("divergence", "preference"):
        tree["trainer"] = {"v1": {"trainer_mode": "composer_sync"}}
    return yaml.safe_dump(tree, sort_keys=False).rstrip()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {_toml(v)}' for k, v in value.items())} }}"
    return f'"{value}"' if isinstance(value, str) else str(value)
