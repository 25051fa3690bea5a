"""Cases of the self-test for the operators of clipping and the optimizers."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from bert_unpad import ops
from bert_unpad.self_test.compare import LIMITS, Compared, Inputs, case


@case
def clip_bucket_(inputs: Inputs) -> Iterator[Compared]:
    max_norm, factor = 3.0, 0.5
    bucket = inputs.normal(5003)
    for out in (None, torch.empty(5003, device=inputs.device, dtype=inputs.dtype)):
        residual = None
        if out is not None and inputs.dtype != torch.float32:
            bucket = bucket.float()
            residual = inputs.parameter(5003, scale=1e-3)
        wide = bucket.double() + (0.0 if residual is None else residual.double())
        expected = wide * (max_norm / wide.norm()) * factor
        result = bucket.clone() if out is None else out
        norm = ops.clip_bucket_(
            bucket.clone() if out is not None else result,
            max_norm,
            factor=factor,
            out=out,
            residual=residual,
        )
        yield Compared("norm", norm, wide.norm(), LIMITS[torch.float32])
        yield Compared("result", result, expected)
        if residual is not None:
            kept = result.double() + residual.double() * factor
            yield Compared("result with what rounding lost", kept, expected, 1e-5)


@case
def multi_tensor_l2norm(inputs: Inputs) -> Iterator[Compared]:
    tensors = _tensors(inputs)
    norms = torch.stack([x.double().norm() for x in tensors])
    total, each = ops.multi_tensor_l2norm(tensors)
    yield Compared("total", total, norms.norm(), LIMITS[torch.float32])
    yield Compared("norms", each, norms, LIMITS[torch.float32])


@case
def multi_tensor_scale_(inputs: Inputs) -> Iterator[Compared]:
    tensors = _tensors(inputs)
    wide = [x.double() for x in tensors]
    ops.multi_tensor_scale_(tensors, torch.tensor(0.3, device=inputs.device))
    for got, x in zip(tensors, wide, strict=True):
        yield Compared("result", got, x * 0.3)


def _tensors(inputs: Inputs, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [inputs.normal(*shape, dtype=dtype) for shape in ((40, 33), (7,), (4099,))]


_LR, _BETAS, _EPS, _DECAY = 0.01, (0.9, 0.99), 1e-6, 0.1


class _Updates:
    """Weights, optimizer state and three gradients, for the operators that update weights."""

    def __init__(self, inputs: Inputs):
        wide = _tensors(inputs, torch.float32)
        self.params = [x.to(inputs.dtype) for x in wide]
        self.masters = [] if inputs.dtype == torch.float32 else wide
        self.expected = [x.double() for x in (self.masters or self.params)]
        self.first, self.second = (
            [torch.zeros_like(x, dtype=torch.float32) for x in wide] for _ in range(2)
        )
        self.steps = [torch.zeros((), device=inputs.device) for _ in wide]
        self.lr = torch.tensor(_LR, device=inputs.device)
        self.grads = [_tensors(inputs) for _ in range(3)]

    def lists(
        self, grads: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        return self.params, grads, self.first, self.second

    def run(self, op: Callable[..., object]) -> None:
        """Makes the three updates."""
        options = {"betas": _BETAS, "eps": _EPS, "weight_decay": _DECAY, "masters": self.masters}
        for grads in self.grads:
            op(*self.lists(grads), self.steps, lr=self.lr, **options)

    def compared(self, expected: Sequence[Tensor]) -> Iterator[Compared]:
        pairs = zip(self.params, expected, strict=True)
        yield from (Compared("weights", got, want) for got, want in pairs)
        for got, want in zip(self.masters, expected, strict=False):
            yield Compared("fp32 weights", got, want, LIMITS[torch.float32])


@case
def adam_(inputs: Inputs) -> Iterator[Compared]:
    state = _Updates(inputs)
    expected = [x.clone().requires_grad_() for x in state.expected]
    peer = torch.optim.AdamW(expected, lr=_LR, betas=_BETAS, eps=_EPS, weight_decay=_DECAY)
    state.run(ops.adam_)
    for grads in state.grads:
        for x, grad in zip(expected, grads, strict=True):
            x.grad = grad.double()
        peer.step()
    yield from state.compared([x.detach() for x in expected])


def _lamb_expected(state: _Updates) -> list[Tensor]:
    """Computes three updates in float64, as in the paper."""
    results = []
    for i, start in enumerate(state.expected):
        x, first, second = start, torch.zeros_like(start), torch.zeros_like(start)
        for step, grads in enumerate(state.grads, 1):
            grad = grads[i].double()
            first = _BETAS[0] * first + (1 - _BETAS[0]) * grad
            second = _BETAS[1] * second + (1 - _BETAS[1]) * grad * grad
            root = (second / (1 - _BETAS[1] ** step)).sqrt() + _EPS
            update = first / (1 - _BETAS[0] ** step) / root + _DECAY * x
            x = x - _LR * x.norm() / update.norm() * update
        results.append(x)
    return results


@case
def lamb_(inputs: Inputs) -> Iterator[Compared]:
    state = _Updates(inputs)
    state.run(ops.lamb_)
    yield from state.compared(_lamb_expected(state))


@case
def frozen_adam_(inputs: Inputs) -> Iterator[Compared]:
    state = _Updates(inputs)
    state.second = [x.square() + 0.1 for x in _tensors(inputs, torch.float32)]
    expected, first = list(state.expected), [torch.zeros_like(x) for x in state.expected]
    state.run(ops.frozen_adam_)
    for step, grads in enumerate(state.grads, 1):
        for i, grad in enumerate(grads):
            first[i] = _BETAS[0] * first[i] + (1 - _BETAS[0]) * grad.double()
            root = (state.second[i].double() / (1 - _BETAS[1] ** step)).sqrt() + _EPS
            update = first[i] / (1 - _BETAS[0] ** step) / root + _DECAY * expected[i]
            expected[i] = expected[i] - _LR * update
    yield from state.compared(expected)


@case
def frozen_lamb_sums_(inputs: Inputs) -> Iterator[Compared]:
    weights, momenta, old = (_tensors(inputs, torch.float32) for _ in range(3))
    frozen, fresh = ([x.square() + 0.1 for x in _tensors(inputs, torch.float32)] for _ in "12")
    sums, variances = [], []
    for w, m, before, v, n in zip(weights, momenta, old, frozen, fresh, strict=True):
        w, m, before, v, n = (x.double() for x in (w, m, before, v, n))
        grad = (m - _BETAS[0] * before) / (1 - _BETAS[0])
        variances.append(_BETAS[1] * n + (1 - _BETAS[1]) * grad * grad)
        update = m / (v.sqrt() + _EPS)
        ratio = (v.sqrt() + _EPS) / (variances[-1].sqrt() + _EPS)
        whole = update + _DECAY * w
        sums.append(torch.stack([update.square().sum(), whole.square().sum(), ratio.max()]))
    got = ops.frozen_lamb_sums_(
        *(weights, momenta, old, frozen, fresh), betas=_BETAS, eps=_EPS, weight_decay=_DECAY
    )
    for got_sums, want in zip(got, sums, strict=True):
        yield Compared("sums", got_sums / want, torch.ones_like(want), 1e-5)
    for variance, want in zip(fresh, variances, strict=True):
        yield Compared("fresh variance", variance, want, 1e-5)


@case
def lamb_halves(inputs: Inputs) -> Iterator[Compared]:
    """Checks lamb_moments_ and lamb_apply_, which update sharded states."""
    state, op = _Updates(inputs), torch.ops.bert_unpad
    for grads in state.grads:
        sums, coefficients = op.lamb_moments_(
            *(*state.lists(grads), state.masters, state.steps, state.lr, None, None, None, None),
            *(*_BETAS, _EPS, _DECAY, 0.0, True, True, False, False),
        )
        op.lamb_apply_(
            *(*state.lists(grads), state.masters, sums, coefficients, _BETAS[0], _EPS, _DECAY),
            *(True, False),
        )
    yield from state.compared(_lamb_expected(state))


def _stable_expected(state: _Updates) -> list[Tensor]:
    """Computes three updates in float64, as in the paper."""
    results = []
    for i, start in enumerate(state.expected):
        x, first, second = start, torch.zeros_like(start), torch.zeros_like(start)
        for step, grads in enumerate(state.grads, 1):
            grad = grads[i].double()
            b1, b2 = (b * (1 - b ** (step - 1)) / (1 - b**step) for b in _BETAS)
            first = b1 * first + (1 - b1) * grad
            second = b2 * second + (1 - b2) * grad * grad
            rms = (grad.square() / second.clamp(min=_EPS**2)).mean().sqrt()
            lr = _LR / rms.clamp(min=1)
            x = x - lr * _DECAY * x - lr * first / (second.sqrt() + _EPS)
        results.append(x)
    return results


@case
def stable_adamw_(inputs: Inputs) -> Iterator[Compared]:
    state = _Updates(inputs)
    state.run(ops.stable_adamw_)
    yield from state.compared(_stable_expected(state))


@case
def stable_adamw_halves(inputs: Inputs) -> Iterator[Compared]:
    """Checks stable_adamw_moments_ and stable_adamw_apply_, which update sharded states."""
    state, op = _Updates(inputs), torch.ops.bert_unpad
    for grads in state.grads:
        sums, coefficients = op.stable_adamw_moments_(
            *(*state.lists(grads), state.masters, state.steps, state.lr, None, None, None),
            *(*_BETAS, _EPS, _DECAY, 0.0, False),
        )
        op.stable_adamw_apply_(
            *(*state.lists(grads), state.masters, sums, coefficients, _EPS, _DECAY)
        )
    yield from state.compared(_stable_expected(state))
