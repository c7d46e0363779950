"""A small prefix cache over `PageTable`: full pages by content, least recently used first out."""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.kv.pages import Owner, PageTable
from tests.sim.tokens import full_pages, page_content


class PrefixCache:
    def __init__(self, pages: PageTable) -> None:
        self._pages = pages
        self._by_content: dict[int, int] = {}

    def hold_prefix(self, tokens: Sequence[int], holder: Owner) -> list[int]:
        """Hold and return the cached pages of the longest known prefix."""
        found: list[int] = []
        for index in range(full_pages(tokens)):
            content = page_content(tokens, index)
            page = self._by_content.get(content)
            if page is None:
                break
            found.append(page)
            self._by_content[content] = self._by_content.pop(content)
        self.hold(found, holder)
        return found

    def hold(self, pages: list[int], holder: Owner) -> None:
        self._pages.hold(pages, holder)

    def drop(self, pages: list[int], holder: Owner) -> None:
        self._pages.drop(pages, holder)

    def insert(self, page: int, content: int, owner: Owner) -> bool:
        """`owner`'s page becomes a cached one that it holds; False where the content is known."""
        if content in self._by_content:
            return False
        self._pages.cache([page], owner)
        self._by_content[content] = page
        return True

    def make_room(self, wanted: int) -> bool:
        """Evict until `wanted` pages are free."""
        if self._pages.free_count >= wanted:
            return True
        for content, page in list(self._by_content.items()):
            if self._pages.is_held(page):
                continue
            del self._by_content[content]
            self._pages.evict(page)
            if self._pages.free_count >= wanted:
                return True
        return False

    def evict_all(self) -> None:
        self.make_room(self._pages.total)
