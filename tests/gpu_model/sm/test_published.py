"""The model of an SM beside published figures of a kernel with wgmma."""

import pytest

from benchmarks.lib import cuda_sass, flash_3_loop
from gpu_model import build
from gpu_model.ptx.compiler import nvcc
from gpu_model.sm.architectures import H100
from gpu_model.sm.attention import Batch
from gpu_model.sm.kernel import Kernel, Model

if build.compiler() is None or nvcc() is None:
    pytest.skip("needs a C++ compiler and nvcc", allow_module_level=True)


@pytest.fixture(scope="module")
def attention(tmp_path_factory) -> Kernel:
    try:
        cuda_sass.find_tools()
    except SystemExit:
        pytest.skip("needs cuobjdump")
    return flash_3_loop.compiled(tmp_path_factory.mktemp("loop"))


@pytest.mark.parametrize(("length", "published"), [(512, 333e12), (8192, 496e12)])
def test_attention_in_the_way_of_flash_attention_3(attention, length, published):
    """Forward, head dimension 64, bf16: FLOP/s published in arXiv:2407.08608. The model is 13 and
    19 % above."""
    batch, model = Batch((length,) * (16384 // length), 32), Model(H100)
    (stage,) = flash_3_loop.forward(attention, batch)
    assert model.occupancy(stage.launches[0]).blocks == 1
    seconds = model.stage(stage).seconds
    assert 1.0 < 2 * batch.products / seconds / published < 1.25
