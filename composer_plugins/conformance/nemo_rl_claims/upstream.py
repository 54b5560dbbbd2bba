"""A checkout of NeMo-RL, whose modules of losses and advantages run here.

Nothing of it is copied: its folder goes on `sys.path`. Packages that it imports and that have no part in a
loss are replaced by empty modules where they are not installed.
"""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from composer_plugins.conformance.stubs import stub
from composer_plugins.errors import ConfigError

STUBBED = (
    *("transformers", "ray", "mlflow", "swanlab", "wandb", "matplotlib", "megatron", "datasets", "omegaconf"),
    *("hydra", "vllm", "nvtx", "tensorboard", "rich", "torchdata", "nemo_automodel", "accelerate", "plotly"),
    *(
        "tensordict",
        "zmq",
        "math_verify",
        "PIL",
        "requests",
        "numba",
        "num2words",
        "torchvision",
        "pynvml",
        "tqdm",
        "prometheus_client",
        "fastapi",
        "uvicorn",
    ),
)


class Upstream(NamedTuple):
    """What of a checkout is compared."""

    losses: ModuleType
    utils: ModuleType
    advantages: ModuleType
    wrapper: ModuleType
    data: Any  # its class BatchedDataDict


def load(checkout: Path) -> Upstream:
    """Import the checkout's modules."""
    if not (checkout / "nemo_rl" / "algorithms" / "loss").is_dir():
        problem = f"{checkout} is not a checkout of NeMo-RL with nemo_rl/algorithms/loss"
        raise ConfigError("--source", problem, "git clone https://github.com/NVIDIA-NeMo/RL")
    stub(*STUBBED)
    sys.path.insert(0, str(checkout))
    losses = import_module("nemo_rl.algorithms.loss.loss_functions")
    assert Path(losses.__file__ or "").is_relative_to(checkout), f"{losses.__file__} is not of {checkout}"
    names = ("utils", "advantage_estimator", "loss.wrapper")
    utils, advantages, wrapper = (import_module(f"nemo_rl.algorithms.{name}") for name in names)
    data = import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    return Upstream(losses, utils, advantages, wrapper, data)
