"""What pyproject.toml cannot say of the build: `kernels/__init__.pyi` is made of the catalogue."""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

WRITE = "from composer_plugins.flat_kernels import write_stub; write_stub()"


class BuildWithStub(build_py):
    """Write the names of all kernels for type checkers beside the built modules."""

    def run(self) -> None:
        super().run()
        folder = Path(__file__).parent if self.editable_mode else Path(self.build_lib)
        subprocess.run([sys.executable, "-c", WRITE], cwd=folder, check=True)


setup(cmdclass={"build_py": BuildWithStub})
