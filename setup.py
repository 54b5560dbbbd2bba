"""What pyproject.toml cannot say of the build: a stub that is made of the catalogue, and absolute links."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
WRITE = "from composer_plugins.flat_kernels import write_stub; write_stub()"
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)\s]+)\)")


def long_description() -> str:
    """README.md with the address of the project before each relative link, for a package index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    address = project["urls"]["Repository"]
    (version,) = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "composer_plugins/__init__.py").read_text(), re.M
    )

    def absolute(link: re.Match[str]) -> str:
        picture, text, path = link.groups()
        return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/v{version}/{path})"

    return RELATIVE.sub(absolute, (ROOT / "README.md").read_text())


class BuildWithStub(build_py):
    """Write the names of all kernels for type checkers beside the built modules."""

    def run(self) -> None:
        super().run()
        folder = ROOT if self.editable_mode else Path(self.build_lib)
        subprocess.run([sys.executable, "-c", WRITE], cwd=folder, check=True)


if __name__ == "__main__":
    setup(
        cmdclass={"build_py": BuildWithStub},
        long_description=long_description(),
        long_description_content_type="text/markdown",
    )
