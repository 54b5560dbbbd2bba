"""What the teacher's top k costs verl's driver: bytes through its process, seconds outside of the model.

    python -m benchmarks.verl_driver [ROWS TOKENS K]

One real worker (FSDP2 on a CPU) and a real TransferQueue, in processes of their own. A quarter of the rows
have no hint. Prints one line of JSON.
"""

import json
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.verl_process import run_module

SIZES = (64, 256, 128)
NODE = {"hint_weight": 1.0, "hint_divergence": "jsd", "hint_teacher": "live"}


class Counted:
    """transfer_queue with the bytes of tensors that this process gets and puts, and the seconds it takes."""

    def __init__(self, module: Any) -> None:
        self.module, self.bytes, self.seconds = module, 0, 0.0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            for value in (kwargs.get("fields"), result):
                columns = value.values() if hasattr(value, "batch_size") else ()
                tensors = [x.values() if x.is_nested else x for x in columns if hasattr(x, "element_size")]
                self.bytes += sum(x.numel() * x.element_size() for x in tensors)
            return result

        return call


def measure(folder: Path, rows: int, tokens: int, k: int) -> None:
    """Score a batch under its hints once to warm up, and once more for the numbers."""
    import ray
    import torch
    import transfer_queue
    from transfer_queue import KVBatchMeta
    from transformers import AutoTokenizer
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from benchmarks.verl_worker import config_of, started
    from composer_plugins.adapters.verl_plugin.options import channels_of_node
    from composer_plugins.adapters.verl_plugin.sync_trainer import hint, scoring
    from composer_plugins.adapters.verl_plugin.sync_trainer.prompts import Prompts

    node = NODE | {"hint_top_k": k}
    config = config_of(folder, node)
    config.data.max_response_length = tokens
    ray.init(num_cpus=32, num_gpus=1, include_dashboard=False, object_store_memory=1 << 28)
    transfer_queue.init(config.transfer_queue)
    group = started(config)
    group._dispatch_info["actor"] = group._query_dispatch_info("actor")
    seconds = {"model": 0.0}
    scored = group.compute_log_prob

    def compute_log_prob(meta: Any) -> None:
        start = time.perf_counter()
        scored(meta)
        seconds["model"] += time.perf_counter() - start

    trainer: Any = SimpleNamespace(config=config, channels=channels_of_node(node), ref_in_actor=False)
    trainer.positions, trainer.tokenizer = 512, AutoTokenizer.from_pretrained(folder / "model")
    workers = SimpleNamespace(compute_log_prob=compute_log_prob, _dispatch_info=group._dispatch_info)
    trainer.actor_rollout_wg = workers
    template, g = Prompts(trainer), torch.Generator().manual_seed(0)
    batch = []
    for i in range(rows):
        messages = [{"role": "user", "content": f"{i}+1=?"}]
        response = torch.randint(5, 260, (tokens - i % 5,), generator=g)
        row = {"raw_prompt": messages, "prompts": torch.tensor(template.ids(messages))}
        row |= {"responses": response, "response_mask": torch.ones_like(response)}
        batch.append(row | {"privileged_context": f"It is {i + 1}." if i % 4 else None})
    for step in range(2):
        counted = Counted(transfer_queue)
        keys, where = [f"row_{step}_{i}" for i in range(rows)], {"partition_id": "train"}
        tags = [{"seq_len": 1} for _ in keys]
        fields = list_of_dict_to_tensordict(batch)
        transfer_queue.kv_batch_put(keys=keys, fields=fields, tags=tags, **where)
        hint.transfer_queue = scoring.transfer_queue = counted  # type: ignore[attr-defined]
        seconds["model"], start = 0.0, time.perf_counter()
        hint.add_teacher_logprobs(trainer, KVBatchMeta(keys=keys, tags=tags, **where), {})
        seconds["all"] = time.perf_counter() - start
        data = transfer_queue.kv_batch_get(keys=keys, **where)
        entries = [data[name].unbind() for name in sorted(data.keys()) if "topk" in name]
        assert len(entries) == 2 and any(len(row) for row in entries[0])
    found = {
        "rows": rows,
        "tokens": tokens,
        "k": k,
        "driver's MiB": counted.bytes / 2**20,
        "its seconds in TransferQueue": counted.seconds,
        "its other seconds": seconds["all"] - seconds["model"] - counted.seconds,
        "seconds of the worker's call": seconds["model"],
        "its largest memory, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }
    print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 5:
        measure(Path(sys.argv[1]), *map(int, sys.argv[2:]))
    else:
        sys.exit(run_module("benchmarks.verl_driver", *(sys.argv[1:] or map(str, SIZES))).returncode)
