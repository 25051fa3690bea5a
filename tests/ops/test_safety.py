"""What every operator refuses instead of crashing or giving a wrong number."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from bert_unpad.hf import plain_modules
from tests.support import function_examples, op_examples
from tests.support.paths import ROOT
from tests.support.seeds import derived

TOKENS, HIDDEN = 8, 32
BATCH = VarlenBatch.from_lengths([3, 5])
IDS = [torch.arange(TOKENS) % 4 for _ in range(3)]
LABELS = torch.arange(TOKENS)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def _projections(x: Tensor, *weights: Tensor) -> Tensor:
    biases = [torch.zeros(len(weight)) for weight in weights]
    return plain_modules._SideBySide.apply(x, torch.float32, len(weights), *weights, *biases)


# The name in the message, the function, and shapes of what it is differentiated by.
FUNCTIONS: dict[str, tuple[str, Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "bias_gelu": ("bias_gelu", ops.bias_gelu, [(TOKENS, HIDDEN), (HIDDEN,)]),
    "glu": ("glu", lambda x, bias: ops.glu(x, "silu", bias), [(TOKENS, HIDDEN), (HIDDEN,)]),
    "rotary": (
        "rotary_",  # linear by itself
        lambda x: ops.rotary_(x * 1, BATCH, heads=2).square(),
        [(TOKENS, 3, 16)],
    ),
    "layer_norm": (
        "dropout_add_layer_norm",
        lambda x, residual, weight: ops.dropout_add_layer_norm(x, residual, weight, weight),
        [(TOKENS, HIDDEN), (TOKENS, HIDDEN), (HIDDEN,)],
    ),
    "add_norm": (
        "dropout_add_layer_norm",
        lambda *leaves: sum(ops.dropout_add_layer_norm(*leaves, return_sum=True)),
        [(TOKENS, HIDDEN), (TOKENS, HIDDEN), (HIDDEN,)],
    ),
    "rms_norm": ("dropout_add_layer_norm", ops.rms_norm, [(TOKENS, HIDDEN), (HIDDEN,)]),
    "attention": (
        "varlen_attention",
        lambda qkv: ops.varlen_attention(qkv, BATCH),
        [(TOKENS, 3, 2, 16)],
    ),
    "cross_attention": (
        "varlen_cross_attention",
        lambda q, kv: ops.varlen_cross_attention(q, kv, *[BATCH.cu_seqlens] * 2, 5, 5),
        [(TOKENS, 2, 16), (TOKENS, 2, 2, 16)],
    ),
    "embedding": (
        "embedding_layer_norm",
        lambda *tables: ops.embedding_layer_norm(*IDS, *tables, tables[-1]),
        [(4, HIDDEN), (4, HIDDEN), (4, HIDDEN), (HIDDEN,)],
    ),
    "cross_entropy": (
        "masked_cross_entropy",
        lambda logits: ops.masked_cross_entropy(logits, LABELS)[0],
        [(TOKENS, 16)],
    ),
    "cross_entropy_in_place": (
        "masked_cross_entropy",
        lambda x: ops.masked_cross_entropy(x * 1, LABELS, inplace_backward=True)[0],
        [(TOKENS, 16)],
    ),
    "linear": (
        "linear",
        lambda x, weight, bias: ops.linear(x.bfloat16(), weight, bias),
        [(TOKENS, HIDDEN), (16, HIDDEN), (16,)],
    ),
    "linear_residual": (
        "linear",
        lambda x, weight, bias: ops.linear_residual(x, weight, bias)[0],
        [(2, 4, HIDDEN), (16, HIDDEN), (16,)],
    ),
    "mlp": (
        "mlp",
        lambda *leaves: ops.mlp(*leaves)[0],
        [(TOKENS, HIDDEN), (16, HIDDEN), (16,), (HIDDEN, 16)],
    ),
    "glu_mlp": (
        "mlp",
        lambda *leaves: ops.glu_mlp(*leaves)[0],
        [(TOKENS, HIDDEN), (32, HIDDEN), (32,), (HIDDEN, 16)],
    ),
    "fp8_linear": ("fp8_linear", ops.fp8_linear, [(TOKENS, HIDDEN), (16, HIDDEN)]),
    "projections": (
        "project_side_by_side",
        _projections,
        [(TOKENS, HIDDEN), (16, HIDDEN), (16, HIDDEN)],
    ),
}


@pytest.fixture(params=FUNCTIONS)
def function(request) -> tuple[str, Callable[..., Tensor], list[Tensor]]:
    torch.manual_seed(derived(0))
    name, f, shapes = FUNCTIONS[request.param]
    return name, f, [leaf(*shape) for shape in shapes]


def test_a_graph_of_the_backward_pass_changes_no_gradient(function) -> None:
    _, f, leaves = function
    plain = torch.autograd.grad(f(*leaves).float().square().sum(), leaves)
    graph = torch.autograd.grad(f(*leaves).float().square().sum(), leaves, create_graph=True)
    for a, b in zip(plain, graph, strict=True):
        assert b.requires_grad
        assert torch.equal(a, b)


@pytest.mark.parametrize("recompute", [False, True])
def test_second_derivatives_raise(function, recompute: bool) -> None:
    """With respect to everything, among terms whose second derivative is known."""
    name, f, leaves = function
    out = checkpoint(f, *leaves, use_reentrant=False) if recompute else f(*leaves)
    # A sum, so that no graph of the gradient comes from what is around the operator.
    gradients = torch.autograd.grad(out.float().sum(), leaves, create_graph=True)
    penalty = sum(g.float().square().sum() for g in gradients)
    for x in leaves:
        with pytest.raises(NotImplementedError, match=f"bert_unpad::{name}: second derivatives"):
            torch.autograd.grad(penalty + x.square().sum(), x, retain_graph=True)


def test_a_gradient_can_be_changed_and_used_after_create_graph() -> None:
    x, bias = leaf(TOKENS, HIDDEN), leaf(HIDDEN)
    ops.bias_gelu(x, bias).sum().backward(create_graph=True)
    torch.nn.utils.clip_grad_norm_([x, bias], 1e-3)
    torch.optim.SGD([x, bias], lr=0.1).step()
    assert x.grad.norm() <= 1e-3


def test_a_linear_layer_that_adds_in_place_gives_autograd_its_gradient() -> None:
    """Added in place, the gradient would have no graph, and the error would be lost."""
    x, weight = leaf(TOKENS, HIDDEN), torch.nn.Parameter(torch.randn(16, HIDDEN))
    ops.accumulate_in_place(weight)
    weight.grad = torch.zeros_like(weight)
    ops.linear_residual(x, weight)[0].sum().backward(create_graph=True)
    with pytest.raises(NotImplementedError, match="bert_unpad::linear: second derivatives"):
        weight.grad.sum().backward()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_forward_mode_raises(function, requires_grad: bool) -> None:
    _, f, leaves = function
    for i, x in enumerate(leaves):
        with forward_ad.dual_level():
            inputs = [t.detach().requires_grad_(requires_grad) for t in leaves]
            inputs[i] = forward_ad.make_dual(inputs[i], torch.ones_like(x))
            with pytest.raises(NotImplementedError, match=r"forward.mode"):
                f(*inputs)


def test_forward_mode_names_the_operator_and_the_argument() -> None:
    x, bias = torch.randn(TOKENS, HIDDEN), torch.randn(HIDDEN)
    with pytest.raises(NotImplementedError, match=r"bert_unpad::bias_gelu: .*, but bias has a t"):
        torch.func.jvp(lambda b: ops.bias_gelu(x, b), (bias,), (torch.ones_like(bias),))
    # Without a tangent nothing is refused.
    with forward_ad.dual_level():
        ops.bias_gelu(x, bias)


def test_a_norm_of_a_list_has_no_gradient() -> None:
    total, _ = ops.multi_tensor_l2norm([leaf(3), leaf(4)])
    with pytest.raises(NotImplementedError, match="multi_tensor_l2norm: gradients are not supp"):
        total.backward()


def test_there_is_an_example_of_every_operator() -> None:
    assert sorted(op_examples._examples()) == op_examples.operator_names()
    for name in op_examples.operator_names():
        getattr(torch.ops.bert_unpad, name)(*op_examples.example(name))


FREED = """
import sys
import torch
from tests.support import op_examples
for name in op_examples.operator_names():
    names = [pair[0] for pair in op_examples.tensor_arguments(name, op_examples.example(name))]
    for argument in names:
        for left in (0, 1):  # bytes
            args = op_examples.example(name)
            tensor = dict(op_examples.tensor_arguments(name, args))[argument]
            print(name, argument, left, flush=True)
            tensor.untyped_storage().resize_(left)
            try:
                getattr(torch.ops.bert_unpad, name)(*args)
            except RuntimeError as error:
                assert str(error).startswith(f"{name}: "), error
                # LayerNorm's weight is called ln_weight where there are others.
                assert f"{argument} must have a storage of at least" in str(error), error
            else:
                sys.exit("no error")
