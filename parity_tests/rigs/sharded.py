"""Run under torchrun on two processes: one launch trains every case of an engine.

`torchrun --nproc_per_node 2 -m parity_tests.rigs.sharded ENGINE JOB FOLDER` writes its results there.
"""

import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor

from parity_tests.rigs import on_a_cpu, tiny

ONE = "one process"
# Of the weights of tiny.model, ZeRO-3 cuts those of more than 1,000 elements, and keeps the others whole.
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 1000}
AUTO = ["train_batch_size", "train_micro_batch_size_per_gpu"]
AUTO += ["gradient_accumulation_steps", "gradient_clipping"]
LAYER = {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
ENGINES: dict[str, dict[str, Any]] = {
    ONE: {},
    "ddp": {"ddp_backend": "gloo"},
    "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2, **LAYER}},
    **{
        engine: {
            "ddp_backend": "gloo",
            "deepspeed": {**dict.fromkeys(AUTO, "auto"), "zero_optimization": zero},
        }
        for engine, zero in {"zero2": {"stage": 2}, "zero3": ZERO3}.items()
    },
}

WHOLE = ("ddp", "zero2")  # the engines that do not cut the weights
HINT = {"policy_weight": 0.0, "hint_weight": 1.0}
ALL = {"policy": "grpo", "hint_weight": 0.7, "replay_weight": 0.3}
# Two steps of two micro-batches each: the second step has moved averages and moved weights.
# Adam with this eps is smooth at gradients of 0, where roundings would otherwise decide a step's sign.
MOVED = {"max_steps": 2, "gradient_accumulation_steps": 2, "adam_epsilon": 1.0, "learning_rate": 0.05}
SHARDED: dict[str, dict[str, Any]] = {
    "TRL's own": {},
    "hint, base": {"hint_weight": 1.0, **MOVED},
    "hint, ema": {"hint_weight": 1.0, "hint_teacher": "ema", "hint_ema_rate": 0.3, **MOVED},
    "hint, live": {"hint_weight": 1.0, "hint_teacher": "live", **MOVED},
    "hint, sampled token": {"hint_weight": 1.0, "hint_divergence": "sampled_token"},
    "replay, dpo": {"policy_weight": 0.0, "replay_weight": 1.0, **MOVED},
    "replay, simpo": {"policy_weight": 0.0, "replay_weight": 1.0, "replay_loss": "simpo"},
    "all": {**ALL, **MOVED},
    "all, checkpointing": {**ALL, "gradient_checkpointing": True, "hint_teacher": "ema"},
    "all, lora": {**ALL, "lora": True, **MOVED},
    "all, lora, ema": {**ALL, "lora": True, "hint_teacher": "ema", "hint_ema_rate": 0.3, **MOVED},
    # One layer is frozen as a whole, and a part of the other one.
    "all, lora, some of it frozen": {**ALL, "lora": True, "frozen": (".layers.0.", ".lora_A."), **MOVED},
    "all, lora and a norm": {**ALL, "lora": True, "modules_to_save": ["norm"], **MOVED},
    # The model is a path: ZeRO-3 cuts it as it is loaded. With beta, TRL's reference model is the copy.
    "all, from a path": {**ALL, "path": True},
    "all, from a path, TRL's reference": {**ALL, "path": True, "beta": 0.1},
    # Another rank has the hint and the pairs of this step.
    "all, one rank without": {**ALL, "first_row_only": True},
    "all, one rank without, ema": {**ALL, "first_row_only": True, "hint_teacher": "ema"},
    "all, evaluated": {**ALL, "evaluated": True},
}
POLICIES = ("grpo", "gspo", "dr_grpo", "dapo", "cispo", "luspo", "importance_sampling")
# What is divided by a number of the whole batch, or gathered from it: the same with every engine.
GATHERED: dict[str, dict[str, Any]] = {
    **{name: {"policy": name} for name in POLICIES},
    "hint, taid": {**HINT, "hint_divergence": "taid", "hint_params": {"t": 0.5}},
    # One group on all ranks: a row's demonstration may be another rank's.
    "hint, successful rollout": {
        **HINT,
        "hint_source": "successful_rollout",
        "success_reward_threshold": 0.8,
        "num_generations": 16,
        "include_environment_feedback": True,
        "reprompt_template": "{prompt}{solution}{feedback}",
        "solution_template": "[{successful_previous_attempt}]",
        "feedback_template": "_{feedback_raw}",
    },
}
CASES = SHARDED | GATHERED
SPECIAL = ("lora", "frozen", "modules_to_save", "path", "first_row_only", "evaluated")  # not options of TRL
SAVED: dict[str, dict[str, Any]] = {
    name: {**ALL, **MOVED, "hint_teacher": "ema", "hint_ema_rate": 0.3, "lora": lora}
    for name, lora in {"resumed": False, "resumed, lora": True}.items()
}

PLAIN = ("TRL's own", "hint, base", "hint, ema", "hint, sampled token", "replay, dpo", "replay, simpo", "all")
# The cases of an engine: of those that keep the weights whole, fewer are enough.
CASES_OF = {
    ONE: tuple(CASES),
    "ddp": (*PLAIN, "all, evaluated", *GATHERED),
    "zero2": ("hint, base", "hint, ema", "replay, dpo", "all, lora, ema", "all, evaluated"),
}


class GradientRecorder(tiny.GradientRecorder):
    """The flat gradient of every optimizer step, gathered from the processes."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        if not args.deepspeed:  # it has taken its step when the callbacks are called
            super().on_pre_optimizer_step(args, state, control, model=model)

    def record(self, gradients: Iterable[Any]) -> None:
        super().record(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)


def record_steps_of(trainer: Any, recorder: GradientRecorder) -> None:
    """Let a trainer record the gradient of every optimizer step."""
    trainer.add_callback(recorder)
    if trainer.is_deepspeed_enabled:
        from deepspeed import DeepSpeedEngine
        from deepspeed.utils import safe_get_full_grad

        class Recording(tiny.TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                engine = trainer.model_wrapped

                def step(*args: Any, **options: Any) -> Any:
                    recorder.record(safe_get_full_grad(p) for p in engine.parameters() if p.requires_grad)
                    return DeepSpeedEngine.step(engine, *args, **options)

                engine.step = step

        trainer.add_callback(Recording())


def made(engine: str, ranks: int, folder: Path, case: dict[str, Any]) -> Any:
    """A trainer of a case, on 16 completions per step shared among `ranks`."""
    options = dict(case)
    special = {name: options.pop(name, False) for name in SPECIAL}
    size = 16 // ranks // options.get("gradient_accumulation_steps", 1)
    # Three steps are less than an epoch of 16 rows: TRL's order of a second epoch is another after resuming.
    rows = tiny.rows(4 if special["first_row_only"] else 16)
    if special["first_row_only"]:
        empty = dict.fromkeys(("privileged_context", "chosen", "rejected", "n_teachers_agreeing"))
        rows = [row | (empty if i else {}) for i, row in enumerate(rows)]
    arguments: dict[str, Any] = {}
    if special["lora"]:
        saved = special["modules_to_save"] or None
        arguments["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=saved)
    if special["evaluated"]:
        arguments["eval_dataset"] = Dataset.from_list(tiny.rows()[2:])
        options |= {"per_device_eval_batch_size": 8 // ranks}
    policy: Any = None
    if special["frozen"]:
        policy = get_peft_model(tiny.model(), arguments.pop("peft_config"))
        for name, weight in policy.named_parameters():
            weight.requires_grad_(".lora_" in name and not any(part in name for part in special["frozen"]))
    if special["path"]:
        policy = str(folder / "model")
        options["model_init_kwargs"] = {"dtype": torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tiny.trainer(
            policy_model=policy,
            dataset=rows,
            arguments=arguments,
            per_device_train_batch_size=size,
            **options,
            **ENGINES[engine],
        )


def trained(trainer: Any, *, evaluated: bool = False, checkpoint: str | None = None) -> dict[str, Any]:
    """What training gives: the gradient of each step, and the channels' metrics of an evaluation."""
    recorder = GradientRecorder()
    record_steps_of(trainer, recorder)
    trainer.train(resume_from_checkpoint=checkpoint)
    found: dict[str, Any] = {"gradients": recorder.gradients}
    if evaluated:
        metrics = trainer.evaluate().items()
        found["evaluation"] = {name: value for name, value in metrics if "composer/" in name}
    return found


def results(engine: str, job: str, ranks: int, folder: Path) -> dict[str, Any]:
    """The results of every case; of the job `resume` those of the third step of the saved cases."""
    found = {}
    for name in CASES_OF.get(engine, SHARDED) if job == "cases" else ():
        case = CASES[name]
        found[name] = trained(made(engine, ranks, folder, case), evaluated=case.get("evaluated", False))
    for name, case in ({} if engine in WHOLE else SAVED).items():
        output = folder / f"{engine} {name}"
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "output_dir": str(output)}
        trainer = made(engine, ranks, folder, {**case, **options})
        found[name] = trained(trainer, checkpoint=str(output / "checkpoint-2") if job == "resume" else None)
    return found


def main(engine: str, job: str, folder: Path) -> None:
    """Write the results of a job into a file of its name."""
    torch.set_num_threads(1)
    if engine == "fsdp2":
        on_a_cpu.shard_with_fsdp()
    elif engine != "ddp":
        on_a_cpu.compile_nothing()
    ranks = PartialState(cpu=True).num_processes
    found = results(engine, job, ranks, folder)
    if PartialState().is_main_process:
        torch.save({"ranks": ranks, **found}, folder / f"{engine} {job}.pt")
    PartialState().destroy_process_group()
    time.sleep(1)  # a process that ends while gloo's threads still release tensors may abort


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
