"""What `composer-plugins doctor` finds in PRIME-RL's TOML.

PRIME-RL's own classes judge its own options, where they can be imported. What is checked here concerns our
loss, which PRIME-RL looks at only after the model is loaded: its import path, its options and its channels.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_plugins.adapters.prime_rl_plugin import keys, own_losses, upstream
from composer_plugins.adapters.prime_rl_plugin.doctor import probe
from composer_plugins.adapters.prime_rl_plugin.doctor.channels import STAMP_WORDS, channels
from composer_plugins.adapters.prime_rl_plugin.doctor.file import NOT_LISTED, Run, read, table
from composer_plugins.adapters.prime_rl_plugin.surface import (
    MODULE,
    PRESETS,
    Requested,
    findings,
    newer_than_tested,
    parse,
    requested,
)
from composer_plugins.diagnosis import Examination, Target, ask
from composer_plugins.errors import ConfigError, did_you_mean, near
from composer_plugins.findings import Finding
from composer_plugins.frameworks import prime_rl
from composer_plugins.frameworks.prime_rl import Generation
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import of_kind

FUNCTIONS = ("loss_fn", *PRESETS)
TOO_LATE = "an import path resolves only after the model is loaded"


def examine(files: Sequence[Path], target: Target) -> Examination:
    """Everything that the doctor finds wrong with these TOML files, merged from left to right."""
    run = read(files, target.overrides)
    plugins = {name for source in run.sources for name in source.plugins.values()}
    is_custom = run.loss is not None and run.loss.get("type") == "custom"
    path = run.path if is_custom and ":" not in run.path and "." in run.path else ""
    question: dict[str, Any] = {"import_path": path, "plugins": sorted(plugins), "words": STAMP_WORDS}
    question |= {"installation": upstream.INSTALLATION, "modules": [*modules(run)]}
    own_class = keys.CONFIG_CLASSES[run.kind]
    question["config"] = (*own_class, run.config) if target.version is None else None
    facts = ask(target.python, Path(probe.__file__), json.dumps(question, default=str))
    release, features = facts["prime_rl"]
    release = release if target.version is None else target.version
    by_features = upstream.generation_by_features(features) if target.version is None else None
    of_number = upstream.generation_of(release)  # a ConfigError for one that is too old
    generation = by_features or of_number
    is_newer = upstream.is_newer(release) or (by_features is not None and not features[1])
    found = [*loss_table(run), *newer_than_tested(is_newer)]
    if is_custom:
        found += import_path(run, facts, target.python)
        asked, more = kwargs(run)
        found += more
        found += channels(run, asked, generation, facts["plugins"])
    found += found_here_only(run, facts["only_here"], target.python)
    if run.kind == keys.ORCHESTRATOR:  # whose options are at the top
        found = [one.without(NOT_LISTED) for one in found]
    found += rejections(facts["rejected"] or (), {one.key for one in found if one.severity == "error"})
    compared = against(target, release, generation, by_features is not None)
    compared += f"; read as {keys.FILE_NAMES[run.kind]}"
    looked_at = f", which PRIME-RL's own {own_class[1]} checked"
    compared += looked_at if facts["rejected"] is not None else "; PRIME-RL's own options were not looked at"
    return Examination(compared, tuple(found))


def rejections(rejected: Sequence[Sequence[Any]], reported: set[str]) -> Iterator[Finding]:
    """What PRIME-RL's own class rejects."""
    for key, message, is_missing in rejected:
        if is_missing:
            remedy = "set it in a file that you give the doctor, or on PRIME-RL's command line"
            yield Finding("warning", key, f"PRIME-RL needs it: {message}", remedy)
        elif key not in reported:
            remedy = "correct it, or PRIME-RL ends at once"
            yield Finding("error", key or "the file", f"PRIME-RL rejects it: {message}", remedy)


def against(target: Target, release: str | None, generation: Generation, is_by_features: bool) -> str:
    """Which PRIME-RL the file was compared with, and how that is known."""
    end = " up to commit 559b447" if generation is prime_rl.TESTED else ""
    how = f"{release or 'it'} is installed for {target.python}"
    how += ", and its source has these features" if is_by_features else ""
    if release is None and not is_by_features:
        how = f"none is installed for {target.python}; name another with --version"
    if target.version is not None:
        how = f"--version {release}"
    return f"the contract of PRIME-RL {generation.since}{end} ({how})"


def loss_table(run: Run) -> Iterator[Finding]:
    """Whether there is a table of type "custom"."""
    if run.kind == keys.SFT:
        problem = f"this is {keys.FILE_NAMES[run.kind]}, which has no policy loss"
        yield Finding("info", "loss", problem, "give the doctor a file of an RL run")
        return
    if run.kind in (keys.ORCHESTRATOR, keys.INFERENCE):
        problem = f"this is {keys.FILE_NAMES[run.kind]}, and the loss is in the trainer's"
        remedy = "give the doctor the trainer's file too, or the rl.toml, which has all three"
        yield Finding("info", "loss", problem, remedy)
        return
    key, kind = run.loss_key, (run.loss or {}).get("type", own_losses.DEFAULT_KIND)
    if kind == "custom":
        return
    problem = f"it is {kind!r}, which is not ours" if run.loss is not None else "there is no such table"
    remedy = f'set type = "custom" and import_path = "{MODULE}.loss_fn" in [{key}]'
    remedy += "; composer-plugins migrate --to prime-rl writes PRIME-RL's own loss as one of ours"
    key += ".type" * (run.loss is not None)
    yield Finding("warning", key, f"{problem}, so PRIME-RL trains with its own loss", remedy)


