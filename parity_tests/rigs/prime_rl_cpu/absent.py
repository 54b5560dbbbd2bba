"""Packages that PRIME-RL's trainer imports and that no step here calls: empty ones stand in for them."""

PACKAGES = (
    "datasets",  # supervised training
    "deep_gemm",  # fp8
    "dion",  # another optimiser
    "fla",  # linear attention
    "grpc",  # moving weights to the samplers
    "modelexpress",  # moving weights
    "openai",  # asking the samplers
    "orjson",  # recording episodes
    "pandas",  # tables of benchmarks
    "prime_cli",  # its makers' platform
    "prometheus_client",  # a metrics server
    "psutil",  # a log of memory
    "pyarrow",  # exporting tokens
    "pynvml",  # which cores are near which GPU
    "renderers",  # chat templates
    "requests",  # a heartbeat
    "ring_flash_attn",  # context parallelism
    "setproctitle",
    "tenacity",  # asking the samplers again
    "tilelang",  # GPU kernels
    "torchao",  # fp8
    "torchdata",  # supervised training
    "torchtitan",  # expert parallelism; its clip_grad_norm_ becomes torch's
    "triton",  # GPU kernels
    "verifiers",  # environments
    "vllm",  # sampling
    "wandb",  # metrics, which go into a file here
    "wandb_gql",
    "wandb_workspaces",
    "zmq",  # batches from the orchestrator
)
