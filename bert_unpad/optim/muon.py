"""Muon: momentum whose matrices are orthogonalized, with Adam for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad._sharded_types import is_dtensor
from bert_unpad.distributed.collectives import all_gather_single
from bert_unpad.optim.adam import FusedAdam
from bert_unpad.optim.checks import check_count, check_number
from bert_unpad.optim.parameter_lists import ParameterList, Update

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """Brings the singular values of matrices near 1 by Newton-Schulz iterations.

    The quintic iteration of Jordan et al., "Muon: An optimizer for hidden layers in neural
    networks" (2024): X <- a X + (b A + c A A) X with A = X X^T, which begins with X divided by its
    Frobenius norm. Its coefficients make small singular values grow fastest; after 5 steps those
    that began above about 0.01 lie between about 0.7 and 1.2.

    Args:
        matrices: [..., rows, columns], in the dtype to compute in.
        steps: iterations.

    Returns:
        Matrices of the same shape and dtype; zeros stay zero.
    """
    a, b, c = _COEFFICIENTS
    shape = matrices.shape
    x = matrices.reshape(-1, *shape[-2:])
    tall = shape[-2] > shape[-1]
    if tall:
        x = x.mT
    x = x / (torch.linalg.matrix_norm(x.float(), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(shape)


def assign(costs: Sequence[int], ranks: int) -> list[int]:
    """Which rank does which piece of work: the largest first, each to the rank with the least.

    Args:
        costs: what each piece of work takes.
        ranks: how many there are.

    Returns:
        A rank for each piece; the same wherever it is computed.
    """
    loads, owners = [0] * ranks, [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owners[piece] = loads.index(min(loads))
        loads[owners[piece]] += costs[piece]
    return owners


class Muon(FusedAdam):
    """Muon (Jordan et al., 2024) for matrices, AdamW for all other parameters.

    A matrix W with gradient G has the momentum M <- momentum M + (1 - momentum) G. With the
    Newton-Schulz iterations of `orthogonalize`, U = orthogonalize(momentum M + (1 - momentum) G),
    or orthogonalize(M) without `nesterov`, and W <- (1 - lr weight_decay) W - lr s U. The factor s
    depends on the shape alone, see `adjust_lr`.

    Where ranks are joined (torch.distributed), all have the same gradients, and each computes the
    iterations of some matrices, dealt out by their work, then all gather the results. So all ranks
    must make the same steps. Momentum is kept on every rank, so a state dict fits any number.

    Args:
        params: groups, see `muon_groups`. Those with `use_muon` True are of matrices [rows,
            columns], float32, bfloat16 or float16; with `stacked`, of several, one above the other.
            The others are updated by AdamW.
        lr: learning rate; a tensor if it should change between replays of a captured graph.
        betas, eps: of Adam.
        weight_decay: decay rate.
        momentum: decay rate of the matrices' momentum.
        nesterov: look one step ahead.
        ns_steps: Newton-Schulz iterations, 1 or more.
        ns_dtype: what they compute in; auto: bf16 on a GPU, fp32 on a CPU.
        adjust_lr: s, as in `torch.optim.Muon`. match_rms_adamw: 0.2 sqrt(max(rows, columns)), with
            which the update is as large as one of AdamW (Liu et al., "Muon is scalable for LLM
            training", 2025, arXiv:2502.16982), so that both parts have the same learning rate.
            original: sqrt(max(1, rows / columns)), Jordan's.
        adam_lr_share: learning rate of the parameters that are updated by AdamW, as a share of lr.
        skip_non_finite: as in `FusedAdam`.
        distributed: False lets every rank compute all matrices, for ranks whose models differ.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    rounds = False
    takes_chunks = False
    splits_stacked = True
    updates_by = "parameters"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: Literal["auto", "bf16", "fp32"] = "auto",
        adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw",
        adam_lr_share: float = 1.0,
        skip_non_finite: bool = False,
        distributed: bool = True,
    ) -> None:
        check_number("momentum", momentum, below=1)
        check_count("ns_steps", ns_steps)
        if ns_dtype not in ("auto", *_DTYPES):
            raise ValueError(f"ns_dtype: expected auto, bf16 or fp32, got {ns_dtype!r}")
        if adjust_lr not in ("match_rms_adamw", "original"):
            raise ValueError(f"adjust_lr: expected match_rms_adamw or original, got {adjust_lr!r}")
        check_number("adam_lr_share", adam_lr_share)
        self.ns_dtype, self.distributed = ns_dtype, distributed
        options = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": False,
            "decoupled_weight_decay": True,
            "bias_correction": True,
            "master_weights": False,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr": adjust_lr,
            "adam_lr_share": adam_lr_share,
            "use_muon": False,
        }
        params = list(params)
        if not any(isinstance(group, dict) and "use_muon" in group for group in params):
            raise ValueError("params: expected groups with use_muon, see muon_groups, got none")
        super(FusedAdam, self).__init__(params, options, None, skip_non_finite, None)
        for group in self.param_groups:
            for p in group["params"] if group["use_muon"] else ():
                _check_matrix(p)

    def _state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        if not group["use_muon"]:
            return super()._state_of(param, group)
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param.detach(), dtype=torch.float32)
        return state

    def _update_all(self, updates: Sequence[Update]) -> None:
        matrices: list[_Matrix] = []
        for group, parameters, common in updates:
            if group["use_muon"]:
                matrices += self._with_gradients(group, parameters, common)
            else:
                lr = common["lr"] * group["adam_lr_share"]
                self._update(group, parameters, common | {"lr": lr})
        for matrix, direction in zip(matrices, self._directions(matrices), strict=True):
            matrix.apply(direction)

    def _with_gradients(
        self, group: dict[str, Any], parameters: ParameterList, common: dict[str, Any]
    ) -> Iterator[_Matrix]:
        """The matrices of a list, after their gradients were added to their momenta."""
        keep = _is_finite(common["norm"], common["grad_scale"])
        if keep is not None and common["skipped"] is not None:
            common["skipped"].add_(~keep)
        tensors = (parameters.tensors[name] for name in ("param", "grad", "momentum_buffer"))
        for param, grad, buffer in zip(*tensors, strict=True):
            scaled = grad.float() if common["grad_scale"] is None else grad * common["grad_scale"]
            matrix = _Matrix(param, scaled, buffer, group, common["lr"], keep)
            matrix.add_gradient()
            yield matrix

    def _directions(self, matrices: list[_Matrix]) -> list[Tensor]:
        """The orthogonalized momentum of each matrix, the same on all ranks."""
        joined = self.distributed and dist.is_available() and dist.is_initialized()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
        owners = assign([matrix.cost for matrix in matrices], ranks)
        mine = [m for m, owner in zip(matrices, owners, strict=True) if owner == rank]
        found = self._orthogonalized(mine)
        if ranks == 1 or not matrices:
            return found
        lengths = [0] * ranks
        places = []
        for matrix, owner in zip(matrices, owners, strict=True):
            places.append(slice(lengths[owner], lengths[owner] + matrix.param.numel()))
            lengths[owner] += matrix.param.numel()
        first = matrices[0].param
        sent = torch.zeros(max(lengths), dtype=self._dtype(first), device=first.device)
        if found:
            sent[: lengths[rank]] = torch.cat([direction.flatten() for direction in found])
        received = sent.new_empty(ranks, max(lengths))
        # As bytes, which all backends can send.
        all_gather_single(received.view(-1).view(torch.uint8), sent.view(torch.uint8))
        return [
            received[owner, place].view_as(matrix.param)
            for matrix, owner, place in zip(matrices, owners, places, strict=True)
        ]

    def _orthogonalized(self, matrices: list[_Matrix]) -> list[Tensor]:
        """The same for some of them, those of one shape together."""
        found: dict[_Matrix, Tensor] = {}
        alike: dict[tuple[int, ...], list[_Matrix]] = {}
        for matrix in matrices:
            alike.setdefault((*matrix.param.shape, matrix.group["ns_steps"]), []).append(matrix)
        for same in alike.values():
            dtype = self._dtype(same[0].param)
            momenta = torch.stack([m.momentum().to(dtype) for m in same])
            found |= zip(same, orthogonalize(momenta, same[0].group["ns_steps"]), strict=True)
        return [found[m] for m in matrices]

    def _dtype(self, param: Tensor) -> torch.dtype:
        """What the iterations compute in."""
        if self.ns_dtype == "auto":
            return torch.bfloat16 if param.is_cuda else torch.float32
        return _DTYPES[self.ns_dtype]