"""


# The same of tensors that are not contiguous, which nothing may copy before it looks.
FREED_APART = """
import sys
import torch
from tests.support import op_examples
from tests.support.function_examples import apart
for name in op_examples.operator_names():
    for argument, tensor in op_examples.tensor_arguments(name, op_examples.example(name)):
        if tensor.dim() == 0:
            continue
        args = op_examples.example(name)
        tensor = dict(op_examples.tensor_arguments(name, args))[argument]
        freed = apart(tensor)
        freed.untyped_storage().resize_(0)
        print(name, argument, flush=True)
        try:
            getattr(torch.ops.bert_unpad, name)(*op_examples.replaced(args, tensor, freed))
        except RuntimeError as error:
            assert str(error).startswith(f"{name}: "), error
            assert argument in str(error), error
        else:
            sys.exit("no error")
"""

FREED_IN_FUNCTIONS = """
import sys
from tests.support.function_examples import apart, examples, public_name
for name in examples():
    for argument in examples()[name][1]:
        function, args = examples()[name]
        args[argument] = apart(args[argument])
        args[argument].untyped_storage().resize_(0)
        print(name, argument, flush=True)
        try:
            function(**args)
        except RuntimeError as error:
            begin = f"{public_name(name)}: {argument} must "
            # What is not copied is left to the operator, which has its own names.
            begins = (begin, begin.replace("position_bias.", "bias_"))
            assert str(error).startswith(begins), error
        else:
            sys.exit("no error")
