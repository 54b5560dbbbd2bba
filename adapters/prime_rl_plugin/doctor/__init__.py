"""What `composer-plugins doctor` finds in PRIME-RL's TOML.

PRIME-RL's own classes validate types and names of options: they are asked where they can be imported. The
checks here find mistakes that PRIME-RL accepts, or that it reports only after the model is loaded.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_plugins.adapters.prime_rl_plugin import keys, own_losses, upstream
from composer_plugins.adapters.prime_rl_plugin.doctor import probe
from composer_plugins.adapters.prime_rl_plugin.doctor.channels import (
    STAMP_WORDS,
    channels,
    cut_rollouts,
    echo_filters,
    echo_terms,
    groups_of_one,
    unweighted,
)
from composer_plugins.adapters.prime_rl_plugin.doctor.file import (
    NOT_LISTED,
    WITH_ADVANTAGES,
    Run,
    not_known,
    read,
    routed,
    table,
    unknown_algorithms,
)
from composer_plugins.adapters.prime_rl_plugin.surface import (
    DEFAULTS,
    MODULE,
    PRESETS,
    Requested,
    chosen_policy,
    findings,
    newer_than_tested,
    parse,
    requested,
)
from composer_plugins.config import ComposerConfig
from composer_plugins.diagnosis import Examination, Target, ask
from composer_plugins.errors import ConfigError, did_you_mean, near
from composer_plugins.findings import Finding
from composer_plugins.frameworks import prime_rl
from composer_plugins.frameworks.contract import NamedLoss
from composer_plugins.frameworks.prime_rl import Generation
from composer_plugins.losses.registry import losses
from composer_plugins.losses.row import Loss, of_kind

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
    question["filters"] = sorted({path for one in run.sources if "." in (path := one.algo.filter_path)})
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
        if function(run):
            found += unweighted(run, asked, generation, facts["plugins"])
            found += groups_of_one(run, asked, generation) if uses_advantages(run) else []
    found += map(Finding.from_error, unknown_algorithms(run.sources))
    found += found_here_only(run, facts["only_here"], target.python)
    found += [*filters(run, facts["filters"], target.python), *echo_filters(run)]
    reported = {one.key for one in found}
    found += [one for one in echo_terms(run) if one.key not in reported]
    if run.kind == keys.ORCHESTRATOR:  # whose options are at the top
        found = [one.without(NOT_LISTED) for one in found]
    found += names(run, facts["rejected"], {one.key for one in found if one.severity == "error"})
    compared = against(target, release, generation, by_features is not None)
    compared += f"; read as {keys.FILE_NAMES[run.kind]}"
    compared += "" if facts["rejected"] is None else f", which PRIME-RL's own {own_class[1]} checked"
    return Examination(compared, tuple(found))


def names(run: Run, rejected: list[list[Any]] | None, reported: set[str]) -> Iterator[Finding]:
    """What PRIME-RL's own class rejects; names that look misspelt, where it could not be asked."""
    guesses = {one.key: one for one in not_known(run.config, run.kind)}
    if rejected is None:
        yield from (one for key, one in guesses.items() if key not in reported)
    for key, message, is_missing in rejected or ():
        if is_missing:
            remedy = "set it in a file that you give the doctor, or on PRIME-RL's command line"
            yield Finding("warning", key, f"PRIME-RL needs it: {message}", remedy)
        elif key not in reported:
            remedy = guesses[key].remedy if key in guesses else "correct it, or PRIME-RL ends at once"
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
    """Whether there is a table of type "custom", and whether it has options that PRIME-RL does not know."""
    if run.kind == keys.SFT:
        problem = f"this is {keys.FILE_NAMES[run.kind]}, which has no policy loss"
        yield Finding("info", "loss", problem, "give the doctor a file of an RL run")
        return
    if run.kind in (keys.ORCHESTRATOR, keys.INFERENCE):
        problem = f"this is {keys.FILE_NAMES[run.kind]}, and the loss is in the trainer's"
        remedy = "give the doctor the trainer's file too, or the rl.toml, which has all three"
        yield Finding("info", "loss", problem, remedy)
        return
    key, ours = run.loss_key, f'set type = "custom" and import_path = "{MODULE}.loss_fn" in [{run.loss_key}]'
    for name in keys.TRAINER_TABLES:
        if run.is_for_rl and name in run.config:
            problem = f"this table is at the top of a file for `rl`, which reads [trainer.{name}]"
            remedy = f"rename it to [trainer.{name}]; only a trainer's own config has it at the top"
            yield Finding("error", name, problem, remedy)
    for holder, name in ((run.config, "kwargs"), (table(run.config, "trainer"), "trainer.kwargs")):
        if "kwargs" in holder:
            problem = "PRIME-RL has no such table: what is in it does not reach the loss"
            yield Finding("error", name, problem, f"rename it to [{key}.kwargs]")
    if run.loss is None:
        problem, remedy = "there is no such table, so PRIME-RL trains with its own loss", ours
        found, everything = routed(run.sources)
        if everything and found:
            problem += f", which is {found[0].own} for {found[0].name!r}: such a table would have no effect"
            remedy = f"leave it, or {WITH_ADVANTAGES}, and {ours}"
        yield Finding("warning", key, problem, remedy)
        return
    kind = run.loss.get("type")
    own = own_losses.find(own_losses.DEFAULT_KIND if kind is None else kind)
    if kind == "custom":
        yield from _misplaced(run)
    elif extra := [name for name in ("import_path", "kwargs") if name in run.loss]:
        given = "there is no type" if kind is None else f"it is {kind!r}"
        problem = f'{given}, and only type = "custom" reads {" and ".join(extra)}'
        yield Finding("error", f"{key}.type", problem, f'set type = "custom" in [{key}]')
    elif own is not None:
        wrong = {error.key: error for error in own_losses.wrong_options(own, run.loss, key)}
        yield _own_loss(run.loss, wrong, key, own)
        yield from wrong.values()
    else:
        name = kind if isinstance(kind, str) and kind in FUNCTIONS else "loss_fn"
        problem = f'it is {kind!r}, and PRIME-RL has only its own losses and "custom"'
        remedy = f'set type = "custom", import_path = "{MODULE}.{name}"'
        yield Finding("error", f"{key}.type", problem, remedy)


