"""The documentation site: these pages, notebooks, and a reference made of the docstrings.

pip install '.[docs]'
python -m sphinx -W --keep-going docs build/site    # -D nb_execution_mode=off: no outputs
"""

import importlib
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import bert_unpad

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "bert_unpad"
version = release = bert_unpad.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"bert_unpad {version}"
html_copy_source = False

# Notebooks are text, and executed for each site; an error ends the build.
exclude_patterns = ["conf.py"]
nb_custom_formats = {".py": ["jupytext.reads", {"fmt": "py:percent"}]}
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars and logs

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
default_role = "py:obj"  # what stands in `...` is a link where it names one thing
suppress_warnings = [
    "ref.python",  # where it names several
    "myst-nb.lexer",  # of a notebook that is not run
]

# Names that packages import when they are first asked for.
for name in ("data", "experimental", "nn", "hf"):
    module = importlib.import_module(f"bert_unpad.{name}")
    for public in module.__all__:
        setattr(module, public, getattr(module, public))

# Pages whose text lies elsewhere in the repository.
PAGES = {
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "development/gpu-model": "gpu_model/README.md",
}
SITE = {file: f"{page}.md" for page, file in PAGES.items()} | {"README.md": "index.md"}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def read_page(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links that hold in the repository hold in the site; to folders and programs they are text."""
    file = ROOT / PAGES.get(docname, f"docs/{docname}.md")
    home = (DOCS / docname).parent

    def in_site(match: re.Match[str]) -> str:
        text, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if "://" in target or not path:
            return match[0]
        place = (file.parent / path).resolve()
        if place.is_dir() or (place.suffix == ".py" and DOCS not in place.parents):
            return text
        place = DOCS / SITE.get(str(place.relative_to(ROOT)), place)
        return f"[{text}]({os.path.relpath(place, home)}{hash_sign}{anchor})"

    source[0] = LINK.sub(in_site, file.read_text() if docname in PAGES else source[0])


def norms(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """|w| in a docstring is a norm, not a substitution."""
    lines[:] = [re.sub(r"\|(\w+)\|", r"\\|\1\\|", line) for line in lines]


def drop_object(app: Sphinx, doctree: nodes.document) -> None:
    """No line says of a class that it extends nothing."""
    for paragraph in list(doctree.findall(nodes.paragraph)):
        if paragraph.astext() == "Bases: object":
            paragraph.parent.remove(paragraph)


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", norms)
    app.connect("doctree-read", drop_object)
