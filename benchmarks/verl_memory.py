"""The largest memory of verl's worker in an update with a hint, and in the teacher's forward.

    python -m benchmarks.verl_memory [ROWS TOKENS VOCABULARY K]

One real worker (FSDP2 on a CPU, float32) in a process of its own, with a tiny model that has a large
vocabulary. One token in sixteen is of a prompt. Prints lines of JSON; each peak is what the call needs above
what the process held before it, in tensors of [tokens, vocabulary] float32.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.timing import peak_of
from benchmarks.verl_process import run_module

SIZES = (8, 256, 32_000, 100)
PLAIN = {"policy": "grpo"}  # no hint
HINT = {"hint_weight": 1.0, "hint_teacher": "live"}
PEAK = "peak_bytes"
CALLS = 5  # the median of them counts: Linux gives a process's memory back late at times


def nodes(k: int) -> list[dict[str, Any]]:
    """`algorithm.composer` with each of three divergences."""
    params: dict[str, Any] = {"sdpo": {"top_k": k + 1, "rest": "renormalised"}}
    return [
        HINT | {"hint_divergence": name, "hint_top_k": k, "hint_params": params.get(name, {})}
        for name in ("jsd", "sdpo", "forward_kl_topk")
    ]


def measured_worker() -> Any:
    """Return verl's worker with our top k, whose metrics have the peak of each batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    from composer_plugins.adapters.verl_plugin.sync_trainer.workers import (
        TopKLogprobsWorker,
        TopKTrainingWorker,
    )

    def with_peak(call: Callable[[TensorDict], TensorDict], data: TensorDict) -> TensorDict:
        outputs = list[TensorDict]()
        peak = peak_of(lambda: outputs.append(call(data)))
        metrics = dict(tensordict_utils.get(outputs[0], "metrics")) | {PEAK: peak}
        tensordict_utils.assign_non_tensor(outputs[0], metrics=metrics)
        return outputs[0]

    class Training(TopKTrainingWorker):
        def train_batch(self, data: TensorDict) -> TensorDict:
            return with_peak(super().train_batch, data)

        def infer_batch(self, data: TensorDict) -> TensorDict:
            return with_peak(super().infer_batch, data)

    class Measured(TopKLogprobsWorker):
        actor_worker_cls = Training

    return Measured


