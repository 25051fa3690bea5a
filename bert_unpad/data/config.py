"""The settings of pretraining data: what the examples are made of, and how."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from bert_unpad._tiers import advanced, code_only
from bert_unpad.data.formats import refuse_foreign
from bert_unpad.data.masking import MaskUnit, check_masking_arguments, masking_rates
from bert_unpad.data.mixture import check_mixture
from bert_unpad.data.objective import SECOND_SEGMENTS, Documents, Objective
from bert_unpad.data.prepared import holds_examples, may_have_pairs
from bert_unpad.data.store.shards import MAX_LENGTH
from bert_unpad.data.text.json_tokenizer import JsonTokenizer
from bert_unpad.data.text.pairs import MIN_SEQ_LENGTH
from bert_unpad.data.text.tokenizer import SPECIAL_TOKENS, TextTokenizer, WordPieceTokenizer

TRAINED = ("wordpiece", "bpe", "unigram", "characters")
"""Kinds of tokenizers that are trained on the text."""


@dataclass(frozen=True)
class DataConfig:
    """The training data, and how examples are made of it.

    Raises:
        ValueError: a number is out of range; the message begins with the name of the field.
    """

    source: str = "stdlib"
    """Where text or examples come from: stdlib (docstrings of Python's standard library), the path
    of a text file or folder (with ?file_per_document=true each file is one document, otherwise a
    blank line ends one), hf:NAME?... (a data set of the `datasets` library), stream:NAME?... (the
    same, read during training), or shards:PATH, a folder that python -m bert_unpad.data prepare
    (large corpora) or import (HDF5, TFRecord, Megatron, Parquet and MDS files) has written."""
    mixture: dict[str, float] | None = advanced(None)
    """Sources with weights, instead of data.source: in which proportion an epoch's examples come
    from them. All need one vocabulary: data.tokenizer, data.vocab_file, or that of the examples."""
    cache_dir: str | None = None
    """Folder of the data cache. By default $XDG_CACHE_HOME/bert_unpad or ~/.cache/bert_unpad."""
    objective: Objective = "mlm_nsp"
    """What the model learns. mlm_nsp: masked tokens, and whether the second segment follows the
    first (BERT). mlm: masked tokens alone. mlm_sop: masked tokens, and whether two segments of a
    document are in order or swapped (ALBERT). rtd: which tokens a small generator has replaced
    (ELECTRA)."""
    documents: Documents = advanced("apart")
    """With data.objective mlm or rtd: what an example is. apart: a piece of one document. joined: a
    piece of all documents one after another, with [SEP] between them."""
    max_seq_length: int = 128
    """Tokens of the longest example, including [CLS] and [SEP]; 5 to 65,535."""
    tokenizer: str = advanced("wordpiece")
    """wordpiece, bpe (byte pairs), unigram or characters (each letter is a token), trained on the
    text, or the path of a tokenizer.json or of a folder with one."""
    vocab_size: int = 8192
    """Size of the vocabulary to train. A small corpus gives a smaller one."""
    vocab_file: str | None = None
    """BERT vocabulary to use. By default a vocabulary is trained."""
    vocab_sample_mb: float | None = advanced(None)
    """Megabytes of text to train the vocabulary on, of documents chosen at random. By default all
    text of the training part."""
    alphabet_size: int = advanced(1000)
    """With data.tokenizer other than bpe: letters of a trained vocabulary, the most frequent
    ones. Chinese and Japanese need several thousand."""
    lowercase: bool | None = advanced(None)
    """Convert text to lower case and strip accents. By default true; a tokenizer.json says itself
    what it does."""
    short_seq_prob: float = code_only(0.1)
    """Probability that a document makes examples of a random shorter length."""
    masked_lm_prob: float | tuple[float, float] = advanced(0.15)
    """Share of an example's tokens to predict. Two numbers, such as [0.3, 0.15]: it goes from the
    first to the second over the run; evaluation takes the second."""
    mask_unit: MaskUnit = advanced("token")
    """What is masked as one. token: tokens. word: whole words. span: runs of up to 10 words, of
    geometric length (SpanBERT, Joshi et al., 2020)."""
    max_predictions_per_seq: int | None = advanced(None)
    """Most tokens to predict per example. By default there is no limit."""
    dupe_factor: int = code_only(1)
    """Passes over the training documents, each with other random sentence pairs. Masks are new in
    every epoch anyway."""
    validation_share: float = 0.05
    """Share of the documents that is held out for evaluation."""
    seed: int = code_only(0)
    """Seed of sentence pairs and masks. Which documents are held out depends on their text only."""
    verify: bool = code_only(False)
    """Whether opening prepared data reads all files and compares their digests, not only their
    sizes; `python -m bert_unpad.data check` does that once."""

    @property
    def trains_tokenizer(self) -> bool:
        """Whether `tokenizer` is a kind that is trained, where no vocabulary is given."""
        return self.tokenizer in TRAINED

    @property
    def lowercases(self) -> bool:
        """`lowercase` with its default, for a tokenizer that is made here."""
        return self.lowercase is not False

    @property
    def segments(self) -> int:
        """Most segments of an example; those of shards may have two whatever the objective."""
        shards = filter(holds_examples, self.mixture or (self.source,))
        pairs = SECOND_SEGMENTS[self.objective] is not None or any(map(may_have_pairs, shards))
        return 2 if pairs else 1

    def given_tokenizer(self) -> TextTokenizer | None:
        """The tokenizer that is named; None where one is to be trained.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged, or lacks a special token; the message names it.
        """
        if self.vocab_file is not None:
            return WordPieceTokenizer.from_vocab_file(self.vocab_file, self.lowercases)
        return None if self.trains_tokenizer else JsonTokenizer.from_file(self.tokenizer)

    def import_command(self, source: str) -> str:
        """The command that imports a source with this vocabulary and length."""
        words = ["python", "-m", "bert_unpad.data", "import", source, "OUTPUT"]
        words += ["--max-seq-length", str(self.max_seq_length)]
        if self.vocab_file is not None:
            words += ["--vocab-file", self.vocab_file]
        elif not self.trains_tokenizer:
            words += ["--tokenizer", self.tokenizer]
        if not self.lowercases:
            words += ["--cased"]
        return shlex.join(words)

    def __post_init__(self) -> None:
        if not MIN_SEQ_LENGTH <= self.max_seq_length <= MAX_LENGTH:
            raise ValueError(
                f"max_seq_length: expected {MIN_SEQ_LENGTH} ([CLS] a [SEP] b [SEP]) to "
                f"{MAX_LENGTH:,} tokens, got {self.max_seq_length}"
            )
        if self.mixture is not None:
            check_mixture(self.mixture)
            default = type(self).source
            if self.source != default:
                raise ValueError(
                    f"source: expected {default} (the default) with mixture, got {self.source}"
                )
        name = "source" if self.mixture is None else "mixture"
        refuse_foreign(name, self.mixture or (self.source,), self.import_command)
        smallest = len(SPECIAL_TOKENS) + 1
        if self.vocab_size < smallest:
            raise ValueError(f"vocab_size: expected at least {smallest}, got {self.vocab_size}")
        for name, kind in (("objective", Objective), ("documents", Documents)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"{name}: expected one of {', '.join(get_args(kind))}, got "
                    f"{getattr(self, name)!r}"
                )
        has_pairs = SECOND_SEGMENTS[self.objective] is not None
        if self.documents != "apart" and has_pairs:
            raise ValueError(
                f"documents: expected apart with objective {self.objective}, whose examples are "
                f"segments of documents, got {self.documents}"
            )
        if self.dupe_factor != 1 and not has_pairs:
            raise ValueError(
                f"dupe_factor: expected 1 with objective {self.objective}, whose examples are not "
                f"random, got {self.dupe_factor}"
            )
        self._check_tokenizer()
        if not 0 <= self.short_seq_prob <= 1:
            raise ValueError(f"short_seq_prob: expected 0 to 1, got {self.short_seq_prob}")
        if self.dupe_factor < 1:
            raise ValueError(f"dupe_factor: expected at least 1, got {self.dupe_factor}")
        if not 0 <= self.validation_share < 1:
            raise ValueError(
                f"validation_share: expected 0 or more and less than 1, got {self.validation_share}"
            )
        if self.seed < 0:
            raise ValueError(f"seed: expected 0 or more, got {self.seed}")
        masking_rates(self.masked_lm_prob)
        check_masking_arguments(self.mask_unit, self.max_predictions_per_seq)

    def _check_tokenizer(self) -> None:
        kind = self.tokenizer
        if kind not in TRAINED and Path(kind).name == kind and not Path(kind).exists():
            raise ValueError(
                f"tokenizer: expected one of {', '.join(TRAINED)}, or the path of a "
                f"tokenizer.json, got {kind!r}"
            )
        if self.vocab_file is not None and kind != "wordpiece":
            raise ValueError(
                f"vocab_file: expected null with tokenizer {kind}, got {self.vocab_file}"
            )
        if self.vocab_sample_mb is not None and not self.vocab_sample_mb > 0:
            raise ValueError(f"vocab_sample_mb: expected more than 0, got {self.vocab_sample_mb}")
        if self.alphabet_size < 1:
            raise ValueError(f"alphabet_size: expected 1 or more, got {self.alphabet_size}")
        if self.lowercase is not None and kind not in TRAINED:
            raise ValueError(
                f"lowercase: expected null with tokenizer {kind}, which says itself what it does "
                f"to letters, got {str(self.lowercase).lower()}"
            )
        given = kind if kind not in TRAINED else self.vocab_file
        if self.vocab_sample_mb is not None and given is not None:
            raise ValueError(
                f"vocab_sample_mb: expected null with the vocabulary of {given}, got "
                f"{self.vocab_sample_mb}"
            )
        default = type(self).alphabet_size
        if self.alphabet_size != default and (given is not None or kind == "bpe"):
            raise ValueError(
                f"alphabet_size: expected {default} with tokenizer {kind}, which has its alphabet, "
                f"got {self.alphabet_size}"
            )
