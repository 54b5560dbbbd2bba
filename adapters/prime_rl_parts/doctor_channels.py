"""Whether a hint or a replayed pair can reach the loss, by what the orchestrator's part of the file says."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from composer_plugins.adapters.prime_rl_parts.doctor_file import DEFAULT_ALGORITHM, Run, Source, table
from composer_plugins.adapters.prime_rl_parts.versions import GENERATIONS, Generation
from composer_plugins.doctor import Finding

# Algorithms whose samples PRIME-RL trains with a loss of its own, and with which.
ROUTED = {"opd": "ref_kl", "opsd": "ref_kl", "sft": "ce"}

HINT_STAMPS = {"stamp_reference", "reference_logprobs", "stamp_from_store"}
ECHO_FILTER = "composer_plugins.adapters.prime_rl_echo.echo_filter"
REPLAY_STAMPS = {"stamp_replay_pair", "loss_weights", "stamp_from_store"}


class Wanted(NamedTuple):
    """Which channels a config asks for, in the words that asked; "" if it does not."""

    hint: str
    replay: str

    @property
    def any(self) -> str:
        """Both in a phrase."""
        return " and ".join(filter(None, self))


def channels(
    run: Run, wanted: Wanted, generation: Generation, stamps: Mapping[str, list[str] | None]
) -> Iterator[Finding]:
    """Whether a hint or a pair can reach the loss: carried, stamped, not filtered out, not routed past it."""
    if not run.whole:
        if wanted.any:
            what = f"{wanted.any}, and what stamps or filters the samples is in the orchestrator's config"
            remedy = "give the doctor the rl.toml, which has both"
            yield Finding("info", f"{run.loss_key}.kwargs", what, remedy)
        return
    refused = list(_not_carried(run, wanted, generation))
    yield from refused
    yield from _routed_past(run, wanted)
    if refused or not wanted.any:
        return
    yield from _filtered_out(run, wanted, generation)
    if generation.hint == "orchestrator.teacher_model":
        yield from _no_teacher(run, wanted)
    for source in run.sources:
        if source.algorithm not in ROUTED:
            yield from _never_stamped(source, wanted, generation, stamps)


def unweighed(
    run: Run, wanted: Wanted, generation: Generation, stamps: Mapping[str, list[str] | None]
) -> Iterator[Finding]:
    """Pairs without `replay_weight`: the mark takes their tokens out of the policy's loss as well."""
    if wanted.replay or not generation.replay:
        return
    for source in run.sources:
        who = "" if source.algorithm in ROUTED else _marks_pairs(source, wanted, generation, stamps)
        if who:
            key = f"{run.loss_key}.kwargs"
            what = f"{who} stamps pairs, and marked tokens train nothing without replay_weight"
            remedy = f"[{key}] replay_weight = 1.0, or stamp none"
            yield Finding("warning", f"{key}.replay_weight", what, remedy)
            return


def _marks_pairs(
    source: Source, wanted: Wanted, generation: Generation, stamps: Mapping[str, list[str] | None]
) -> str:
    """Who stamps pairs, as far as can be told; a store beside a hint is taken for the hint's."""
    if source.algorithm == "echo" and source.filter.get("import_path") == ECHO_FILTER:
        options = table(source.filter, "kwargs")
        kinds = options.get("kinds")
        told = "replay" in kinds if isinstance(kinds, list) else not wanted.hint
        if "store" in options and told:
            return "echo_filter"
    if generation.replay == "verifiers node":
        calling = [
            name for name in source.plugins.values() if "stamp_replay_pair" in (stamps.get(name) or ())
        ]
        return calling[0] if calling else ""
    return ""


def _not_carried(run: Run, wanted: Wanted, generation: Generation) -> Iterator[Finding]:
    for phrase, carried, name in (
        (wanted.hint, generation.hint, "hint_weight"),
        (wanted.replay, generation.replay, "replay_weight"),
    ):
        if phrase and not carried:
            why = (
                "lets no teacher run beside RL, so that nothing fills teacher_logprobs"
                if name == "hint_weight"
                else "has no loss_weights, in which a pair's coefficient travels"
            )
            yield Finding(
                "error",
                f"{run.loss_key}.kwargs.{name if name in phrase else 'policy'}",
                f"{phrase}, and PRIME-RL {generation.since} {why}",
                "upgrade to 0.7 or later, or leave it out",
            )


def _routed_past(run: Run, wanted: Wanted) -> Iterator[Finding]:
    """PRIME-RL trains samples of opd, opsd and sft with its own ref_kl or ce; ours is not called for them."""
    mode = table(run.config, "orchestrator").get("training_mode", "")  # v0.6: of the whole run
    if not isinstance(mode, str):
        what = f"training_mode is {mode!r}; wanted a word"
        yield Finding("error", "orchestrator.training_mode", what, 'training_mode = "rl"')
        mode = ""
    sources = [(one.algorithm, one.algorithm_key) for one in run.sources]
    if not sources:
        default = table(run.config, "orchestrator", "algo").get("type", DEFAULT_ALGORITHM)
        sources = [(str(default), "orchestrator.algo.type")]
    if mode in ROUTED:
        sources = [(mode, "orchestrator.training_mode")]
    routed = [one for one in dict.fromkeys(sources) if one[0] in ROUTED]
    everything = all(algorithm in ROUTED for algorithm, _ in sources)
    for algorithm, key in routed:
        what = f"samples of {algorithm!r} are trained by PRIME-RL's own {ROUTED[algorithm]}, not by this loss"
        remedy = 'type = "grpo", or another algorithm that assigns advantages'
        if wanted.hint and ROUTED[algorithm] == "ref_kl":
            what += f"; {wanted.hint} does not touch them"
            remedy = (
                "choose one: ref_kl upstream (no hint_weight), or the hint beside RL "
                '(type = "grpo", the environment stamps)'
            )
        elif wanted.any:
            what += f"; {wanted.any} does not touch them"
        yield Finding("error" if everything and wanted.any else "warning", key, what, remedy)


