"""Advantages: what a rollout's reward is compared with."""

from composer_plugins.bundled.shared import KERNELS
from composer_plugins.catalogue import Dialect, Loss, Parameter

GROUPED = ("rewards", "group_ids")
SINGLETON = Parameter("zero", "what a group of one gets: 0, or its own reward", choices=("zero", "raw"))

LOSSES = (
    Loss(
        name="grpo",
        kind="advantage",
        path=f"{KERNELS}.advantages:grpo",
        summary="the reward's deviation from its group's mean, in standard deviations",
        paper="arXiv 2402.03300",
        needs=GROUPED,
        optional=("mask",),
        parameters={
            "scale": Parameter("group", "whose standard deviation", choices=("group", "batch")),
            "ddof": Parameter(
                1, "delta degrees of freedom of the standard deviation", low=0, high=1, integer=True
            ),
            "eps": Parameter(1e-6, "added to the standard deviation", low=0),
            "singleton": SINGLETON,
        },
        dialects=(
            Dialect(
                upstream="verl",
                params={"ddof": 1, "eps": 1e-6, "singleton": "raw"},
                source="verl 0.9.1 trainer/ppo/core_algos.py compute_grpo_outcome_advantage",
                proof="test_kernels_advantages_golden.py::test_advantages_equal_verl",
                note="a group of one passes its reward through, divided by 1 + eps",
            ),
            Dialect(
                upstream="trl",
                params={"ddof": 1, "eps": 1e-4},
                source="TRL 1.16 trainer/grpo_trainer.py _generate_and_score_completions",
                proof="test_kernels_advantages_golden.py::test_advantages_equal_trl",
                note="scale_rewards is scale; 'none' is the loss dr_grpo",
            ),
        ),
        proof="TODO",
    ),
    Loss(
        name="dr_grpo",
        kind="advantage",
        path=f"{KERNELS}.advantages:dr_grpo",
        summary="the reward's deviation from its group's mean",
        paper="arXiv 2503.20783",
        needs=GROUPED,
        optional=("mask",),
        proof="TODO",
    ),
    Loss(
        name="rloo",
        kind="advantage",
        path=f"{KERNELS}.advantages:rloo",
        summary="the reward less the mean of the others of its group",
        paper="arXiv 2402.14740",
        needs=GROUPED,
        optional=("mask",),
        parameters={"singleton": SINGLETON},
        proof="TODO",
    ),
)
