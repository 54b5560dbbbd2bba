"""One worker of verl's with a real FSDP2 engine, a fixed batch, and our loss: no rollout and no trainer.

    python -m benchmarks.verl_worker FOLDER NODE

NODE is `algorithm.composer` as JSON. The teacher, this model before the first update, is asked with a
hint; then the actor makes six updates on the same rows. The last line printed is the metrics of each, as
JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils import tensordict_utils
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_from_nested

from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    HINT_MASK,
    TEACHER,
    TEACHER_PROMPT,
    TOP_DTYPES,
    TOP_K,
    nested,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.loss import ComposerLoss
from composer_plugins.adapters.verl_plugin.sync_trainer.scoring import PromptResponse, batch_row
from composer_plugins.adapters.verl_plugin.sync_trainer.workers import TopKLogprobsWorker
from composer_plugins.adapters.verl_plugin.upstream import SHOW_LOGITS
from composer_plugins.recipes.verl.on_a_cpu.overrides import COMPOSER_CONFIG, overrides

ROWS, STEPS = 8, 6
TRAIN = {
    "calculate_entropy": False,
    "global_batch_size": ROWS,
    "mini_batch_size": ROWS,
    "epochs": 1,
    "seed": 0,
    "dataloader_kwargs": {"shuffle": False},
    "temperature": 1.0,
}


def config_of(folder: Path, node: dict[str, Any]) -> Any:
    """main_ppo's config for this folder, with the node where the workers look for it."""
    own = "actor_rollout_ref.actor.policy_loss"
    more = [
        f"{own}.loss_mode=composer",
        f"{own}._target_={COMPOSER_CONFIG}",
        "actor_rollout_ref.actor.optim.lr=3e-5",
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", [*overrides(folder, STEPS), *more])
    OmegaConf.set_struct(config, False)
    config.actor_rollout_ref.actor.policy_loss.composer = node
    config.actor_rollout_ref.actor.optim.total_training_steps = STEPS
    return config


def sequences() -> tuple[list[PromptResponse], list[PromptResponse]]:
    """Fixed responses after their prompts, and after the teacher's, which are longer."""
    g = torch.Generator().manual_seed(0)

    def draw(n: int) -> Tensor:
        return torch.randint(5, 260, (n,), generator=g)

    plain = [PromptResponse(draw(3 + i % 3), draw(2 + i % 4)) for i in range(ROWS)]
    return plain, [PromptResponse(torch.cat([draw(4), one.prompt]), one.response) for one in plain]


def batch(rows: list[dict[str, Tensor]], **extra: Any) -> TensorDict:
    """As a worker gets it."""
    fields = {name: nested([one[name] for one in rows]) for name in rows[0]}
    data = TensorDict(fields, batch_size=len(rows))
    tensordict_utils.assign_non_tensor(data, **extra)
    return data


def started(config: Any, worker: type = TopKLogprobsWorker) -> RayWorkerGroup:
    """Start the one worker of this config with its model, in a Ray that runs."""
    pool = RayResourcePool([1], use_gpu=True, max_colocate_count=1)
    remote = RayClassWithInitArgs(ray.remote(worker), config=config.actor_rollout_ref, role="actor")
    group = RayWorkerGroup(pool, remote, device_name="cpu")
    group.init_model()
    return group


def main(folder: Path, node: dict[str, Any]) -> None:
    """Ask, train, print."""
    config = config_of(folder, node)
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, object_store_memory=1 << 28)
    group = started(config)
    plain, hinted = sequences()
    top_k = node.get("hint_top_k")
    asked = {"compute_loss": True, SHOW_LOGITS: True, TOP_K: top_k} if top_k else {"compute_loss": False}
    masks = nested([torch.ones_like(one.response) for one in plain])

    def ask(sequences: list[PromptResponse], **more: Any) -> TensorDict:
        question = [batch_row(one) | {TEACHER_PROMPT: one.prompt} for one in sequences]
        return group.compute_log_prob(batch(question, calculate_entropy=False, temperature=1.0, **more))

    answer, old = ask(hinted, **asked), ask(plain, compute_loss=False)
    found = {"old_log_probs": response_from_nested(old["log_probs"], masks).unbind()}
    if top_k:
        found |= {name: answer[name].unbind() for name in (TEACHER, *TOP_DTYPES)}
    else:
        found[TEACHER] = response_from_nested(answer["log_probs"], masks).unbind()
    rows = [
        {
            **batch_row(one),
            HINT_MASK: torch.ones_like(one.response),
            "advantages": torch.zeros(len(one.response)),
            **{name: values[i] for name, values in found.items()},
        }
        for i, one in enumerate(plain)
    ]
    group.set_loss_fn(ComposerLoss(omega_conf_to_dataclass(config.actor_rollout_ref.actor), node))
    steps = [
        tensordict_utils.get(
            group.update_actor(batch(rows, **TRAIN, **{SHOW_LOGITS: bool(top_k)})), "metrics"
        )
        for _ in range(STEPS)
    ]
    ours = [
        {name: float(torch.tensor(v).mean()) for name, v in s.items() if "composer" in name} for s in steps
    ]
    print(json.dumps(ours), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
