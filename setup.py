"""Hands the extension modules to setuptools; build_backend/native.py knows how to build them."""

import sys
from pathlib import Path

from setuptools import setup

sys.path.insert(0, str(Path(__file__).parent / "build_backend"))

from native import NativeBuild, extensions

setup(ext_modules=extensions(), cmdclass={"build_ext": NativeBuild})
