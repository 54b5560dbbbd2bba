"""Replayed rows in the batch of verl's update: an equal share in every mini-batch of every rank.

verl gives each rank a part of the batch, which the rank cuts into mini-batches. The policy's rows keep their
order and their mini-batches, and each mini-batch gets its share of replayed rows, so the policy's term is
what it is without them. Rows that fill up the shares have an empty mask and coefficients of 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import transfer_queue
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from composer_plugins.adapters.verl_plugin import upstream
from composer_plugins.adapters.verl_plugin.sync_trainer.fields import (
    PER_TOKEN,
    REPLAY,
    TOP_DTYPES,
    nested,
    rows_of,
)
from composer_plugins.adapters.verl_plugin.sync_trainer.replay import Replayed
from composer_plugins.adapters.verl_plugin.sync_trainer.scoring import PromptResponse, batch_row
from composer_plugins.errors import ConfigError

Row = TypeVar("Row")


class BatchLayout(NamedTuple):
    """How verl cuts a batch: ranks, rows of a mini-batch over all ranks, rows of a micro-batch."""

    ranks: int
    mini: int
    micro: int


def batch_layout(trainer: Any) -> BatchLayout:
    """Return the layout that the trainer's config sets."""
    mini, micro = upstream.mini_and_micro_batch(trainer.config)
    return BatchLayout(upstream.data_parallel_size(trainer.actor_rollout_wg), mini, micro)


def rows_per_share(count: int, rows: int, layout: BatchLayout) -> int:
    """Return the replayed rows per mini-batch and rank, in whole micro-batches, for `count` of them."""
    shares = layout.ranks * (rows // layout.mini)
    return -(-count // (shares * layout.micro)) * layout.micro


def interleave(rows: Sequence[Row], extra: Sequence[Row], layout: BatchLayout) -> list[Row]:
    """Return `rows` with an equal share of `extra` spread over each rank's part of each mini-batch.

    They are spread so that every micro-batch of a fixed size has rows of the policy, because verl logs means
    over micro-batches.
    """
    width = layout.mini // layout.ranks
    parts = [rows[i : i + width] for i in range(0, len(rows), width)]
    # Every len(parts)-th row, so that the empty rows, which are the last, are in all of the shares.
    return [row for i, part in enumerate(parts) for row in _spread(part, extra[i :: len(parts)])]


def add_replayed_rows(
    trainer: Any, batch: KVBatchMeta, found: Sequence[Replayed]
) -> tuple[KVBatchMeta, list[str], int]:
    """Return the batch with the replayed rows in it, their keys, and the rows of a mini-batch then.

    A step of `minis` mini-batches makes `minis` updates, each with about 1 / minis of the replayed rows. The
    coefficients are multiplied by `minis`, so that each update has the mean.
    """
    where = {"partition_id": batch.partition_id}
    template = transfer_queue.kv_batch_get(keys=[batch.keys[0]], **where)[0]
    if upstream.ROUTES in template:
        problem = "a replayed row has no routes, and rollout routing replay needs the routes of every row"
        raise ConfigError("algorithm.composer.replay_weight", problem, "set it to 0")
    layout = batch_layout(trainer)
    minis = len(batch) // layout.mini
    share = rows_per_share(len(found), len(batch), layout)
    end = torch.tensor([trainer.tokenizer.eos_token_id])
    empty = Replayed(PromptResponse(end, end), torch.zeros(1))
    rows = [*found, *[empty] * (share * layout.ranks * minis - len(found))]
    made = [_row(template, one, minis) for one in rows]
    keys = [f"composer-replay-{i}_0_0" for i in range(len(rows))]
    tags = [{**batch.tags[0], "is_padding": True, "seq_len": len(one["input_ids"])} for one in made]
    transfer_queue.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(made), tags=tags, **where)
    data = transfer_queue.kv_batch_get(keys=batch.keys, select_fields=["responses"], **where)
    zeros = nested([torch.zeros(len(response)) for response in rows_of(data["responses"])])
    fields = TensorDict({REPLAY: zeros}, batch_size=len(batch))
    transfer_queue.kv_batch_put(keys=batch.keys, fields=fields, **where)
    own_tags = dict(zip(batch.keys, batch.tags, strict=True))
    order = interleave(batch.keys, keys, layout)
    tags = [own_tags.get(key, {}) for key in order]
    whole = KVBatchMeta(keys=order, tags=tags, extra_info=batch.extra_info, **where)
    return whole, keys, layout.mini + share * layout.ranks


def _spread(rows: Sequence[Row], extra: Sequence[Row]) -> list[Row]:
    places = [((i + 0.5) / len(part), one) for part in (rows, extra) for i, one in enumerate(part)]
    return [one for _, one in sorted(places, key=lambda place: place[0])]


def _row(template: TensorDict, one: Replayed, minis: int) -> dict[str, Any]:
    """Return a row like verl's own padding, in which only the coefficients count."""
    made: dict[str, Any] = dict(template.items())
    length = len(one.sequence.response)
    for name in (*upstream.RESPONSE_FIELDS, *PER_TOKEN):
        if name in made:
            made[name] = made[name].new_zeros((length, *made[name].shape[1:]))
    made |= {name: made[name][:0] for name in TOP_DTYPES if name in made}  # not scored
    zeros = torch.zeros(length, dtype=torch.int64)
    made |= batch_row(one.sequence) | {"response_mask": zeros, "loss_mask": zeros}
    return made | {REPLAY: (one.coefficients * minis).float()}
