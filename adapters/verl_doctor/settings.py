"""What our adapter says against a run: its rules, called where the run will be.

The probe calls `read` in the interpreter that will train, where losses of other plugins are installed. The
rules themselves are `verl_parts`', which the estimators, the policy losses and the trainer go by.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from composer_plugins.adapters.verl_doctor.run import CHANNELS, Run, positive
from composer_plugins.adapters.verl_parts import rules
from composer_plugins.adapters.verl_parts.run import ACTOR, LOSS, faults, is_ours, missing_column
from composer_plugins.catalogue import Kind, of_kind
from composer_plugins.errors import ComposerError, in_a_line
from composer_plugins.plugins import losses

NODE = rules.NODE


def read(tree: Mapping[str, Any], columns: Mapping[str, list[str]]) -> dict[str, Any]:
    """As JSON: what is refused by whom, what the channels miss, and a policy loss's rollout anchor."""
    run = Run(tree)
    return {
        "refused": [*dict.fromkeys([*_no_table(run), *_refused(run)])],
        "faults": [tuple(one) for one in dict.fromkeys(_faults(run, columns))],
        "anchored": _anchored(run),
    }


def _no_table(run: Run) -> Iterator[tuple[str, str]]:
    for key in (NODE, f"{LOSS}.composer"):
        node = run.at(key)
        if node is not None and not isinstance(node, Mapping):
            yield key, f"{node!r}; wanted a table of options"


def _refused(run: Run) -> Iterator[tuple[str, str]]:
    """What the estimator, the policy loss and the trainer say at their first call."""
    if _known(run.estimator, "advantage"):
        yield from _complaint(NODE, lambda: _chosen(run, run.node, "advantage"))
    if _known(run.loss, "policy"):
        same = not run.worker_node or run.worker_node == run.node
        yield from _complaint(
            NODE if same else f"{LOSS}.composer", lambda: _chosen(run, run.worker_node, "policy")
        )
    if run.carries:
        yield from _complaint(NODE, lambda: rules.channels(run.node))


def _known(name: str, kind: Kind) -> bool:
    """Whether a registered name is ours; that there is no such loss is said by its key."""
    return is_ours(name) and (rules.named(name) is None or rules.named(name) in of_kind(losses(), kind))


def _chosen(run: Run, node: dict[str, Any], kind: Literal["policy", "advantage"]) -> Any:
    """By the rules of the registries. Who delivers a weighed channel is judged by the trainer, elsewhere."""
    name = rules.named(run.estimator if kind == "advantage" else run.loss)
    if run.carries:
        with rules.carried():
            return rules.chosen(node, kind, name)
    weights = {f"{channel}_weight" for channel in CHANNELS}
    unweighed = {key: value for key, value in node.items() if key not in weights or not positive(value)}
    return rules.chosen(unweighed, kind, name)


def _faults(run: Run, columns: Mapping[str, list[str]]) -> Iterator[tuple[str, str, str]]:
    """What keeps the trainer from delivering the channels; none where it is another."""
    if not run.carries:
        return
    try:
        channels = rules.channels(run.node)
    except ComposerError:
        return
    try:
        yield from faults(run.tree, channels)
    except (TypeError, ValueError) as error:  # a list where a number is compared
        yield ACTOR, f"a value of the wrong type: {in_a_line(error)}", "mend it; the rest is not judged"
    if run.at("data.custom_cls.path"):  # a class of the user's may make what the file has not
        return
    for file, present in columns.items():
        if (missing := missing_column(file, present, channels)) is not None:
            yield missing


def _anchored(run: Run) -> str:
    """The policy loss of ours, if its region is around the policy that sampled."""
    if not _known(run.loss, "policy"):
        return ""
    try:
        _, choice = _chosen(run, run.worker_node, "policy")
    except ComposerError:
        return ""
    return choice.loss.name if "rollout_logprobs" in choice.loss.needs else ""


def _complaint(key: str, call: Callable[[], Any]) -> Iterator[tuple[str, str]]:
    try:
        call()
    except ComposerError as error:
        yield key, str(error).removeprefix(f"{NODE}: ")
    except Exception as error:
        yield key, in_a_line(error)
