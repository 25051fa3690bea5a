"""The launches of csrc/attention, as the model of an SM gets them."""

import ctypes
import dataclasses
import itertools
import math

import pytest

from gpu_model import build
from gpu_model.block_model import SHARED_BYTES
from gpu_model.sm import attention, attention_wgmma
from gpu_model.sm.architectures import A100, ARCHITECTURES, H100
from gpu_model.sm.attention import Batch
from gpu_model.sm.kernel import Kernel
from tests.support.sass_text import function

PARAMETERS = ctypes.sizeof(attention._Launch)


@pytest.fixture(scope="module")
def available():
    kernel = Kernel(function(["EXIT"]), 32, 0, PARAMETERS)
    return {name: kernel for d in (32, 64, 128) for name in attention.kernel_names(d)}


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_choices_and_layout_are_those_of_the_sources():
    from tests.support import model_attention

    params = model_attention.Args.buckets.offset  # what comes then is a bias's
    assert params + 24 == PARAMETERS  # and three ints, two floats, aligned
    bias = ctypes.sizeof(model_attention.Args) - params
    assert ctypes.sizeof(attention._BiasLaunch) == PARAMETERS + bias + 8  # and an int, aligned
    for known, shared in itertools.product(ARCHITECTURES.values(), SHARED_BYTES.values()):
        architecture = dataclasses.replace(known, block_shared=shared)
        for heads, head_dim in ((16, 64), (16, 32), (16, 128), (1, 64)):
            for longest in (1, 63, 64, 65, 128, 129, 384, 385, 511, 512, 513, 1024, 1025):
                batch = Batch((longest,) * 24, heads, head_dim)
                sizes = (24, heads, longest, longest, head_dim, architecture.sms)
                tiles, fused, *shape = model_attention.plan(*sizes, architecture.block_shared)
                assert attention.forward_row_tiles(longest, head_dim) == tiles
                assert attention.backward_is_fused(batch, architecture) == fused
                assert attention.fused_shape(batch, longest, architecture) == tuple(shape)


def test_a_launch_per_group(available):
    batch = Batch((300, 20, 130), 2, order=(0, 2, 1), groups=((2, 300), (1, 20)))
    (stage,) = attention.forward(available, batch, 0.1)
    long, short = stage.launches
    assert (long.grid, short.grid) == ((2 * 2 * 3, 1, 1), (2, 1, 1))
    # The first tile of the first head checks what was loaded.
    assert list(long.kinds[:3]) == [(4, 10, True, i == 0) for i in range(2)] + [
        (2, 10, True, False)
    ]
    # The third tile has no rows.
    assert long.kinds[6:9] == [(4, 5, True, True), (1, 5, True, False), (0, 0, True, False)]
    assert short.kinds == [(1, 1, True, True), (1, 1, True, False)]
    first = attention._Launch.from_buffer_copy(short.parameters)
    assert (first.first, first.tiles, first.max_q) == (2, 1, 20)
    assert first.keep_threshold == 65536 - round(6553.6)
    assert first.scale == pytest.approx(1 / math.sqrt(64))
    assert short.memory.regions[first.cu_q].tolist() == [0, 300, 320, 450]
    rows = short.memory.regions[first.order].reshape(-1, first.order_columns).tolist()
    assert rows == [[0, 0, 300, 0], [2, 320, 130, 0], [1, 300, 20, 0]]
    assert stage.bytes == 450 * 2 * (4 * 128 + 4)


def test_the_backward_pass_is_one_kernel_where_it_fits(available):
    batch = Batch((512,) * 24)
    for architecture in (A100, H100):
        (one,) = attention.backward(available, batch, 0.0, architecture)
        # With the sums of dQ after all passes but the last.
        warps, passes = (4, 4) if architecture is A100 else (8, 2)
        assert (one.name, one.launches[0].threads) == ("backward", 32 * warps)
        assert one.bytes == 24 * 512 * 16 * (8 * 128 + 4 + (passes - 1) * 4 * 64)
    two = attention.backward(available, Batch((1025,) * 24), 0.0, A100)
    assert [stage.name for stage in two] == ["backward, dQ", "backward, dK and dV"]
    assert {launch.threads for stage in two for launch in stage.launches} == {128}


def test_an_order_is_part_of_the_kind(available):
    (stage,) = attention.forward(available, Batch((64,)), 0.0)
    assert stage.launches[0].kinds[0] == (2, 2, False, False)


def test_without_dropout_no_random_numbers(available):
    (stage,) = attention.forward(available, Batch((64,)), 0.0)
    launch = attention._Launch.from_buffer_copy(stage.launches[0].parameters)
    assert (launch.rng, launch.order, launch.keep_threshold) == (None, None, 65536)


def test_a_kernel_that_is_missing(available):
    with pytest.raises(ValueError, match="kernels: expected _ZN10bert_unpad24attention_forward"):
        attention.forward({}, Batch((64,)), 0.0)


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_choices_of_kernels_with_wgmma_are_those_of_the_sources():
    from tests.support import model_attention

    for count, heads in ((24, 16), (24, 1), (9, 16), (6, 16), (5, 16)):
        for longest in (1, 64, 65, 128, 192, 193, 256, 257, 512, 576, 577, 1024, 5000):
            batch = Batch((longest,) * count, heads)
            sizes = (count, batch.tokens, heads, longest, longest, H100.sms, H100.block_shared)
            out = model_attention.wgmma_plan(*sizes)
            groups = attention_wgmma.backward_groups(longest)
            assert out[:2] == (attention_wgmma.backward_is_fused(batch, H100), groups)
            assert out[2] == attention_wgmma.backward_shared(groups, longest)
            assert out[3] == attention_wgmma.forward_groups(longest, -1)
            wide = dataclasses.replace(batch, head_dim=128)
            assert not attention_wgmma.backward_is_fused(wide, H100)


