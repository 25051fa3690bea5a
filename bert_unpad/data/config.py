"""The settings of pretraining data: what they are made of and how."""

from __future__ import annotations

from dataclasses import dataclass

from bert_unpad.data.masking import check_masking_arguments
from bert_unpad.data.store.shards import MAX_LENGTH
from bert_unpad.data.text.pairs import MIN_SEQ_LENGTH
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS


@dataclass(frozen=True)
class DataConfig:
    """What data to train on and how examples are made of it.

    Attributes:
        source: `stdlib` (docstrings of Python's standard library), `hf:NAME?...` (a data set of the
            `datasets` library, see `HuggingFaceSource`), `stream:NAME?...` (the same, read while it
            is trained on, see `text_stream`), the path of a text file or folder, or `hdf5:PATH` or
            `shards:PATH` for examples that are made already (see `ready`), of which only
            max_seq_length, vocab_file, lowercase and, without masks of their own, the masking
            settings still matter.
        cache_dir: folder of the cache; None: `$XDG_CACHE_HOME/bert_unpad` or `~/.cache/bert_unpad`.
        max_seq_length: longest example in tokens, [CLS] and both [SEP] included; 5 to 65,535.
        vocab_size: size of the vocabulary to train (a small corpus gives a smaller one).
        vocab_file: a BERT vocabulary to use instead of training one.
        lowercase: lower-case and strip accents.
        short_seq_prob: probability that a document aims at examples of a random shorter length.
        masked_lm_prob: share of a sequence's tokens to predict.
        whole_word: mask whole words.
        max_predictions_per_seq: most predicted tokens per sequence; None: no limit.
        dupe_factor: passes over the training documents, each with other random pairs. Masks are new
            in every epoch anyway.
        validation_share: share of the documents that are held out.
        seed: of pairs and masks. Which documents are held out depends on their text alone.
        file_per_document: for paths: a file is a document (otherwise a blank line ends one).
        verify: compare the digests of all cached files when opening them, not only their sizes.

    Raises:
        ValueError: a number is out of range; the message names the argument.
    """

    source: str = "stdlib"
    cache_dir: str | None = None
    max_seq_length: int = 128
    vocab_size: int = 8192
    vocab_file: str | None = None
    lowercase: bool = True
    short_seq_prob: float = 0.1
    masked_lm_prob: float = 0.15
    whole_word: bool = False
    max_predictions_per_seq: int | None = None
    dupe_factor: int = 1
    validation_share: float = 0.05
    seed: int = 0
    file_per_document: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        if not MIN_SEQ_LENGTH <= self.max_seq_length <= MAX_LENGTH:
            raise ValueError(
                f"max_seq_length: expected {MIN_SEQ_LENGTH} ([CLS] a [SEP] b [SEP]) to "
                f"{MAX_LENGTH:,} tokens, got {self.max_seq_length}"
            )
        smallest = len(SPECIAL_TOKENS) + 1
        if self.vocab_size < smallest:
            raise ValueError(f"vocab_size: expected at least {smallest}, got {self.vocab_size}")
        if not 0 <= self.short_seq_prob <= 1:
            raise ValueError(f"short_seq_prob: expected 0 to 1, got {self.short_seq_prob}")
        if self.dupe_factor < 1:
            raise ValueError(f"dupe_factor: expected at least 1, got {self.dupe_factor}")
        if not 0 <= self.validation_share < 1:
            raise ValueError(
                f"validation_share: expected 0 or more and less than 1, got {self.validation_share}"
            )
        check_masking_arguments(self.masked_lm_prob, self.max_predictions_per_seq)
