"""A TransferQueue of one process, and a trainer whose workers answer from a table."""

from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from composer_plugins.adapters.verl_plugin.options import channels_of_node
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    TEACHER,
    TEACHER_PROMPT,
    TOP_IDS,
    TOP_K,
    TOP_LOGPROBS,
    nested,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.prompts import Prompts

VOCABULARY = 300


class Queue:
    """transfer_queue's functions that the adapter calls, on a dictionary."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}

    def kv_batch_put(
        self, *, keys: list[str], partition_id: str, fields: TensorDict, tags: Any = None
    ) -> KVBatchMeta:
        """Each row's fields over what it has."""
        rows_of = {name: x.unbind() if isinstance(x, Tensor) else x for name, x in fields.items()}
        columns = {name: [getattr(row, "data", row) for row in rows] for name, rows in rows_of.items()}
        for i, key in enumerate(keys):
            row = {name: values[i] for name, values in columns.items()}
            self.rows.setdefault((partition_id, key), {}).update(row)
        return KVBatchMeta(keys=keys, tags=[{} for _ in keys], partition_id=partition_id)

    def batch_of(self, rows: list[dict[str, Any]], **tag: Any) -> KVBatchMeta:
        """The batch of these rows, with the tag at each."""
        keys = [f"row_{i}" for i in range(len(rows))]
        self.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(rows))
        return KVBatchMeta(keys=keys, tags=[dict(tag) for _ in keys], partition_id="train")

    def kv_batch_get(self, *, keys: list[str], partition_id: str, select_fields: Any = None) -> TensorDict:
        """The rows, nested as verl nests them."""
        rows = [self.rows[partition_id, key] for key in keys]
        return list_of_dict_to_tensordict(
            [{n: row[n] for n in select_fields or row if n in row} for row in rows]
        )

    def kv_clear(self, *, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.rows[partition_id, key]


class Model:
    """log pi of a token given the one before it, from a table; the workers' calls, through the queue."""

    def __init__(self, queue: Queue, seed: int) -> None:
        self.queue, self.asked, self.extra_infos = queue, list[int](), list[dict[str, Any]]()
        g = torch.Generator().manual_seed(seed)
        self.table = torch.randn(VOCABULARY, VOCABULARY, generator=g, dtype=torch.float64).log_softmax(-1)
        self._dispatch_info = {"actor": [0, 1]}

    def of(self, prompt: Tensor, response: Tensor) -> Tensor:
        """Of each token of the response."""
        before = torch.cat([prompt[-1:], response[:-1]])
        return self.table[before, response]

    def compute_log_prob(self, meta: KVBatchMeta) -> None:
        """As verl's workers answer: per position of the whole sequence, of the token that follows.

        With TOP_K as ours do: of each token of the response, after the teacher's prompt.
        """
        self.asked.append(len(meta))
        self.extra_infos.append(meta.extra_info)
        where = {"keys": meta.keys, "partition_id": meta.partition_id}
        data = self.queue.kv_batch_get(**where, select_fields=meta.fields)
        if k := meta.extra_info.get(TOP_K):
            pairs = list(zip(data[TEACHER_PROMPT].unbind(), data["responses"].unbind(), strict=True))
            top = [self.table[torch.cat([p[-1:], r[:-1]])].sort(-1, descending=True) for p, r in pairs]
            rests = [t.values[:, k:].logsumexp(-1, keepdim=True) for t in top]
            both = [torch.cat([t.values[:, :k], x], -1) for t, x in zip(top, rests, strict=True)]
            found = {
                TEACHER: nested([self.of(*pair).float() for pair in pairs]),
                TOP_LOGPROBS: nested([x.half() for x in both]),
                TOP_IDS: nested([t.indices[:, :k].int() for t in top]),
            }
        else:
            found = {"log_probs": nested([self.table[x, x.roll(-1)] for x in data["input_ids"].unbind()])}
        fields = TensorDict(found, batch_size=len(meta))
        self.queue.kv_batch_put(keys=meta.keys, partition_id=meta.partition_id, fields=fields)

    compute_ref_log_prob = compute_log_prob


def rollout(trainer: Any, i: int, responses: Tensor, **fields: Any) -> dict[str, Any]:
    """A row of a batch: a response to prompt number `i`, with these fields more."""
    messages = [{"role": "user", "content": f"{i}+0=?"}]
    return {
        "uid": f"uid{i}",
        "raw_prompt": messages,
        "prompts": torch.tensor(Prompts(trainer).ids(messages)),
        "responses": responses,
        "response_mask": torch.ones_like(responses),
        **fields,
    }


def trainer(queue: Queue, tokenizer: Any, node: dict[str, Any]) -> Any:
    """What hint.py, replay.py and batch_layout.py read of a trainer: two ranks, micro-batches of three."""
    sampling = {"temperature": 1.0, "n": 2, "log_prob_use_dynamic_bsz": False}
    models = {
        "rollout": sampling | {"log_prob_micro_batch_size_per_gpu": 3},
        "ref": sampling | {"log_prob_micro_batch_size_per_gpu": 4},
        "actor": {"use_dynamic_bsz": False, "ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 2},
    }
    return SimpleNamespace(
        config=OmegaConf.create({"actor_rollout_ref": models, "data": {}}),
        channels=channels_of_node(node),
        tokenizer=tokenizer,
        positions=512,
        columns=frozenset({"chosen", "rejected", "n_teachers_agreeing"}),
        ref_in_actor=False,
        actor_rollout_wg=Model(queue, seed=1),
        ref_policy_wg=Model(queue, seed=2),
    )