def test_launches_of_kernels_with_wgmma():
    kernel = Kernel(function(["EXIT"]), 32, 0, PARAMETERS)
    available = dict.fromkeys(attention_wgmma.kernel_names(), kernel)
    batch = Batch((300, 20, 130), 2, order=(0, 2, 1), groups=((2, 300), (1, 20)))
    assert attention_wgmma.backward_is_fused(batch, dataclasses.replace(H100, sms=4))  # 450 / 300
    assert not attention_wgmma.backward_is_fused(batch, dataclasses.replace(H100, sms=5))
    (stage,) = attention_wgmma.forward(available, batch, 0.1)
    assert [(x.grid[0], x.threads, x.shared) for x in stage.launches] == [
        (2 * 2 * 3, 256, 65536), (2, 128, 49152),
    ]  # fmt: skip
    sms = dataclasses.replace(H100, sms=3)
    (stage,) = attention_wgmma.backward(available, batch, 0.0, sms)
    sums, rows = 320 * 256, 320 * 8
    assert [(x.grid[0], x.threads, x.shared) for x in stage.launches] == [
        (4, 256, 65536 + rows + sums), (2, 128, 49152 + 64 * 8),
    ]  # fmt: skip
    two = attention_wgmma.backward(available, batch, 0.0, H100)
    assert [stage.name for stage in two] == ["backward, dQ", "backward, dK and dV"]
    for stage, shared in zip(two, (49152, 51712), strict=True):
        launches = [(x.grid[0], x.threads, x.shared) for x in stage.launches]
        assert launches == [(2 * 2 * 5, 128, shared), (2, 128, shared)]
        assert stage.bytes == 450 * 2 * (6 * 128 + 8)


def test_launches_of_head_dim_128():
    kernel = Kernel(function(["EXIT"]), 32, 0, PARAMETERS)
    available = dict.fromkeys(attention_wgmma.kernel_names(128), kernel)
    batch = Batch((300, 150), 2, 128, order=(0, 1), groups=((1, 300), (1, 150)))
    (stage,) = attention_wgmma.forward(available, batch, 0.1)
    launches = [(x.grid[0], x.threads, x.shared) for x in stage.launches]
    assert launches == [(2 * 3, 256, 131072), (2 * 3, 128, 98304)]
    assert stage.bytes == 450 * 2 * (4 * 256 + 4)
    stages = attention_wgmma.backward(available, batch, 0.0, dataclasses.replace(H100, sms=1))
    for stage, shared in zip(stages, (98304, 100864), strict=True):
        launches = [(x.grid[0], x.threads, x.shared) for x in stage.launches]
        assert launches == [(2 * 5, 128, shared), (2 * 3, 128, shared)]
        assert stage.bytes == 450 * 2 * (6 * 256 + 8)


def test_launches_with_a_position_bias():
    kernel = Kernel(function(["EXIT"]), 32, 0, ctypes.sizeof(attention._BiasLaunch))
    batch = Batch((300, 20), 2, buckets=(1, 0, 2))
    for module, shared in ((attention, (48960, 48896)), (attention_wgmma, (78656, 74496))):
        available = dict.fromkeys(module.bias_kernel_names(64), kernel)
        for stage, size in zip(module.backward(available, batch, 0.0, H100), shared, strict=True):
            (launch,) = stage.launches
            assert (launch.grid[0], launch.threads, launch.shared) == (2 * 2 * 5, 128, size)
    given = attention._BiasLaunch.from_buffer_copy(launch.parameters)
    assert (given.buckets, given.reach, given.first_column) == (3, 1, 0)
    assert launch.memory.regions[given.bucket].tolist() == [1, 0, 2]
    assert given.dquery_sums is not None
    assert given.dkey_sums is None


def test_windows_go_to_kernels_of_one_warpgroup_with_kinds_by_place():
    kernel = Kernel(function(["EXIT"]), 32, 0, PARAMETERS)
    available = dict.fromkeys(attention_wgmma.kernel_names(), kernel)
    batch = Batch((640,), 16, window=64)
    (stage,) = attention_wgmma.forward(available, batch, 0.0)
    (launch,) = stage.launches
    assert (launch.grid[0], launch.threads, launch.shared) == (16 * 10, 128, 49152)
    # How many tiles are before and after it, as far as a window reaches.
    assert [kind[4:] for kind in launch.kinds[:10]] == [
        *((0, 2), (1, 2)), *[(2, 2)] * 6, *((2, 1), (2, 0)),
    ]  # fmt: skip
    given = attention._Launch.from_buffer_copy(launch.parameters)
    assert (given.window_left, given.window_right) == (64, 64)
    sms = dataclasses.replace(H100, sms=1)
    assert len(attention_wgmma.backward(available, batch, 0.0, sms)) == 2


def test_names():
    name = attention.kernel_name("attention_forward_kernel", 64, 2, True, False)
    assert name == (
        "_ZN10bert_unpad24attention_forward_kernelINS_4bf16ELi64ELi2ELb1ELb0E"
        "NS_15AttentionLaunchEEEvT4_"
    )
    name = attention_wgmma.backward_name(2, True)
    assert name == (
        "_ZN10bert_unpad31attention_backward_wgmma_kernelINS_4bf16ELi2ELb1EEEvNS_15AttentionLaunchE"
    )
