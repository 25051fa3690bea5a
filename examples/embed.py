"""sentence-transformers on packed tokens: a model as it is and after `hf.unpad`, on the same texts.

    python examples/embed.py path/to/model                        # one vector for each text
    python examples/embed.py path/to/model --kind token-vectors   # one for each token (ColBERT)
    python examples/embed.py path/to/reranker --kind scores       # each text against the first

Prints the seconds of both and how far the results are apart. All there is to see of bert_unpad is
one line. Texts are lines of --texts, by default the docstrings of Python's builtins. Needs
`pip install sentence-transformers`.
"""

from __future__ import annotations

import argparse
import builtins
import inspect
import time
from pathlib import Path
from typing import Any

import numpy as np

from bert_unpad._extras import packages_of

with packages_of("hf"):
    import transformers  # noqa: F401  hf needs it

    from bert_unpad import hf


def builtin_texts() -> list[str]:
    found = (inspect.getdoc(getattr(builtins, name)) for name in dir(builtins))
    return list(dict.fromkeys(text for text in found if text))


def results_of(kind: str, model: Any, texts: list[str]) -> np.ndarray:
    """What a model computes of the texts, as one array."""
    if kind == "vectors":
        return model.encode(texts)
    if kind == "token-vectors":
        return np.concatenate([np.asarray(x) for x in model.encode_document(texts)])
    return model.predict([(texts[0], text) for text in texts])


KINDS = {
    "vectors": "SentenceTransformer",
    "token-vectors": "MultiVectorEncoder",
    "scores": "CrossEncoder",
}


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder or name of a sentence-transformers model")
    parser.add_argument("--kind", choices=KINDS, default="vectors")
    parser.add_argument("--texts", type=Path, help="a file with a text in each line")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    texts = args.texts.read_text().splitlines() if args.texts else builtin_texts()

    import sentence_transformers

    model = getattr(sentence_transformers, KINDS[args.kind])(args.model)
    seconds: dict[str, list[float]] = {"stock": [], "unpadded": []}
    results = {}
    for _ in range(args.rounds):
        for name, times in seconds.items():
            if name == "unpadded":
                hf.unpad(model)  # the one line
            start = time.perf_counter()
            results[name] = results_of(args.kind, model, texts)
            times.append(time.perf_counter() - start)
        hf.repad(model)
    best = {name: min(times) for name, times in seconds.items()}
    difference = float(np.abs(results["stock"] - results["unpadded"]).max())
    print(
        f"{len(texts)} texts: stock {best['stock']:.2f} s, unpadded {best['unpadded']:.2f} s "
        f"({best['stock'] / best['unpadded']:.2f}x), largest difference {difference:.1e}"
    )
    return best | {"difference": difference}


if __name__ == "__main__":
    main()
