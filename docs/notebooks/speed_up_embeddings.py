# %% [markdown]
# # Speed up an embedding model, and prove it equal
#
# An embedding model gets texts of all lengths. A batch is as wide as its longest text, and the rest
# is padding, which the model computes all the same. `hf.unpad(model)` removes it: one line, no
# conversion, the same weights. This page shows the line, its proof, and what it brings.
#
# Nothing is downloaded here: the model has the sizes of all-MiniLM-L6-v2 and random weights, which
# take the same time, and the texts are the pages of Python's own manual. With a model of yours,
# replace the next two cells by `AutoTokenizer.from_pretrained` and `AutoModel.from_pretrained`.

# %%
import tempfile
import time
from pydoc_data.topics import topics

import torch
import transformers

from bert_unpad import hf
from bert_unpad.data import WordPieceTokenizer

texts = [text.strip() for page in topics.values() for text in page.split("\n\n") if text.strip()]
texts = texts[:64]
print(f"{len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} characters")

# %%
with tempfile.TemporaryDirectory() as folder:
    WordPieceTokenizer.train(lambda: [texts], vocab_size=4000).save(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=1536,
)
model = transformers.BertModel(config, add_pooling_layer=False).eval()

# %% [markdown]
# What an embedding library does with it: sort the texts by length, cut them into batches, pad each
# batch, and take the mean of the hidden states of each text.


# %%
def batches(texts: list[str], size: int = 32):
    """Yields the numbers of some texts, and the padded batch of these texts."""
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for numbers in (order[i : i + size] for i in range(0, len(order), size)):
        chosen = [texts[i] for i in numbers]
        yield numbers, tokenizer(chosen, padding=True, return_tensors="pt")


@torch.inference_mode()
def encode(texts: list[str]) -> torch.Tensor:
    """Returns float32 [texts, hidden], of length 1 each."""
    vectors = torch.empty(len(texts), config.hidden_size)
    for numbers, batch in batches(texts):
        hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        vectors[numbers] = (hidden * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(vectors, dim=1)


masks = [batch["attention_mask"] for _, batch in batches(texts)]
real, computed = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
print(f"{real:,} tokens; in padded batches {computed:,}: {1 - real / computed:.0%} is padding")

# %% [markdown]
# ## The line, and its proof
#
# First, what would run on packed tokens:

# %%
print(hf.supports(model))

# %% [markdown]
# `verify=True` runs the first batch by the stock modules and by the packed ones, layer by layer,
# and raises `hf.VerificationError` where they differ by more than rounding. How much rounding
# explains is measured, against the stock model in fp64.

# %%
stock = encode(texts)
hf.unpad(model, verify=True)
packed = encode(texts)  # its first batch is the one that is verified

difference = (stock - packed).abs().max().item()
cosine = (stock * packed).sum(1).min().item()
print(f"largest difference {difference:.1e}, least cosine {cosine:.7f}")
assert difference < 1e-5

# %% [markdown]
# ## What it brings
#
# Both take turns, and the best of three rounds counts. `hf.repad` restores the stock classes.

# %%
seconds: dict[str, list[float]] = {"stock": [], "unpadded": []}
for _ in range(3):
    for name, change in (("stock", hf.repad), ("unpadded", hf.unpad)):
        change(model)
        start = time.perf_counter()
        encode(texts)
        seconds[name].append(time.perf_counter() - start)
best = {name: min(times) for name, times in seconds.items()}
print(f"{best['stock']:.2f} s -> {best['unpadded']:.2f} s: {best['stock'] / best['unpadded']:.2f}x")

# %% [markdown]
# The gain follows the padding, and the packed operators add some. Of a call of thousands of texts
# sorting leaves little of it, so there the gain is smaller: [measured beside other
# backends](../embedding.md). In sentence-transformers, `hf.unpad(SentenceTransformer(...))` is the
# same line. More: [which families, which calls](../huggingface.md).
