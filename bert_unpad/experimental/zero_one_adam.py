"""ZeroOneAdam: Adam whose ranks exchange one bit a value, and not in every step."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bert_unpad.ops.optim import multi_tensor_l2norm
from bert_unpad.optim.checks import check_count, is_count
from bert_unpad.optim.one_bit import OneBitOptimizer, Scale, Segment
from bert_unpad.optim.parameter_lists import scalar


class ZeroOneAdam(OneBitOptimizer):
    """0/1 Adam (Lu et al., ICLR 2023, arXiv:2202.06009) with AdamW's weight decay.

    - The variance v changes only in the steps T_v, which become rare: the j-th and the next one are
      2^floor(j / var_update_scaler) apart, and there are none after `freeze_step` steps. In these,
      gradients are averaged as they are, and the step is Adam's.
    - In all other steps each rank makes an Adam step of its own, with its own gradient and the v
      there is, and adds lr * m to u.
    - In the steps T_u the ranks average u, with one bit a value and error feedback
      (`distributed.OneBitAllreduce`): from the weights of the last such step, w = w - u / (sqrt(v)
      + eps) and m = u / sum of lr since then. T_u is every step up to `freeze_step`, then every
      2^floor(i / local_step_scaler)-th after i more steps, at most `local_step_clipper` apart.

    The schedules are those of the authors' implementation. As there, and unlike in the paper's
    listing, a step of T_v needs no exchange of u, since all ranks have the same gradient. A step
    with a learning rate of 0 exchanges nothing; the next one does.

    Between steps of T_u the ranks' weights and momenta differ. `synchronise` averages both as they
    are: call it before an evaluation, before saving, and at the end. There is no bias correction.
    What `OneBitAdam` says about gradients, weights that had none, and one rank holds here too.

    Args:
        params, lr, betas, eps, weight_decay, master_weights, skip_non_finite, group, scale: as in
            `OneBitAdam`.
        freeze_step: steps in which the variance may change; 1 or more.
        var_update_scaler: updates of the variance after which the steps between them double.
        local_step_scaler: steps, after `freeze_step`, after which the steps between two exchanges
            double.
        local_step_clipper: most steps between two exchanges, a power of 2.

    Raises:
        ValueError: a number is out of range; the message names it.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        freeze_step: int = 1000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        master_weights: bool = False,
        skip_non_finite: bool = False,
        group: dist.ProcessGroup | None = None,
        scale: Scale = "buffer",
    ) -> None:
        check_count("var_update_scaler", var_update_scaler)
        check_count("local_step_scaler", local_step_scaler)
        if not (is_count(local_step_clipper) and local_step_clipper.bit_count() == 1):
            raise ValueError(
                f"local_step_clipper: expected a power of 2, got {local_step_clipper!r}"
            )
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler, self.local_step_clipper = local_step_scaler, local_step_clipper
        # By segment, since the last exchange: weights then, sum of lr, what decay leaves of 1.
        self._anchors: list[list[Tensor]] = []
        self._rates: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._last_guard: Tensor | None = None  # of that exchange; None after a step without one
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options["master_weights"] = master_weights
        super().__init__(params, options, freeze_step, skip_non_finite, group, scale)

    @property
    def averages_gradients(self) -> bool:
        """Whether the next `step` takes gradients averaged over the ranks, not each rank's own."""
        step = self.updates
        if step >= self.freeze_step:
            return False
        # Steps 2^i apart begin at var_update_scaler * (2^i - 1).
        power = (step // self.var_update_scaler + 1).bit_length() - 1
        return (step - self.var_update_scaler * (2**power - 1)) % 2**power == 0

    @property
    def exchanges(self) -> bool:
        """Whether the next `step`, if it takes each rank's own gradients, ends with an exchange."""
        later = max(self.updates - self.freeze_step, 0) // self.local_step_scaler
        apart = min(2 ** min(later, 62), self.local_step_clipper)
        moves = any(float(group["lr"]) > 0 for group in self.param_groups)
        return moves and (self.updates + 1) % apart == 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class or of `torch.optim.AdamW`; see `FusedAdam`."""
        super().load_state_dict(state_dict)
        self._forget_interval()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that require a gradient; see `OneBitAdam`."""
        if self.averages_gradients:  # for which all ranks must have the same momenta
            self.synchronise()
        return super().step(closure)

    @torch.no_grad()
    def synchronise(self) -> None:
        """Averages weights and momenta over the ranks as they are; all ranks must call it.

        It ends the steps since the last exchange early. Errors stay as they are. Where the ranks
        cannot differ, it does nothing.
        """
        if not self._anchors:
            return
        # The last guard is the same on all ranks. This waits for the device.
        if self._last_guard is None or not bool(self._last_guard.isfinite()):
            self._average_exactly(self._weights)
            self._average_exactly(lambda segment: self._states(segment, "exp_avg"))
            for segment in self._segments:
                params = [param.detach() for param in segment.params]
                torch._foreach_copy_(params, self._weights(segment))
                torch.autograd.graph.increment_version(segment.params)
        self._forget_interval()

    def _average_exactly(self, tensors_of: Callable[[Segment], list[Tensor]]) -> None:
        assert self._exchange is not None
        if self._exchange.ranks == 1:
            return
        for segment in self._segments:
            torch._foreach_copy_(segment.views, tensors_of(segment))
        dist.all_reduce(self._flat, group=self._ranks)
        self._flat.div_(self._exchange.ranks)
        for segment in self._segments:
            torch._foreach_copy_(tensors_of(segment), segment.views)

    def _forget_interval(self) -> None:
        self._anchors, self._rates, self._kept = [], [], []
        self._last_guard = None

    def _own_step(self) -> None:
        if self.exchanges:
            self._step_together()
        else:
            self._step_alone()

    def _step_alone(self) -> None:
        if not self._anchors:
            for segment in self._segments:
                self._anchors.append([weight.clone() for weight in self._weights(segment)])
                self._rates.append(self._flat.new_zeros(()))
                self._kept.append(self._flat.new_ones(()))
        self._last_guard = None
        gradients = [
            [grad.contiguous() for grad in self._own_gradients(segment)]
            for segment in self._segments
        ]
        found = getattr(self, "found_inf", None)
        if found is None:
            norm = multi_tensor_l2norm([grad for grads in gradients for grad in grads])[0]
        else:
            norm = torch.where(found.reshape(()).to(self._flat.device) > 0, torch.inf, 0.0)
        for number, (segment, grads) in enumerate(zip(self._segments, gradients, strict=True)):
            lr, decay = scalar(segment.group["lr"], norm.device), segment.group["weight_decay"]
            self._apply(
                *(segment, grads, lr, norm),
                weight_decay=decay,
                averaged=False,
                grad_scale=self._inverse_scale(),
            )
            # Also where this rank leaves the step out: they must be the same on all ranks.
            self._rates[number] += lr
            self._kept[number] *= 1.0 - lr * decay

    def _step_together(self) -> None:
        self._fill_with_momenta()
        rates, kept = [], []
        for number, segment in enumerate(self._segments):
            lr = scalar(segment.group["lr"], self._flat.device)
            keep = 1.0 - lr * segment.group["weight_decay"]
            torch._foreach_mul_(segment.views, lr)
            if self._anchors:
                self._add_own_steps(segment, self._anchors[number], self._kept[number], keep)
                lr, keep = lr + self._rates[number], keep * self._kept[number]
            rates.append(lr)
            kept.append(keep)
        guard = self._average()
        for number, (segment, rate) in enumerate(zip(self._segments, rates, strict=True)):
            if float(segment.group["lr"]) == 0 and float(rate) == 0:
                continue  # the buffer holds nothing of it, and its momentum stays
            if self._anchors:
                for weight, anchor in self._with_anchors(segment, number):
                    weight.copy_(torch.where(guard.isfinite(), anchor * kept[number], weight))
            self._apply(
                *(segment, segment.views, rate, guard),
                weight_decay=0.0 if self._anchors else segment.group["weight_decay"],
                grad_scale=torch.where(rate > 0, rate.reciprocal(), 0.0),
            )
        if self._anchors:
            self._begin_interval(guard)

    def _add_own_steps(
        self, segment: Segment, anchors: list[Tensor], kept: Tensor, keep: Tensor
    ) -> None:
        """Adds u, the sum of lr * m of the steps since the last exchange, to the flat buffer.

        It is sqrt(v) + eps times what the weights have moved by, so no sum has to be kept. With
        weight decay, what an early step added has decayed with the weights since.
        """
        lists = (anchors, self._weights(segment), self._states(segment, "exp_avg_sq"))
        for view, anchor, weight, variance in zip(segment.views, *lists, strict=True):
            moved = (anchor.float() * kept - weight.float()) * keep
            view.addcmul_(moved, variance.sqrt().add_(segment.group["eps"]))

    def _with_anchors(self, segment: Segment, number: int) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._weights(segment), self._anchors[number], strict=True)

    def _begin_interval(self, guard: Tensor) -> None:
        """Takes the weights as those of the last exchange, unless that was left out."""
        self._last_guard, done = guard, guard.isfinite()
        for number, segment in enumerate(self._segments):
            for weight, anchor in self._with_anchors(segment, number):
                anchor.copy_(torch.where(done, weight, anchor))
            self._rates[number] = torch.where(done, 0.0, self._rates[number])
            self._kept[number] = torch.where(done, 1.0, self._kept[number])
