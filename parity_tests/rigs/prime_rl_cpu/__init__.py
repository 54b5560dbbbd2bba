"""PRIME-RL's real trainer, from a checkout, on a CPU.

`python -m parity_tests.rigs.prime_rl_cpu --source DIR`.

`prime_rl.trainer.rl.train.train()` runs as it stands: its FSDP2 over gloo (one rank), its fused LM head,
`compute_loss`, AdamW and metrics file. Replaced are, at the edges only:

- packages that a step never calls, when they are not installed (`trainer.py`);
- the device: "cuda" means the CPU, and gloo takes the place of NCCL (`device.py`);
- the data: the fake loader's random numbers become possible ones, packed, masked and padded (`inputs.py`);
- torchtitan's gradient clipping by torch's, and, before v0.8, the metrics file, which it had not yet.
"""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

TRANSFORMERS = "5.6.2"  # which PRIME-RL pins; newer ones build rotary embeddings in another way
NEEDED = ("transformers", "loguru", "msgspec", "pydantic_config", "pydantic_settings", "tomli", "tomli_w")


def missing() -> str:
    """What the trainer needs and this environment has not; empty if nothing."""
    if gone := [name for name in NEEDED if find_spec(name) is None]:
        return f"no {', '.join(gone)}"
    try:
        found = version("transformers")
    except PackageNotFoundError:
        found = "none"
    return "" if found == TRANSFORMERS else f"transformers is {found}, PRIME-RL's is {TRANSFORMERS}"
