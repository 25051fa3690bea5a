"""A training step never makes the host wait for the device, and adds nothing up by float atomics.

On a GPU, PyTorch itself raises where it would wait. Without one, the step runs on the meta device,
whose tensors hold no values: whatever looks at one raises, and a dispatch mode sees every copy
between host and device. A copy from the host has to be asked for as non_blocking; that its source
is page-locked, and the optimizer (fused AdamW has no meta kernels), only the GPU test sees.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.cuda_checks import GPU_ONLY, raise_if_the_host_waits

pytest.importorskip("tqdm", reason="the trainer needs the extra `pretrain`")

from bert_unpad.batch import PackedInputs, VarlenBatch, pad, unpad
from bert_unpad.nn import BertConfig, BertForPreTraining
from bert_unpad.pretrain.config import OptimizerConfig, PretrainConfig
from bert_unpad.pretrain.feed.steps import Step, count_labels
from bert_unpad.pretrain.output.metrics import Window
from bert_unpad.pretrain.parallel import make_way
from bert_unpad.pretrain.parallel.way import seed_step
from bert_unpad.pretrain.ranks import HostSums, Ranks
from bert_unpad.pretrain.run import Run
from tests.support.seeds import derived

LENGTHS = [[40, 17, 0, 5], [33, 8], []]  # of a step's passes


def tiny_model(recompute: str) -> BertForPreTraining:
    torch.manual_seed(derived(0))
    model = BertForPreTraining(
        BertConfig(
            vocab_size=99,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=128,
            max_position_embeddings=64,
        )
    )
    model.bert.encoder.recompute = recompute
    return model


def host_inputs(lengths: list[int]) -> PackedInputs:
    batch = VarlenBatch.from_lengths(lengths)
    masked = torch.arange(0, batch.total, 6)
    return PackedInputs.build(
        batch,
        torch.arange(batch.total) % 99,
        masked_positions=masked,
        masked_labels=masked % 99,
        next_sentence_labels=torch.arange(len(lengths)) % 2,
    )


def host_step() -> Step:
    passes = tuple(host_inputs(lengths) for lengths in LENGTHS)
    labels = np.array([count_labels(inputs) for inputs in passes]).sum(0)
    counts = {"masked": float(labels[0]), "pairs": float(labels[1])}
    return Step(passes, 0, np.arange(sum(map(len, LENGTHS))), counts)


# What PyTorch computes on a GPU with float atomics, the same sum with other bits in every run.
ATOMIC = {
    "_index_put_impl_",
    "embedding_dense_backward",
    "index_add",
    "index_add_",
    "index_put",
    "index_put_",
    "scatter_add",
    "scatter_add_",
}


class NoWaiting(TorchDispatchMode):
    """Raises at a copy between host and device that the host would wait for, and at atomics."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.overloadpacket.__name__ in ATOMIC:
            raise RuntimeError(f"adds up by float atomics: {function}")
        result = function(*args, **kwargs)
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[1] if function is torch.ops.aten.copy_.default else args[0]
            same = source.device.type == result.device.type
            positional = args[2] if len(args) > 2 else False
            if not (same or kwargs.get("non_blocking", positional)):
                raise RuntimeError(f"blocking copy: {source.device} to {result.device}")
        return result


@pytest.mark.parametrize("recompute", ["none", "gelu", "layer"])
def test_no_step_looks_at_the_device(recompute: str) -> None:
    ranks = Ranks(0, 1, torch.device("meta"), None)
    model = tiny_model(recompute).to("meta")
    way = make_way(Run(PretrainConfig(), ranks, model))
    way.optimizer = torch.optim.SGD(model.parameters())
    way.begin()
    window, step = Window(ranks), host_step()
    counts = HostSums(ranks, step.counts)
    with NoWaiting():
        window.add_losses(way.accumulate(step, counts))
        gradient = way.finish()
        window.add_gradient(gradient)
    assert gradient.norm.device.type == gradient.finite.device.type == "meta"
    assert all(p.grad.device.type == "meta" for p in model.parameters())


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.add(torch.ones(3).to(x.device)),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.copy_(torch.ones(3), False),
    ],
)
def test_looks_at_the_device_are_found(look) -> None:
    with NoWaiting(), pytest.raises((RuntimeError, NotImplementedError)):
        look(torch.empty(3, device="meta"))


def test_padding_and_unpadding_copy_rows() -> None:
    batch = host_inputs([3, 0, 5]).batch.to("meta")
    x = torch.empty(3, 5, 2, device="meta", requires_grad=True)
    with NoWaiting():
        pad(unpad(x, batch), batch).sum().backward()
    assert x.grad.shape == x.shape
    with NoWaiting(), pytest.raises(RuntimeError, match="float atomics"):
        x.flatten(0, 1).index_select(0, batch.indices).sum().backward()


class TestOnAGpu:
    pytestmark = GPU_ONLY

    @pytest.mark.parametrize("recompute", ["none", "gelu", "layer"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", ["adamw", "fused_adam", "lamb"])
    def test_a_step_does_not_make_the_host_wait(
        self, name: str, dtype: torch.dtype, recompute: str
    ) -> None:
        ranks = Ranks(0, 1, torch.device("cuda", torch.cuda.current_device()), None)
        model = tiny_model(recompute).to(ranks.device)
        precision = "fp32" if dtype == torch.float32 else "bf16"
        config = PretrainConfig(precision=precision, optimizer=OptimizerConfig(name=name))
        way = make_way(Run(config, ranks, model))
        way.make_optimizer()
        way.begin()
        window, step = Window(ranks), host_step().pin_memory()
        before = [p.detach().clone() for p in model.parameters()]

        def update(number: int) -> tuple[HostSums, Tensor]:
            seed_step(1, number, 0)
            counts = HostSums(ranks, step.counts)
            window.add_losses(way.accumulate(step, counts))
            gradient = way.finish()
            window.add_gradient(gradient)
            way.step(gradient.finite, 1e-3 / (number + 1))
            return counts, gradient.norm

        update(0)  # loads libraries and makes the optimizer's state
        with raise_if_the_host_waits():
            counts, norm = update(1)
        assert counts.on_host() == step.counts
        assert norm.isfinite()
        sums = window.fold()
        assert sums["mlm_loss"] > 0
        assert sums["clippable"] == 2
        assert sums["skipped"] == 0
        assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

    def test_waiting_is_found(self) -> None:
        x = torch.ones(3, device="cuda")
        with raise_if_the_host_waits(), pytest.raises(RuntimeError, match="synchroniz"):
            x.sum().item()
