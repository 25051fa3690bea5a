"""Data collators that pack examples end to end, without padding.

`DataCollatorWithFlattening` of transformers drops token types, overwrites the first label of each
example and masks no tokens. These collators keep all of that, for a model that
`bert_unpad.hf.unpad` has changed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from bert_unpad.hf.packing import IGNORE

Features = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True)
class _PackedCollator(ABC):
    """Joins examples into one row [1, T]; a subclass adds the labels."""

    position_ids_start: int = 0
    """The position of an example's first token: `padding_idx + 1` of the embeddings, mostly 2, for
    RoBERTa, XLM-RoBERTa, CamemBERT and other models that count positions like it."""

    def __call__(self, features: Features) -> dict[str, Tensor | int]:
        """Packs B examples of T tokens in all; tokens whose attention_mask is 0 are dropped.

        Returns:
            input_ids, position_ids (counted in every example) and, if the examples have them,
            token_type_ids: int64 [1, T]. cu_seq_lens_q = cu_seq_lens_k: int32 [B + 1].
            max_length_q = max_length_k: int. Labels as the class says.

        Raises:
            ValueError: there are no examples, only some have a column, or a column has other
                shapes or types than expected.
        """
        if not features:
            raise ValueError("features: expected at least one example, got none")
        kept = [_kept(feature) for feature in features]
        lengths = np.array([int(keep.sum()) for keep in kept], np.int32)
        cu_seqlens = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        longest, start = int(lengths.max()), self.position_ids_start
        batch: dict[str, Any] = {
            "input_ids": _join(features, kept, "input_ids"),
            "position_ids": torch.cat([torch.arange(int(n)) + start for n in lengths])[None],
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        types = _join(features, kept, "token_type_ids")
        if types is not None:
            batch["token_type_ids"] = types
        return batch | self._labelled(features, kept, batch["input_ids"])

    @abstractmethod
    def _labelled(
        self, features: Features, kept: list[np.ndarray], ids: Tensor
    ) -> dict[str, Tensor]:
        """Returns what a batch has besides, or instead of, the joined columns.

        Args:
            features: the examples.
            kept: bool [tokens] of each example, its tokens in the batch.
            ids: the batch's input_ids, int64 [1, T].
        """


@dataclass
class DataCollatorForPackedClassification(_PackedCollator):
    """Joins examples with one label each: sequence classification and regression.

    `labels`, or `label`, of the examples become `labels`: int64 [B] of integers, float32 [B] of
    floats (regression), float32 [B, K] of lists of K floats (several labels or targets). Without,
    the batch has none.
    """

    def _labelled(
        self, features: Features, kept: list[np.ndarray], ids: Tensor
    ) -> dict[str, Tensor]:
        labels = _stack(features, "labels" if "labels" in features[0] else "label")
        return {} if labels is None else {"labels": labels}


@dataclass
class DataCollatorForPackedTokenClassification(_PackedCollator):
    """Joins examples with a label for each token, such as named entities.

    `labels` of the examples become `labels`, int64 [1, T], the first of each example too; -100 is
    left out of the loss. Without, the batch has none.
    """

    def _labelled(
        self, features: Features, kept: list[np.ndarray], ids: Tensor
    ) -> dict[str, Tensor]:
        labels = _join(features, kept, "labels")
        return {} if labels is None else {"labels": labels}


@dataclass
class DataCollatorForPackedMLM(_PackedCollator):
    """Joins examples and masks tokens as BERT does (Devlin et al., 2019).

    A share `mlm_probability` of the tokens that are not special is chosen. 80 % of these become the
    mask token, 10 % a random one, and 10 % stay: `labels`, int64 [1, T]. Examples that have
    `labels` are not masked. next_sentence_label is kept, int64 [B].

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

    def _labelled(
        self, features: Features, kept: list[np.ndarray], ids: Tensor
    ) -> dict[str, Tensor]:
        special = _join(features, kept, "special_tokens_mask")
        labels = _join(features, kept, "labels")
        if labels is None:
            if special is None:
                special = torch.isin(ids, torch.tensor(self.tokenizer.all_special_ids))
            ids, labels = self._mask(ids, special.bool())
        next_sentence = _stack(features, "next_sentence_label")
        extra = {} if next_sentence is None else {"next_sentence_label": next_sentence}
        return {"input_ids": ids, "labels": labels} | extra

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
        draws = torch.rand((2, *ids.shape), generator=generator)
        chosen = (draws[0] < self.mlm_probability) & ~special
        labels = ids.masked_fill(~chosen, IGNORE)
        ids = ids.masked_fill(chosen & (draws[1] < 0.8), self.tokenizer.mask_token_id)
        randoms = torch.randint(len(self.tokenizer), ids.shape, generator=generator)
        return torch.where(chosen & (draws[1] >= 0.9), randoms, ids), labels


def _kept(feature: Mapping[str, Any]) -> np.ndarray:
    """Returns which tokens of an example the batch has, bool [tokens]."""
    if "input_ids" not in feature:
        raise ValueError(f"features: expected input_ids in each, got only {list(feature)}")
    mask = feature.get("attention_mask")
    return np.ones(len(feature["input_ids"]), bool) if mask is None else np.asarray(mask) != 0


def _given(features: Features, name: str) -> bool:
    given = [name in feature for feature in features]
    if any(given) and not all(given):
        raise ValueError(f"features: expected {name} in all examples or in none, got some")
    return all(given)


def _join(features: Features, kept: list[np.ndarray], name: str) -> Tensor | None:
    """Joins a column with a value for each token to int64 [1, T]; None if no example has it."""
    if not _given(features, name):
        return None
    parts = []
    for number, (feature, keep) in enumerate(zip(features, kept, strict=True)):
        values = np.asarray(feature[name])
        if values.shape != keep.shape or (values.size and values.dtype.kind not in "biu"):
            raise ValueError(
                f"{name}: expected an integer for each of {len(keep)} tokens in example {number}, "
                f"got {values.dtype} of shape {list(values.shape)}"
            )
        parts.append(values[keep])
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))[None]


def _stack(features: Features, name: str) -> Tensor | None:
    """Stacks a column to [B, ...], int64 or float32; None if no example has it."""
    if not _given(features, name):
        return None
    values = [np.asarray(feature[name]) for feature in features]
    kinds = {value.dtype.kind for value in values}
    if len({value.shape for value in values}) > 1 or not kinds <= set("biuf"):
        found = sorted({f"{value.dtype} of shape {list(value.shape)}" for value in values})
        raise ValueError(f"{name}: expected numbers of one shape, got {', '.join(found)}")
    return torch.from_numpy(np.stack(values).astype(np.float32 if "f" in kinds else np.int64))
