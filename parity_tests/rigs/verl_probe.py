"""The adapter in the verl that is first on the path, whichever its version: a program, one process each.

It writes down names, warnings, the config by that version's YAML as a worker gets it, and how our registered
losses compare with verl's own. `test_wheels.py` judges them.
"""

import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import composer_plugins
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.verl_wheels import PLUGIN, TARGET

NODE = {"advantage": "grpo@verl", "policy": "grpo@verl"}
NODE |= {"policy_params": {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2}}
LOSS = "actor_rollout_ref.actor.policy_loss"
OVERRIDES = (
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "algorithm.adv_estimator=composer",
    f"+algorithm.composer={NODE}".replace("'", ""),
    f"{LOSS}._target_={TARGET}",
    f"+{LOSS}.composer=${{algorithm.composer}}",
)
CASES = 20
SINCE_0_9 = "policy_loss.dro_beta"  # the one option of verl's losses that 0.8 does not have


def compared() -> list[tuple[str, str, str]]:
    """Our registered losses beside verl's own: its name, verl's name, and how they compare."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    from composer_plugins.conformance import running
    from composer_plugins.conformance.verl_claims import policy

    if "dro" not in POLICY_LOSS_REGISTRY:
        del policy.DRAWN[SINCE_0_9]
    from parity_tests.rigs.verl_registered import advantages, policies

    known = {*ADV_ESTIMATOR_REGISTRY, *POLICY_LOSS_REGISTRY}
    rows = [running.compared(one, CASES) for one in policies() + advantages() if one.theirs in known]
    return [(row.ours, row.theirs, row.status) for row in rows]


def worker_config(root: Path) -> Any:
    """The actor's config in a worker, from this verl's ppo_trainer.yaml as its main_ppo composes it."""
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with initialize_config_dir(str(root / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", list(OVERRIDES))
    assert not need_critic(config)
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    # A worker is sent its part of the config, and makes dataclasses of it there.
    return omega_conf_to_dataclass(pickle.loads(pickle.dumps(config.actor_rollout_ref)).actor)


def is_ours(warning: warnings.WarningMessage) -> bool:
    """Whether a warning is of this package, by its file or its words without the path of the checkout."""
    in_package = Path(composer_plugins.__file__).parent in Path(warning.filename).parents
    return in_package or "composer" in str(warning.message).replace(str(ROOT), "")


def main(out: str) -> None:
    """Load our plugin with this verl and write down what it does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import verl
    messages, loaded = [str(one.message) for one in caught if is_ours(one)], PLUGIN in sys.modules
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    policy_loss = worker_config(Path(verl.__file__).parent).policy_loss
    found = {
        "version": verl.__version__,
        "file": verl.__file__,
        "loaded": loaded,
        "warnings": messages,
        "advantage": sorted(name for name in ADV_ESTIMATOR_REGISTRY if name.startswith("composer")),
        "policy": sorted(name for name in POLICY_LOSS_REGISTRY if name.startswith("composer")),
        "config": f"{type(policy_loss).__module__}.{type(policy_loss).__qualname__}",
        "node": policy_loss.composer,
        "compared": compared(),
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
