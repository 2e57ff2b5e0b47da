"""Build a wheel with the configs of the repository in it; those of the extras are in the package.

pyproject.toml names this class; everything else of a build is there.
"""

import shutil
from pathlib import Path

from setuptools.command.build_py import build_py

CONFIGS = ("*.yaml", "*.yml")


class BuildWithConfigs(build_py):
    """Copy configs/ to vpipe/configs; an editable installation opens them in the repository."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for pattern in CONFIGS:
                for file in Path("configs").glob(pattern):
                    copy = Path(self.build_lib, "vpipe", file)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, copy)
