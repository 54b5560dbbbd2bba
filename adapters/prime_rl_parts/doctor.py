"""What `composer-plugins doctor` knows of PRIME-RL: each way in which a run can be lost to its TOML.

PRIME-RL itself validates the file where it is a matter of types and names; here is what it lets through, or
what it tells only after the model is loaded.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from composer_plugins.adapters.prime_rl_parts import probe
from composer_plugins.adapters.prime_rl_parts.config import NAMED, TABLE, parse
from composer_plugins.adapters.prime_rl_parts.doctor_channels import Wanted, channels, unweighed
from composer_plugins.adapters.prime_rl_parts.doctor_file import Run, read
from composer_plugins.adapters.prime_rl_parts.versions import GENERATIONS, Generation
from composer_plugins.doctor import Examination, Finding, Target, ask
from composer_plugins.errors import ConfigError, did_you_mean, near

OURS = "composer_plugins.adapters.prime_rl_loss"

FUNCTIONS: dict[str, dict[str, str]] = {"loss_fn": {}, **NAMED}
OPTIONS = {"type", "import_path", "kwargs"}  # of a table of type "custom"
BUILT_IN = {"default", "ipo", "sft", "icepop"}  # in one version or another
OLD_DEFAULTS = {"0.4": "masked_is@prime-rl<0.5", "0.5": "ipo@prime-rl<0.6"}  # later it is `dppo`

NEVER_CALLED = "an import path resolves after the model is loaded: a typo costs that"


def examine(files: Sequence[Path], target: Target) -> Examination:
    """Everything that is wrong with these TOML files, merged from left to right, as far as can be told."""
    run = read(files)
    plugins = {name for source in run.sources for name in source.plugins.values()}
    custom = run.loss is not None and run.loss.get("type") == "custom"
    path = run.path if custom and ":" not in run.path and "." in run.path else ""
    facts = ask(target.python, Path(probe.__file__), path, *sorted(plugins))
    number, is_later = facts["prime_rl"]
    generation = generation_of(
        number if target.version is None else target.version, is_later and target.version is None
    )
    findings = list(loss_table(run, generation))
    if custom:
        findings += import_path(run, facts, target.python)
        wanted, more = kwargs(run)
        findings += more
        findings += denominators(run, generation)
        findings += channels(run, wanted, generation, facts["plugins"])
        if function(run):
            findings += unweighed(run, wanted, generation, facts["plugins"])
    return Examination(against(target, number, generation), tuple(findings))


def against(target: Target, number: str | None, generation: Generation) -> str:
    """Which PRIME-RL, and how that is known."""
    end = f"up to {generation.until}" if generation.until else "and later"
    contract = f"the contract of PRIME-RL {generation.since} {end}"
    if target.version is not None:
        return f"{contract} (--version {target.version})"
    if number is not None:
        return f"{contract} ({number} is installed for {target.python})"
    return f"{contract} (none is installed for {target.python}; --version tells of another)"


def generation_of(release: str | None, is_later: bool = False) -> Generation:
    """The contract of a release; the newest if nothing is known. HEAD after 0.8.0 still says 0.8.0."""
    if release is None or is_later or release.upper() == "HEAD":
        return GENERATIONS[-1]
    number = _number(release)
    if number < _number(GENERATIONS[0].since):
        raise ConfigError(
            f"PRIME-RL {release} takes no custom loss; wanted 0.5 or later: upgrade it, or name another "
            "with --version"
        )
    return [one for one in GENERATIONS if _number(one.since) <= number][-1]


def _number(release: str) -> tuple[float, ...]:
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.?dev(\d+))?", release)
    if found is None:
        raise ConfigError(f"--version {release!r} is no version; wanted 0.8.0, 0.8.1.dev52, HEAD ...")
    major, minor, patch, dev = found.groups()
    return int(major), int(minor), int(patch or 0), float(dev or "inf") if patch else 0.0


def loss_table(run: Run, generation: Generation) -> Iterator[Finding]:
    """Whether there is a table of type "custom", with nothing else in it than belongs there."""
    key, three = run.loss_key, f'[{run.loss_key}] type = "custom", import_path = "{OURS}.loss_fn"'
    if run.whole and "loss" in run.config:
        yield Finding(
            "error",
            "loss",
            "a table [loss] at the top of a file for `rl`, which reads [trainer.loss]",
            "rename it to [trainer.loss]; [loss] is for a trainer's own config",
        )
    if run.loss is None:
        what = f"no table [{key}]: PRIME-RL trains with its own loss, and with none of ours"
        yield Finding("warning", key, what, three)
        return
    kind = run.loss.get("type")
    if kind == "custom":
        yield from _stray_options(run)
        return
    if extra := [name for name in ("import_path", "kwargs") if name in run.loss]:
        given = "no type" if kind is None else f"type {kind!r}"
        what = f'{given} beside {" and ".join(extra)}, which only type = "custom" reads'
        yield Finding("error", f"{key}.type", what, f'set type = "custom" in [{key}]')
    elif isinstance(kind, str) and kind in BUILT_IN:
        gone = '; newer PRIME-RL has no type "default" (#3418)' if kind == "default" else ""
        back = _default(generation) if kind == "default" else three
        what = f"type {kind!r} is PRIME-RL's own loss, and none of ours{gone}"
        yield Finding("warning", f"{key}.type", what, back)
    else:
        name = kind if isinstance(kind, str) and kind in FUNCTIONS else "loss_fn"
        what = f'type {kind!r}; PRIME-RL knows its own losses and "custom"'
        yield Finding("error", f"{key}.type", what, f'set type = "custom", import_path = "{OURS}.{name}"')


def _default(generation: Generation) -> str:
    if policy := OLD_DEFAULTS.get(generation.since):
        return f'import_path = "{OURS}.loss_fn" with kwargs policy = "{policy}" is that loss'
    return f'import_path = "{OURS}.dppo" is that loss'


def _stray_options(run: Run) -> Iterator[Finding]:
    assert run.loss is not None
    for name in run.loss.keys() - OPTIONS:
        yield Finding(
            "error",
            f"{run.loss_key}.{name}",
            f"{name} stands in [{run.loss_key}], where before v0.6 it is ignored and later refused",
            f"move it to [{run.loss_key}.kwargs]",
        )


def import_path(run: Run, facts: dict[str, Any], python: str) -> Iterator[Finding]:
    """Whether PRIME-RL will find the function there, as it looks for it."""
    assert run.loss is not None
    key, given = f"{run.loss_key}.import_path", run.loss.get("import_path")
    path = run.path

    def error(what: str, remedy: str) -> Finding:
        return Finding("error", key, what, remedy)

    if not path:
        yield error(f"import_path is {given!r}; wanted a dotted path", f'import_path = "{OURS}.loss_fn"')
    elif ":" in path:
        what = f"{path!r} has a colon; PRIME-RL splits at the last dot, and finds no such module or attribute"
        yield error(what, f'import_path = "{path.replace(":", ".")}"')
    elif "." not in path:
        yield error(f"{path!r} has no dot; wanted module.function", "name the module before the function")
    if facts["package"] and (path.startswith("composer_plugins") or not path):
        what = f"composer_plugins cannot be imported by {python}, which will train: {facts['package']}"
        yield error(what, f"install it there: uv pip install --python {python} composer-plugins")
    elif facts["loss"] is not None:
        stage, detail = facts["loss"]
        yield error(*_unresolved(path, stage, detail, python))


def _unresolved(path: str, stage: str, detail: Any, python: str) -> tuple[str, str]:
    """What came and what to do, by where the look-up ended."""
    module, _, name = path.rpartition(".")
    if stage == "inside":
        short = detail.rpartition(".")[0]
        return (
            f"{path!r}: {detail} is no module, but something in one; PRIME-RL takes all before the last dot "
            "for a module",
            f"give {short} a name for it (step = {detail.rpartition('.')[2]}().{name}), and point there",
        )
    if stage == "module":
        where = f"install it for {python}, or correct the path"
        return f"{path!r}: {python} has no module {detail}; {NEVER_CALLED}", where
    if stage == "attribute":
        names = near(name, FUNCTIONS if module == OURS else detail)
        remedy = did_you_mean(names).removeprefix(": ") if names else f"name a function of {module}"
        if module == OURS and not names:
            remedy = f"one of {', '.join(FUNCTIONS)}"
        return f"{path!r}: the module {module} has no {name!r}; {NEVER_CALLED}", remedy
    if stage == "callable":
        remedy = f'import_path = "{path}.loss_fn"' if path == OURS else "point at a function"
        return f"{path!r} is a {detail}; wanted a function", remedy
    return f"{path!r}: importing {module} fails in {python}: {detail}", "mend that import there"


def function(run: Run) -> str:
    """The name of our function that is pointed at, with a dot or a colon; "" if it is not ours."""
    module, _, name = run.path.replace(":", ".").rpartition(".")
    return name if module == OURS and name in FUNCTIONS else ""


def kwargs(run: Run) -> tuple[Wanted, list[Finding]]:
    """What is wrong with the kwargs of a function of ours; of others nothing is known."""
    assert run.loss is not None
    key, given = f"{run.loss_key}.kwargs", run.loss.get("kwargs", {})
    if not function(run):
        return Wanted("", ""), []
    if not isinstance(given, dict):
        return Wanted("", ""), [Finding("error", key, f"kwargs is {given!r}", f"make it a table: [{key}]")]
    fixed = FUNCTIONS[function(run)]
    if twice := sorted(fixed.keys() & given.keys()):
        what = f"{', '.join(twice)}: {function(run)} has chosen already, {fixed}"
        remedy = f'remove it, or set import_path = "{OURS}.loss_fn" to choose'
        return _wanted(given), [Finding("error", f"{key}.{twice[0]}", what, remedy)]
    try:
        parsed = parse(fixed | given)
    except ConfigError as error:
        return _wanted(given), [_refused(key, given, str(error).removeprefix(f"[{TABLE}] "))]
    learns = {"teacher_logprobs", "ref_logprobs"} & set(parsed.policy.loss.needs)
    hint, replay = _wanted(given)
    by_policy = f"policy {parsed.policy.loss.name!r}" if learns else ""
    return Wanted(hint or by_policy, replay), []


def _wanted(given: Mapping[str, Any]) -> Wanted:
    """The channels by their weights, whatever else may be wrong."""
    weights = {name: given.get(name) for name in ("hint_weight", "replay_weight")}
    on = [
        f"{name} = {value:g}"
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        else ""
        for name, value in weights.items()
    ]
    return Wanted(*on)


def _refused(key: str, given: Mapping[str, Any], message: str) -> Finding:
    """The config's complaint, at the option that it speaks of first."""
    spoken = {
        name: found.start() for name in given if (found := re.search(rf"\b{re.escape(name)}\b", message))
    }
    if spoken:
        key = f"{key}.{min(spoken, key=spoken.__getitem__)}"
    for separator in (": did you mean ", "; "):
        what, offered, rest = message.partition(separator)
        if offered:
            return Finding("error", key, what, (separator + rest).lstrip(":; "))
    return Finding("error", key, message, "composer-plugins explain NAME, or list --framework prime-rl")


def denominators(run: Run, generation: Generation) -> Iterator[Finding]:
    """What v0.4 and v0.5 divide a sum by, and that v0.4's `rl` starts no custom loss at all."""
    key = f"{run.loss_key}.type"
    if generation.since == "0.4" and run.whole:
        yield Finding(
            "error",
            key,
            "`rl` of PRIME-RL 0.4 reads trainer.loss.teacher_tau, which a custom loss has not, and stops",
            "upgrade to 0.6 or later; or start trainer and orchestrator by themselves",
        )
    if generation.denominator != "global tokens":
        what = {
            "micro-batches": "the number of micro-batches, so that the step grows with the tokens in one",
            "this rank's tokens": "each rank's own tokens, so that a token's weight depends on its rank",
        }[generation.denominator]
        yield Finding(
            "warning",
            key,
            f"PRIME-RL {generation.since} divides a custom loss, which is a sum over tokens, by {what}",
            "upgrade to 0.6 or later, which divides by the tokens of the global batch",
        )
