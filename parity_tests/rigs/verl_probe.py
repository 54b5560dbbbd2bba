"""The adapter in the verl that is first on the path, whichever its version: a program, one process each.

It writes down names, warnings, signatures, advantages by that version's compute_advantage, losses by the
keywords of that version's workers, and the configs by its YAML. `test_wheels.py` judges them.
"""

import ast
import inspect
import pickle
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import torch

import composer_plugins
from parity_tests.rigs.paths import ROOT
from parity_tests.rigs.verl_wheels import PLUGIN, TARGET, stub

NODE = {"advantage": "grpo@verl", "policy": "grpo@verl"}
NODE |= {"policy_params": {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2}}
LOSS = "actor_rollout_ref.actor.policy_loss"
CLIPS = (
    "actor_rollout_ref.actor.clip_ratio_low=0.1",
    "actor_rollout_ref.actor.clip_ratio_high=0.15",
    "actor_rollout_ref.actor.clip_ratio_c=1.2",
)
COMMON = (
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
    "actor_rollout_ref.rollout.n=16",  # at least the largest group that is drawn
)
OURS = (
    "algorithm.adv_estimator=composer",
    f"+algorithm.composer={NODE}".replace("'", ""),
    f"{LOSS}._target_={TARGET}",
    f"+{LOSS}.composer=${{algorithm.composer}}",
)


