# %% [markdown]
# # Where a step's time goes, and what a cluster would do
#
# Before machines are rented: what does a training step consist of, who waits for whom when many
# ranks share it, and which machines would do how much for what price? This page measures a step
# here, then simulates a cluster and plans a run. **What is simulated is not measured.**

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

from bert_unpad import plan
from bert_unpad.batch import PackedInputs, VarlenBatch
from bert_unpad.data.sampling.histogram import sample_lengths, wikipedia_lengths
from bert_unpad.nn import PRESETS, BertConfig, EncoderForPreTraining
from bert_unpad.optim import FusedAdam
from bert_unpad.simulate import Cluster, ComputeCost, StepModel, scaling_curve, simulate

_ = torch.manual_seed(0)

# %% [markdown]
# ## One step here
#
# A small BERT, and batches whose lengths are those of Wikipedia: a quarter of the texts are cut at
# 512 tokens, the others have any length.

# %%
sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
model = EncoderForPreTraining(BertConfig(vocab_size=4096, intermediate_size=512, **sizes))
optimizer = FusedAdam(model.parameters(), lr=1e-4, max_grad_norm=1.0)


def step(lengths: list[int]) -> dict[str, float]:
    """Trains on one batch; returns the seconds of each part."""
    batch = VarlenBatch.from_lengths(lengths)
    ids = torch.randint(5, 4096, (batch.total,))
    masked = torch.arange(3, batch.total, 7)
    inputs = PackedInputs.build(
        batch=batch,
        input_ids=ids,
        token_type_ids=torch.zeros_like(ids),
        masked_positions=masked,
        masked_labels=ids[masked],
        next_sentence_labels=torch.zeros(len(lengths), dtype=torch.int64),
    )
    times = [time.perf_counter()]
    out = model(inputs)
    times.append(time.perf_counter())
    (out.mlm_loss_sum / len(masked)).backward()
    times.append(time.perf_counter())
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.perf_counter())
    return dict(zip(("forward", "backward", "update"), np.diff(times), strict=True))


texts = [int(length) for length in sample_lengths(16, seed=0, histogram=wikipedia_lengths())]
rounds = [step(texts) for _ in range(6)][1:]  # the first one allocates
parts = {name: float(np.median([r[name] for r in rounds])) for name in rounds[0]}
figure, axes = plt.subplots(figsize=(6, 2.2))
axes.barh(list(parts), [1000 * seconds for seconds in parts.values()])
axes.invert_yaxis()
axes.set_xlabel("milliseconds of a step")
figure.tight_layout()

# %% [markdown]
# ## What a batch costs, by its lengths
#
# The time of a batch is well described by `fixed + linear * sum(s) + quadratic * sum(s^2)` over its
# lengths `s`: linear layers, and attention. A few timings give the three numbers.

# %%
batches = [[64] * 8, [128] * 8, [256] * 8, [512] * 8, [32] * 64, texts]
seconds = [min(sum(step(batch).values()) for _ in range(5)) for batch in batches]
cost = ComputeCost.fit(batches, seconds)
for batch, measured in zip(batches, seconds, strict=True):
    print(f"{sum(batch):6} tokens: {measured:.3f} s, by the model {cost.seconds(batch):.3f} s")

# %% [markdown]
# ## Who waits for whom
#
# In a step of many ranks all wait for the one with the most work. Dealt at random, one rank has the
# long texts. The balancer of the trainer deals equal work, without moving any data. Left: the steps
# of an epoch of 200,000 Wikipedia texts on 64 ranks, 8 to a node, by BERT-large. Right: the share
# of time in which nobody waits, for a rank or for the network, with more ranks.

# %%
lengths = sample_lengths(200_000, seed=0, histogram=wikipedia_lengths())
large = StepModel()  # BERT-large on 8 cards a node
results = {
    name: simulate(lengths, ranks=64, batch=16, strategy=name, model=large)
    for name in ("random", "stratified")
}
assert results["stratified"].efficiency > results["random"].efficiency
curve = scaling_curve(
    wikipedia_lengths(), 16, list(results), ranks=[8, 32, 128, 512], pool_steps=16, model=large
)
edges = np.linspace(0.5, 1.01, 52)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for name, result in results.items():
    left.hist(result.per_step, bins=edges, label=f"{name}: mean {result.efficiency:.3f}")
    points = [(p.ranks, p.step_time.scaling_efficiency) for p in curve if p.strategy == name]
    right.plot(*zip(*points, strict=True), marker="o", label=name)
left.set(xlabel="mean work / greatest work of a rank", ylabel="steps")
right.set(xlabel="ranks", ylabel="throughput / ideal", xscale="log", ylim=(0, 1.02))
left.legend()
figure.tight_layout()

# %% [markdown]
# ## Which machines
#
# A plan tries the ways to share the memory, to send gradients and to compute again, keeps those
# that fit, and takes the fastest. Here: BERT-large for 100,000 updates of 2,048 sequences, on nodes
# of 8 A100 at 2.50 an hour each, joined by 100 Gbit/s.

# %%
config = BertConfig(**PRESETS["bert-large"])
work = plan.Workload(config, wikipedia_lengths(), global_batch=2048, updates=100_000)
device = plan.card_device(plan.CARDS["a100-80"], work)
planner = plan.Planner(work, device, Cluster(8, network=plan.network_link("100G", 8)))
choices = plan.curve(planner, 8, plan.Allowed(), price=2.50)
for choice in choices:
    print(
        f"{choice.candidate.nodes} nodes: {choice.days:5.1f} days, {choice.cost:8,.0f}, "
        f"computing {choice.shares['compute']:.0%}, network {choice.shares['network']:.0%}"
    )

# %% [markdown]
# Where the update's time goes as nodes are added:

# %%
figure, axes = plt.subplots(figsize=(6, 3))
bottom = np.zeros(len(choices))
for kind in choices[0].shares:
    height = np.array([choice.shares[kind] * choice.time.total for choice in choices])
    axes.bar([choice.candidate.nodes for choice in choices], height, bottom=bottom, label=kind)
    bottom += height
axes.set(xlabel="nodes", ylabel="seconds of an update")
axes.legend()
figure.tight_layout()

# %% [markdown]
# The days assume that passes reach 40 % of the card's peak, so use them to compare choices. Before
# relying on a date, measure a card: `python -m bert_unpad.plan --calibrate`, a minute. Commands,
# and what is left out: [simulation](../capacity/simulation.md),
# [planning](../capacity/planning.md).
