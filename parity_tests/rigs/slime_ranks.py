"""slime's dispatcher with our loss on ranks of context parallelism: each has two chunks of every response.

    python -m parity_tests.rigs.slime_ranks CHECKOUT FOLDER RANK RANKS

writes the gradient of the whole step in the logits, as Megatron adds it up, to FOLDER/RANK.pt. The options
and the batch are in FOLDER/case.pt. As slime's own tests/test_loss_cp_invariance.py, with gloo and without
Megatron.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from composer_plugins.conformance.slime_claims import claims, upstream

NOT_CUT = ("unconcat_tokens", "total_lengths", "response_lengths", "loss_masks", "rollout_mask_sums")


def step(loaded: upstream.Upstream, mpu: Any, case: dict[str, Any], ranks: int) -> list[Tensor]:
    """Loss and gradient of the step on this rank, before ranks are averaged."""
    batch, leaf = dict(case["batch"]), case["logits"].clone().requires_grad_()
    args = claims.arguments(**case["options"])
    cut = loaded.loss.slice_log_prob_with_cp
    sizes = list(zip(batch["total_lengths"], batch["response_lengths"], strict=True))
    for name in batch.keys() - {*NOT_CUT}:
        batch[name] = [cut(x, *size) for x, size in zip(batch[name], sizes, strict=True)]
    logits, rank = leaf, mpu.get_context_parallel_rank()
    if ranks > 1:  # as get_batch cuts tokens
        chunks = []
        for x in leaf[0].split(batch["total_lengths"]):
            size = -(-len(x) // (2 * ranks))
            x = torch.nn.functional.pad(x, (0, 0, 0, 2 * ranks * size - len(x)))
            other = 2 * ranks - rank - 1
            chunks += [x[size * rank : size * (rank + 1)], x[size * other : size * (other + 1)]]
        logits = torch.cat(chunks).unsqueeze(0)
    loss, count = loaded.loss_of(args, batch, logits, 1, case["size"])
    loss = loss / count.clamp(min=1)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return [loss.detach(), gradient]


def main(checkout: str, folder: str, rank: int, ranks: int) -> None:
    """One rank."""
    here = Path(folder)
    dist.init_process_group("gloo", init_method=f"file://{here}/store", rank=rank, world_size=ranks)
    loaded = upstream.load(Path(checkout))
    mpu = sys.modules["megatron.core.mpu"]
    for name, value in (
        ("get_context_parallel_world_size", ranks),
        ("get_context_parallel_rank", rank),
        ("get_context_parallel_group", dist.group.WORLD),
        ("get_data_parallel_world_size", ranks),
    ):
        setattr(mpu, name, upstream.answer(value))
    loaded.loss.get_log_probs_and_entropy.__globals__["dist"] = dist
    case = torch.load(here / "case.pt", weights_only=True)
    # The ranks of tensor parallelism are one, and its group is this rank alone.
    alone = [dist.new_group([one]) for one in range(ranks)][rank]
    mpu.get_tensor_model_parallel_group = upstream.answer(alone)  # type: ignore[attr-defined]
    found = step(loaded, mpu, case, ranks)
    if not case["options"].get("calculate_per_token_loss"):
        for x in found:  # Megatron's average over the ranks of data and context parallelism
            dist.all_reduce(x)
            x /= ranks
    torch.save(found, here / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
