"""Replayed rows among the rows of verl's update: every mini-batch of every rank has as many of them.

verl hands each rank a piece of the batch, which the rank cuts into mini-batches. The policy's rows keep
their order and their mini-batches, and each mini-batch has its share of replayed rows among them: so the
policy's term is what it is without them. Rows to fill up the shares say nothing and count nowhere.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import transfer_queue
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from composer_plugins.adapters.verl_parts.fields import PER_TOKEN, REPLAY, nested, rows_of
from composer_plugins.adapters.verl_plugin.replay import Replayed
from composer_plugins.adapters.verl_plugin.scoring import Spoken, data_parallel_size, row
from composer_plugins.errors import ConfigError

Row = TypeVar("Row")
OF_A_RESPONSE = (  # verl's numbers per response token, of which a replayed row has none
    "advantages",
    "entropy",
    "old_log_probs",
    "ref_log_prob",
    "returns",
    "rm_scores",
    "rollout_is_weights",
    "rollout_log_probs",
    "token_level_rewards",
    "values",
)


class Cut(NamedTuple):
    """How verl cuts a batch: ranks, and rows of a mini-batch over all of them; rows of a micro-batch."""

    ranks: int
    mini: int
    micro: int


def cut_of(trainer: Any) -> Cut:
    """As the trainer's config has it; with dynamic batches any number of rows is a micro-batch."""
    config = trainer.config.actor_rollout_ref
    mini = config.actor.ppo_mini_batch_size * config.rollout.n
    micro = 1 if config.actor.use_dynamic_bsz else config.actor.ppo_micro_batch_size_per_gpu
    return Cut(data_parallel_size(trainer), mini, micro)


def share(count: int, rows: int, cut: Cut) -> int:
    """Replayed rows per mini-batch and rank, for `count` of them among `rows`: whole micro-batches."""
    cells = cut.ranks * (rows // cut.mini)
    return -(-count // (cells * cut.micro)) * cut.micro


def dealt(rows: Sequence[Row], extra: Sequence[Row], cut: Cut) -> list[Row]:
    """`rows` with an equal part of `extra` spread over each rank's part of each mini-batch.

    Spread, so that micro-batches of one size have rows of the policy: verl logs the mean over micro-batches.
    """
    width = cut.mini // cut.ranks
    cells = [rows[i : i + width] for i in range(0, len(rows), width)]
    # Dealt one by one, so that what only fills up is spread over all.
    return [one for i, cell in enumerate(cells) for one in _spread(cell, extra[i :: len(cells)])]


def put(trainer: Any, batch: KVBatchMeta, found: Sequence[Replayed], cut: Cut) -> tuple[list[str], int]:
    """Store the rows beside the batch's; their keys, and how many rows a mini-batch then has.

    A step of `minis` mini-batches makes `minis` updates, each with the mean over about 1 / minis of the
    pairs: hence the factor on the coefficients.
    """
    where = {"partition_id": batch.partition_id}
    template = transfer_queue.kv_batch_get(keys=[batch.keys[0]], **where)[0]
    if "routed_experts" in template:
        raise ConfigError("replay_weight > 0 with rollout routing replay: a replayed row has no routes")
    minis = len(batch) // cut.mini
    each = share(len(found), len(batch), cut)
    end = torch.tensor([trainer.tokenizer.eos_token_id])
    nothing = Replayed(Spoken(end, end), torch.zeros(1))
    rows = [*found, *[nothing] * (each * cut.ranks * minis - len(found))]
    made = [_row(template, one, minis) for one in rows]
    keys = [f"composer-replay-{i}_0_0" for i in range(len(rows))]
    tags = [{**batch.tags[0], "is_padding": True, "seq_len": len(one["input_ids"])} for one in made]
    transfer_queue.kv_batch_put(keys=keys, fields=list_of_dict_to_tensordict(made), tags=tags, **where)
    data = transfer_queue.kv_batch_get(keys=batch.keys, select_fields=["responses"], **where)
    zeros = nested([torch.zeros(len(response)) for response in rows_of(data["responses"])])
    fields = TensorDict({REPLAY: zeros}, batch_size=len(batch))
    transfer_queue.kv_batch_put(keys=batch.keys, fields=fields, **where)
    return keys, cut.mini + each * cut.ranks


def _spread(rows: Sequence[Row], extra: Sequence[Row]) -> list[Row]:
    places = [((i + 0.5) / len(part), one) for part in (rows, extra) for i, one in enumerate(part)]
    return [one for _, one in sorted(places, key=lambda place: place[0])]


def _row(template: TensorDict, one: Replayed, minis: int) -> dict[str, Any]:
    """A row like verl's own padding: nothing of it counts, but for the coefficients."""
    made: dict[str, Any] = dict(template.items())
    length = len(one.spoken.response)
    for name in (*OF_A_RESPONSE, *PER_TOKEN):
        if name in made:
            made[name] = made[name].new_zeros((length, *made[name].shape[1:]))
    zeros = torch.zeros(length, dtype=torch.int64)
    made |= row(one.spoken) | {"response_mask": zeros, "loss_mask": zeros}
    return made | {REPLAY: (one.coefficients * minis).float()}