"""

# Gradients whose storage was freed, contiguous or not; and what the node had saved.
FREED_IN_BACKWARD = """
import sys
import torch
from torch import Tensor
from tests.support.function_examples import apart, examples, public_name
def result(name):
    function, args = examples()[name]
    if public_name(name) == "rotary_":
        args["x"] = args["x"] * 1
    leaves = [t for t in args.values() if t.is_floating_point()]
    for t in leaves:
        t.requires_grad_()
    if public_name(name) == "rotary_":
        return leaves, function(**args | {"x": leaves[0] * 1})
    found = function(**args)
    found = found.x if hasattr(found, "x") else found
    return leaves, found if isinstance(found, Tensor) else found[0]
for name in examples():
    for change in (lambda t: t.clone(), apart):
        leaves, y = result(name)
        dy = change(torch.ones_like(y))
        dy.untyped_storage().resize_(0)
        print(name, "dy", flush=True)
        if name == "linear":  # PyTorch's own product
            continue
        try:
            y.backward(dy)
        except RuntimeError as error:
            assert "must have a storage of at least" in str(error), error
        else:
            sys.exit("no error")
    for i in range(len(leaves)):
        leaves, y = result(name)
        dy = torch.ones_like(y)
        print(name, "leaf", i, flush=True)
        if name == "linear":
            continue
        leaves[i].untyped_storage().resize_(0)
        try:
            y.backward(dy)
        except RuntimeError as error:
            assert "must have a storage of at least" in str(error), error
