"""Hands the extension modules to setuptools; build_backend/native.py knows how to build them."""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))

from native import ABI3, NativeBuild, extensions


class FreshBuildPy(build_py):
    """build_py into an empty folder: what an earlier build left there would go into the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "bert_unpad", ignore_errors=True)
        super().run()


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": NativeBuild, "build_py": FreshBuildPy},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ABI3 else {},
)
