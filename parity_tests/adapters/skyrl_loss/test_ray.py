"""Our losses reach SkyRL's Ray workers: SkyRL pickles them into its actor, and a worker takes them out."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from composer_plugins.adapters.skyrl_loss.register import register
from composer_plugins.conformance.skyrl_claims import upstream
from composer_plugins.errors import DataError
from parity_tests.rigs.paths import ROOT

# As conformance.skyrl_claims.upstream, for processes that import SkyRL by themselves.
SITE = """
import sys, typing
if sys.version_info < (3, 12):
    import typing_extensions
    typing.TypedDict = typing_extensions.TypedDict
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[None]:
    (tmp_path / "sitecustomize.py").write_text(SITE)
    path = ":".join([str(tmp_path), str(ROOT), *filter(None, sys.path)])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RAY_DISABLE_PYTHON_VERSION_CHECK": "1"}
    # Ray writes this into a line of bash as it is, and the path of a Python may have a blank.
    environment = {"env_vars": variables, "py_executable": shlex.quote(sys.executable)}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env=environment, log_to_driver=False)
    yield
    ray.shutdown()
    for registry in (upstream.ppo_utils.PolicyLossRegistry, upstream.ppo_utils.AdvantageEstimatorRegistry):
        registry._ray_actor, registry._synced_to_actor = None, False


def in_a_worker(name: str, mask: list[float]) -> tuple[float, list[str]]:
    """What a worker gets from the registry, and its loss on two tokens with this loss_mask."""
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
    from skyrl.train.config import AlgorithmConfig

    function = PolicyLossRegistry.get(name)
    config = AlgorithmConfig()
    config.policy_loss_type = name
    logprobs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    advantages, weights = torch.tensor([[0.5, 0.5]]), torch.tensor([mask])
    loss, metrics = function(logprobs, logprobs.detach(), advantages, config, weights, logprobs.detach())
    loss.backward()
    return float(loss), sorted(metrics)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_worker_of_ray_gets_our_loss_from_skyrls_actor(cluster: None) -> None:
    register()
    upstream.ppo_utils.sync_registries()
    loss, metrics = ray.get(ray.remote(in_a_worker).remote("composer/cispo", [1.0, 2.0]))
    assert loss == pytest.approx(2.5)  # 0.5 (1 + 2 * 2): the sum, with weights of 1 and 2
    with pytest.raises(DataError, match=r"loss_mask: it holds -0\.5, and a weight is a finite number"):
        ray.get(ray.remote(in_a_worker).remote("composer/ppo", [1.0, -0.5]))
    assert metrics[0] == "clip_ratio" and "composer/policy/ratio" in metrics
    assert "composer/rloo" in upstream.ppo_utils.AdvantageEstimatorRegistry.list_available()
