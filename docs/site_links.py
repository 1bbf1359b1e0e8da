"""A hook of MkDocs: links whose text is a file name, as `serve.md`, show the title of the page instead."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\[([\w-]+\.md)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, /, *, page: Any, config: Any, files: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def titled(link: re.Match[str]) -> str:
        path = posixpath.join(folder, link[2].partition("#")[0])
        target = files.get_file_from_path(posixpath.normpath(path))
        known = target is not None and target.page is not None and target.page.title
        return f"[{target.page.title}]({link[2]})" if known else link[0]

    return LINK.sub(titled, markdown)
