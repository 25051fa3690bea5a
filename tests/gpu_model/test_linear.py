"""Which of cuBLASLt's algorithms the linear layer's GPU products take, on a model of cuBLASLt
(gpu_model/cublaslt.h). What they compute is in tests/ops, for every backend."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gpu_model import build
from gpu_model.block_model import Model
from tests.support.model_linear import own_library
from tests.support.seeds import derived

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as in csrc/common/types.h


FASTEST = 1  # 1 ms, where the others take 3 and 2


@pytest.fixture(scope="module")
def library():
    model = Model(build.load(build.KERNELS / "linear.cpp"))
    yield model
    model.clear()


@pytest.fixture(autouse=True)
def fresh(library):
    library.clear()
    library.call("set_timing", False, b"")
    library.call("set_library", 3, False)


class Counts:
    """What the model of cuBLASLt has been asked for since the test began."""

    def __init__(self, library):
        values = (ctypes.c_int64 * 8)()
        library.call("library_counts", values)
        self.heuristics, self.products, self.algorithm, self.bytes, *self.alignments = values


def inputs(library, dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(derived(seed))
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [library.register(tensor, writable=False) for tensor in tensors]


def output(library, shape, dtype):
    return library.register(torch.full(shape, torch.nan, dtype=dtype))


def check(got, want):
    """One rounding of a sum."""
    tolerance = 2 * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def aligned(library, values, offset=0):
    """The values in registered memory, `offset` elements behind a multiple of 256 bytes."""
    room = 256 // values.element_size()
    memory = torch.empty(values.numel() + room + offset, dtype=values.dtype)
    first = -(memory.data_ptr() // values.element_size()) % room + offset
    library.register(memory)
    return memory[first : first + values.numel()].view(values.shape).copy_(values)


def forward_once(library, tokens, in_features, out_features, offset=0):
    """One product, with x `offset` elements behind a multiple of 256 bytes."""
    library.clear()
    x = aligned(library, torch.randn(tokens, in_features).bfloat16(), offset)
    weight = aligned(library, torch.randn(out_features, in_features).bfloat16())
    y = aligned(library, torch.full((tokens, out_features), torch.nan).bfloat16())
    library.call("linear_forward", 1, tokens, in_features, out_features, x, weight, None, y, None)
    check(y, x.double() @ weight.double().T)


def test_bf16_needs_tensor_cores_that_multiply_it(library):
    library.set_device((7, 5))
    try:
        message = (
            r"linear: bfloat16 needs a GPU of compute capability 8\.0 .* has 7\.5; use float16"
        )
        with pytest.raises(RuntimeError, match=message):
            forward_once(library, 6, 56, 24)
        library.clear()
        x, weight = inputs(library, torch.float16, (6, 56), (24, 56))
        y = output(library, (6, 24), torch.float16)
        library.call("linear_forward", DTYPES[torch.float16], 6, 56, 24, x, weight, None, y, None)
        check(y, x.double() @ weight.double().T)
    finally:
        library.set_device()


def test_an_algorithm_serves_a_bucket_of_token_counts(library):
    for tokens in (128, 5, 77):
        forward_once(library, tokens, 48, 16)
    assert Counts(library).heuristics == 1
    forward_once(library, 129, 48, 16)
    assert Counts(library).heuristics == 2


def in_new_thread(function):
    """Of a thread that has no plans yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_algorithms_are_timed_by_default(tmp_path):
    """In a library that nothing was said to about timing."""
    library = own_library(tmp_path)
    forward_once(library, 3, 64, 16)
    assert Counts(library).algorithm == FASTEST


def test_timing_can_be_turned_off(library):
    forward_once(library, 3, 56, 16)
    counts = Counts(library)
    assert (counts.algorithm, counts.products) == (0, 1)
    library.call("set_timing", True, b"")  # forgets choices
    forward_once(library, 3, 56, 16)
    assert Counts(library).algorithm == FASTEST


def test_a_process_has_one_choice(library):
    library.call("set_timing", True, b"")
    forward_once(library, 3, 56, 16)
    before = Counts(library)
    library.call("set_library", 3, False)
    in_new_thread(lambda: forward_once(library, 70, 56, 16))
    counts = Counts(library)
    assert (counts.algorithm, counts.products, counts.heuristics) == (FASTEST, 1, 0)
    assert before.products > 1


