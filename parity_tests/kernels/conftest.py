"""A fixture of the kernels' own tests."""

import jaxtyping
import pytest


@pytest.fixture
def without_annotation_checks() -> None:
    """Kernels as users call them: jaxtyping would refuse a wrong shape or choice before the kernel does."""
    jaxtyping.config.update("jaxtyping_disable", True)
