"""One run of a checkout's own trainer: its configuration, what is patched, what it leaves behind."""

import json
import math
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_plugins.conformance.stubs import Anything, stub
from parity_tests.rigs.prime_rl_cpu import device, inputs

# Packages that the trainer imports and that no step here calls: empty ones stand in for them.
ABSENT = (
    *("datasets", "torchdata"),  # supervised training
    *("openai", "tenacity", "vllm", "renderers", "verifiers", "grpc", "modelexpress", "zmq"),  # the samplers
    *("dion", "fla", "tilelang", "triton", "deep_gemm", "torchao"),  # optimisers and kernels of GPUs, fp8
    *("ring_flash_attn", "torchtitan"),  # parallelism; torchtitan's clip_grad_norm_ becomes torch's
    *("wandb", "wandb_gql", "wandb_workspaces", "prometheus_client", "pandas", "orjson"),  # metrics, records
    *("prime_cli", "psutil", "pyarrow", "pynvml", "requests", "setproctitle"),  # the machine and its platform
)


def open_checkout(checkout: Path) -> Any:
    """The module `prime_rl.trainer.rl.train` of this checkout."""
    os.environ.update(TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1", WANDB_MODE="disabled")
    folders = [checkout / "src", checkout / "packages" / "prime-rl-configs" / "src"]
    sys.path[:0] = [str(folder) for folder in folders if folder.is_dir()]
    empty = stub(*ABSENT)
    print("not installed, so empty here:", ", ".join(empty), flush=True)
    train = import_module("prime_rl.trainer.rl.train")
    assert Path(train.__file__ or "").is_relative_to(checkout), f"{train.__file__} is not of {checkout}"
    return train


def configured(train: Any, out: Path, loss: dict[str, Any], steps: int, data: Any) -> Any:
    """Its TrainerConfig: AdamW with clipping, one rank, nothing compiled, offloaded or recomputed."""
    off = ("compile", "ac", "ac_offloading")
    fields = type(train.TrainerConfig().model).model_fields
    model = {
        "name": str(out / "model"),
        "seq_len": data.SEQ_LEN,
        "impl": "hf",
        "attn": "flash_attention_2",
        "optim_cpu_offload": False,
    } | dict.fromkeys(off)
    table = {
        "model": {key: value for key, value in model.items() if key in fields},
        "data": {"fake": {"batch_size": data.MICRO_BATCHES}},
        "loss": loss,
        "optim": {"type": "adamw", "lr": 1e-3},  # a thousand times the default, so that 3 steps are seen
        "max_steps": steps,
        "output_dir": str(out),
    }
    if "file_monitor" in train.TrainerConfig.model_fields:
        table["file_monitor"] = {}  # from the next version on it is there unasked
    config = train.TrainerConfig.model_validate(table)
    config.model.attn = "sdpa"  # which its validation refuses; flash attention needs a GPU
    return config


def run(
    checkout: Path, out: Path, loss: dict[str, Any], *, steps: int, float32: bool, data: Any = inputs
) -> None:
    """Train; leave metrics.jsonl, and the parameters before.pt and after.pt, in `out`.

    `data` is the module with the model and the micro-batches, `inputs` or `recorded`.
    """
    train = open_checkout(checkout)
    out.mkdir(parents=True, exist_ok=True)
    (out / "metrics.jsonl").unlink(missing_ok=True)  # an earlier run's, to which this one would append
    data.write_model(out / "model")
    config = configured(train, out, loss, steps, data)
    logs = bool({"file_monitor", "monitors"} & type(config).model_fields.keys())
    models = patch(train, out, data, float32=float32, logs=logs)
    with device.cpu_as_cuda():
        train.train(config)
        torch.save(parameters(models[0]), out / "after.pt")


def patch(train: Any, out: Path, data: Any, *, float32: bool, logs: bool) -> list[Any]:
    """Data, device, a GPU's peak speed, what torchtitan has. Returns the list that the model will be in."""
    models: list[Any] = []
    setup, compute_stats = train.setup_model, train.Tensors.compute_stats

    def setup_model(*args: Any, **kwargs: Any) -> Any:
        models.append(setup(*args, **kwargs))
        torch.save(parameters(models[0]), out / "before.pt")
        return models[0]

    def logged(tensors: Any) -> Any:
        metrics = compute_stats(tensors)
        with (out / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        return metrics

    train.setup_model = setup_model
    train.FakeDataLoader = data.loader(train.FakeDataLoader)
    if not logs:
        train.Tensors.compute_stats = logged
    import_module("prime_rl.trainer.parallel_dims").device_type = "cpu"
    counter = import_module("prime_rl.trainer.perf").PerfCounter
    count = counter.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        count(self, *args, **kwargs)
        self.gpu_peak_flops = math.inf  # of which what was used is 0

    counter.__init__ = counted
    for module in (train, import_module("prime_rl.trainer.utils")):
        for name in ("clip_grad_norm_", "torch_clip_grad_norm_"):
            found = getattr(module, name, None)
            if isinstance(found, type) and issubclass(found, Anything):  # its package is not installed
                setattr(module, name, clip)
    if float32:
        model = import_module("prime_rl.trainer.model")
        policy = model.MixedPrecisionPolicy
        model.MixedPrecisionPolicy = lambda param_dtype, **rest: policy(param_dtype=torch.float32, **rest)
    return models


def clip(parameters: Any, max_norm: float, **_: Any) -> Any:
    """What torchtitan's function does on one rank."""
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def parameters(model: Any) -> dict[str, Tensor]:
    """The sharded model's parameters, whole: with one rank the shard is all of it."""
    return {name: value.to_local().detach().clone() for name, value in model.named_parameters()}
