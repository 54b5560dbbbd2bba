"""Every trainer of the installed TRL, and every loss it lets one choose: where it is compared, or why not.

The options are read from TRL's source: one that comes, goes or changes its name fails here.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from parity_tests.support.paths import TESTS
from parity_tests.support.trl_live import compared_with

TRL = Path(str(find_spec("trl").origin)).parent
OPTIONS = (
    "loss_type",
    "distillation_mode",
    "f_divergence_type",
    "importance_sampling_level",
    "multi_objective_aggregation",
    "scale_rewards",
    "vllm_importance_sampling_mode",
)

POLICY = "policy::test_policy_losses_equal_trl"
CPO, TPO = "preference::test_cpo_equals_trl", "preference::test_tpo_equals_trl"
ALPHA = "preference::test_alpha_divergence_equals_trl_in_float32"
ADVANTAGES, GDPO = "advantages::test_advantages_equal_trl", "advantages::test_gdpo_equals_trl"
WEIGHTS = "advantages::test_rollout_weights_equal_trl"
SDPO = "divergences::test_sdpo_equals_its_trainer"
TERM = "policy::test_the_policy_term_of_sdpo_equals_trls"
SERVER = "divergences::test_forward_kl_topk_equals_trls_server_distillation"

SAME_AS_SDPO = "not compared: calls SDPO's loss_utils, a file equal to this trainer's"
NO_KERNEL = "not compared: no kernel here; "
ONLINE = "not compared: computed inside training_step, after generation; the formula is DPOTrainer's"

DPO_TYPES = (
    *("aot", "aot_unpaired", "apo_down", "apo_zero", "bco_pair", "discopop", "exo_pair", "hinge", "ipo"),
    *("nca_pair", "robust", "sft", "sigmoid_norm", "sppo_hard"),
)

# Of each trainer: its options and their values, or (an empty name) its only loss.
WHERE: dict[str, dict[str, dict[str, str]]] = {
    "trainer/grpo_trainer.py": {
        "loss_type": dict.fromkeys(
            ("bnpo", "cispo", "dapo", "dr_grpo", "grpo", "luspo", "sapo", "vespo"), POLICY
        ),
        "importance_sampling_level": {"sequence": POLICY, "token": POLICY},
        "vllm_importance_sampling_mode": dict.fromkeys(
            ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate"), WEIGHTS
        ),
        "scale_rewards": dict.fromkeys(("batch", "group", "none"), ADVANTAGES),
        "multi_objective_aggregation": {"normalize_then_sum": GDPO, "sum_then_normalize": ADVANTAGES},
    },
    "experimental/gmpo/gmpo_trainer.py": {"": {"": "policy::test_gmpo_equals_trl"}},
    "trainer/rloo_trainer.py": {"": {"": "policy::test_rloo_has_the_gradient_of_trl_on_policy"}},
    "trainer/dpo_trainer.py": {
        "loss_type": {name: f"preference::test_{name}_equals_trl" for name in DPO_TYPES}
        | {"sigmoid": "preference::test_dpo_equals_trl"},
        "f_divergence_type": dict.fromkeys(
            ("forward_kl", "js_divergence", "reverse_kl"), "preference::test_dpo_equals_trl"
        )
        | {"alpha_divergence": ALPHA},
    },
    "trainer/kto_trainer.py": {
        "loss_type": {
            "kto": "preference::test_kto_equals_trl",
            "apo_zero_unpaired": "preference::test_apo_zero_unpaired_equals_trl",
        }
    },
    "experimental/cpo/cpo_trainer.py": {
        "loss_type": dict.fromkeys(("hinge", "ipo", "sigmoid"), CPO)
        | {
            "simpo": "preference::test_simpo_equals_trl",
            "kto_pair": "not compared: named in a warning, not a loss of CPOTrainer.cpo_loss",
        },
        "": {
            "cpo_alpha": "preference::test_cpo_simpo_equals_trl",
            "alpha": "preference::test_alpha_po_equals_trl",
        },
    },
    "experimental/orpo/orpo_trainer.py": {"": {"": "preference::test_orpo_equals_trl"}},
    "experimental/tpo/tpo_trainer.py": {
        "loss_type": dict.fromkeys(("hinge", "ipo", "sigmoid"), TPO)
        | {"tpo-l": "preference::test_tpo_l_equals_trl"}
    },
    "experimental/gkd/gkd_trainer.py": {"": {"": "divergences::test_jsd_equals_trl"}},
    "experimental/gold/gold_trainer.py": {
        "": {
            "": "divergences::test_jsd_equals_trl",
            "uld": NO_KERNEL + "sorted probabilities of two vocabularies",
        }
    },
    "experimental/iw_opd/iw_opd_trainer.py": {
        "": {
            "policy loss": "distilled::test_iw_opd_equals_trl",
            "beta": "divergences::test_jsd_equals_trl",
            "top_k": "divergences::test_top_k_equals_iw_opd",
            "top_k with 0 < beta < 1": NO_KERNEL + "the union of two supports",
        }
    },
    "trainer/distillation_trainer.py": {"": {"": "divergences::test_jsd_equals_the_distillation_trainers"}},
    "experimental/server_distillation/server_distillation_trainer.py": {
        "": {
            "beta 0": SERVER,
            "beta 1": "divergences::test_reverse_kl_topk_of_one_token_equals_trls_server_distillation",
            "0 < beta < 1": NO_KERNEL + "the union of two supports",
        }
    },
    "experimental/async_distillation/async_distillation_trainer.py": {
        "": {"": "not compared: ServerDistillationTrainer's sparse losses again, from packed rows"}
    },
    "experimental/async_grpo/async_grpo_trainer.py": {
        "": {"": "not compared: GRPOTrainer's clip again, from packed rows, over a global count of tokens"}
    },
    "experimental/sdpo/sdpo_trainer.py": {
        "distillation_mode": dict.fromkeys(("full_logits", "sampled_token", "topk_logits"), SDPO),
        "loss_type": dict.fromkeys(("bnpo", "dapo", "dr_grpo", "grpo"), TERM),
        "importance_sampling_level": {"sequence": TERM},
        "scale_rewards": dict.fromkeys(("batch", "none"), "not compared: GRPOTrainer's advantages again"),
    },
    "experimental/sdft/sdft_trainer.py": {
        "distillation_mode": dict.fromkeys(("full_logits", "sampled_token", "topk_logits"), SAME_AS_SDPO)
    },
    "experimental/online_dpo/online_dpo_trainer.py": {"loss_type": {"ipo": ONLINE, "sigmoid": ONLINE}},
    "experimental/a2po/a2po_trainer.py": {
        "": {"": NO_KERNEL + "a regression of whole completions on values of their prompts"}
    },
    "experimental/bema_for_ref_model/dpo_trainer.py": {"": {"": "not compared: another reference, no loss"}},
    "trainer/base_trainer.py": {"": {"": "not compared: no loss"}},
    "trainer/reward_trainer.py": {"": {"": NO_KERNEL + "it trains a reward model"}},
    "trainer/sft_trainer.py": {
        "loss_type": {
            "nll": "preference::test_sft_equals_trl",
            "dft": NO_KERNEL + "supervised fine-tuning weighted by probability",
        }
    },
}


def test_no_trainer_is_forgotten() -> None:
    found = {path.relative_to(TRL).as_posix() for path in TRL.glob("**/*_trainer.py")}
    assert found == set(WHERE)


@pytest.mark.parametrize("path", WHERE)
def test_no_option_of_a_trainer_is_forgotten(path: str) -> None:
    source = (TRL / path).read_text()
    found = {option: compared_with(source, option) for option in OPTIONS}
    listed = {option: set(values) for option, values in WHERE[path].items() if option}
    assert {option: values for option, values in found.items() if values} == listed


def test_each_comparison_that_is_named_exists() -> None:
    places = {place for options in WHERE.values() for values in options.values() for place in values.values()}
    for place in places:
        if place.startswith("not compared: "):
            continue
        name, _, test = place.partition("::")
        files = [TESTS / folder / "trl" / f"test_{name}.py" for folder in ("live", "adapters")]
        text = "".join(path.read_text() for path in files if path.exists())
        assert re.search(rf"^def {test}\(", text, re.M), f"no {place}"


def test_sdft_uses_a_file_equal_to_sdpos() -> None:
    sdpo, sdft = (TRL / "experimental" / name / "loss_utils.py" for name in ("sdpo", "sdft"))
    assert sdpo.read_text() == sdft.read_text()
