"""Pretraining examples in HDF5 files, in the layouts of MLPerf's BERT benchmark.

All hold finished examples: sentence pairs with next-sentence labels and masks.

    variable length                                 fixed length (S tokens, P predictions at most)
    input_ids            int16 of any length [N]    input_ids            int16 [N, S], padded
                                                    input_mask           int8 [N, S], 1 = real
    segment_ids          int8 of any length [N]     segment_ids          int8 [N, S]
    masked_lm_positions  int16 of any length [N]    masked_lm_positions  int16 [N, P], 0 = none
    masked_lm_ids        int16 of any length [N]    masked_lm_ids        int16 [N, P]
    next_sentence_labels int8 [N]                   next_sentence_labels int8 [N]

Packed files (create_packed_trainset.py of NVIDIA's submissions from 1.1 on) hold several examples a
row, one after another, and are read example by example. They have the datasets of variable length,
next_sentence_labels of variable length too, and

    packed_input_len, packed_masked_lm_len   int16 of any length [N]: tokens, masks of each example

with masked_lm_positions that count from the begin of the row.

`python -m bert_unpad.data.hdf5 --help` writes the first two, converts and checks
all. Needs `h5py`.
"""

from bert_unpad.data.hdf5.dataset import Hdf5Dataset
from bert_unpad.data.hdf5.write import write_hdf5

__all__ = ["Hdf5Dataset", "write_hdf5"]
