"""Frameworks without an adapter: their names of parameters. Their dialects are in the rows of the losses."""

from composer_plugins.frameworks.clips import BOTH, DUAL, HIGH
from composer_plugins.frameworks.contract import Framework, Sets

OTHERS = (
    Framework(name="openrlhf", title="OpenRLHF", names={"eps_clip": BOTH}),
    Framework(
        name="areal",
        title="AReaL",
        names={
            "eps_clip": BOTH,
            "eps_clip_higher": HIGH,
            "c_clip": DUAL,
            "sapo_tau_pos": (Sets(("tau_pos",), ("sapo",)),),
            "sapo_tau_neg": (Sets(("tau_neg",), ("sapo",)),),
        },
        marks=("gconfig", "allocation_mode"),
    ),
    Framework(name="oat", title="oat"),
    Framework(name="open-instruct", title="open-instruct"),
    Framework(name="liger", title="Liger Kernel"),
    Framework(name="r1-zero", title="understand-r1-zero (Dr. GRPO)"),
    Framework(name="stable-rl", title="Stable-RL (DPPO)"),
    Framework(name="gmpo", title="GMPO"),
    Framework(name="vespo", title="VESPO"),
    Framework(name="spo", title="Simple Policy Optimization"),
    Framework(name="unirl", title="UniRL (DRPO)"),
    Framework(name="archer", title="Archer2.0 (ASPO)"),
    Framework(name="luffy", title="LUFFY"),
    Framework(name="bapo", title="BAPO"),
    Framework(name="ce-gppo", title="CE-GPPO"),
    Framework(name="dcpo", title="DCPO"),
    Framework(name="lightrft", title="LightRFT"),
    Framework(name="m2po", title="M2PO"),
    Framework(name="taid", title="TAID"),
    Framework(name="distillm", title="DistiLLM"),
    Framework(name="opsd", title="OPSD", names={"token_clip": (Sets(("entry_clip",)),)}),
    Framework(
        name="sdpo", title="SDPO", names={"is_clip": (Sets(("ratio_cap",), ("sampled_token", "sdpo")),)}
    ),
    Framework(name="eric-mitchell", title="direct-preference-optimization (DPO)"),
    Framework(name="official", title="SimPO"),
    Framework(name="simper", title="SimPER"),
    Framework(name="cal-dpo", title="Cal-DPO"),
    Framework(name="abkd", title="ABKD"),
    Framework(name="todi", title="ToDi"),
    Framework(name="passk-training", title="Pass@k Training"),
    Framework(name="bnpo", title="BNPO"),
    # Those below are known by their configs alone.
    Framework(name="axolotl", title="Axolotl", marks=("base_model", "rl", "trl")),
    Framework(name="easyr1", title="EasyR1", marks=("worker",)),
    Framework(name="llama-factory", title="LLaMA-Factory", marks=("finetuning_type", "stage")),
    Framework(name="ms-swift", title="ms-swift", marks=("rlhf_type",)),
    Framework(name="roll", title="ROLL", marks=("actor_train", "actor_infer")),
    Framework(name="trinity-rft", title="Trinity-RFT", marks=("explorer", "synchronizer")),
    Framework(name="fireworks", title="Fireworks' cookbook"),
)