def calls(root: Path) -> list[tuple[str, ...]]:
    """The keywords by which this verl's workers call a policy loss, each way once."""
    found = set()
    for file in sorted((root / "workers").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "policy_loss_fn":
                assert not node.args, f"{file} passes something by position"
                found.add(tuple(str(keyword.arg) for keyword in node.keywords))
    return sorted(found)


def configs(root: Path, *overrides: str) -> Any:
    """This verl's ppo_trainer.yaml with overrides, as its main_ppo composes it."""
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(str(root / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", [*COMMON, *overrides])


def unbound(ours: Any, theirs: dict[str, Any]) -> list[str]:
    """The functions of verl's whose parameters ours does not take, by position or by name."""
    bad = []
    for name, function in theirs.items():
        parameters = [
            p for p in inspect.signature(function).parameters.values() if p.kind.name != "VAR_KEYWORD"
        ]
        try:
            inspect.signature(ours).bind(**{p.name: None for p in parameters})
        except TypeError as error:
            bad.append(f"{name}: {error}")
    return bad


def advantages(own: Any, ours: Any) -> list[dict[str, Any]]:
    """Drawn rollouts through this verl's compute_advantage: ours, and its own GRPO."""
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    from composer_plugins.conformance.batches import rollouts
    from composer_plugins.conformance.verl_claims.upstream import names
    from composer_plugins.testing.draws import Draw

    found = []
    for batch in (rollouts(Draw(seed), min_group=2) for seed in range(20)):
        row: dict[str, Any] = {"batch": batch}
        for who, algorithm, estimator in (
            ("theirs", own, "grpo"),
            ("ours", ours, ours.adv_estimator),
            ("named", ours, "composer/grpo"),
        ):
            tensors = {"token_level_rewards": batch.token_rewards, "response_mask": batch.mask.long()}
            data = DataProto.from_dict(tensors, non_tensors={"uid": names(batch.ids.tolist())})
            data = compute_advantage(data, adv_estimator=estimator, config=algorithm)
            row[who] = data.batch["advantages"], data.batch["returns"]
        found.append(row)
    return found


def policy_losses(own: Any, ours: Any, keywords: list[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Drawn batches in every mode by the keywords of this verl's workers: ours, and its own vanilla."""
    from composer_plugins.conformance.batches import global_batch, policy_batch
    from composer_plugins.conformance.verl_claims.upstream import modes
    from composer_plugins.testing.draws import Draw

    found = []
    for draw in map(Draw, range(12)):
        batch, counts = policy_batch(draw), range(3 if hasattr(own, "global_batch_info") else 0)
        infos = [{}, *(global_batch(draw, batch.mask) for _ in counts)]
        for mode, info, names in product(modes(), infos, keywords):
            row: dict[str, Any] = {"mode": mode, "info": info, "keywords": names, "batch": batch}
            row["theirs"] = policy_loss("vanilla", row, own)
            row["ours"] = policy_loss("composer/grpo", row, ours)
            found.append(row)
    return found


def by_mode(own: Any, keywords: tuple[str, ...]) -> dict[str, list[torch.Tensor]]:
    """GSPO of one batch, this verl's and ours, as two modes reduce it."""
    from composer_plugins.conformance.batches import Batch

    logprobs = -torch.arange(1.0, 7.0, dtype=torch.float64).view(2, 3)
    advantages = torch.tensor([[1.0], [-0.5]], dtype=torch.float64).expand(2, 3).contiguous()
    mask = torch.tensor([[True, True, True], [True, False, False]])
    batch = Batch(logprobs, logprobs - 1e-5, advantages, mask, None)  # within any clip
    modes = ("token-mean", "seq-mean-token-mean")
    rows = [{"mode": mode, "info": {}, "keywords": keywords, "batch": batch} for mode in modes]
    names = {"theirs": "gspo", "ours": "composer/gspo_token"}
    return {who: [policy_loss(name, row, own)[0] for row in rows] for who, name in names.items()}


def across_a_tool(own: Any) -> dict[str, torch.Tensor]:
    """REINFORCE++ of two responses, one with a tool's tokens in it: this verl's and ours."""
    from omegaconf import OmegaConf, open_dict
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_advantage

    algorithm = OmegaConf.create(OmegaConf.to_container(own))
    with open_dict(algorithm):
        algorithm.composer = {"advantage": "reinforce_pp@verl"}
    found = {}
    for who, name in (("theirs", "reinforce_plus_plus"), ("ours", "composer")):
        rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.5]], dtype=torch.float64)
        mask = torch.tensor([[1, 0, 1], [1, 1, 1]])
        data = DataProto.from_dict({"token_level_rewards": rewards, "response_mask": mask})
        found[who] = compute_advantage(data, adv_estimator=name, config=algorithm).batch["advantages"]
    return found


def policy_loss(
    name: str, row: dict[str, Any], config: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """A registered loss, its gradient and what it logs."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    if row["info"]:
        config.global_batch_info.update(row["info"])
    batch = row["batch"]
    given = {
        "old_log_prob": batch.old_logprobs,
        "log_prob": batch.logprobs.clone().requires_grad_(),
        "advantages": batch.advantages,
        # The engine's workers say bool and count the whole batch, the older ones neither.
        "response_mask": batch.mask if row["info"] else batch.mask.long(),
        "loss_agg_mode": row["mode"],
        "config": config,
        "rollout_is_weights": batch.weights,
    }
    loss, logged = get_policy_loss_fn(name)(**{key: given[key] for key in row["keywords"]})
    getattr(config, "global_batch_info", {}).clear()
    return loss.detach(), torch.autograd.grad(loss, given["log_prob"])[0], logged


def is_ours(warning: warnings.WarningMessage) -> bool:
    """Whether a warning is of this package, by its file or its words without the path of the checkout."""
    in_package = Path(composer_plugins.__file__).parent in Path(warning.filename).parents
    return in_package or "composer" in str(warning.message).replace(str(ROOT), "")


def main(out: str) -> None:
    """Load our plugin with this verl and write down what it does."""
    stub()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import verl
    messages = [str(w.message) for w in caught if is_ours(w)]
    loaded = PLUGIN in sys.modules
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
    from verl.trainer.ppo.utils import need_critic
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    registries = {"advantage": ADV_ESTIMATOR_REGISTRY, "policy": POLICY_LOSS_REGISTRY}
    assert "composer" in ADV_ESTIMATOR_REGISTRY, messages
    root = Path(verl.__file__).parent
    own, ours = configs(root, *CLIPS), configs(root, *OURS)
    validate_config(config=ours, use_reference_policy=False, use_critic=need_critic(ours))
    # A worker is sent its part of the config, and makes dataclasses of it there.
    actor = omega_conf_to_dataclass(pickle.loads(pickle.dumps(ours.actor_rollout_ref)).actor)
    keywords = calls(root)
    found = {
        "version": verl.__version__,
        "file": verl.__file__,
        "loaded": loaded,
        "warnings": messages,
        "names": {k: sorted(n for n in r if n.startswith("composer")) for k, r in registries.items()},
        "unbound": {
            kind: unbound(r["composer"], {n: f for n, f in r.items() if not n.startswith("composer")})
            for kind, r in registries.items()
        },
        "critic": need_critic(ours),
        "node": actor.policy_loss.composer,
        "config": f"{type(actor.policy_loss).__module__}.{type(actor.policy_loss).__qualname__}",
        "keywords": keywords,
        "advantages": advantages(own.algorithm, ours.algorithm),
        "policy": policy_losses(omega_conf_to_dataclass(own.actor_rollout_ref.actor), actor, keywords),
        "by_mode": by_mode(omega_conf_to_dataclass(configs(root).actor_rollout_ref.actor), keywords[0]),
        "across_a_tool": across_a_tool(own.algorithm),
    }
    torch.save(found, out)


if __name__ == "__main__":
    main(sys.argv[1])
