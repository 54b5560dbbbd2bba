# python -c "from composer_plugins.flat_kernels import stub; print(stub(), end='')" > kernels/__init__.pyi
# ruff: noqa: I001

from composer_plugins.kernels.advantages import dr_grpo as dr_grpo_advantage
from composer_plugins.kernels.advantages import gae
from composer_plugins.kernels.advantages import gdpo
from composer_plugins.kernels.advantages import gpg as gpg_advantage
from composer_plugins.kernels.advantages import grpo as grpo_advantage
from composer_plugins.kernels.advantages import maxrl
from composer_plugins.kernels.advantages import opo
from composer_plugins.kernels.advantages import pass_at_k
from composer_plugins.kernels.advantages import reinforce_pp
from composer_plugins.kernels.advantages import reinforce_pp_baseline
from composer_plugins.kernels.advantages import remax
from composer_plugins.kernels.advantages import rloo as rloo_advantage
from composer_plugins.kernels.aggregation import aggregate
from composer_plugins.kernels.aggregation import prompt_mean
from composer_plugins.kernels.aggregation import seq_mean_token_mean
from composer_plugins.kernels.aggregation import seq_mean_token_sum
from composer_plugins.kernels.aggregation import seq_mean_token_sum_norm
from composer_plugins.kernels.aggregation import token_mean
from composer_plugins.kernels.aggregation import token_sum
from composer_plugins.kernels.corrections import icepop
from composer_plugins.kernels.corrections import mis
from composer_plugins.kernels.corrections import tis
from composer_plugins.kernels.divergences import adaptive_kl
from composer_plugins.kernels.divergences import entropy_gated_kl
from composer_plugins.kernels.divergences import forward_kl
from composer_plugins.kernels.divergences import forward_kl_topk
from composer_plugins.kernels.divergences import jsd
from composer_plugins.kernels.divergences import reverse_kl
from composer_plugins.kernels.divergences import reverse_kl_topk
from composer_plugins.kernels.divergences import sampled_token
from composer_plugins.kernels.divergences import sdpo
from composer_plugins.kernels.divergences import skewed_forward_kl
from composer_plugins.kernels.divergences import skewed_reverse_kl
from composer_plugins.kernels.divergences import symmetric_kl
from composer_plugins.kernels.divergences import tv
from composer_plugins.kernels.kl import absolute
from composer_plugins.kernels.kl import k1
from composer_plugins.kernels.kl import k1_plus
from composer_plugins.kernels.kl import k2
from composer_plugins.kernels.kl import k3
from composer_plugins.kernels.kl import k3_corrected
from composer_plugins.kernels.kl import k3_plus
from composer_plugins.kernels.kl import squared
from composer_plugins.kernels.policy import cispo
from composer_plugins.kernels.policy import clip_cov
from composer_plugins.kernels.policy import dapo
from composer_plugins.kernels.policy import dppo_kl
from composer_plugins.kernels.policy import dppo_topk_kl
from composer_plugins.kernels.policy import dppo_topk_tv
from composer_plugins.kernels.policy import dppo_tv
from composer_plugins.kernels.policy import dr_grpo
from composer_plugins.kernels.policy import dro
from composer_plugins.kernels.policy import gmpo
from composer_plugins.kernels.policy import gpg
from composer_plugins.kernels.policy import grpo
from composer_plugins.kernels.policy import gspo
from composer_plugins.kernels.policy import gspo_token
from composer_plugins.kernels.policy import importance_sampling
from composer_plugins.kernels.policy import ipo
from composer_plugins.kernels.policy import ipo_centered
from composer_plugins.kernels.policy import iw_opd
from composer_plugins.kernels.policy import kimi
from composer_plugins.kernels.policy import kl_cov
from composer_plugins.kernels.policy import luspo
from composer_plugins.kernels.policy import masked_is
from composer_plugins.kernels.policy import minirl
from composer_plugins.kernels.policy import opd
from composer_plugins.kernels.policy import opsm
from composer_plugins.kernels.policy import ppo
from composer_plugins.kernels.policy import ref_kl
from composer_plugins.kernels.policy import reinforce
from composer_plugins.kernels.policy import rloo
from composer_plugins.kernels.policy import sapo
from composer_plugins.kernels.policy import vespo
from composer_plugins.kernels.preference import alpha_po
from composer_plugins.kernels.preference import aot
from composer_plugins.kernels.preference import aot_unpaired
from composer_plugins.kernels.preference import apo_down
from composer_plugins.kernels.preference import apo_zero
from composer_plugins.kernels.preference import apo_zero_unpaired
from composer_plugins.kernels.preference import bco
from composer_plugins.kernels.preference import bco_pair
from composer_plugins.kernels.preference import cdpo
from composer_plugins.kernels.preference import cpo
from composer_plugins.kernels.preference import cpo_simpo
from composer_plugins.kernels.preference import discopop
from composer_plugins.kernels.preference import dpo
from composer_plugins.kernels.preference import exo_pair
from composer_plugins.kernels.preference import hinge
from composer_plugins.kernels.preference import ipo as ipo_preference
from composer_plugins.kernels.preference import kto
from composer_plugins.kernels.preference import nca_pair
from composer_plugins.kernels.preference import orpo
from composer_plugins.kernels.preference import robust
from composer_plugins.kernels.preference import sequence_logprobs
from composer_plugins.kernels.preference import sft
from composer_plugins.kernels.preference import sigmoid_norm
from composer_plugins.kernels.preference import simpo
from composer_plugins.kernels.preference import sppo_hard
from composer_plugins.kernels.preference import tpo
from composer_plugins.kernels.preference import tpo_l
from composer_plugins.kernels.taid import taid as taid_divergence
from composer_plugins.kernels.types import Metric
from composer_plugins.kernels.types import PairLoss
from composer_plugins.kernels.types import TokenLoss

