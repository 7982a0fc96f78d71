"""English text to measure on, to calibrate on and to make prompts of: Wikipedia articles out of a package's test data.

gensim's wheel carries an excerpt of a 2016 dump of the English Wikipedia (CC BY-SA). The wheel is downloaded once,
the one file taken out of it and kept in the cache folder; it is never installed, and none of the text is in this
repository. The markup is stripped by a few rules, good enough that what is left reads as prose: it renders
hardly any templates, and drops lists, tables and references rather than guess at them.
"""

from __future__ import annotations

import bz2
import html
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from lowkv.errors import LowkvError
from lowkv.models.sources import cache_folder, member_of_wheel

PACKAGE = "gensim==4.4.0"
MEMBER = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
SOURCE = f"English Wikipedia, excerpt of a 2016 dump in PyPI {PACKAGE}, markup stripped (CC BY-SA)"

_PAGE = re.compile(r"<page>.*?<title>(?P<title>[^<]*)</title>.*?<text[^>]*>(?P<text>.*?)</text>", re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_EMPTY_ELEMENT = re.compile(r"<\w+[^<>]*/>")
_DROPPED = re.compile(
    r"<(ref|math|gallery|timeline|score|source|syntaxhighlight|pre|code|table|imagemap|sub|sup|small)\b[^<>]*>.*?</\1>",
    re.DOTALL | re.IGNORECASE,
)
_TAG = re.compile(r"</?\w+[^<>]*>")
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\|).)*?\|\}", re.DOTALL)
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_NOT_TEXT = re.compile(r"\s*:?\s*(file|image|category|media|[a-z]{2,3}(-[a-z]+)?)\s*:", re.IGNORECASE)
_EXTERNAL = re.compile(r"\[(?:https?:)?//[^\s\]]*\s*([^\]]*)\]")
_QUOTES = re.compile(r"'{2,}")
_HEADING = re.compile(r"^=+\s*(.*?)\s*=+\s*$", re.MULTILINE)
_BACK_MATTER = re.compile(
    r"^==\s*(see also|references|notes|footnotes|external links|further reading|bibliography|sources|citations)\s*==.*",
    re.MULTILINE | re.IGNORECASE | re.DOTALL,
)
_NOT_PROSE = re.compile(r"^[*#:;|!{}].*$", re.MULTILINE)
_HOLLOW = re.compile(r"\([,;:\s]*\)")  # what was in the parentheses is gone
_HOLLOW_START = re.compile(r"\([,;:\s]+")
_SPACES = re.compile(r"[ \t\u00a0]+")
_SHORTEST_PARAGRAPH = 80  # characters; shorter lines are captions, headings of dropped lists and the like


def articles(path: Path) -> Iterator[tuple[str, str]]:
    """(title, plain text) of each article of a dump excerpt (`.xml.bz2`), in its order, redirects left out.

    Raises:
        LowkvError: the file is not such an excerpt.
    """
    try:
        dump = bz2.decompress(path.read_bytes()).decode()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise LowkvError(
            "the evaluation text cannot be read", got=str(path), expected="a Wikipedia dump, .xml.bz2", fix=str(error)
        ) from error
    for page in _PAGE.finditer(dump):
        text = plain_text(html.unescape(page["text"]))
        if text:
            yield html.unescape(page["title"]), text


def plain_text(markup: str) -> str:
    """Prose of a page in wiki markup, one paragraph a line; empty for a redirect."""
    if markup.lstrip().upper().startswith("#REDIRECT"):
        return ""
    text = _COMMENT.sub("", markup)
    text = _BACK_MATTER.sub("", text)
    text = _EMPTY_ELEMENT.sub("", text)
    text = _innermost_first(_DROPPED.sub, text, "")
    text = _innermost_first(_TEMPLATE.sub, text, _template_text)
    text = _innermost_first(_TABLE.sub, text, "")
    text = _innermost_first(_LINK.sub, text, _link_text)
    text = _EXTERNAL.sub(r"\1", text)
    text = _TAG.sub("", text)
    text = html.unescape(_QUOTES.sub("", text))
    text = _HEADING.sub("", text)
    text = _NOT_PROSE.sub("", text)
    text = _HOLLOW_START.sub("(", _HOLLOW.sub("", text))
    text = _SPACES.sub(" ", text).replace(" ,", ",").replace(" .", ".")
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if len(line) >= _SHORTEST_PARAGRAPH)


def wikipedia(cache: Path | None = None) -> list[tuple[str, str]]:
    """(title, text) of the articles of `SOURCE`, downloading it the first time.

    Args:
        cache: folder to keep the excerpt in; None is lowkv's own under the user's cache folder.

    Raises:
        LowkvError: it is not there and cannot be downloaded.
    """
    return list(articles(_excerpt(cache)))


def _excerpt(cache: Path | None) -> Path:
    kept = (cache or cache_folder()) / "text" / Path(MEMBER).name
    return member_of_wheel(PACKAGE, MEMBER, kept)


def _link_text(link: re.Match[str]) -> str:
    target, _, label = link[1].partition("|")
    if _NOT_TEXT.match(target):
        return ""
    return label.rpartition("|")[2] or target.lstrip(":")


def _template_text(template: re.Match[str]) -> str:
    """Templates are dropped, but for those that only wrap words of the sentence they stand in."""
    name, *arguments = (part.strip() for part in template[0][2:-2].split("|"))
    plain = [argument for argument in arguments if "=" not in argument]
    match name.lower():
        case "lang" | "transl" | "nowrap" | "nobr":
            return plain[-1] if plain else ""
        case "convert" | "cvt":
            return " ".join(plain[:2])
        case _:
            return ""


def _innermost_first(
    substitute: Callable[..., str], text: str, replacement: str | Callable[[re.Match[str]], str]
) -> str:
    """Substitute until nothing changes: the pattern matches what holds none of its own kind."""
    while (replaced := substitute(replacement, text)) != text:
        text = replaced
    return text
