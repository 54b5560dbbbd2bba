"""Preference losses over pairs."""

from composer_plugins.bundled.shared import KERNELS, LABEL_SMOOTHING, TINY
from composer_plugins.catalogue import Loss, Parameter

LOSSES = (
    Loss(
        name="dpo",
        kind="preference",
        path=f"{KERNELS}.preference:dpo",
        summary="DPO, and cDPO with label_smoothing",
        paper="arXiv 2305.18290",
        needs=("chosen", "rejected", "ref_chosen", "ref_rejected"),
        parameters={
            "beta": Parameter(0.1, "how strongly the reference holds", low=TINY),
            "label_smoothing": LABEL_SMOOTHING,
        },
        proof="TODO",
    ),
    Loss(
        name="simpo",
        kind="preference",
        path=f"{KERNELS}.preference:simpo",
        summary="reference-free, length-averaged, with a target margin",
        paper="arXiv 2405.14734",
        needs=("chosen", "rejected"),
        parameters={
            "beta": Parameter(2.0, "scale of the length-averaged margin", low=TINY),
            "gamma_beta_ratio": Parameter(0.25, "target margin gamma over beta", low=0),
            "label_smoothing": LABEL_SMOOTHING,
            "link": Parameter("sigmoid", "how the margin becomes a loss", choices=("sigmoid", "hinge")),
        },
        average=True,
        proof="TODO",
    ),
)