def _filtered_out(run: Run, wanted: Wanted, generation: Generation) -> Iterator[Finding]:
    """Zero advantages: a group that all solved or none, where hint and replay are all there is to learn."""
    orchestrator = table(run.config, "orchestrator")
    lost = f"drops samples of advantage 0, and {wanted.any} with them"
    listed = {"pre_batch_filters", "post_batch_filters"} & orchestrator.keys()
    if generation is GENERATIONS[-1] and not listed:
        train = table(orchestrator, "train")
        if train.get("filter_zero_advantages", True) is not False:
            is_set = "filter_zero_advantages" in train
            yield Finding(
                "error",
                "orchestrator.train.filter_zero_advantages",
                f"{'true' if is_set else 'not set, which is true'}: it {lost}",
                "[orchestrator.train] filter_zero_advantages = false",
            )
        yield from _gated(train, lost)
    elif listed or generation.hint == "echo filter":
        yield from _batch_filters(orchestrator, lost)
    elif table(orchestrator, "buffer").get("online_difficulty_filtering") is True:
        key = "orchestrator.buffer.online_difficulty_filtering"
        yield Finding("error", key, f"true: it {lost}", "set it to false")


def _gated(train: dict[str, Any], lost: str) -> Iterator[Finding]:
    sources = train.get("source")
    for source in sources if isinstance(sources, list) else ():
        for name, gate in table(source, "curriculum", "gates").items():
            if table(gate).get("type") == "advantage_range":
                low, high = gate.get("reject_min", 0.0), gate.get("reject_max", 0.0)
                if all(isinstance(x, int | float) for x in (low, high)) and low <= 0 <= high:
                    key = f"orchestrator.train.source.curriculum.gates.{name}"
                    what = f"rejects advantages from {low} to {high}: it {lost}"
                    yield Finding("error", key, what, "remove the gate, or keep 0 out of its range")


def _batch_filters(orchestrator: dict[str, Any], lost: str) -> Iterator[Finding]:
    """v0.6 to v0.8: after a batch, zero_advantage is in the list that stands where none is given."""
    for slot in ("pre_batch_filters", "post_batch_filters"):
        key, listed = f"orchestrator.{slot}", orchestrator.get(slot)
        if listed is None:
            if slot == "post_batch_filters":
                what = f'not set, and the filter "zero_advantage" of its default {lost}'
                remedy = f'[[{key}]] type = "zero_advantage", enforce = false'
                yield Finding("error", key, what, remedy)
            continue
        for one in listed if isinstance(listed, list) else ():
            if table(one).get("type") == "zero_advantage" and one.get("enforce", True) is not False:
                what = (
                    f'"zero_advantage" with enforce {one.get("enforce", "not set, which is true")}: it {lost}'
                )
                yield Finding("error", f"{key}.enforce", what, f"[[{key}]] enforce = false")


def _no_teacher(run: Run, wanted: Wanted) -> Iterator[Finding]:
    """v0.4 and v0.5: a teacher model scores every sample."""
    given = "teacher_model" in table(run.config, "orchestrator") or "teacher_inference" in run.config
    given = given or bool(table(run.config, "deployment").get("num_teacher_gpus"))
    if wanted.hint and not (given or run.config.get("teacher_gpu_ids")):
        what = f"{wanted.hint}, and no teacher_model: nothing fills teacher_logprobs"
        remedy = "[orchestrator.teacher_model] with its model and client"
        yield Finding("error", "orchestrator.teacher_model", what, remedy)


def _never_stamped(
    source: Source, wanted: Wanted, generation: Generation, stamps: Mapping[str, list[str] | None]
) -> Iterator[Finding]:
    """Since v0.7 nobody but an echo filter (all) or the environment (the newest) stamps beside RL."""
    if source.algorithm == "echo" and source.filter.get("import_path"):
        return
    if generation.hint == "echo filter":
        what = f"{wanted.any}, and {source.algorithm!r} stamps nothing; before 0.8.1.dev52 an echo filter can"
        remedy = 'type = "echo" with filter.import_path of prime_rl_echo.echo_filter, or upgrade'
        yield Finding("error", source.algorithm_key, what, remedy)
    if generation.hint != "verifiers node":
        return
    found = {word for name in source.plugins.values() for word in stamps.get(name) or ()}
    absent = [name for name in source.plugins.values() if stamps.get(name) is None]
    key = next(iter(source.plugins), source.key)
    for phrase, marks, call in (
        (wanted.hint, HINT_STAMPS, "stamp_reference"),
        (wanted.replay, REPLAY_STAMPS, "stamp_replay_pair"),
    ):
        if phrase and not marks & found:
            why = f"{source.algorithm!r} stamps nothing, and the environment's code "
            why += f"cannot be read: {', '.join(absent)} is not installed" if absent else "speaks of no stamp"
            remedy = f"call prime_rl_stamps.{call} in its Task.finalize or Env.finalize"
            if absent:
                remedy = f"install it for the interpreter that is asked (--python); there {remedy}"
            yield Finding("warning", key, f"{phrase}, and {why}", remedy)
    if wanted.hint and "ref_kl" in found:
        what = f"{wanted.hint}, and the environment's code names PRIME-RL's own ref_kl: a sample gets both"
        yield Finding("warning", key, what, "stamp loss_weights['ref_kl'], or set hint_weight; not both")