def import_path(run: Run, facts: dict[str, Any], python: str) -> Iterator[Finding]:
    """Whether PRIME-RL, which splits the path at its last dot, will find the function."""
    assert run.loss is not None
    path = run.path

    def error(problem: str, remedy: str) -> Finding:
        return Finding("error", f"{run.loss_key}.import_path", problem, remedy)

    if not path:
        given = run.loss.get("import_path")
        yield error(f"it is {given!r}, not a dotted path", f'set import_path = "{MODULE}.loss_fn"')
    elif ":" in path:
        problem = f"{path!r} has a colon, and PRIME-RL splits at the last dot"
        yield error(problem, f'set import_path = "{path.replace(":", ".")}"')
    elif "." not in path:
        yield error(f"{path!r} has no dot", "write module.function")
    if facts["package"] and (path.startswith("composer_plugins") or not path):
        problem = f"{python}, which will train, cannot import composer_plugins: {facts['package']}"
        yield error(problem, f"install it there: uv pip install --python {python} composer-plugins")
    elif facts["loss"] is not None:
        stage, detail = facts["loss"]
        problem, remedy = _unresolved(path, stage, detail, python)
        yield error(f"{problem}, and {TOO_LATE}", remedy)
    elif path.startswith("composer_plugins.") and not function(run):
        name = path.rpartition(".")[2]
        policy = f' and kwargs.policy = "{name}"' if name in of_kind(losses(), "policy") else ""
        remedy = f'set import_path = "{MODULE}.loss_fn"{policy}'
        yield error(f"{path!r} cannot be called with PRIME-RL's LossInputs", remedy)


def modules(run: Run) -> dict[str, str]:
    """The modules of the functions that the file names, each with the key of one of them."""
    key = run.loss_key
    named = {f"{key}.import_path": run.path}
    for name, value in table(run.loss, "kwargs").items():
        if isinstance(value, str) and ":" in value:
            named[f"{key}.kwargs.{name}"] = value
    return {
        path.replace(":", ".").partition(".")[0]: key
        for key, path in reversed(named.items())
        if path.strip(".:")
    }


def found_here_only(run: Run, folders: Mapping[str, str], python: str) -> Iterator[Finding]:
    """The modules that are found in the working directory only, which `folders` has by module.

    `rl` starts its trainer with `torchrun -m`, which looks there, and the orchestrator by its command.
    """
    for module, key in modules(run).items():
        if (folder := folders.get(module)) is not None:
            problem = f"{python} finds {module} in the working directory {folder} only, where the trainer "
            problem += "of `rl` looks if `rl` starts there, and `trainer` and the orchestrator do not look"
            install = f"install it: uv pip install --python {python} -e ."
            own = f"set PYTHONPATH={folder} where training starts, or {install}"
            yield Finding("warning", key, problem, install if module == "composer_plugins" else own)


def _unresolved(path: str, stage: str, detail: Any, python: str) -> tuple[str, str]:
    """The problem and the remedy, by the stage at which the look-up of the path ended."""
    module, _, name = path.rpartition(".")
    if stage == "inside":
        short, _, attribute = detail.rpartition(".")
        return (
            f"{path!r}: {detail} is not a module, and PRIME-RL takes all before the last dot for one",
            f"name the function in {short} (step = {attribute}().{name}), and set that name",
        )
    if stage == "module":
        return f"{path!r}: {python} has no module {detail}", f"install it for {python}, or correct the path"
    if stage == "attribute":
        names = near(name, FUNCTIONS if module == MODULE else detail)
        remedy = did_you_mean(names) if names else f"name a function of {module}"
        if module == MODULE and name in of_kind(losses(), "policy"):
            remedy = f'set import_path = "{MODULE}.loss_fn" and kwargs.policy = "{name}"'
        elif module.startswith("composer_plugins") and not names:
            remedy = f"name one of {', '.join(FUNCTIONS)} in {MODULE}"
        return f"{path!r}: the module {module} has no {name!r}", remedy
    if stage == "callable":
        remedy = f'set import_path = "{path}.loss_fn"' if path == MODULE else "name a function"
        return f"{path!r} is a {detail}, not a function", remedy
    return f"{path!r}: importing {module} fails in {python}: {detail}", "correct that import there"


def function(run: Run) -> str:
    """Which of our functions is named, with a dot or a colon; "" if none is."""
    module, _, name = run.path.replace(":", ".").rpartition(".")
    return name if module == MODULE and name in FUNCTIONS else ""


def kwargs(run: Run) -> tuple[Requested, list[Finding]]:
    """The channels that one of our functions is asked for, and what is wrong with its kwargs."""
    assert run.loss is not None
    key, given = f"{run.loss_key}.kwargs", run.loss.get("kwargs", {})
    if not function(run):
        return Requested("", ""), []
    if not isinstance(given, dict):
        return Requested("", ""), [Finding("error", key, f"it is {given!r}", f"make it a table: [{key}]")]
    try:
        parsed = parse(given, function(run), key)
    except ConfigError as error:
        return requested(given), Finding.all_from(error)
    found = list(findings(parsed, key))
    return parsed.requested, found
