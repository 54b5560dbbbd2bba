"""Whether a hint or a replayed pair can reach the loss, by the orchestrator's options in the TOML."""

from collections.abc import Iterator, Mapping
from typing import Any

from composer_plugins.adapters.prime_rl_plugin import keys, upstream
from composer_plugins.adapters.prime_rl_plugin.doctor.file import (
    ECHO_FILTER,
    NOT_LISTED,
    WITH_ADVANTAGES,
    Run,
    Source,
    routed,
    table,
)
from composer_plugins.adapters.prime_rl_plugin.keys import ROUTED
from composer_plugins.adapters.prime_rl_plugin.surface import Requested
from composer_plugins.findings import Finding
from composer_plugins.frameworks.prime_rl import ECHO, NODE, TESTED, Generation

# Words in the source of an environment that stamps: our functions, verifiers' fields, PRIME-RL's own stream.
REFERENCE_FIELD, WEIGHTS_FIELD = upstream.NODE_FIELDS
HINT_WORDS = {"stamp_reference", "stamp_from_store", REFERENCE_FIELD}
REPLAY_WORDS = {"stamp_replay_pair", "stamp_from_store", WEIGHTS_FIELD}
OWN_STREAM = ROUTED["opsd"]
STAMP_WORDS = sorted(HINT_WORDS | REPLAY_WORDS)

Words = Mapping[str, list[str] | None]  # by environment, those in its source; None if it is not installed


def channels(run: Run, asked: Requested, generation: Generation, words: Words) -> Iterator[Finding]:
    """Why a hint or a pair may not reach the loss: not available, not stamped, filtered out, another loss."""
    if not run.is_for_rl:
        if asked.any:
            problem = f"{asked.any} is set, and this file does not say how samples are stamped and filtered"
            remedy = "give the doctor the rl.toml, which has the orchestrator's options too"
            yield Finding("info", f"{run.loss_key}.kwargs", problem, remedy)
        return
    yield from _routed_past(run, asked)
    if not asked.any:
        return
    yield from _filtered_out(run, asked, generation)
    for source in run.sources:
        if source.algo.name not in ROUTED:
            yield from _never_stamped(source, asked, generation, words)


def _routed_past(run: Run, asked: Requested) -> Iterator[Finding]:
    """Samples that PRIME-RL trains with a loss of its own, without calling a custom loss."""
    found, everything = routed(run.sources)
    for one in found:
        problem = f"PRIME-RL trains the samples of {one.name!r} with its own {one.own}, not with this loss"
        remedy = WITH_ADVANTAGES
        if asked.any:
            problem += f", so {asked.any} has no effect on them"
        if asked.hint and one.own == OWN_STREAM:
            remedy = 'choose one: remove hint_weight, or set type = "grpo" and stamp in the environment'
        yield Finding("error" if everything and asked.any else "warning", one.key, problem, remedy)


def _filtered_out(run: Run, asked: Requested, generation: Generation) -> Iterator[Finding]:
    """Filters that drop a group of equal rewards, whose advantages are 0: only hint and replay train it."""
    orchestrator = table(run.config, "orchestrator")
    lost = f"it drops samples of advantage 0, and {asked.any} has no effect on them"
    listed = {"pre_batch_filters", "post_batch_filters"} & orchestrator.keys()
    if generation.stamps == NODE and not listed:
        train = table(orchestrator, "train")
        option = keys.NEWEST_OPTION
        if train.get(option, True) is not False:
            value = "true" if option in train else "not set, which means true"
            remedy = f"set {option} = false in [orchestrator.train]"
            yield Finding("error", f"orchestrator.train.{option}", f"it is {value}, and {lost}", remedy)
        yield from _gated(train, lost)
    else:
        yield from _batch_filters(orchestrator, lost)


def _gated(train: dict[str, Any], lost: str) -> Iterator[Finding]:
    sources = train.get("source")
    for source in sources if isinstance(sources, list) else ():
        for name, gate in table(source, "curriculum", "gates").items():
            if table(gate).get("type") == "advantage_range":
                low, high = gate.get("reject_min", 0.0), gate.get("reject_max", 0.0)
                if all(isinstance(x, int | float) for x in (low, high)) and low <= 0 <= high:
                    key = f"orchestrator.train.source.curriculum.gates.{name}"
                    problem = f"it rejects advantages from {low} to {high}: {lost}"
                    yield Finding("error", key, problem, "remove the gate, or keep 0 out of its range")


def _batch_filters(orchestrator: dict[str, Any], lost: str) -> Iterator[Finding]:
    """v0.8: the default list of filters after a batch has zero_advantage in it."""
    for slot in ("pre_batch_filters", "post_batch_filters"):
        key, listed = f"orchestrator.{slot}", orchestrator.get(slot)
        if listed is None:
            if slot == "post_batch_filters":
                problem = f'it is not set, and its default has the filter "zero_advantage": {lost}'
                remedy = f'add [[{key}]] with type = "zero_advantage", enforce = false'
                yield Finding("error", key, problem, remedy)
            continue
        for one in listed if isinstance(listed, list) else ():
            if table(one).get("type") == "zero_advantage" and one.get("enforce", True) is not False:
                value = one.get("enforce", "not set, which means true")
                problem = f'for the filter "zero_advantage" it is {value}: {lost}'
                yield Finding("error", f"{key}.enforce", problem, f"set enforce = false in [[{key}]]")


def _never_stamped(
    source: Source, asked: Requested, generation: Generation, words: Words
) -> Iterator[Finding]:
    """Sources that nothing stamps: an echo filter can, and since 0.8.1.dev52 the environment."""
    if source.algo.filter_path:
        return
    if generation.stamps == ECHO:
        problem = f"{asked.any} is set, and {source.algo.name!r} stamps nothing before {TESTED.since}"
        remedy = f'set type = "echo" with filter.import_path = "{ECHO_FILTER}", or upgrade'
        yield Finding("error", source.algo.key, problem, remedy)
        return
    if source.key == NOT_LISTED:
        return
    found = {word for name in source.plugins.values() for word in words.get(name) or ()}
    absent = [name for name in source.plugins.values() if words.get(name) is None]
    for phrase, stamps, call in (
        (asked.hint, HINT_WORDS, "stamp_reference"),
        (asked.replay, REPLAY_WORDS, "stamp_replay_pair"),
    ):
        if phrase and not stamps & found:
            why = "no stamp is found in the environment's code"
            remedy = f"call stamps.{call} in its Task.finalize or Env.finalize"
            if absent:
                why = f"the environment's code cannot be read: {', '.join(absent)} is not installed"
                remedy = f"install it for the interpreter that is asked (--python), and {remedy}"
            problem = f"{phrase} is set, {source.algo.name!r} stamps nothing, and {why}"
            yield Finding("warning", next(iter(source.plugins), source.key), problem, remedy)