@dataclass(frozen=True, eq=False)
class _Matrix:
    """A matrix in a step: a parameter, or rows of one."""

    param: Tensor
    grad: Tensor
    """The gradient, float32."""
    buffer: Tensor
    """The momentum, float32."""
    group: dict[str, Any]
    lr: Tensor
    keep: Tensor | None
    """bool []: whether the step changes anything; None: it does."""

    @property
    def cost(self) -> int:
        """Multiplications of the iterations."""
        small, large = sorted(self.param.shape)
        return self.group["ns_steps"] * small**2 * (2 * large + small)

    def add_gradient(self) -> None:
        """Updates the momentum."""
        new = self.buffer.lerp(self.grad, 1 - self.group["momentum"])
        self.buffer.copy_(self._kept(new, self.buffer))

    def momentum(self) -> Tensor:
        """What is orthogonalized."""
        if not self.group["nesterov"]:
            return self.buffer
        return self.grad.lerp(self.buffer, self.group["momentum"])

    def apply(self, direction: Tensor) -> None:
        """Updates the parameter."""
        rows, columns = self.param.shape
        if self.group["adjust_lr"] == "original":
            size = math.sqrt(max(1.0, rows / columns))
        else:
            size = 0.2 * math.sqrt(max(rows, columns))
        decayed = self.param.float() * (1 - self.lr * self.group["weight_decay"])
        self.param.copy_(self._kept(decayed - direction * (self.lr * size), self.param))

    def _kept(self, new: Tensor, old: Tensor) -> Tensor:
        return new if self.keep is None else torch.where(self.keep, new.to(old.dtype), old)


def _is_finite(*values: Tensor | None) -> Tensor | None:
    """Whether all values that are given are finite, bool []; None if none is given."""
    given = [value.isfinite() for value in values if value is not None]
    return torch.stack(given).all() if given else None


def _check_matrix(param: Tensor) -> None:
    if is_dtensor(param):
        raise ValueError("params: expected whole matrices, got a sharded one")
    if param.dim() != 2:
        raise ValueError(
            f"params: expected matrices, got a parameter of shape {tuple(param.shape)}"
        )
