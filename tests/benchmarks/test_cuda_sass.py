"""What benchmarks/cuda_build.py reads out of machine code, and the record that it keeps."""

import json

import pytest

from benchmarks.lib import cuda_kernels, cuda_sass, cuda_table

NAME = "_ZN10bert_unpad24attention_forward_kernelINS_4bf16ELi64EEEvv"

SASS = f"""
Fatbin elf code:
================
arch = sm_80
		Function : {NAME}
	.headerflags	@"EF_CUDA_SM80"
        /*0000*/                   MOV R1, c[0x0][0x28] ;        /* 0x00000a0000017a02 */
                                                                 /* 0x000fe40000000f00 */
        /*0010*/              @!P0 LDGSTS.E.BYPASS.128 [R5], [R2.64] ;
        /*0020*/                   LDSM.16.M88.4 R8, [R9] ;
        /*0030*/              @UP1 HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0040*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
Fatbin elf code:
arch = sm_90a
		Function : {NAME}
        /*10000*/                  STL.64 [R1], R2 ;
        /*10010*/             @P0  LDL R2, [R1] ;
        /*10020*/                  HMMA.16816.F32 R4, R8, R10, R4 ;
"""

ELF = f"""
arch = sm_80
.nv.info
	Attribute:	EIATTR_REGCOUNT
	Value:	function: {NAME}(0x1)	register count: 32
.nv.info.{NAME}
	Attribute:	EIATTR_MAXREG_COUNT
	Value:	0xff
	Attribute:	EIATTR_MAX_THREADS
	Format:	EIFMT_SVAL
	Value:	0x80 0x2 0x1
	Attribute:	EIATTR_CUDA_API_VERSION
	Value:	0x82 0x1 0x1
"""


@pytest.fixture
def scripts():
    return [cuda_kernels, cuda_sass, cuda_table]


def test_instructions_are_counted_by_kernel_and_architecture(scripts):
    _, sass, _ = scripts
    found = sass.count_instructions(SASS.splitlines())
    assert found[NAME, "sm_80"] == {"MOV": 1, "LDGSTS": 1, "LDSM": 1, "HMMA": 2}
    assert found[NAME, "sm_90a"] == {"STL": 1, "LDL": 1, "HMMA": 1}
    assert sass.problems(found[NAME, "sm_80"]) == []
    assert sass.problems(found[NAME, "sm_90a"]) == ["no LDSM", "no LDGSTS", "1 LDL", "1 STL"]
    assert sass.problems(found[NAME, "sm_90a"], "sm_75") == ["no LDSM", "1 LDL", "1 STL"]


def test_threads_are_those_of_the_launch_bounds(scripts):
    assert scripts[1].read_threads(ELF.splitlines()) == {(NAME, "sm_80"): 256}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attention_forward_kernel<bf16, 64, 1, true>", True),
        ("attention_backward_dq_kernel<f16, 64, true>", True),
        ("attention_fp32_forward_kernel<float, 64, true>", False),
        ("bias_gelu_kernel<bf16, 8, true>", False),
    ],
)
def test_which_kernels_need_tensor_cores(scripts, name, expected):
    assert scripts[1].uses_tensor_cores(name) is expected
    assert scripts[1].uses_tensor_cores(name, "sm_75") is (expected and "<f16" in name)


@pytest.mark.parametrize(
    ("registers", "threads", "blocks"),
    [(32, 128, 16), (64, 128, 8), (65, 128, 7), (128, 128, 4), (168, 128, 3), (169, 128, 2),
     (255, 128, 2), (255, 256, 1), (16, 32, 32), (200, 384, 0)],
)  # fmt: skip
def test_blocks_that_registers_allow(scripts, registers, threads, blocks):
    """By hand: registers go to a warp in units of 256, and warps in fours."""
    assert scripts[0].Kernel("k", "sm_80", registers).blocks_per_sm(threads) == blocks
    room = min(blocks, 16, 32 // (threads // 32))
    assert scripts[0].Kernel("k", "sm_75", registers).blocks_per_sm(threads) == room


def kernels_of(scripts, **change):
    values = {"registers": 168, "shared": 16, "readable": "some_kernel<bf16, 64>"} | change
    return [scripts[0].Kernel("k", "sm_80", **values)]


def test_the_table_is_compared_with_what_is_built(scripts, tmp_path, capsys):
    table = scripts[2]
    path = tmp_path / "kernels.json"
    text = table.render(kernels_of(scripts), {("k", "sm_80"): 128}, "13.0")
    assert json.loads(text) == {"nvcc": "13.0", "some_kernel<bf16, 64> sm_80": [128, 168, 16, 0]}
    assert "is missing" in table.difference(path, text)
    path.write_text(text)
    assert table.difference(path, text) == ""
    other = table.render(kernels_of(scripts, registers=169), {("k", "sm_80"): 128}, "13.0")
    line = '+ "some_kernel<bf16, 64> sm_80": [128, 169, 16, 0]'
    assert line in table.difference(path, other)
    assert table.difference(path, other.replace("13.0", "14.0")) == ""
    assert "not compared" in capsys.readouterr().out


def test_limits_of_registers(scripts, monkeypatch):
    table = scripts[2]
    monkeypatch.setattr(table, "LIMITS", {r"some_kernel<": 168, r"gone_kernel<": 64})
    (within,), (over,) = kernels_of(scripts), kernels_of(scripts, registers=169)
    assert table.over_limit(within) == 0
    assert table.over_limit(over) == 168
    over.arch = "sm_120"
    assert table.over_limit(over) == 0
    assert table.unused_limits([within]) == ["gone_kernel<"]


def test_without_a_disassembler_it_says_what_to_install(scripts, monkeypatch, tmp_path):
    sass = scripts[1]
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr(sass.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(SystemExit, match="pip install nvidia-cuda-cuobjdump"):
        sass.find_tools()
