"""Pretraining data: corpora to sentence pairs of true length, packed and masked on the fly."""

from bert_unpad.data.collate import PackedCollator, Prefetcher
from bert_unpad.data.masking import MaskedTokens, TokenMasker, most_frequent_token_rate
from bert_unpad.data.prepare import DataConfig, PreparedData, prepare
from bert_unpad.data.shards import DamagedDataError, Example, ShardDataset, ShardWriter
from bert_unpad.data.tokenizer import WordPieceTokenizer

__all__ = [
    "DamagedDataError",
    "DataConfig",
    "Example",
    "MaskedTokens",
    "PackedCollator",
    "Prefetcher",
    "PreparedData",
    "ShardDataset",
    "ShardWriter",
    "TokenMasker",
    "WordPieceTokenizer",
    "most_frequent_token_rate",
    "prepare",
]
