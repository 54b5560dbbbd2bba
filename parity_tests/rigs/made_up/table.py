"""What Lantern is, as data, and the hook by which composer-plugins knows it."""

from collections.abc import Callable

from composer_plugins.frameworks.contract import (
    MINUS_ONE,
    ONE_MINUS,
    Conversion,
    Framework,
    NamedLoss,
    Option,
    Sets,
)
from composer_plugins.hookspecs import hookimpl

LANTERN = Framework(
    name="lantern",
    title="Lantern",
    release="3.1",
    path="parity_tests.rigs.made_up.loss:Loss",
    summary="a framework that does not exist",
    losses=(
        NamedLoss("ppo", {"lantern.loss": "surrogate"}),
        NamedLoss("cispo", {"lantern.loss": "weighted"}),
        NamedLoss("reinforce", {"lantern.loss": "score"}),
    ),
    # Its bounds are of the ratio itself; ours are distances from 1.
    options=(
        Option(key="lantern.lower", default=0.8, sets=(Sets(("clip_low",), ("ppo",), ONE_MINUS),)),
        Option(key="lantern.upper", default=1.2, sets=(Sets(("clip_high",), ("ppo", "cispo"), MINUS_ONE),)),
        Option(key="lantern.divide", default="words", objective="mode"),
        Option(key="lantern.surprise", default=0.0, objective="entropy"),
        Option(key="lantern.leash", default=0.0, objective="kl.weight"),
        Option(
            key="lantern.leash_kind",
            default="third",
            objective="kl.estimator",
            conversion=Conversion(values={"first": "k1", "third": "k3"}),
        ),
        Option(key="lantern.heat", default=1.0, objective="temperature"),
        Option(key="lantern.tries", default=8, objective="group_size"),
    ),
    denominators={"words": "token-mean", "stories": "seq-mean-token-mean"},
    provides={"policy": frozenset({"logprobs", "old_logprobs", "advantages", "mask"})},
    not_carried={"lantern.dream": (None, False)},
    marks=("lantern",),
    suffixes=(".lantern",),
    convention="parity_tests.rigs.made_up.loss:CONVENTION",
)


@hookimpl
def register_frameworks(register: Callable[[Framework], None]) -> None:
    """Make Lantern known to every command."""
    register(LANTERN)
