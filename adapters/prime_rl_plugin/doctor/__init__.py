"""What `composer-plugins doctor` finds in PRIME-RL's TOML.

PRIME-RL's own class of the config judges PRIME-RL's options, where it can be imported. What is judged here is
what our loss says at its first call, which is after the model is loaded: its import path and its options.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_plugins.adapters.prime_rl_plugin import files as configs
from composer_plugins.adapters.prime_rl_plugin import upstream
from composer_plugins.adapters.prime_rl_plugin.doctor import probe
from composer_plugins.adapters.prime_rl_plugin.options import FUNCTION, newer_than_tested, parse
from composer_plugins.doctor import Examination, Target, ask
from composer_plugins.errors import ConfigError, Finding, did_you_mean
from composer_plugins.frameworks.prime_rl import COMMIT
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import of_kind

TOO_LATE = "PRIME-RL finds that out only after the model is loaded"


def examine(files: Sequence[Path], target: Target) -> Examination:
    """Everything that the doctor finds wrong with these TOML files, merged from left to right."""
    config = configs.merged_config(files, target.overrides)
    if not (known := {*configs.TABLES, configs.LOSS}) & config.keys():
        problem = f"the config has none of {', '.join(sorted(known))} at its top"
        remedy = "give an rl.toml, or the words -- --trainer @ FILE --orchestrator @ FILE for two files"
        raise ConfigError("FILE", problem, remedy)
    is_whole = configs.as_rl(config) is config
    key = "trainer.loss" if is_whole else "loss"
    loss = configs.table_at(configs.as_rl(config), "trainer.loss")
    path = str(loss.get("import_path", ""))
    own_class = upstream.RL_CONFIG if is_whole else upstream.TRAINER_CONFIG
    question: dict[str, Any] = {"installation": upstream.INSTALLATION}
    question["import_path"] = path if loss.get("type") == "custom" else None
    question["config"] = (*own_class, config) if target.version is None else None
    facts = ask(target.python, Path(probe.__file__), json.dumps(question, default=str))
    installed, is_later = facts["prime_rl"]
    release = installed if target.version is None else target.version
    upstream.require(release)
    found = [*newer_than_tested(upstream.is_newer(release) or (is_later and target.version is None))]
    found += of_loss(loss, key, path, facts["loss"], target.python)
    reported = {one.key for one in found if one.severity == "error"}
    found += rejections(facts["rejected"] or (), reported)
    looked_at = "PRIME-RL's own options were not looked at"
    if facts["rejected"] is not None:
        looked_at = f"PRIME-RL's own {own_class[1]} checked the others"
    return Examination(f"our options for PRIME-RL {release or COMMIT}; {looked_at}", tuple(found))


def of_loss(
    loss: Mapping[str, Any], key: str, path: str, complaint: str | None, python: str
) -> Iterator[Finding]:
    """What is wrong with the table of the loss at `key`; `complaint` is Python's about its import path."""
    if loss.get("type") != "custom":
        remedy = f'set type = "custom" and import_path = "{FUNCTION}" in [{key}]'
        remedy += "; composer-plugins migrate --from prime-rl --to prime-rl writes it with our loss"
        problem = f"its type is {loss['type']!r}" if "type" in loss else "no type is set"
        yield Finding("warning", key, f"{problem}, so PRIME-RL trains with its own loss", remedy)
        return
    is_ours = path == FUNCTION
    if complaint is None and path.startswith("composer_plugins.") and not is_ours:
        complaint = "it cannot be called with PRIME-RL's LossInputs"
    if complaint is not None:
        problem = f"{python} cannot use {path!r} as the loss ({complaint}), and {TOO_LATE}"
        install = f"install it there: uv pip install --python {python} composer-plugins"
        remedy = install if is_ours else remedy_for(path, python)
        yield Finding("error", f"{key}.import_path", problem, remedy)
    if is_ours:
        kwargs = loss.get("kwargs", {})
        if not isinstance(kwargs, dict):
            yield Finding("error", f"{key}.kwargs", f"it is {kwargs!r}", f"write a table, [{key}.kwargs]")
            return
        yield from parse(kwargs, f"{key}.kwargs")[1]


def remedy_for(path: str, python: str) -> str:
    """What to do about an import path that PRIME-RL, which splits it at its last dot, cannot call."""
    name = path.replace(":", ".").rpartition(".")[2]
    if name in of_kind(losses(), "policy"):
        return f'set import_path = "{FUNCTION}" and kwargs.policy = "{name}"'
    if not path or path.startswith("composer_plugins"):
        return did_you_mean([FUNCTION])
    return f"write module.function, and install the module for {python}"


def rejections(rejected: Sequence[Sequence[str]], reported: set[str]) -> Iterator[Finding]:
    """What PRIME-RL's own class rejects."""
    for key, message in rejected:
        if key not in reported:
            remedy = "correct it, or set it on PRIME-RL's command line, which the doctor takes after --"
            yield Finding("error", key or "the file", f"PRIME-RL rejects it: {message}", remedy)