def test_nothing_is_timed_while_a_graph_is_captured(library, tmp_path):
    path = tmp_path / "algorithms.txt"
    library.call("set_timing", True, str(path).encode())
    library.call("set_capturing", True)
    try:
        forward_once(library, 3, 56, 16)
    finally:
        library.call("set_capturing", False)
    counts = Counts(library)
    assert (counts.algorithm, counts.products) == (0, 1)
    # The process keeps to it, in all threads; other processes do not learn of it.
    in_new_thread(lambda: forward_once(library, 3, 56, 16))
    counts = Counts(library)
    assert (counts.algorithm, counts.products) == (0, 2)
    assert not path.exists()
    forward_once(library, 3, 48, 16)
    assert Counts(library).algorithm == FASTEST
    assert len(path.read_text().splitlines()) == 1


def test_the_first_of_several_processes_chooses(library, tmp_path):
    path = tmp_path / "algorithms.txt"
    library.call("set_timing", True, str(path).encode())
    forward_once(library, 3, 72, 16)
    (line,) = path.read_text().splitlines()
    path.unlink()
    library.call("set_timing", True, str(path).encode())
    # What another process writes while this one times: the last of the algorithms.
    kind, _, number, *rest = line.split()
    assert int(number) == FASTEST
    path.write_text(" ".join([kind, "2048", "2", *rest]) + "\n")
    forward_once(library, 3, 72, 16)
    assert Counts(library).algorithm == 2


def test_the_fastest_algorithm_is_kept_in_the_file(library, tmp_path):
    path = tmp_path / "algorithms.txt"
    library.call("set_timing", True, str(path).encode())
    forward_once(library, 3, 64, 16)
    counts = Counts(library)
    assert counts.algorithm == FASTEST
    # While timing: a result, and one workspace for the greediest; then the best one's.
    result = 3 * 16 * 2
    assert counts.bytes == result + 2 * 1024 + 1 * 1024
    assert len(path.read_text().splitlines()) == 1
    forward_once(library, 3, 72, 16)
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["algorithms.txt"]
    # A later process takes it from there.
    library.call("set_library", 3, False)
    library.call("set_timing", True, str(path).encode())
    forward_once(library, 100, 72, 16)
    counts = Counts(library)
    assert (counts.algorithm, counts.heuristics, counts.products) == (FASTEST, 0, 1)


def test_what_another_process_has_written_stays(library, tmp_path):
    path = tmp_path / "algorithms.txt"
    library.call("set_timing", True, str(path).encode())
    forward_once(library, 3, 80, 16)
    path.write_text(path.read_text() + "another 0 1 2 3 4 5 6 7 8\n")
    forward_once(library, 3, 88, 16)
    assert {line.split()[0] for line in path.read_text().splitlines()} >= {"another"}
    assert len(path.read_text().splitlines()) == 3


def test_a_broken_file_is_named(library, tmp_path):
    path = tmp_path / "algorithms.txt"
    for line in ("kind 0 1 2 3", f"kind {(32 << 20) + 1} 1 2 3 4 5 6 7 8"):
        path.write_text(line + "\n")
        message = r"algorithms.txt, line 1: expected .* delete the file"
        with pytest.raises(RuntimeError, match=message):
            library.call("set_timing", True, str(path).encode())


def test_an_algorithm_that_refuses_the_exact_tokens_is_replaced(library, tmp_path):
    library.call("set_library", 1, False)
    forward_once(library, 128, 96, 16)
    # From now on the only algorithm that the plan knows refuses all but whole buckets.
    library.call("set_library", 1, True)
    with pytest.raises(RuntimeError, match="no algorithm for m = 16, n = 100, k = 96"):
        forward_once(library, 100, 96, 16)
    library.call("set_library", 2, True)  # now the first takes any number
    forward_once(library, 100, 96, 16)
    assert Counts(library).products == 1


def test_alignment_is_told(library):
    forward_once(library, 4, 104, 16, offset=8)
    assert Counts(library).alignments[1] == 16  # x is matrix B
    assert Counts(library).heuristics == 1
    forward_once(library, 4, 104, 16)
    assert Counts(library).alignments[1] == 256
    assert Counts(library).heuristics == 2


def test_sizes_that_no_algorithm_takes(library):
    with pytest.raises(RuntimeError, match="BERT_UNPAD_CUBLASLT=0 leaves linear layers to PyTorch"):
        forward_once(library, 4, 12, 16)
