"""All claims about NeMo-RL, for a checkout of it."""

from collections.abc import Iterator
from pathlib import Path

from composer_plugins.conformance.claims import Absent
from composer_plugins.conformance.running import Suite
from composer_plugins.conformance.stubs import commit_of

KNOWN = ("7ea279a",)
COMPARED = {"ClippedPGLossFn", "DistillationLossFn", "DPOLossFn"}
NOT_COMPARED = {
    "NLLLossFn": "the cross-entropy of given tokens",
    "PreferenceLossFn": "of a reward model: it takes scores, and not log-probabilities",
    "MseValueLossFn": "of a critic",
    "DraftCrossEntropyLossFn": "of a draft model",
    "CrossTokenizerDistillationLossFn": "between two tokenizers",
}
UNKNOWN = "this version of composer-plugins does not know it"


def suite(source: Path) -> Suite:
    """The claims, and which losses the checkout has."""
    from composer_plugins.conformance.nemo_rl_claims import claims, upstream

    loaded = upstream.load(source.resolve())

    def absent() -> Iterator[Absent]:
        names = {name for name in vars(loaded.losses) if name.endswith("LossFn")} - COMPARED
        for name in sorted(names):
            yield Absent(name, NOT_COMPARED.get(name, UNKNOWN), missing=name not in NOT_COMPARED)

    return Suite(commit_of(source), KNOWN, claims.claims(loaded), lambda _: True, absent)