def measure(folder: Path, rows: int, tokens: int, vocabulary: int, k: int) -> None:
    """Call the worker for each case once to warm up, and then for the numbers."""
    import ray
    import torch
    from verl.utils import tensordict_utils
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.padding import response_from_nested

    from benchmarks.verl_worker import TRAIN, batch, config_of, started
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
    from composer_plugins.adapters.verl_plugin.upstream import SHOW_LOGITS
    from composer_plugins.recipes.verl.on_a_cpu import tiny

    tiny.model(folder / "model", vocabulary)
    config = config_of(folder, PLAIN)
    for owner in (config.actor_rollout_ref.rollout, config.actor_rollout_ref.ref):
        owner.log_prob_micro_batch_size_per_gpu = rows
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = rows
    ray.init(num_cpus=8, num_gpus=1, include_dashboard=False, object_store_memory=1 << 28)
    group = started(config, measured_worker())
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 260, (rows, tokens), generator=g)
    sequences = [PromptResponse(row[: tokens // 16], row[tokens // 16 :]) for row in ids]
    questions = [batch_row(one) | {TEACHER_PROMPT: one.prompt.flip(0)} for one in sequences]
    unit = rows * tokens * vocabulary * 4

    def peak(case: str, call: Callable[[], Any]) -> Any:
        outputs = [call() for _ in range(1 + CALLS)][1:]
        found = [tensordict_utils.get(output, "metrics")[PEAK] for output in outputs]
        tensors = median(x[0] if isinstance(x, list) else x for x in found) / unit
        print(json.dumps({"case": case, "[tokens, vocabulary] tensors": round(tensors, 2)}), flush=True)
        return outputs[-1]

    def scored(**more: Any) -> Any:
        return group.compute_log_prob(batch(questions, calculate_entropy=False, temperature=1.0, **more))

    def updated(data: list[dict[str, Any]], **more: Any) -> Any:
        sizes = {"global_batch_size": rows, "mini_batch_size": rows}
        return group.update_actor(batch(data, **TRAIN | sizes, **more))

    old = peak("log-probabilities, verl's own", lambda: scored(compute_loss=False))
    asked = {"compute_loss": True, SHOW_LOGITS: True, TOP_K: k}
    teacher = peak("log-probabilities, and the teacher's top k", lambda: scored(**asked))
    masks = nested([torch.ones_like(one.response) for one in sequences])
    old_logprobs = response_from_nested(old["log_probs"], masks).unbind()
    columns = {name: teacher[name].unbind() for name in (TEACHER, *TOP_DTYPES)}
    data = [
        batch_row(one)
        | {"old_log_probs": old_logprobs[i], "advantages": torch.ones(len(one.response))}
        | {name: values[i] for name, values in columns.items()}
        for i, one in enumerate(sequences)
    ]
    peak("update, verl's own loss", lambda: updated(data))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    for node in nodes(k):
        group.set_loss_fn(ComposerLoss(actor, node))
        for every in (1, 2) if node["hint_divergence"] == "jsd" else (1,):
            for i, one in enumerate(data):
                one[HINT_MASK] = torch.full_like(one["responses"], i % every == 0)
            shown = (
                f"update, {node['hint_divergence']} on {'every row' if every == 1 else 'half of the rows'}"
            )
            peak(shown, lambda: updated(data, **{SHOW_LOGITS: True}))


def measure_loss(rows: int, tokens: int, vocabulary: int, k: int) -> None:
    """Measure the loss and its backward alone, on logits as verl's engine has them on a GPU.

    They are bfloat16, and verl's cross-entropy writes their gradient over them, so that verl's own loss needs
    almost no memory beside them.
    """
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils

    from benchmarks.verl_logits import overwriting
    from composer_plugins.adapters.verl_plugin.config import ComposerPolicyLossConfig
    from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
        HINT_MASK,
        TEACHER,
        TOP_DTYPES,
        TOP_IDS,
        TOP_LOGPROBS,
        nested,
    )
    from composer_plugins.adapters.verl_plugin.sync_trainer.loss import ComposerLoss
    from composer_plugins.conformance.verl_claims.upstream import actor

    g, length = torch.Generator().manual_seed(0), tokens - tokens // 16
    hidden = torch.randn(rows * tokens, 64, generator=g).bfloat16()
    head = torch.randn(vocabulary, 64, generator=g).bfloat16().requires_grad_()
    ids = torch.randint(vocabulary, (rows, tokens), generator=g)
    top = torch.randn(rows, length, k + 1, generator=g).log_softmax(-1)
    entries = torch.rand(rows, length, 4 * k, generator=g).topk(k).indices
    ones = torch.ones(rows, length, dtype=torch.long)
    fields = {"input_ids": ids, "prompts": ids[:, : tokens - length], "responses": ids[:, -length:]}
    fields |= {"response_mask": ones, "loss_mask": ones, HINT_MASK: ones}
    fields |= dict.fromkeys(("old_log_probs", TEACHER), -torch.ones(rows, length))
    fields |= {"advantages": torch.ones(rows, length), TOP_LOGPROBS: top.half()}
    fields |= {TOP_IDS: entries.to(TOP_DTYPES[TOP_IDS])}
    data = TensorDict({name: nested(list(x)) for name, x in fields.items()}, batch_size=rows)
    counts = {"dp_size": 1, "batch_num_tokens": rows * length, "global_batch_size": rows}
    tensordict_utils.assign_non_tensor(data, **counts)
    offsets = torch.arange(0, rows * tokens + 1, tokens)

    def step(loss: ComposerLoss, shown: bool) -> None:
        logits = (hidden @ head.t()).unsqueeze(0).squeeze(0)
        if shown:
            loss(student_logits=logits.unsqueeze(0), data=data)
        logprobs = overwriting(logits, ids.flatten().roll(-1))
        del logits
        output = {"log_probs": torch.nested.nested_tensor_from_jagged(logprobs, offsets)}
        loss(model_output=output, data=data)[0].backward()

    unit = rows * tokens * vocabulary * 2
    for node in (PLAIN, *nodes(k)):
        config = actor()
        policy = ComposerPolicyLossConfig(loss_mode="composer", composer=node)
        object.__setattr__(config, "policy_loss", policy)
        loss = ComposerLoss(config, node)
        call = partial(step, loss, node is not PLAIN)
        call()
        found = round(median(peak_of(call) for _ in range(CALLS)) / unit, 2)
        name = f"the loss alone, {node.get('hint_divergence', 'without a hint')}"
        print(json.dumps({"case": name, "[tokens, vocabulary] tensors of bfloat16": found}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 6:
        measure_loss(*map(int, sys.argv[2:]))
        measure(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    else:
        # A freed tensor goes back to the system at once.
        given, variables = sys.argv[1:] or map(str, SIZES), {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
        sys.exit(run_module("benchmarks.verl_memory", *given, **variables).returncode)
