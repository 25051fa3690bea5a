"""The parser of machine code's text."""

import pytest

from gpu_model.sm import sass
from tests.support.sass_text import function, listing

CUOBJDUMP = """
	code for sm_90a
		Function : first
	.headerflags	@"EF_CUDA_64BIT_ADDRESS EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;                /* 0x00000a00ff017b82 */
                                                                         /* 0x000e700000000800 */
        /*0010*/              @!P0 BRA P1, 0x0 ;                         /* 0x0000000000408947 */
                                                                         /* 0x002fea0000800000 */
        /*0020*/                   EXIT ;                                /* 0x000000000000794d */
                                                                         /* 0x000fea0003800000 */
		Function : second
        /*0000*/                   NOP;                                  /* 0x0000000000007918 */
                                                                         /* 0x000fc00000000000 */
"""
NVDISASM = """
	.section	.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R0, R0, 0x1, RZ ;
        /*0020*/               @P0 BRA `(.L_x_0) ;
        /*0030*/                   EXIT ;
"""


def test_functions_and_control_codes_of_cuobjdump():
    found = sass.parse(CUOBJDUMP)
    assert list(found) == ["first", "second"]
    first = found["first"]
    assert first.arch == "sm_90a"
    assert [i.name for i in first.instructions] == ["LDC", "BRA", "EXIT"]
    # LDC holds scoreboard 1 until its result is there; the branch waits for it.
    assert first.instructions[0].control == sass.Control(8, False, 1, 7, 0)
    branch = first.instructions[1]
    assert branch.control.wait_mask == 0b10
    assert (branch.target, branch.guard.negated, branch.condition.number) == (0, True, 1)
    assert found["second"].instructions[0].text == "NOP"


@pytest.mark.parametrize("stall", [0, 1, 15])
@pytest.mark.parametrize(("write", "read", "wait"), [(7, 7, 0), (0, 5, 0b100001), (3, 7, 0b111111)])
def test_control_codes(stall, write, read, wait):
    control = function([("NOP", stall, write, read, wait)]).instructions[0].control
    assert control == sass.Control(stall, False, write, read, wait)


def test_labels_of_nvdisasm_become_addresses():
    code = sass.parse(NVDISASM)["kernel"].instructions
    assert code[2].target == 0x10
    assert all(i.control is None for i in code)


def test_a_label_that_is_not_there():
    with pytest.raises(ValueError, match=r"expected the label \.L_x_1"):
        sass.parse(NVDISASM.replace("`(.L_x_0)", "`(.L_x_1)"))


def registers(name: str, first: int, count: int) -> set[str]:
    return {f"{name}{first + i}" for i in range(count)}


@pytest.mark.parametrize(
    ("text", "written", "read"),
    [
        ("IADD3 R4, P0, P1, R2, -R3, RZ", {"R4", "P0", "P1"}, {"R2", "R3"}),
        ("IADD3.X R5, R1.reuse, ~R6, RZ, P0, !PT", {"R5"}, {"R1", "R6", "P0"}),
        ("@!P2 LOP3.LUT P1, RZ, R7, 0x3, RZ, 0xc0, !PT", {"P1"}, {"R7", "P2"}),
        ("IMAD.WIDE.U32 R4, P3, R8, UR4, R10", {"R4", "R5", "P3"}, {"R8", "UR4", "R10", "R11"}),
        ("IMAD.WIDE R4, R8, 0x4, R4", {"R4", "R5"}, {"R8", "R4", "R5"}),
        ("IMAD.HI.U32 R3, R3, R5, R2", {"R3"}, {"R3", "R5", "R2"} | {"R3"}),
        ("ISETP.GE.U32.AND P0, PT, R2, c[0x0][0x160], P4", {"P0"}, {"R2", "P4"}),
        (
            "HMMA.16816.F32.BF16 R64, R88, R184.reuse, R68",
            registers("R", 64, 4),
            registers("R", 88, 4) | registers("R", 184, 2) | registers("R", 68, 4),
        ),
        ("LDSM.16.MT88.4 R8, [R12+0x800]", registers("R", 8, 4), {"R12"}),
        ("LDG.E.128 R8, desc[UR4][R2.64+0x10]", registers("R", 8, 4), {"R2", "R3", "UR4", "UR5"}),
        ("STG.E.64 [R2.64], R6", set(), {"R2", "R3", "R6", "R7"}),
        ("STS [R3+UR5+0x10], R4", set(), {"R3", "UR5", "R4"}),
        ("LDGSTS.E.BYPASS.128 [R13], [R6.64], !P4", set(), {"R13", "R6", "R7", "P4"}),
        ("SHFL.BFLY PT, R14, R13, 0x1, 0x1f", {"R14"}, {"R13"}),
        ("FADD R4, |R5|, -|R6|", {"R4"}, {"R5", "R6"}),
        ("CS2R R62, SRZ", {"R62", "R63"}, set()),
        ("ULDC.64 UR6, c[0x0][0x260]", {"UR6", "UR7"}, set()),
        ("@P0 EXIT", set(), {"P0"}),
    ],
)
def test_registers_read_and_written(text, written, read):
    instruction = sass.Instruction(0, text)
    assert instruction.written == written
    assert instruction.read == read


def test_an_address_between_instructions():
    code = sass.parse(listing(["NOP", "EXIT"]))["kernel"]
    assert code.index(16) == 1
    for address in (8, 32, -16):
        with pytest.raises(ValueError, match="no instruction at"):
            code.index(address)
