"""For tests: a report as its structure, so that they check values and not sentences."""

from html.parser import HTMLParser
from xml.etree.ElementTree import Element, TreeBuilder

VOID = {"br", "img", "meta", "link", "input"}


class Parser(HTMLParser):
    """HTML to elements; svg's attributes are in small letters then."""

    def __init__(self) -> None:
        super().__init__()
        self.builder = TreeBuilder()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.builder.start(tag, {key: value or "" for key, value in attrs})
        if tag in VOID:
            self.builder.end(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        self.builder.end(tag)

    def handle_data(self, data: str) -> None:
        self.builder.data(data)


def words_of(element: Element) -> str:
    """Everything in an element that is text, on one line."""
    return " ".join(" ".join(element.itertext()).split())


class Page:
    """A report: its headline, and of each section its text, tables and facts."""

    def __init__(self, document: str):
        parser = Parser()
        parser.feed(document)
        self.root = parser.builder.close()
        big = self.root.find(".//p[@class='headline']")
        assert big is not None and big.text is not None
        self.headline = " ".join(big.text.split()), words_of(big[0])
        self.header = words_of(self.root.find(".//header"))
        self.sections = {words_of(one.find("h2")): one for one in self.root.iter("section")}

    def text(self, heading: str) -> str:
        return words_of(self.sections[heading])

    def rows(self, heading: str, number: int = 0, *, css: str | None = None) -> list[dict[str, str]]:
        """One table of a section: a row each, by the names of its columns; css: only rows of this class."""
        table = list(self.sections[heading].iter("table"))[number]
        columns = [words_of(cell) for cell in table.find("thead/tr")]
        rows = [row for row in table.find("tbody") if css is None or row.get("class") == css]
        return [dict(zip(columns, map(words_of, row), strict=True)) for row in rows]

    def facts(self, heading: str) -> dict[str, str]:
        """All names with their values in a section."""
        terms, values = ([words_of(e) for e in self.sections[heading].iter(tag)] for tag in ("dt", "dd"))
        return dict(zip(terms, values, strict=True))
