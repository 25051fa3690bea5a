"""Articles of a MediaWiki dump, as text."""

import bz2

import pytest

from bert_unpad.data import DamagedDataError
from bert_unpad.data.cli import main
from bert_unpad.data.formats.sources import open_source
from tests.support.prepared_text import contents

pytest.importorskip("mwxml")
parser = pytest.importorskip("mwparserfromhell")

from bert_unpad.data.formats.mediawiki import plain_text

SITE = """  <siteinfo>
    <sitename>Wikipedia</sitename><dbname>dewiki</dbname>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="10" case="first-letter">Vorlage</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""


def page(title, text, number, space=0, redirect=None):
    versions = [text] if isinstance(text, str) else text
    revisions = "".join(
        f"<revision><id>{i}</id><timestamp>2024-01-0{i}T00:00:00Z</timestamp>"
        f'<contributor><username>A</username><id>1</id></contributor><text xml:space="preserve">'
        f"{version.replace('&', '&amp;').replace('<', '&lt;')}</text></revision>"
        for i, version in enumerate(versions, 1)
    )
    redirected = f'<redirect title="{redirect}" />' if redirect else ""
    return (
        f"  <page><title>{title}</title><ns>{space}</ns><id>{number}</id>{redirected}"
        f"{revisions}</page>\n"
    )


def dump(*pages):
    head = '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11">\n'
    return head + SITE + "".join(pages) + "</mediawiki>\n"


PAGES = (
    page(
        "Haus", "'''Haus''' ist ein [[Gebäude|Bau]].\n\n[[Datei:Haus.jpg|mini|Ein Haus]]\nEnde.", 1
    ),
    page("Heim", "#WEITERLEITUNG [[Haus]]", 2, redirect="Haus"),
    page("Vorlage:X", "Text einer Vorlage.", 3, space=10),
    page("Hof", ["Alt.", "Neu. [[Kategorie:Orte]]"], 4),
    page("Leer", "{{Infobox}}", 5),
)
TEXTS = ["Haus ist ein Bau.\n\nEnde.", "Neu."]


@pytest.mark.parametrize("name", ["wiki.xml", "wiki.xml.bz2", "wiki.xml-p1p41.bz2"])
def test_articles_of_a_dump(tmp_path, name):
    data = dump(*PAGES).encode()
    (tmp_path / name).write_bytes(bz2.compress(data) if name.endswith("bz2") else data)
    for place in (tmp_path / name, tmp_path):
        source = open_source(str(place), cache_dir=tmp_path)
        assert list(source.documents()) == TEXTS


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("A '''bold''', ''thin'' [[Town|city]] of [[Rome]].", "A bold, thin city of Rome."),
        ("One<ref>Smith, p. 3.</ref> two<ref name=a /> three.", "One two three."),
        ("X ({{lang|de|Y}}; {{IPA|z}}) is.", "X is."),
        ("{{Infobox\n| a = [[B]]\n* c\n}}\nText.", "Text."),
        ("Intro.\n== History ==\nThen.\n=== More ===\nNow.", "Intro.\n\nThen.\n\nNow."),
        ("Intro.\n* one\n** two\n# three\n; term : what\n: indented\nEnd.", "Intro.\n\nEnd."),
        ("{| class=x\n|-\n| cell\n|}\nAfter.", "After."),
        ("A[[File:x.jpg|A [[linked]] one]]B [[Category:C]][[:Category:D]].", "AB Category:D."),
        (
            "See [https://x.org the site] or https://y.org. <!-- no -->",
            "See the site or https://y.org.",
        ),
        ("1&nbsp;km &amp; &lt;b&gt;", "1 km & <b>"),
        ("A<br />B<math>x^2</math> C <sub>2</sub>.", "A\n\nB C 2."),
        ("__NOTOC__ Text\nof two   lines.", "Text\n\nof two lines."),
        ("", ""),
    ],
)
def test_markup_to_text(markup, text):
    assert plain_text(parser.parse(markup), {"file", "image", "category"}) == text


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b"</page>", b"</pag>", 1),
        lambda data: data.replace(b"mediawiki", b"html"),
        lambda data: b"",
        lambda data: b"\x00\x01",
    ],
)
def test_damaged_dumps_are_named(tmp_path, damage):
    (tmp_path / "wiki.xml").write_bytes(damage(dump(*PAGES).encode()))
    source = open_source(str(tmp_path / "wiki.xml"), cache_dir=tmp_path)
    with pytest.raises(DamagedDataError, match=r"wiki\.xml: expected a complete XML dump"):
        list(source.documents())


def test_entities_do_not_expand_without_end(tmp_path):
    entities = "".join(f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(12))
    head = f'<!DOCTYPE mediawiki [<!ENTITY a0 "haha">{entities}]>\n'
    text = head + dump(page("A", "x", 1)).replace(">x<", ">&a12;<")
    (tmp_path / "wiki.xml").write_text(text)
    source = open_source(str(tmp_path / "wiki.xml"), cache_dir=tmp_path)
    with pytest.raises(DamagedDataError, match=r"wiki\.xml: expected a complete XML dump"):
        list(source.documents())


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "wiki.xml").write_text(dump(*PAGES))

    def missing(name):
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr("bert_unpad.data.formats.mediawiki.importlib.import_module", missing)
    source = open_source(str(tmp_path / "wiki.xml"), cache_dir=tmp_path)
    with pytest.raises(ImportError, match=r"pip install 'bert_unpad\[wikipedia\]'"):
        list(source.documents())


@pytest.mark.parametrize("error", [parser.parser.ParserError, RecursionError])
def test_a_page_that_cannot_be_parsed_is_named_and_left_out(tmp_path, monkeypatch, caplog, error):
    (tmp_path / "wiki.xml").write_text(dump(*PAGES))
    parse = parser.parse

    def fails(markup):
        if "Alt" in markup or "Neu" in markup:
            raise error("too deep")
        return parse(markup)

    monkeypatch.setattr(parser, "parse", fails)
    source = open_source(str(tmp_path / "wiki.xml"), cache_dir=tmp_path)
    assert list(source.documents()) == TEXTS[:1]
    assert "wiki.xml: leaving out the page 'Hof', whose markup cannot be read" in caplog.text


def test_dumps_are_prepared_in_parallel(tmp_path):
    (tmp_path / "dumps").mkdir()
    for part in range(4):
        numbers = range(1 + 30 * part, 31 + 30 * part)
        pages = (page(f"P{n}", f"Article {n} is [[here|there]]. It ends.", n) for n in numbers)
        path = tmp_path / "dumps" / f"wiki{part}.xml-p{numbers[0]}p{numbers[-1]}.bz2"
        path.write_bytes(bz2.compress(dump(*pages).encode()))
    options = ["--source", str(tmp_path / "dumps"), "--vocab-size", "60", "--block-mb", "0.0001"]
    for workers in ("1", "2"):
        command = ["prepare", str(tmp_path / workers), "--workers", workers, *options]
        assert main([*command, "--objective", "mlm", "--max-seq-length", "32"]) == 0
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
