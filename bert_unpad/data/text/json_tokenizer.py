"""Any tokenizer of the `tokenizers` library, from its `tokenizer.json`.

Special tokens are found by their role: first by the `tokenizer_config.json` beside the file, as
`transformers` writes it, then by the names that are in use. Which tokens continue a word, which
whole-word masking needs, follows from how the tokenizer marks the beginning or the continuation of
words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from bert_unpad._files import read_json_object
from bert_unpad.data.text.tokenizer import CONFIG, FILE, TextTokenizer, WordPieceTokenizer

# The names of each role's token, and the roles of tokenizer_config.json that may stand for it.
_ROLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pad": (("[PAD]", "<pad>", "<|pad|>"), ("pad_token",)),
    "unk": (("[UNK]", "<unk>"), ("unk_token",)),
    "cls": (("[CLS]", "<cls>", "<s>"), ("cls_token", "bos_token")),
    "sep": (("[SEP]", "<sep>", "</s>", "<eos>"), ("sep_token", "eos_token")),
    "mask": (("[MASK]", "<mask>", "<|mask|>"), ("mask_token",)),
}
_NEEDED = ("cls", "sep", "mask")
_MARKS = {"ByteLevel": "\u0120\u010a\u0109", "Metaspace": "\u2581"}  # at the beginning of a word


class JsonTokenizer(TextTokenizer):
    """Converts text to the ids of a `tokenizer.json`.

    Args:
        tokenizer: the tokenizer; its truncation and padding are turned off.
        roles: tokens by the roles of `tokenizer_config.json`, such as {"mask_token": "<mask>"}.
            What is not given is found by its name.

    Raises:
        ValueError: there is no token for the beginning or end of an example, or for masks.
    """

    files = (FILE, CONFIG)

    def __init__(self, tokenizer: Tokenizer, roles: Mapping[str, Any] | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True  # written in a text they are ordinary characters
        self._tokenizer = tokenizer
        self._text = tokenizer.to_str()
        about = json.loads(self._text)
        ids = tokenizer.get_vocab()
        self._roles = _find_roles(ids, roles or {})
        found = {role: ids[token] for role, token in self._roles.items()}
        self.pad_id, self.unk_id = found.get("pad"), found.get("unk")
        self.cls_id, self.sep_id, self.mask_id = (found[role] for role in _NEEDED)

        names = {index: token for token, index in ids.items()}
        size = max(names) + 1
        self.vocabulary = tuple(names.get(index, "") for index in range(size))
        special = {token["id"] for token in about["added_tokens"] if token["special"]}
        special |= set(found.values()) | (set(range(size)) - set(names))  # also ids without a token
        self.unmaskable_ids = tuple(sorted(special - {self.unk_id}))
        self.is_continuation = _continuations(self.vocabulary, about)
        self.is_continuation[list(special)] = False
        # A sentence within a text follows a space, also where a tokenizer adds none.
        byte_level = _find(about["pre_tokenizer"], "ByteLevel")
        self._prefix = " " if byte_level and not byte_level["add_prefix_space"] else ""

    @classmethod
    def from_file(cls, path: str | Path) -> JsonTokenizer:
        """Reads a `tokenizer.json`, or the one in a folder, and the `tokenizer_config.json` beside.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: a file is damaged, or a special token is missing; the message names it.
        """
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"tokenizer: {path} does not exist; expected a {FILE}")
        beside = path.with_name(CONFIG)
        roles = read_json_object(beside) if beside.is_file() else {}
        try:
            return cls(Tokenizer.from_file(str(path)), roles)
        except ValueError as error:
            raise ValueError(f"tokenizer: {path}: {error}") from error
        except Exception as error:  # whatever the library's own reader raises
            raise ValueError(f"tokenizer: {path} is no {FILE}: {error}") from error

    def identity(self) -> dict[str, Any]:
        """See `TextTokenizer`."""
        return {
            "tokenizer": hashlib.sha256(self._text.encode()).hexdigest(),
            "special_tokens": self._roles,
        }

    def save(self, folder: str | Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` in Hugging Face's layout."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(self._text, "utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast"}
        config |= {f"{role}_token": token for role, token in self._roles.items()}
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")

    def _exported(self) -> Tokenizer:
        about = json.loads(self._text)
        byte_level = _find(about["pre_tokenizer"], "ByteLevel")
        if byte_level and self._prefix:  # as `encode_batch` puts before each text
            byte_level["add_prefix_space"] = True
        return Tokenizer.from_str(json.dumps(about))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """See `TextTokenizer`."""
        return super().encode_batch([f"{self._prefix}{text}" for text in texts])


def load_tokenizer(folder: str | Path) -> TextTokenizer:
    """Reads the files of a tokenizer's `save`, or of a Hugging Face model.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged; the message names it.
    """
    folder = Path(folder)
    if (folder / FILE).is_file() and not (folder / "vocab.txt").is_file():
        return JsonTokenizer.from_file(folder)
    return WordPieceTokenizer.load(folder)


def _find_roles(ids: Mapping[str, int], given: Mapping[str, Any]) -> dict[str, str]:
    """The token of each role that has one."""
    found, missing = {}, []
    for role, (names, keys) in _ROLES.items():
        tokens = [given.get(key) for key in keys]
        # transformers writes a token as text, or as an object with its text as `content`.
        tokens = [token.get("content") if isinstance(token, dict) else token for token in tokens]
        known = [token for token in (*tokens, *names) if isinstance(token, str) and token in ids]
        if known:
            found[role] = known[0]
        elif role in _NEEDED:
            missing.append(f"{keys[0]} ({', '.join(names)})")
    if missing:
        raise ValueError(
            f"special tokens: expected a token for each of these roles, by these names or as named "
            f"in a {CONFIG} beside the file; missing: {'; '.join(missing)}"
        )
    return found


def _continuations(vocabulary: Sequence[str], about: Mapping[str, Any]) -> np.ndarray:
    """Which tokens continue a word; none where the tokenizer does not mark words."""
    prefix = about["model"].get("continuing_subword_prefix")
    if prefix:
        return np.array([token.startswith(prefix) for token in vocabulary])
    for kind, marks in _MARKS.items():
        if _find(about["pre_tokenizer"], kind):
            return np.array([not token.startswith(tuple(marks)) for token in vocabulary])
    return np.zeros(len(vocabulary), bool)


def _find(part: dict[str, Any] | None, kind: str) -> dict[str, Any] | None:
    """The part of this type among pre-tokenizers, which may be a sequence."""
    if part is None or part["type"] == kind:
        return part
    parts = (_find(inner, kind) for inner in part.get("pretokenizers", ()))
    return next((inner for inner in parts if inner is not None), None)


def tokenizer_beside(path: Path) -> TextTokenizer:
    """Reads the tokenizer in a folder of examples.

    Raises:
        ValueError: there is none.
    """
    if not (path / "tokenizer").is_dir():
        raise ValueError(
            f"vocab_file: expected the vocabulary that the examples of {path} were made with (or "
            f"tokenizer), because there is no folder {path / 'tokenizer'}"
        )
    return load_tokenizer(path / "tokenizer")
