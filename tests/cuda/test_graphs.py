"""Passes from buffers that keep their place, and, on a GPU, captured ones against eager ones.

Without a GPU, the same buffers serve one batch after another, and nothing but their contents may
differ from pass to pass: what a replay needs.
"""

import copy
import dataclasses
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from tests.nn.test_bert import TINY, backward, make_inputs, make_model

pytest.importorskip("tqdm", reason="the trainer needs the extra `pretrain`")

from bert_unpad import ops
from bert_unpad.batch import PackedInputs
from bert_unpad.batch.graph_shapes import GraphShapes
from bert_unpad.nn import BertForPreTraining, PreTrainingOutput
from bert_unpad.optim import FusedAdam
from bert_unpad.pretrain.config import ConfigError, PretrainConfig
from bert_unpad.pretrain.feed.steps import Step, StepCollator
from bert_unpad.pretrain.gradients.cuda_graphs import GraphRunner, StaticPass, check_graphs, sizes
from bert_unpad.pretrain.output.metrics import Window
from bert_unpad.pretrain.parallel import captured, make_way
from bert_unpad.pretrain.parallel.way import seed_step
from bert_unpad.pretrain.ranks import HostSums, Ranks
from bert_unpad.pretrain.run import Run
from tests.support.cuda_checks import GPU_ONLY, raise_if_the_host_waits
from tests.support.seeds import derived

DROPOUT = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
# Twice the share that batches have, so that chance exceeds it nowhere.
SHAPES = GraphShapes(sequences=5, max_seqlen=TINY.max_position_embeddings, masked_share=0.3)
ONE = [1.0, 1.0]


def padded_inputs(lengths: list[int], seed: int = 1) -> PackedInputs:
    return SHAPES.pad(make_inputs(lengths, seed, masked_fraction=0.15))


def scaled(values: list[float], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, device=device)


def gradients(model: BertForPreTraining) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters()]


class Uncaptured:
    """As `GraphRunner`, but a replay runs the pass anew."""

    def __init__(self, model: BertForPreTraining) -> None:
        self.model = model
        self.passes: dict[tuple[int, ...], StaticPass] = {}

    def __call__(
        self, inputs: PackedInputs, scale: Tensor, first: bool = False
    ) -> PreTrainingOutput:
        keys = self.model.bert.draw_rng_keys(torch.device("cpu"))
        key = sizes(inputs)
        if key not in self.passes:
            self.passes[key] = StaticPass(self.model, nullcontext(), inputs, keys)
        self.passes[key].load(inputs, keys, scale)
        return self.passes[key].run(first)


