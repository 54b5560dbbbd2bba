"""The command line of main_ppo for two cores: float32, nothing compiled, one worker of each kind."""

from pathlib import Path

ORDER = Path(__file__).with_name("order.py")
# The value of policy_loss._target_ with which the table `composer` reaches the workers.
COMPOSER_CONFIG = "composer_plugins.adapters.verl_plugin.config.ComposerPolicyLossConfig"
PROMPTS, SAMPLES = 4, 4  # of a batch: two mini-batches of 8 rows, each in two micro-batches, and all again


def quoted(path: Path) -> str:
    """A path as a value of Hydra's command line, where a comma, a space or a bracket has another meaning."""
    return "'" + str(path).replace("'", r"\'") + "'"


def overrides(folder: Path, steps: int) -> list[str]:
    """Hydra's overrides for a run on the files that `tiny.make` wrote."""
    float32 = ["fsdp_config.model_dtype=fp32", "fsdp_config.use_torch_compile=False"]
    tables = {
        "data": [
            f"train_files={quoted(folder / 'train.parquet')}",
            f"val_files={quoted(folder / 'train.parquet')}",
            f"train_batch_size={PROMPTS}",
            "max_prompt_length=48",
            "max_response_length=8",
            "dataloader_num_workers=0",
            "filter_overlong_prompts=False",
            "return_raw_chat=True",
            "shuffle=False",
        ],
        "actor_rollout_ref.model": [
            f"path={quoted(folder / 'model')}",
            "use_remove_padding=False",
            "enable_gradient_checkpointing=False",
        ],
        "actor_rollout_ref.actor": [
            "strategy=fsdp2",
            f"ppo_mini_batch_size={PROMPTS // 2}",  # so that all but the first step are off the policy
            "ppo_micro_batch_size_per_gpu=4",
            "ppo_epochs=2",
            "use_torch_compile=False",
            "optim.lr=1e-2",
            *float32,
        ],
        "actor_rollout_ref.ref": ["log_prob_micro_batch_size_per_gpu=8", *float32],
        "actor_rollout_ref.rollout": [
            "name=transformers_cpu",
            f"n={SAMPLES}",
            "tensor_model_parallel_size=1",
            "prompt_length=48",
            "response_length=8",
            "calculate_log_probs=True",
            "log_prob_micro_batch_size_per_gpu=8",
            "free_cache_engine=False",
            "agent.num_workers=1",
            "n_gpus_per_node=1",
        ],
        "trainer": [
            "device=cpu",
            "n_gpus_per_node=1",
            "nnodes=1",
            "logger=[console,file]",
            "val_before_train=False",
            f"total_training_steps={steps}",
            "total_epochs=1",
            "save_freq=-1",
            "test_freq=-1",
            "resume_mode=disable",
            f"v1.sampler.custom_sampler.path={quoted(ORDER)}",
            "v1.sampler.custom_sampler.name=Ordered",
        ],
    }
    return [
        *(f"{table}.{line}" for table, lines in tables.items() for line in lines),
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        *(
            f"+actor_rollout_ref.{whose}.fsdp_config.mixed_precision.{of}_dtype=fp32"
            for whose in ("actor", "ref")
            for of in ("param", "reduce", "buffer")
        ),
        f"reward.custom_reward_function.path={quoted(folder / 'reward.py')}",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"hydra.run.dir={quoted(folder / 'hydra')}",
        # Ray only counts CPUs. verl's actors wait for ever if there are too few. The "GPU" is the CPU.
        "ray_kwargs.ray_init.num_cpus=32",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=268435456",
    ]
