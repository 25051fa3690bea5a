# %% [markdown]
# # Pretrain a ModernBERT-like encoder on your own texts
#
# A folder of texts goes in; a folder that `transformers` loads comes out. This page does it at a
# size that takes seconds. A real run has the same steps, more text and more updates.

# %% [markdown]
# ## Texts
#
# Any folder of text files, in which a blank line ends a document, or with `?file_per_document=true`
# each file is one. Here: the pages of Python's own manual, which every Python has.

# %%
import json
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
import transformers

from bert_unpad import hf
from bert_unpad.pretrain import main

folder = Path("texts")
folder.mkdir(exist_ok=True)
for name, text in topics.items():
    (folder / f"{name.replace('/', '_')}.txt").write_text(text)
print(f"{len(topics)} documents, {sum(map(len, topics.values())):,} characters")

# %% [markdown]
# ## Settings
#
# `preset` gives ModernBERT's parts (rotary positions, windows, gated units, no biases), and the
# lines below it a small size. The tokenizer is trained on the texts. [Every other
# choice](../training/own-encoder.md) is a line here too.

# %%
settings = """
run_dir: run
seed: 1
model:
  preset: modernbert-base
  hidden_size: 128
  num_hidden_layers: 3
  num_attention_heads: 2
  intermediate_size: 192
  max_position_embeddings: 128
data:
  source: texts?file_per_document=true
  cache_dir: cache
  objective: mlm
  masked_lm_prob: 0.3
  max_seq_length: 128
  vocab_size: 2048
batching:
  global_batch_size: 16
optimizer:
  lr: 3.0e-3
  betas: [0.9, 0.98]
schedule:
  total_steps: 60
  warmup_share: 0.1
evaluation:
  examples: 64
checkpoint:
  every: 0        # only at the end
logging:
  progress: lines
device: cpu       # leave this out to train on a GPU where there is one
"""
_ = Path("settings.yaml").write_text(settings)

# %% [markdown]
# ## Training
#
# From a shell this is `torchrun --nproc-per-node 8 scripts/pretrain.py --config settings.yaml`,
# with one process for each GPU. In Python, one process:

# %%
assert main(["--config", "settings.yaml"]) == 0

# %% [markdown]
# The log says what each update did. So little training only teaches how frequent each token is; the
# loss falls all the same.

# %%
lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
train = [line for line in lines if line["kind"] == "train"]
figure, axes = plt.subplots(figsize=(6, 3))
axes.plot([line["step"] for line in train], [line["loss"] for line in train], marker="o")
axes.set_xlabel("updates")
axes.set_ylabel("masked-token loss")
figure.tight_layout()
assert train[-1]["loss"] < train[0]["loss"]

# %% [markdown]
# ## The model for everybody else
#
# `run/model` has config.json, model.safetensors, the tokenizer, and README.md: a model card with
# data, recipe and held-out metrics.

# %%
print(*sorted(path.name for path in Path("run/model").iterdir()), sep="\n")
print("...\n" + Path("run/model/README.md").read_text().partition("## Recipe")[2])

# %% [markdown]
# transformers needs nothing of this package to use it:

# %%
tokenizer = transformers.AutoTokenizer.from_pretrained("run/model")
model = transformers.AutoModelForMaskedLM.from_pretrained("run/model").eval()
print(type(model).__name__)
batch = tokenizer(
    ["The [MASK] statement is used to raise an exception.", "A short one."],
    padding=True,
    return_tensors="pt",
)
with torch.inference_mode():
    logits = model(**batch).logits
guesses = logits[batch["input_ids"] == tokenizer.mask_token_id].topk(5).indices[0]
print(tokenizer.convert_ids_to_tokens(guesses))

# %% [markdown]
# With this package the same model runs [without padding](speed_up_embeddings.py), to fine-tune or
# to serve:

# %%
hf.unpad(model, verify=True)
with torch.inference_mode():
    packed = model(**batch).logits
real = batch["attention_mask"].bool()
torch.testing.assert_close(packed[real], logits[real], rtol=1e-4, atol=1e-4)

# %% [markdown]
# `hf upload me/my-encoder run/model` publishes the folder. To stop and continue, to use several
# machines, and what each file of `run` is: [running a pretraining](../training/running.md).