"""


def run(script: str) -> str:
    """What a script writes to stdout; it may crash without taking the tests with it."""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr[-2000:])
    return done.stdout


@pytest.mark.parametrize("script", [FREED, FREED_APART, FREED_IN_FUNCTIONS, FREED_IN_BACKWARD])
def test_a_storage_that_was_freed_is_named(script: str) -> None:
    run(script)


@pytest.mark.parametrize("name", function_examples.examples())
def test_functions_refuse_tensors_on_several_devices(name: str) -> None:
    for argument in function_examples.examples()[name][1]:
        function, args = function_examples.examples()[name]
        if len(args) == 1:
            continue
        args[argument] = args[argument].to("meta")
        with pytest.raises(RuntimeError, match=r"expected a tensor on (cpu|meta) like"):
            function(**args)


@pytest.mark.parametrize("name", function_examples.examples())
def test_functions_name_an_argument_that_is_no_tensor(name: str) -> None:
    public = function_examples.public_name(name)
    for argument in function_examples.examples()[name][1]:
        function, args = function_examples.examples()[name]
        args[argument] = [1.0, 2.0]
        expected = rf"^{public}: {argument}: expected a tensor.*, got \[1.0, 2.0\] \(list\)"
        with pytest.raises(TypeError, match=expected):
            function(**args)


def test_functions_within_torch_func_have_no_storage_to_check() -> None:
    x, weight = torch.randn(TOKENS, HIDDEN), torch.randn(16, HIDDEN)
    found = torch.func.vmap(lambda row: ops.linear(row, weight))(x)
    torch.testing.assert_close(found, x @ weight.t())


@pytest.mark.parametrize("name", op_examples.operator_names())
def test_a_meta_tensor_among_others_is_named(name: str) -> None:
    """PyTorch calls the fake kernel then, whose results nobody has written."""
    op, args = getattr(torch.ops.bert_unpad, name), op_examples.example(name)
    found = [pair for pair in op_examples.tensor_arguments(name, args) if pair[0] != "groups"]
    lists = sum(len(value) for value in args if isinstance(value, list))
    if len(found) == 1 and lists < 2:
        return
    for argument, tensor in found:
        mixed = op_examples.replaced(args, tensor, tensor.to("meta"))
        expected = r"expected a tensor on (cpu|meta) like \S+, got one on (cpu|meta)"
        if argument != found[0][0]:
            expected = rf"{name}: {argument.replace('[', '.').replace(']', '.')}: {expected}"
        with pytest.raises(RuntimeError, match=expected):
            op(*mixed)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_rows_of_no_columns(device: str) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.ones(shape, device=device)

    with pytest.raises(RuntimeError, match=r"x must have shape \[..., hidden\] with hidden >= 1"):
        ops.dropout_add_layer_norm(empty(3, 0), None, empty(0), empty(0))
    if device == "meta":
        return
    with pytest.raises(RuntimeError, match="head_dim must be between 1 and 256, got 0"):
        ops.varlen_attention(empty(3, 3, 2, 0), VarlenBatch.from_lengths([3]))
    cu = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="head_dim must be between 1 and 256, got 0"):
        ops.varlen_cross_attention(empty(3, 2, 0), empty(3, 2, 2, 0), cu, cu, 3, 3)
    ids = [torch.zeros(3, dtype=torch.int64)] * 3
    with pytest.raises(RuntimeError, match=r"word must have shape \[entries, hidden\]"):
        ops.embedding_layer_norm(*ids, *[empty(4, 0)] * 3, empty(0), empty(0))


# A part of the keys takes more than what may still be allocated; there are tasks for all threads.
OUT_OF_MEMORY = """
import ctypes
import resource
import torch
from bert_unpad import ops
keys = 2000
torch.set_num_threads(2)
def call(keys):
    cu_q, cu_k = (torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (1, keys))
    return ops.varlen_cross_attention(q, kv[: 2 * keys], cu_q, cu_k, 1, keys)
q, kv = torch.zeros(2, 64, 256), torch.zeros(2 * keys, 2, 1, 256)
call(1)  # starts the threads
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**19, -1))
malloc = ctypes.CDLL(None).malloc
malloc.restype = ctypes.c_void_p
while malloc(ctypes.c_size_t(2**20)):  # what glibc has in reserve
    pass
try:
    call(keys)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's limit on memory")
def test_a_failed_allocation_of_scratch_memory_keeps_its_message() -> None:
    said = run(OUT_OF_MEMORY)
    assert said.startswith("out of memory: a thread could not get "), said
    assert said.strip().endswith("bytes of scratch memory"), said
