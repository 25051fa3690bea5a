"""Fine-tunes a trained model on GLUE and SQuAD and measures it: `python -m bert_unpad.evaluate`.

    python -m bert_unpad.evaluate runs/x/model --tasks rte mrpc squad --seeds 0 1 2

Models are Hugging Face's, computed on packed tokens by `hf.unpad` and trained by transformers'
`Trainer`. Data are those of the `datasets` library, or local files with the same columns. Needs
`bert_unpad[evaluate]`.
"""
