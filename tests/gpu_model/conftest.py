"""Runs the tests of kernels on every level of gpu_model: their sources, and what nvcc makes of
them.

BERT_UNPAD_PTX_TESTS says how many run on compiled kernels: `all`, `sample` (the default: one case
of each test) or `none`.
"""

from pathlib import Path

import pytest

from gpu_model.block_model import compiled_for
from gpu_model.build import compiler
from gpu_model.ptx.compiler import nvcc
from tests.support.samples import Cases, leave_out, ptx_cases

# These test a level itself, or no kernel.
OF_ONE_LEVEL = {
    *("test_attention_sm75", "test_attention_sm120", "test_block_model", "test_block_wgmma"),
    *("test_linear", "test_tickets"),
}
# Compute capabilities; nvcc makes the same PTX for 90a as long as no source asks for the
# architecture.
ARCHS = ("80",)
NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    path = Path(metafunc.module.__file__)
    here, name = path.parent == Path(__file__).parent, path.stem
    if here and name not in OF_ONE_LEVEL and not name.startswith("test_ptx"):
        metafunc.parametrize(
            "level", [None, *ARCHS], ids=["source", *(f"sm_{arch}" for arch in ARCHS)],
            indirect=True,
        )  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    compiled = ptx_cases()
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(NEEDS_COMPILER)

    def cases(item: pytest.Item) -> Cases:
        here = item.path.parent == Path(__file__).parent and hasattr(item, "callspec")
        return compiled if here and item.callspec.params.get("level") else "all"

    leave_out(config, items, cases)


@pytest.fixture(autouse=True)
def level(request: pytest.FixtureRequest):
    """The compute capability whose compiled kernels run, or None for sources."""
    arch = getattr(request, "param", None)
    if arch is not None and nvcc() is None:
        pytest.skip("needs nvcc")
    with compiled_for(arch):
        yield arch
