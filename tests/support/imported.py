"""Files of other formats: read by their importers, and imported to shards."""

from pathlib import Path

from bert_unpad.data import ExampleBatch, WordPieceTokenizer
from bert_unpad.data.formats import FORMATS, Setting, find_files, load_format
from bert_unpad.data.preparation.engines import InProcess
from bert_unpad.data.preparation.import_data import import_data
from tests.support.masked_examples import CLS, LONGEST, SEP, VOCAB


def setting(max_seq_length=LONGEST, vocab_size=100, **options):
    """What importers are told of the vocabulary of random examples."""
    return Setting(vocab_size, (0, CLS, SEP, 4), CLS, SEP, 0, max_seq_length, options)


def read(path, kind, max_seq_length=LONGEST, vocab_size=100, **options):
    """All examples of a file, or of the files of a folder."""
    about = setting(max_seq_length, vocab_size, **options)
    files = find_files(Path(path), kind)
    batches = [batch for file in files for batch in load_format(kind).examples(file, about)]
    if not batches:
        return ExampleBatch.empty("i8", FORMATS[kind].finished)
    return ExampleBatch.concatenate(batches)


def imported(source, output, max_seq_length=LONGEST, vocabulary=VOCAB):
    """Imports with a vocabulary; returns the source that opens the result."""
    tokenizer = WordPieceTokenizer(vocabulary)
    options = {"max_seq_length": max_seq_length, "tokenizer": tokenizer, "progress": False}
    import_data(source, Path(output), InProcess(), **options)
    return f"shards:{output}"


def raw_of(batch):
    """The examples of a batch with masks, as `masked_examples` gives them, of lists."""
    examples, token, mask = [], 0, 0
    columns = (batch.lengths, batch.second_starts, batch.masks.counts, batch.next_sentence_labels)
    for length, second, masked, following in zip(*(x.tolist() for x in columns), strict=True):
        ids = batch.tokens[token : token + length].tolist()
        places = slice(mask, mask + masked)
        masks = (batch.masks.positions[places].tolist(), batch.masks.labels[places].tolist())
        examples.append((ids, [0] * second + [1] * (length - second), *masks, following))
        token, mask = token + length, mask + masked
    return examples


def as_lists(examples):
    """Examples of `masked_examples`, of lists."""
    return [(*(column.tolist() for column in columns), n) for *columns, n in examples]
