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
from composer_plugins.adapters.prime_rl_plugin.store import KINDS, Store
from composer_plugins.adapters.prime_rl_plugin.surface import Requested
from composer_plugins.errors import ComposerError, unknown
from composer_plugins.findings import Finding
from composer_plugins.frameworks.prime_rl import ECHO, NODE, TESTED, Generation
from composer_plugins.objective.rules import cut_sampling

# Words in the source of an environment that stamps: our functions, verifiers' fields, PRIME-RL's own stream.
REFERENCE_FIELD, WEIGHTS_FIELD = upstream.NODE_FIELDS
HINT_WORDS = {"stamp_reference", "stamp_from_store", REFERENCE_FIELD}
REPLAY_WORDS = {"stamp_replay_pair", "stamp_from_store", WEIGHTS_FIELD}
OWN_STREAM = ROUTED["opsd"]
STAMP_WORDS = [*sorted(HINT_WORDS | REPLAY_WORDS), f"'{OWN_STREAM}'", f'"{OWN_STREAM}"']

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


def unweighted(run: Run, asked: Requested, generation: Generation, words: Words) -> Iterator[Finding]:
    """Pairs that are stamped without `replay_weight`: their tokens train nothing."""
    if asked.replay:
        return
    for source in run.sources:
        who = "" if source.algo.name in ROUTED else _stamps_pairs(source, asked, generation, words)
        if who:
            key = f"{run.loss_key}.kwargs"
            problem = f"{who} stamps pairs, and their tokens train nothing without replay_weight"
            remedy = f"set replay_weight = 1.0 in [{key}], or stamp no pairs"
            yield Finding("warning", f"{key}.replay_weight", problem, remedy)
            return


def groups_of_one(run: Run, asked: Requested, generation: Generation) -> Iterator[Finding]:
    """Groups of one completion, whose reward is the group's mean: every advantage is 0."""
    orchestrator = table(run.config, "orchestrator")
    if not orchestrator:
        return
    unset = f"orchestrator.{keys.GROUP_SIZE}"
    dropped = list(_filtered_out(run, asked, generation))
    effect = f", and only {asked.any} trains" if asked.any else ""
    effect = ", and PRIME-RL drops such samples and ends after 10 empty batches" if dropped else effect
    remedy = "set it to 2 or more, unless the environment's episodes have several agents"
    groups = {(one.algo.name, one.group_size.key, str(one.group_size.value)) for one in run.sources}
    for name, key, size in sorted(groups):
        if name in keys.GROUP_RELATIVE and (size == "1" or not key):
            problem = f"it is {'1' if key else 'not set, which means 1'}, and {name!r} subtracts the group's "
            problem += f"mean reward, so every advantage is 0{effect}"
            yield Finding("warning", key or unset, problem, remedy)


def cut_rollouts(run: Run) -> Iterator[Finding]:
    """Options that cut the distribution which completions are sampled from, beside a ratio to it."""
    found = list[Finding]()
    for source in run.sources:
        for key, sampling in source.samplings.items():
            for above, options in (
                (key, table(sampling)),
                (f"{key}.extra_body", table(sampling, "extra_body")),
            ):
                whole = {f"{above}.{name}": value for name, value in options.items()}
                found += cut_sampling(whole.get, f"{above}.")
    yield from dict.fromkeys(found)


def echo_terms(run: Run) -> Iterator[Finding]:
    """What the algorithm "echo" trains beside the policy loss, with a cross-entropy of PRIME-RL's own."""
    for key, term in {one.algo.key: one.algo.echo for one in run.sources if one.algo.echo}.items():
        own = ROUTED["sft"]
        problem = f"'echo' also trains {term}, with PRIME-RL's own {own} and not with this loss"
        remedy = 'leave it if you mean that; otherwise set type = "grpo"'
        yield Finding("warning", key, problem, remedy)


def echo_filters(run: Run) -> Iterator[Finding]:
    """Options of `echo_filter` that it would reject in the middle of the first rollout, and its store."""
    for source in run.sources:
        if source.algo.filter_path != ECHO_FILTER:
            continue
        key, options = f"{source.algo.filter_key}.kwargs", table(source.algo.filter, "kwargs")
        for name in sorted(options.keys() - {"store", "kinds"}):
            yield Finding.from_error(unknown(f"{key}.{name}", name, ("store", "kinds"), noun="option"))
        kinds, path = options.get("kinds", list(KINDS)), options.get("store")
        if not isinstance(kinds, list) or not kinds or any(kind not in KINDS for kind in kinds):
            remedy = f"set a list of {', '.join(KINDS)}"
            yield Finding("error", f"{key}.kinds", f"it is {kinds!r}", remedy)
        if not isinstance(path, str):
            problem = f"it is {path!r}" if "store" in options else "it is not set"
            yield Finding("error", f"{key}.store", problem, "set the path of the store, a file")
            continue
        try:
            Store(path)
        except ComposerError as error:
            problem = f"the store {path!r} cannot be read here: {error.problem}"
            remedy = f"{error.remedy}, or ignore this if the orchestrator runs elsewhere"
            yield Finding("warning", f"{key}.store", problem, remedy)


def _stamps_pairs(source: Source, asked: Requested, generation: Generation, words: Words) -> str:
    """The name of what stamps pairs; "" if nothing is known to. A store may hold only a hint's references."""
    if source.algo.filter_path == ECHO_FILTER:
        options = table(source.algo.filter, "kwargs")
        kinds = options.get("kinds")
        has_pairs = "replay" in kinds if isinstance(kinds, list) else not asked.hint
        if "store" in options and has_pairs:
            return "echo_filter"
    if generation.stamps == NODE:
        plugins = source.plugins.values()
        return next((name for name in plugins if "stamp_replay_pair" in (words.get(name) or ())), "")
    return ""


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
        kinds = table(source.algo.filter, "kwargs").get("kinds", list(KINDS))
        for phrase, kind in ((asked.hint, "reference"), (asked.replay, "replay")):
            if phrase and source.algo.filter_path == ECHO_FILTER and kind not in str(kinds):
                problem = f"{phrase} is set, and the kinds {kinds!r} stamp no {kind}"
                yield Finding("error", f"{source.algo.filter_key}.kwargs.kinds", problem, f"add {kind!r}")
        return
    if generation.stamps == ECHO:
        problem = f"{asked.any} is set, and {source.algo.name!r} stamps nothing before {TESTED.since}"
        remedy = f'set type = "echo" with filter.import_path = "{ECHO_FILTER}", or upgrade'
        yield Finding("error", source.algo.key, problem, remedy)
    if generation.stamps != NODE or source.key == NOT_LISTED:
        return
    found = {word for name in source.plugins.values() for word in words.get(name) or ()}
    absent = [name for name in source.plugins.values() if words.get(name) is None]
    key = next(iter(source.plugins), source.key)
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
            yield Finding("warning", key, problem, remedy)
    if asked.hint and OWN_STREAM in found:
        problem = f"the environment names PRIME-RL's own {OWN_STREAM}: a sample gets both"
        remedy = f"stamp {WEIGHTS_FIELD}['{OWN_STREAM}'] or set hint_weight, not both"
        yield Finding("warning", key, f"{asked.hint} is set, and {problem}", remedy)