__all__ = [
    "Metric",
    "PairLoss",
    "TokenLoss",
    "absolute",
    "adaptive_kl",
    "aggregate",
    "alpha_po",
    "aot",
    "aot_unpaired",
    "apo_down",
    "apo_zero",
    "apo_zero_unpaired",
    "bco",
    "bco_pair",
    "cdpo",
    "cispo",
    "clip_cov",
    "cpo",
    "cpo_simpo",
    "dapo",
    "discopop",
    "dpo",
    "dppo_kl",
    "dppo_topk_kl",
    "dppo_topk_tv",
    "dppo_tv",
    "dr_grpo",
    "dr_grpo_advantage",
    "dro",
    "entropy_gated_kl",
    "exo_pair",
    "forward_kl",
    "forward_kl_topk",
    "gae",
    "gdpo",
    "gmpo",
    "gpg",
    "gpg_advantage",
    "grpo",
    "grpo_advantage",
    "gspo",
    "gspo_token",
    "hinge",
    "icepop",
    "importance_sampling",
    "ipo",
    "ipo_centered",
    "ipo_preference",
    "iw_opd",
    "jsd",
    "k1",
    "k1_plus",
    "k2",
    "k3",
    "k3_corrected",
    "k3_plus",
    "kimi",
    "kl_cov",
    "kto",
    "luspo",
    "masked_is",
    "maxrl",
    "minirl",
    "mis",
    "nca_pair",
    "opd",
    "opo",
    "opsm",
    "orpo",
    "pass_at_k",
    "ppo",
    "prompt_mean",
    "ref_kl",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "reverse_kl",
    "reverse_kl_topk",
    "rloo",
    "rloo_advantage",
    "robust",
    "sampled_token",
    "sapo",
    "sdpo",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "sequence_logprobs",
    "sft",
    "sigmoid_norm",
    "simpo",
    "skewed_forward_kl",
    "skewed_reverse_kl",
    "sppo_hard",
    "squared",
    "symmetric_kl",
    "taid_divergence",
    "tis",
    "token_mean",
    "token_sum",
    "tpo",
    "tpo_l",
    "tv",
    "vespo",
]
