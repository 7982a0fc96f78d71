"""Wiki markup to prose, and the excerpt taken out of a wheel by the real pip, from a folder instead of an index."""

from __future__ import annotations

import bz2
import zipfile
from pathlib import Path

import pytest

from lowkv.errors import LowkvError
from lowkv.wikipedia import MEMBER, articles, plain_text, wikipedia

LONG = "The rest of this sentence is only here to make the paragraph long enough to be taken for prose."

PAGES = f"""<mediawiki><page><title>Old name</title><ns>0</ns><revision>
<text xml:space="preserve">#REDIRECT [[New name]]</text></revision></page>
<page><title>Tom &amp; Jerry</title><ns>0</ns><revision>
<text xml:space="preserve">'''Tom''' &amp;amp; [[Jerry (mouse)|Jerry]] ran.&lt;ref&gt;A book&lt;/ref&gt; {LONG}</text>
</revision></page></mediawiki>"""


@pytest.mark.parametrize(
    ("markup", "prose"),
    [
        ("'''Bold''' and ''italic''.", "Bold and italic."),
        ("A [[link]] and [[Target page|a label]].", "A link and a label."),
        ("Seen[[File:A.jpg|thumb|A [[nested]] caption]] there.", "Seen there."),
        ("One[[de:Eins]][[Category:Numbers]] two.", "One two."),
        ("Cited.<ref name=x>{{cite|a=b}}</ref> And.<ref name=x/>", "Cited. And."),
        ("Kept {{small|{{nested|x}}}}text.", "Kept text."),
        ("The {{lang|grc|λόγος}} ran {{convert|5|km|mi|abbr=on}} far.", "The λόγος ran 5 km far."),
        ("Born ({{IPA|x}}; 1809) in ({{IPA|y}}) here.", "Born (1809) in here."),
        ("See [http://example.org the site] and [https://example.org].", "See the site and."),
        ("Less &lt; more<!-- hidden --> &amp;c.", "Less < more &c."),
        ("{|\n| a table\n{| nested\n|}\n|}Text after.", "Text after."),
        ("<math>x^2</math>Inline <b>tags</b>.", "Inline tags."),
    ],
)
def test_markup(markup: str, prose: str) -> None:
    assert plain_text(f"{markup} {LONG}") == f"{prose} {LONG}"


def test_headings_lists_captions_and_back_matter_go() -> None:
    markup = (
        f"{LONG}\n== A heading ==\n* a list item that is long enough to be a paragraph: {LONG}\nA caption\n{LONG}\n"
    )
    assert plain_text(markup + f"==See also==\n{LONG}") == f"{LONG}\n{LONG}"


def test_redirects_are_no_articles(tmp_path: Path) -> None:
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(bz2.compress(PAGES.encode()))
    assert list(articles(path)) == [("Tom & Jerry", f"Tom & Jerry ran. {LONG}")]


def test_a_file_that_is_no_dump_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dump.xml.bz2"
    path.write_bytes(b"not bzip2")
    with pytest.raises(LowkvError, match=r"dump\.xml\.bz2"):
        list(articles(path))


def test_the_excerpt_comes_out_of_the_package_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, cache = tmp_path / "index", tmp_path / "cache"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(LowkvError, match="gensim"):
        wikipedia(cache)

    wheel = index / "gensim-4.4.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, bz2.compress(PAGES.encode()))
        archive.writestr("gensim-4.4.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: gensim\nVersion: 4.4.0\n")
        archive.writestr(
            "gensim-4.4.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("gensim-4.4.0.dist-info/RECORD", "")
    assert [title for title, _ in wikipedia(cache)] == ["Tom & Jerry"]

    wheel.unlink()  # the second time, nothing is downloaded
    assert [title for title, _ in wikipedia(cache)] == ["Tom & Jerry"]
    assert [path.name for path in (cache / "text").iterdir()] == [Path(MEMBER).name]