@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_serve_every_batch_of_their_sizes(in_place: bool) -> None:
    """Weight gradients written within products, as the trainer lets them, are the same bits too:
    what was there before is forgotten."""
    model = make_model(**DROPOUT)
    if in_place:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                ops.accumulate_in_place(module.weight)
    batches = [
        padded_inputs([12, 9, 0, 5, 1]),
        padded_inputs([24, 24, 3], 2),
        padded_inputs([7, 24]),
    ]
    assert len({sizes(inputs) for inputs in batches}) == 1
    run = Uncaptured(model)
    for number, inputs in enumerate([*batches, batches[0]]):
        torch.manual_seed(derived(number))
        out, want = backward(model, inputs)
        model.zero_grad()
        if in_place and number > 0:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, torch.nan)
        torch.manual_seed(derived(number))
        got = run(inputs, scaled(ONE), first=in_place)
        for a, b in zip(got, out, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(gradients(model), want.values(), strict=True):
            assert torch.equal(a, b)
    assert len(run.passes) == 1


def test_random_numbers_are_an_input() -> None:
    """Same buffers, same batch: masks follow the keys given, and the generator is left alone."""
    model, inputs = make_model(**DROPOUT), padded_inputs([12, 9, 3])
    keys = [model.bert.draw_rng_keys(torch.device("cpu")) for _ in range(2)]
    static = StaticPass(model, nullcontext(), inputs, keys[0])
    state = torch.get_rng_state()
    losses = []
    for given in (keys[0], keys[1], keys[0]):
        static.load(inputs, given, scaled(ONE))
        losses.append(static.run().mlm_loss_sum.item())
    assert losses[0] == losses[2] != losses[1]
    assert torch.equal(torch.get_rng_state(), state)
    # They are the ones that the model would have drawn.
    torch.manual_seed(derived(8))
    expected = model(inputs).mlm_loss_sum
    torch.manual_seed(derived(8))
    static.load(inputs, model.bert.draw_rng_keys(torch.device("cpu")), scaled(ONE))
    assert torch.equal(static.run().mlm_loss_sum, expected.detach())


def test_a_pass_refuses_other_sizes() -> None:
    model, inputs = make_model(**DROPOUT), padded_inputs([12, 9])
    keys = model.bert.draw_rng_keys(torch.device("cpu"))
    static = StaticPass(model, nullcontext(), inputs, keys)
    with pytest.raises(ValueError, match="inputs: expected sizes"):
        static.load(make_inputs([12, 9]), keys, scaled(ONE))
    batch = dataclasses.replace(inputs.batch, max_seqlen=23)
    with pytest.raises(ValueError, match="inputs: expected sizes"):
        static.load(dataclasses.replace(inputs, batch=batch), keys, scaled(ONE))
    with pytest.raises(ValueError, match=r"rng_keys: expected keys, .* got None"):
        static.load(inputs, None, scaled(ONE))


def make_step(padded: bool) -> Step:
    """Three passes, one of them without tokens."""
    batches = [make_inputs(lengths, 3, masked_fraction=0.15) for lengths in ([9, 4], [20, 7], [])]
    collate = StepCollator(
        lambda numbers, epoch, progress: batches[numbers[0]], 3, SHAPES if padded else None
    )
    return collate(torch.arange(3).numpy(), 0, 0.0)


def test_the_trainer_counts_and_sums_the_same(monkeypatch) -> None:
    """Up to rounding: a product of few rows may take another routine, and sums have more zeros."""
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    results = []
    monkeypatch.setattr(captured, "GraphRunner", lambda model, autocast: Uncaptured(model))
    for graphs in (False, True):
        model = make_model(**DROPOUT)
        step = make_step(padded=graphs)
        window = Window(ranks)
        seed_step(1, 2, 0)
        way = make_way(Run(PretrainConfig(cuda_graphs=graphs), ranks, model))
        way.make_optimizer()
        way.begin()
        counts = HostSums(ranks, step.counts)
        window.add_losses(way.accumulate(step, counts))
        results.append((step.counts, window.fold(), gradients(model)))
    (counts, sums, want), (padded_counts, padded_sums, got) = results
    assert counts == padded_counts
    # Two layers, each of some hundred roundings on the way to a number and back.
    assert sums == pytest.approx(padded_sums, rel=1e-5)
    for a, b in zip(got, want, strict=True):
        assert (a - b).abs().max() <= 3e-5 * b.abs().max()


def make_config(**changes) -> PretrainConfig:
    config = PretrainConfig(cuda_graphs=True)
    config.batching.batch_size_per_rank, config.schedule.total_steps = 4, 1
    for name, value in changes.items():
        setattr(config, name, value)
    config.clip = dataclasses.replace(config.clip, mode=changes.get("mode", "after"))
    return config


def test_what_cannot_be_captured_is_refused() -> None:
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match="cuda_graphs: expected false with device cpu, got true"):
        check_graphs(make_config(), Ranks(0, 1, torch.device("cpu"), None))
    check_graphs(make_config(mode="bucket"), Ranks(0, 2, cuda, None))
    check_graphs(make_config(mode="bucket"), Ranks(0, 1, cuda, None))
    with pytest.raises(ConfigError, match="cuda_graphs: expected false with compile"):
        make_config(compile=True).validate()
    with pytest.raises(ValueError, match="model: expected one on a GPU, got one on cpu"):
        GraphRunner(make_model(), nullcontext())


