"""PEP 517 backend: setuptools, plus torch as a build requirement where none can be borrowed."""

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403
from torch_location import find_torch


def _torch_requirement() -> list[str]:
    return [] if find_torch() else ["torch>=2.11"]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()
