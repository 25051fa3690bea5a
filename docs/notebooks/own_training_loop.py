# %% [markdown]
# # The operators in a training loop of your own
#
# The trainer is one user of the operators; a loop of yours is another. This page writes an encoder
# layer from operators, trains it in two processes with DDP, and clips each gradient bucket before
# it is averaged, so that one process with a broken gradient cannot ruin the others.

# %%
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bert_unpad import ops
from bert_unpad.batch import VarlenBatch
from bert_unpad.distributed import BucketClip
from bert_unpad.optim import FusedAdam, decay_groups

RANKS, STEPS, WORDS, WIDTH, HEADS = 2, 30, 16, 64, 2

# %% [markdown]
# ## A layer on packed tokens
#
# All sequences of a batch lie one after another in one matrix `[tokens, hidden]`. Only attention
# needs to know where each begins and ends: `VarlenBatch` says so.


# %%
class Layer(nn.Module):
    """A BERT layer: attention and a feed-forward half, each with residual and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, batch: VarlenBatch) -> Tensor:
        qkv = ops.linear(x, self.qkv.weight, self.qkv.bias).view(-1, 3, HEADS, WIDTH // HEADS)
        mixed = ops.varlen_attention(qkv, batch).flatten(1)
        mixed = ops.linear(mixed, self.out.weight)
        x = self.norm(self.norm1, mixed, x, self.out.bias)
        wide, x = ops.mlp(x, self.up.weight, self.up.bias, self.down.weight)
        return self.norm(self.norm2, wide, x, self.down.bias)

    def norm(self, norm: nn.LayerNorm, x: Tensor, residual: Tensor, x_bias: Tensor) -> Tensor:
        weights, p = (norm.weight, norm.bias), 0.1 if self.training else 0.0
        return ops.dropout_add_layer_norm(x, residual, *weights, x_bias=x_bias, dropout_p=p)


class Tagger(nn.Module):
    """Predicts for each word which word stands first in its sequence: attention has to look."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, batch: VarlenBatch) -> Tensor:
        x = self.embedding(ids) + self.position(batch.position_ids)
        for layer in self.layers:
            x = layer(x, batch)
        return self.head(x)


# %% [markdown]
# ## Packed and padded are the same
#
# A sequence's result does not depend on what else is in the batch, so it can be computed alone:

# %%
torch.manual_seed(0)
model = Tagger().eval()
lengths = [9, 4, 2]
ids = torch.randint(WORDS, (sum(lengths),))
with torch.inference_mode():
    together = model(ids, VarlenBatch.from_lengths(lengths)).split(lengths)
    for part, result in zip(ids.split(lengths), together, strict=True):
        alone = model(part, VarlenBatch.from_lengths([len(part)]))
        torch.testing.assert_close(result, alone, rtol=1e-5, atol=1e-5)

# %% [markdown]
# ## The loop
#
# Three things differ from a padded loop. The loss is a sum, divided by the number of tokens of
# *all* ranks, since ranks have unequal numbers of tokens; DDP averages, hence the factor `RANKS`.
# `BucketClip` is DDP's communication hook: it clips each bucket as soon as the backward pass has
# filled it, and starts its allreduce. And rank 1 sends an infinite gradient once, in step 10.


# %%
def train(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)  # the same weights on all ranks
    model = DistributedDataParallel(Tagger(), bucket_cap_mb=0.1)
    clip = BucketClip(max_norm=1.0, policy="adaptive").attach(model)
    optimizer = FusedAdam(decay_groups(model, weight_decay=0.01), lr=1e-2)
    torch.manual_seed(1 + rank)  # other data on each
    log = []
    for step in range(STEPS):
        lengths = torch.randint(2, 20, (64,))
        batch = VarlenBatch.from_lengths(lengths.tolist())
        ids = torch.randint(WORDS, (batch.total,))
        labels = ids[batch.cu_seqlens[:-1].long()].repeat_interleave(lengths)
        loss, correct = ops.masked_cross_entropy(model(ids, batch), labels)
        sums = torch.stack([loss.detach(), correct.float(), torch.tensor(float(batch.total))])
        dist.all_reduce(sums)
        if rank == 1 and step == 10:
            loss = loss * float("inf")
        (loss * RANKS / sums[2]).backward()
        report = clip.report()
        if report.finite:  # the same on all ranks: together they leave the update out
            optimizer.step()
        optimizer.zero_grad()
        means = (sums[:2] / sums[2]).tolist()
        log.append((*means, bool(report.finite), len(report.norms)))
    torch.save((log, [p.detach() for p in model.parameters()]), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


# %% [markdown]
# A script would be started by `torchrun`. In a notebook, processes are forked:

# %%
with tempfile.TemporaryDirectory() as folder:
    mp.start_processes(train, (folder,), nprocs=RANKS, start_method="fork")
    (log, weights), (_, others) = (torch.load(f"{folder}/rank{rank}.pt") for rank in range(RANKS))
for step in (0, 9, 10, 11, STEPS - 1):
    loss, accuracy, finite, buckets = log[step]
    print(f"step {step:2}: loss {loss:.3f}, accuracy {accuracy:.2f}, finite {finite}")

# %% [markdown]
# Step 10 changed nothing on any rank, training went on, and all ranks have the same weights, to the
# bit:

# %%
assert [finite for _, _, finite, _ in log].count(False) == 1
assert all(map(torch.equal, weights, others))
assert log[-1][1] > 2 * log[0][1]
print(f"{buckets} buckets, each clipped while the backward pass was still running")

# %% [markdown]
# [What clipping guarantees](../training/gradients.md#clipping); [all operators](../api/ops.md). On
# a GPU the same code runs with `nccl` and tensors on `cuda`; `torch.compile(fullgraph=True)` works.