class TestOnAGpu:
    pytestmark = GPU_ONLY

    @pytest.mark.parametrize("recompute", ["none", "gelu", "layer"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_replayed_pass_equals_the_eager_one(self, dtype: torch.dtype, recompute: str) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        autocast = torch.autocast(
            "cuda", dtype, enabled=dtype != torch.float32, cache_enabled=False
        )
        model = make_model(hidden_size=64, num_attention_heads=2, **DROPOUT).to(device)
        model.bert.encoder.recompute = recompute
        lengths = [[12, 9, 0, 5, 1], [24, 24, 3], [24] * 5, [], [1], [24, 24, 3]]
        batches = [padded_inputs(given, seed) for seed, given in enumerate(lengths)]
        scale = scaled([0.5, 0.25], device)
        expected = []
        for number, inputs in enumerate(batches):
            torch.manual_seed(derived(number))
            model.zero_grad()
            with autocast:
                out = model(inputs.to(device))
            (out.mlm_loss_sum * scale[0] + out.nsp_loss_sum * scale[1]).backward()
            expected.append(([value.detach().clone() for value in out], gradients(model)))
        del out  # its graph's ends at the parameters belong to this stream
        runner = GraphRunner(model, autocast)
        for _ in range(2):  # with captures between replays, and then replays alone
            for number, inputs in enumerate(batches):
                torch.manual_seed(derived(number))
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad.fill_(torch.nan)
                got = runner(inputs.pin_memory(), scale, first=True)
                for a, b in zip(got, expected[number][0], strict=True):
                    assert torch.equal(a, b)
                for a, b in zip(gradients(model), expected[number][1], strict=True):
                    assert torch.equal(a, b)
        assert runner.graphs == len({sizes(inputs) for inputs in batches})

    def test_replays_accumulate_and_draw_fresh_masks(self) -> None:
        model = make_model(**DROPOUT).cuda()
        runner = GraphRunner(model, nullcontext())
        inputs, scale = padded_inputs([12, 9, 3]).pin_memory(), scaled(ONE, "cuda")
        torch.manual_seed(derived(0))
        losses = [runner(inputs, scale).mlm_loss_sum.item() for _ in range(3)]
        assert len(set(losses)) == 3
        summed = gradients(model)
        model.zero_grad(set_to_none=False)
        torch.manual_seed(derived(0))
        parts = []
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            runner(inputs, scale)
            parts.append(gradients(model))
        for total, *each in zip(summed, *parts, strict=True):
            torch.testing.assert_close(total, sum(each), rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("fp8", [False, True])
    def test_weights_that_the_optimizer_rounds(self, fp8) -> None:
        """A replay reads what the last update, or something else, has made of the weights."""
        if fp8 and torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("needs a GPU of compute capability 8.9")
        model = make_model().cuda()
        model.bert.encoder.fp8 = fp8
        weights = model.bert.encoder.fp8_weights
        if not fp8:
            weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        optimizer = FusedAdam(model.parameters(), lr=0.01)
        optimizer.keep_rounded(weights, torch.float8_e4m3fn if fp8 else torch.bfloat16)
        autocast = torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
        runner = GraphRunner(model, autocast)
        inputs, scale = padded_inputs([12, 9, 3]).pin_memory(), scaled(ONE, "cuda")
        for number in range(4):
            got = runner(inputs, scale, first=True).mlm_loss_sum.clone()
            with autocast, torch.no_grad():
                plain = copy.deepcopy(model)(inputs.to("cuda"))  # its weights have no copies
            assert torch.equal(got, plain.mlm_loss_sum)
            optimizer.step()
            if number == 1:
                with torch.no_grad():
                    weights[0].mul_(0.5)
        assert runner.graphs == 1

    def test_a_replay_does_not_make_the_host_wait(self) -> None:
        model = make_model(**DROPOUT).cuda()
        runner = GraphRunner(model, nullcontext())
        inputs, scale = padded_inputs([12, 9, 3]).pin_memory(), scaled(ONE, "cuda")
        runner(inputs, scale)
        with raise_if_the_host_waits():
            out = runner(inputs, scale)
        assert out.mlm_loss_sum.isfinite()

    def test_a_replaced_gradient_is_refused(self) -> None:
        model = make_model().cuda()
        runner = GraphRunner(model, nullcontext())
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"\.grad was replaced"):
            runner(padded_inputs([3]).pin_memory(), scaled(ONE, "cuda"))
