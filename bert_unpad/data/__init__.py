"""Pretraining data: from corpora to sentence pairs of true length, packed and masked on the fly.

Names are imported on first use: the samplers and the length histograms need only numpy, but making
examples needs the packages of the `pretrain` extra.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bert_unpad.data.collate import PackedCollator, pack_examples
    from bert_unpad.data.config import DataConfig
    from bert_unpad.data.masking import MaskedTokens, TokenMasker, most_frequent_token_rate
    from bert_unpad.data.mixture import Mixture
    from bert_unpad.data.open_data import PreparedData, prepare
    from bert_unpad.data.prefetch import Prefetcher
    from bert_unpad.data.sampling.balanced_sampler import BalancedSampler
    from bert_unpad.data.sampling.histogram import sample_lengths, wikipedia_lengths
    from bert_unpad.data.sampling.packed_sampler import PackedSampler
    from bert_unpad.data.sampling.speed_sampler import SpeedSampler
    from bert_unpad.data.sampling.warmup_sampler import BatchWarmup, WarmupSampler
    from bert_unpad.data.store.example_batch import ExampleBatch
    from bert_unpad.data.store.manifest import DamagedDataError
    from bert_unpad.data.store.shard_writer import ShardWriter
    from bert_unpad.data.store.shards import Example, ShardDataset
    from bert_unpad.data.streams.exchange import ExampleExchange, ExchangedStep, ExchangeError
    from bert_unpad.data.streams.stream import ExampleStream, IterableStream, ShardStream
    from bert_unpad.data.streams.text_stream import TextStream
    from bert_unpad.data.text.json_tokenizer import JsonTokenizer
    from bert_unpad.data.text.tokenizer import TextTokenizer, WordPieceTokenizer
    from bert_unpad.data.text.train_tokenizer import train_tokenizer

_NAMES = {
    "collate": "PackedCollator pack_examples",
    "config": "DataConfig",
    "masking": "MaskedTokens TokenMasker most_frequent_token_rate",
    "mixture": "Mixture",
    "open_data": "PreparedData prepare",
    "prefetch": "Prefetcher",
    "sampling.balanced_sampler": "BalancedSampler",
    "sampling.histogram": "sample_lengths wikipedia_lengths",
    "sampling.packed_sampler": "PackedSampler",
    "sampling.speed_sampler": "SpeedSampler",
    "sampling.warmup_sampler": "BatchWarmup WarmupSampler",
    "store.example_batch": "ExampleBatch",
    "store.manifest": "DamagedDataError",
    "store.shard_writer": "ShardWriter",
    "store.shards": "Example ShardDataset",
    "streams.exchange": "ExampleExchange ExchangeError ExchangedStep",
    "streams.stream": "ExampleStream IterableStream ShardStream",
    "streams.text_stream": "TextStream",
    "text.json_tokenizer": "JsonTokenizer",
    "text.tokenizer": "TextTokenizer WordPieceTokenizer",
    "text.train_tokenizer": "train_tokenizer",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "BalancedSampler",
    "BatchWarmup",
    "DamagedDataError",
    "DataConfig",
    "Example",
    "ExampleBatch",
    "ExampleExchange",
    "ExampleStream",
    "ExchangeError",
    "ExchangedStep",
    "IterableStream",
    "JsonTokenizer",
    "MaskedTokens",
    "Mixture",
    "PackedCollator",
    "PackedSampler",
    "Prefetcher",
    "PreparedData",
    "ShardDataset",
    "ShardStream",
    "ShardWriter",
    "SpeedSampler",
    "TextStream",
    "TextTokenizer",
    "TokenMasker",
    "WarmupSampler",
    "WordPieceTokenizer",
    "most_frequent_token_rate",
    "pack_examples",
    "prepare",
    "sample_lengths",
    "train_tokenizer",
    "wikipedia_lengths",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("tokenizers", "tqdm"):
            raise
        raise ImportError(
            f"{__name__}.{name} needs the package `{error.name}`: "
            "pip install 'bert_unpad[pretrain]'"
        ) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
