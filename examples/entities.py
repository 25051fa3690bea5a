"""GLiNER on packed tokens: entities of texts, without the padding of its DeBERTa.

    python examples/entities.py path/to/gliner "Marie Curie left Warsaw." --labels person city

Needs `pip install gliner`.
"""

from __future__ import annotations

import argparse

from bert_unpad._extras import packages_of

with packages_of("hf"):
    import transformers  # noqa: F401  hf needs it

    from bert_unpad import hf


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="folder or name of a GLiNER model")
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--labels", nargs="+", required=True)
    args = parser.parse_args(argv)
    from gliner import GLiNER

    model = GLiNER.from_pretrained(args.model)
    hf.unpad(model)  # the one line
    for text, found in zip(args.texts, model.inference(args.texts, args.labels), strict=True):
        print(text)
        for entity in found:
            print(f"  {entity['label']}: {entity['text']} ({entity['score']:.2f})")


if __name__ == "__main__":
    main()
