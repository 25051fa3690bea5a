"""Adam, LAMB, LANS and StableAdamW in float64, as in their papers, and tensors to run on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bert_unpad import ops
from tests.support.seeds import derived


@dataclass(frozen=True)
class Rule:
    """One way to update; `kind` is adam, lamb or stable."""

    kind: str
    lr: float = 0.01
    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-6
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    grad_scale: float = 1.0
    decoupled: bool = True
    bias_correction: bool = True
    grad_averaging: bool = True
    trust_ratio: bool = True
    nesterov: bool = False
    maximize: bool = False


def _ratio(weight: Tensor, update: Tensor) -> float:
    a, b = weight.norm().item(), update.norm().item()
    return a / b if a > 0 and b > 0 else 1.0


def rms(gradient: Tensor, second: Tensor, eps: float) -> float:
    """StableAdamW's RMS of a gradient over its second moment, without bias."""
    return (gradient.square() / second.clamp(min=eps**2)).mean().sqrt().item()


class Truth:
    """Parameters and moments in float64."""

    def __init__(self, params: Sequence[Tensor], rule: Rule) -> None:
        self.params = [p.detach().double() for p in params]
        self.first = [torch.zeros_like(p) for p in self.params]
        self.second = [torch.zeros_like(p) for p in self.params]
        self.rule, self.steps = rule, 0

    def step(self, grads: Sequence[Tensor], rule: Rule | None = None) -> None:
        rule = rule or self.rule
        self.steps += 1
        wide = [g.detach().double() * rule.grad_scale for g in grads]
        if rule.max_grad_norm:
            total = torch.cat([g.flatten() for g in wide]).norm()
            wide = [g / max(1.0, total.item() / rule.max_grad_norm) for g in wide]
        for numbers in range(len(wide)):
            self._update(numbers, -wide[numbers] if rule.maximize else wide[numbers], rule)

    def _update(self, i: int, g: Tensor, rule: Rule) -> None:
        w, (beta1, beta2), decay = self.params[i], rule.betas, rule.weight_decay
        if rule.nesterov:
            g = g / g.norm() if g.norm() > 0 else g
        if rule.kind == "adam" and not rule.decoupled:
            g = g + decay * w
        self.first[i] = beta1 * self.first[i] + (1 - beta1 if rule.grad_averaging else 1) * g
        self.second[i] = beta2 * self.second[i] + (1 - beta2) * g * g
        correct1, correct2 = 1.0, 1.0
        if rule.bias_correction:
            correct1, correct2 = 1 - beta1**self.steps, 1 - beta2**self.steps
        second = self.second[i] / correct2
        root = second.sqrt() + rule.eps
        update = self.first[i] / correct1 / root
        if rule.kind == "stable":
            lr = rule.lr / max(1.0, rms(g, second, rule.eps))
            self.params[i] = w - lr * decay * w - lr * update
            return
        if rule.kind == "adam":
            if rule.decoupled:
                w = w - rule.lr * decay * w
            self.params[i] = w - rule.lr * update
            return
        update = update + decay * w
        ratio = _ratio(w, update) if rule.trust_ratio else 1.0
        if not rule.nesterov:
            self.params[i] = w - rule.lr * ratio * update
            return
        look = g / root + decay * w
        look_ratio = _ratio(w, look) if rule.trust_ratio else 1.0
        step = beta1 * ratio * update + (1 - beta1) * look_ratio * look
        self.params[i] = w - rule.lr * step


@dataclass
class State:
    """What the operators work on."""

    params: list[Tensor]
    masters: list[Tensor]
    start: list[Tensor]
    exp_avgs: list[Tensor] = field(init=False)
    exp_avg_sqs: list[Tensor] = field(init=False)
    steps: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.exp_avgs = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]
        self.exp_avg_sqs = [torch.zeros_like(p, dtype=torch.float32) for p in self.params]
        self.steps = [torch.zeros((), device=p.device) for p in self.params]

    def everything(self) -> list[Tensor]:
        return [*self.steps, *self.exp_avgs, *self.exp_avg_sqs, *self.masters, *self.params]

    def step(
        self,
        grads: Sequence[Tensor],
        rule: Rule,
        *,
        skipped: Tensor | None = None,
        check: bool = False,
        halves: bool = False,
    ) -> None:
        """`check`: hands in the norm, which says whether the gradient is finite."""
        device = self.params[0].device
        norm, each = ops.multi_tensor_l2norm(grads)
        wanted = check or rule.max_grad_norm > 0
        common = {
            "lr": torch.tensor(rule.lr, device=device),
            "masters": self.masters,
            "grad_scale": torch.tensor(rule.grad_scale, device=device),
            "norm": norm if wanted else None,
            "skipped": skipped,
            "betas": rule.betas,
            "eps": rule.eps,
            "weight_decay": rule.weight_decay,
            "max_grad_norm": rule.max_grad_norm,
            "bias_correction": rule.bias_correction,
            "maximize": rule.maximize,
        }
        lists = (self.params, grads, self.exp_avgs, self.exp_avg_sqs)
        if rule.kind == "adam":
            ops.adam_(*lists, self.steps, decoupled=rule.decoupled, **common)
        elif rule.kind == "stable":
            del common["bias_correction"]  # as in the paper, always
            self._step_stable(lists, common, halves)
        elif not halves:
            ops.lamb_(
                *(*lists, self.steps),
                grad_norms=each if rule.nesterov else None,
                grad_averaging=rule.grad_averaging,
                trust_ratio=rule.trust_ratio,
                nesterov=rule.nesterov,
                **common,
            )
        else:
            op = torch.ops.bert_unpad
            sums, coefficients = op.lamb_moments_(
                *(*lists, self.masters, self.steps, common["lr"], common["grad_scale"]),
                *(common["norm"], each if rule.nesterov else None, skipped, *rule.betas, rule.eps),
                *(rule.weight_decay, rule.max_grad_norm, rule.grad_averaging),
                *(rule.bias_correction, rule.nesterov, rule.maximize),
            )
            op.lamb_apply_(
                *(*lists, self.masters, sums, coefficients, rule.betas[0], rule.eps),
                *(rule.weight_decay, rule.trust_ratio, rule.nesterov),
            )

    def _step_stable(self, lists: tuple, common: dict, halves: bool) -> None:
        if not halves:
            ops.stable_adamw_(*lists, self.steps, **common)
            return
        op = torch.ops.bert_unpad
        sums, coefficients = op.stable_adamw_moments_(
            *(*lists, self.masters, self.steps, common["lr"], common["grad_scale"]),
            *(common["norm"], common["skipped"], *common["betas"], common["eps"]),
            *(common["weight_decay"], common["max_grad_norm"], common["maximize"]),
        )
        op.stable_adamw_apply_(
            *(*lists, self.masters, sums, coefficients, common["eps"], common["weight_decay"])
        )


def draw_state(
    sizes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    *,
    masters: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> State:
    """Normal weights; `masters` keeps them in float32 too."""
    generator = torch.Generator().manual_seed(derived(seed))
    weights = [torch.randn(size, generator=generator).to(device) for size in sizes]
    params = [w.to(dtype, copy=True) for w in weights]
    return State(params, weights if masters else [], [p.clone() for p in params])
