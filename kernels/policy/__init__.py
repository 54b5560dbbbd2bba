"""Policy losses, one short function per published loss, per token."""

from composer_plugins.kernels.policy.balanced import *  # noqa: F403
from composer_plugins.kernels.policy.bounds import *  # noqa: F403
from composer_plugins.kernels.policy.centered import *  # noqa: F403
from composer_plugins.kernels.policy.clipped import *  # noqa: F403
from composer_plugins.kernels.policy.covariance import *  # noqa: F403
from composer_plugins.kernels.policy.distilled import *  # noqa: F403
from composer_plugins.kernels.policy.gated import *  # noqa: F403
from composer_plugins.kernels.policy.masked import *  # noqa: F403
from composer_plugins.kernels.policy.quadratic import *  # noqa: F403
from composer_plugins.kernels.policy.regions import *  # noqa: F403
from composer_plugins.kernels.policy.reweighted import *  # noqa: F403
from composer_plugins.kernels.policy.scored import *  # noqa: F403
from composer_plugins.kernels.policy.sequence import *  # noqa: F403
from composer_plugins.kernels.policy.tapered import *  # noqa: F403
