"""Articles of a MediaWiki site, such as Wikipedia, from its XML dump.

`mwxml` reads the dump and `mwparserfromhell` the markup. As in BERT (Devlin et al., 2019,
arXiv:1810.04805, section 3.1) only text passages are kept: no lists, tables or headings. Templates,
footnotes, formulas and pictures are left out too.
"""

import importlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO
from xml.etree.ElementTree import ParseError

from bert_unpad.data.store.manifest import DamagedDataError

logger = logging.getLogger(__name__)

_FILE, _CATEGORY = 6, 14  # numbers of name spaces, the same on all sites
_ENGLISH = ("file", "image", "category")  # their names in English, known on all sites
_DROPPED = {"ref", "table", "gallery", "math", "chem", "timeline", "syntaxhighlight", "score"}
_LIST_MARKS = {"*", "#", ":", ";"}
_LIST = "\0"  # marks a line of a list until it is dropped
_EMPTY_BRACKETS = re.compile(r" ?\([\s,;:]*\)")  # what is left around a template
_SWITCH = re.compile(r"__[A-Z]+__")


def documents(file: BinaryIO, path: Path) -> Iterator[str]:
    """Yields the text of each article; paragraphs are separated by blank lines.

    Redirects and pages of other name spaces are left out, and, with a warning, pages whose markup
    cannot be read. Of several versions of a page the last one counts.
    """
    mwxml, parser = _load("mwxml"), _load("mwparserfromhell")
    try:
        dump = mwxml.Dump.from_file(file)
        hidden = _hidden_names(dump)
        for page in dump:
            if page.namespace != 0 or page.redirect is not None:
                continue
            markup = None
            for revision in page:
                markup = revision.text
            try:
                text = plain_text(parser.parse(markup), hidden) if markup else ""
            except (parser.parser.ParserError, RecursionError) as error:
                logger.warning(
                    "%s: leaving out the page %r, whose markup cannot be read (%s)",
                    *(path, page.title, error),
                )
                continue
            if text:
                yield text
    except (ParseError, mwxml.errors.MalformedXML, AssertionError, StopIteration) as error:
        raise DamagedDataError(
            f"{path}: expected a complete XML dump of MediaWiki ({error})"
        ) from error


def _load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"dumps of MediaWiki need the package `{name}`: pip install 'bert_unpad[wikipedia]'"
        ) from error


def _hidden_names(dump: Any) -> set[str]:
    """Returns the names, in lower case, before links that show no text: pictures and categories."""
    found = set(_ENGLISH)
    for space in dump.site_info.namespaces or ():
        if space.id in (_FILE, _CATEGORY) and space.name:
            found.add(space.name.lower())
    return found


def plain_text(code: Any, hidden: set[str]) -> str:
    """Returns the text passages of parsed markup; links to the name spaces `hidden` show none."""
    text = _SWITCH.sub("", _EMPTY_BRACKETS.sub("", _text(code, hidden)))
    lines = (" ".join(line.split()) for line in text.split("\n") if not line.startswith(_LIST))
    return "\n\n".join(line for line in lines if line)


def _text(code: Any, hidden: set[str]) -> str:
    """The text of some nodes; headings, templates and comments have none."""
    if code is None:
        return ""
    parts = []
    for node in code.nodes:
        kind = type(node).__name__
        if kind == "Text":
            parts.append(node.value)
        elif kind == "Wikilink":
            space = str(node.title).partition(":")[0].strip().lower()
            if space not in hidden:
                shown = node.title if node.text is None else node.text
                parts.append(_text(shown, hidden).lstrip(":"))
        elif kind == "ExternalLink":
            parts.append(_text(node.title if node.brackets else node.url, hidden))
        elif kind == "HTMLEntity":
            parts.append(node.normalize())
        elif kind == "Tag":
            name = str(node.tag).strip().lower()
            if node.wiki_markup in _LIST_MARKS:
                parts.append(_LIST)
            elif name == "br":
                parts.append("\n")
            elif name not in _DROPPED:
                parts.append(_text(node.contents, hidden))
    return "".join(parts)