def _misplaced(run: Run) -> Iterator[Finding]:
    """Options beside import_path and kwargs, with the name and the place that they have in `loss_fn`."""
    assert run.loss is not None
    key = run.loss_key
    problem = f"[{key}] has no such option: PRIME-RL rejects it"
    for name in sorted(run.loss.keys() - prime_rl.LOSS_OPTIONS):
        remedy = f"move it to [{key}.kwargs]"
        if nearest := near(name, prime_rl.LOSS_OPTIONS - run.loss.keys()):
            yield Finding("error", f"{key}.{name}", problem, did_you_mean(nearest))
            continue
        if function(run) and name not in ComposerConfig.model_fields:
            found = own_losses.advice(name, run.loss[name], named_policy(run), key)
            nearest = near(name, ComposerConfig.model_fields)
            remedy = f"remove it, or set {nearest[0]} in [{key}.kwargs]" if nearest else "remove it"
            problem_here, remedy = found or ("loss_fn has no such option either", remedy)
            yield Finding("error", f"{key}.{name}", f"{problem}, and {problem_here}", remedy)
            continue
        yield Finding("error", f"{key}.{name}", problem, remedy)


def _own_loss(loss: Mapping[str, Any], wrong: Collection[str], key: str, own: NamedLoss) -> Finding:
    """One of PRIME-RL's own losses, with the options of ours that give the same loss but for wrong ones."""
    rest = {name: value for name, value in loss.items() if f"{key}.{name}" not in wrong}
    kwargs, differences = own_losses.kwargs_of(own, rest)
    differences += [f"{name} is left out" for name in loss if name not in rest]
    problem = f"{own.options['type']!r} is PRIME-RL's own loss"
    same = [f'import_path = "{MODULE}.{"loss_fn" if "policy" in kwargs else "dppo"}"']
    same += [f"kwargs.{name} = {own_losses.inline(value)}" for name, value in kwargs.items()]
    remedy = f'set type = "custom", {" and ".join(same)}, which is that loss'
    if differences:
        remedy += f", except that {', and '.join(differences)}"
    return Finding("warning", f"{key}.type", problem, remedy)


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
    named |= {f"{one.algo.filter_key}.import_path": one.algo.filter_path for one in run.sources}
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


def filters(run: Run, found: Mapping[str, Any], python: str) -> Iterator[Finding]:
    """Whether the orchestrator will find the functions that are filters of the algorithm "echo"."""
    for key, path in {one.algo.filter_key: one.algo.filter_path for one in run.sources}.items():
        if found.get(path) is not None:
            stage, detail = found[path]
            problem, remedy = _unresolved(path, stage, detail, python)
            yield Finding("error", f"{key}.import_path", problem, remedy)


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
    old = parsed.config.old_policy == "rollout" or parsed.rollout_correction or parsed.hint
    if old or "rollout_logprobs" in parsed.policy.loss.needs:
        found += cut_rollouts(run)
    return parsed.requested, found


def uses_advantages(run: Run) -> bool:
    """Whether the policy that is named for one of our functions learns from advantages."""
    given = table(run.loss, "kwargs")
    policy = named_policy(run)
    return given.get("policy_weight") != 0 and policy is not None and "advantages" in policy.needs


def named_policy(run: Run) -> Loss | None:
    """The row of the policy that is named for one of our functions, whatever else may be wrong."""
    fixed = PRESETS[function(run)].options if function(run) in PRESETS else {}
    return chosen_policy(DEFAULTS | fixed, table(run.loss, "kwargs"))
