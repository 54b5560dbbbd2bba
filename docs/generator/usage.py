"""How a loss is named in each framework: the section "Use it" of its page."""

from typing import Any

import yaml

from composer_plugins.frameworks import registry as frameworks
from composer_plugins.losses.row import KINDS, REQUIRED, Loss

WEIGHTS = {"hint_divergence": {"hint_weight": 1.0}, "replay_loss": {"replay_weight": 0.5}}
LANGUAGES = {"verl": "yaml", "PRIME-RL": "toml"}


def section(loss: Loss) -> str:
    """A tab for the function, and one for each framework that runs the loss by name."""
    tabs = {"Function": _function(loss)}
    running = [one.name for one in frameworks.running() if one.runs(loss)]
    named = options(loss)
    if named and "trl" in running:
        given = named | ({"scale_rewards": "none"} if loss.advantage else {})
        tabs["TRL"] = f"ComposerGRPOConfig({', '.join(f'{key}={value!r}' for key, value in given.items())})"
    if named and "verl" in running:
        tabs["verl"] = _verl(loss, named)
    if named and "prime-rl" in running:
        kwargs = named | ({"old_policy": "rollout"} if "old_logprobs" in loss.needs else {})
        lines = [f"{name} = {_toml(value)}" for name, value in kwargs.items()]
        tabs["PRIME-RL"] = "\n".join(["[trainer.loss.kwargs]", *lines])
    blocks = []
    for name, text in tabs.items():
        block = f"```{LANGUAGES.get(name, 'python')}\n{text}\n```".replace("\n", "\n    ")
        blocks.append(f'=== "{name}"\n\n    {block}')
    return "## Use it\n\n" + "\n\n".join(blocks)


def options(loss: Loss) -> dict[str, Any]:
    """The options that name the loss in the config of a framework; none for a kind that no option names."""
    option = KINDS[loss.kind].option
    if not option:
        return {}
    required = [name for name in loss.parameters if loss.defaults[name] is REQUIRED]
    examples = {name: loss.parameters[name].example for name in required}
    params = {f"{option.partition('_')[0]}_params": examples} if examples else {}
    return WEIGHTS.get(option, {}) | {option: loss.name} | params


def _function(loss: Loss) -> str:
    module, _, function = loss.path.partition(":")
    if loss.kind == "aggregation":
        module, function = "composer_plugins.kernels.aggregation", "aggregate"
    return f"from {module} import {function}"


def _verl(loss: Loss, named: dict[str, Any]) -> str:
    composer = ({"advantage": loss.advantage} if loss.advantage else {}) | named
    tree: dict[str, Any] = {"algorithm": {"adv_estimator": "composer", "composer": composer}}
    if loss.kind in ("divergence", "preference"):
        tree["trainer"] = {"v1": {"trainer_mode": "composer_sync"}}
    return yaml.safe_dump(tree, sort_keys=False).rstrip()


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{k} = {_toml(v)}' for k, v in value.items())} }}"
    return f'"{value}"' if isinstance(value, str) else str(value)
