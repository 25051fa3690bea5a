"""A data collator that packs masked-language-modelling examples end to end, without padding.

`DataCollatorWithFlattening` of transformers drops token types and masks no tokens. This collator
masks like `DataCollatorForLanguageModeling`, for a model that `bert_unpad.hf.unpad` has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from bert_unpad.hf.packing import IGNORE


@dataclass
class DataCollatorForPackedMLM:
    """Joins examples into one row [1, T] and masks tokens as BERT does (Devlin et al., 2019).

    A share `mlm_probability` of the tokens that are not special is chosen. 80 % of these become the
    mask token, 10 % a random one, and 10 % stay. Examples that have `labels` are not masked. Tokens
    whose attention_mask is 0 are dropped; token_type_ids and next_sentence_label are kept.

    Raises:
        ValueError: mlm_probability is not in (0, 1), or the tokenizer has no mask token.
    """

    tokenizer: Any
    """A Hugging Face tokenizer with `mask_token_id`, `all_special_ids` and a length."""
    mlm_probability: float = 0.15
    """The share of tokens that are predicted."""
    seed: int | None = None
    """Seed of the masks; None uses PyTorch's default generator. In a worker of a DataLoader the
    stream also follows from the worker's own seed, which that draws anew from the loader's
    `generator` in each epoch: with the same seeds of both, the same masks. Ranks that seed alike
    draw alike."""

    def __post_init__(self) -> None:
        if not 0 < self.mlm_probability < 1:
            raise ValueError(
                f"mlm_probability: expected a number in (0, 1), got {self.mlm_probability}"
            )
        if self.tokenizer.mask_token_id is None:
            raise ValueError("tokenizer: expected one with a mask token")
        self._stream: tuple[int | None, torch.Generator] | None = None  # the worker's seed, draws

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Tensor | int]:
        """Packs B examples of T tokens in all.

        Returns:
            input_ids, labels, position_ids (from 0 in every example) and, if the examples have
            them, token_type_ids: int64 [1, T]. cu_seq_lens_q = cu_seq_lens_k: int32 [B + 1].
            max_length_q = max_length_k: int. next_sentence_label: int64 [B], if given.

        Raises:
            ValueError: there are no examples, or only some have labels or token types.
        """
        if not features:
            raise ValueError("features: expected at least one example, got none")
        kept = [_kept(feature) for feature in features]
        lengths = np.array([int(keep.sum()) for keep in kept], np.int32)
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        ids = _join(features, kept, "input_ids")
        special = _join(features, kept, "special_tokens_mask")
        labels = _join(features, kept, "labels")
        if labels is None:
            if special is None:
                special = torch.isin(ids, torch.tensor(self.tokenizer.all_special_ids))
            ids, labels = self._mask(ids, special.bool())
        longest = int(lengths.max())
        batch = {
            "input_ids": ids[None],
            "labels": labels[None],
            "position_ids": torch.cat([torch.arange(int(n)) for n in lengths])[None],
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        types = _join(features, kept, "token_type_ids")
        if types is not None:
            batch["token_type_ids"] = types[None]
        if "next_sentence_label" in features[0]:
            values = [int(feature["next_sentence_label"]) for feature in features]
            batch["next_sentence_label"] = torch.tensor(values)
        return batch

    def _generator(self) -> torch.Generator | None:
        """This process's generator, which goes on from batch to batch."""
        if self.seed is None:
            return None
        info = get_worker_info()
        worker = None if info is None else info.seed
        # A worker gets the collator of the main process, with the generator of that.
        if self._stream is None or self._stream[0] != worker:
            seed = self.seed
            if worker is not None:
                mixed = np.random.SeedSequence([seed % 2**64, worker])
                seed = int(mixed.generate_state(1, np.uint64)[0])
            self._stream = worker, torch.Generator().manual_seed(seed)
        return self._stream[1]

    def _mask(self, ids: Tensor, special: Tensor) -> tuple[Tensor, Tensor]:
        generator = self._generator()
        draws = torch.rand((2, ids.shape[0]), generator=generator)
        chosen = (draws[0] < self.mlm_probability) & ~special
        labels = ids.masked_fill(~chosen, IGNORE)
        ids = ids.masked_fill(chosen & (draws[1] < 0.8), self.tokenizer.mask_token_id)
        randoms = torch.randint(len(self.tokenizer), ids.shape, generator=generator)
        return torch.where(chosen & (draws[1] >= 0.9), randoms, ids), labels


def _kept(feature: Mapping[str, Any]) -> np.ndarray:
    mask = feature.get("attention_mask")
    return np.ones(len(feature["input_ids"]), bool) if mask is None else np.asarray(mask) != 0


def _join(features, kept, name: str) -> Tensor | None:
    given = [name in feature for feature in features]
    if not any(given):
        return None
    if not all(given):
        raise ValueError(f"features: expected {name} in all examples or in none, got some")
    parts = [np.asarray(f[name])[keep] for f, keep in zip(features, kept, strict=True)]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
