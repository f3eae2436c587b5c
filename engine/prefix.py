"""PrefixCache: finds sealed pages by the tokens that they hold and all tokens before them. It counts no references; the pool does.

A page's digest is blake2b-128 over (digest of the page before it, its tokens); the chain starts from the cache salt, the page size and the KV
format. 128 bits of a cryptographic hash: two different prefixes with one digest are not to be expected in any run.
"""

from __future__ import annotations

from collections.abc import KeysView
from hashlib import blake2b

from twinfer.errors import LawViolation

Digest = bytes
_DIGEST_BYTES = 16


class PrefixCache:
    """digest -> page and page -> digest, always inverse to each other."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_of: dict[Digest, int] = {}
        self._digest_of: dict[int, Digest] = {}

    def __len__(self) -> int:
        return len(self._page_of)

    def root(self, salt: str, kv_format: str) -> Digest:
        """The digest before the first page. Requests share pages only under the same salt and format."""
        return blake2b(repr((salt, self.page_size, kv_format)).encode(), digest_size=_DIGEST_BYTES).digest()

    def extend(self, before: Digest, tokens: bytes) -> Digest:
        """Digest of a full page: `before` is its predecessor's, `tokens` its page_size int32 token ids in native order."""
        return blake2b(before + tokens, digest_size=_DIGEST_BYTES).digest()

    def match(self, digests: list[Digest]) -> list[int]:
        """Pages of the longest known beginning of `digests`."""
        pages = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def seal(self, page: int, digest: Digest) -> None:
        """Makes a full, written page findable, under a digest that finds none yet."""
        if digest in self._page_of:
            raise LawViolation("sealed once", f"page {self._page_of[digest]} is found by what page {page} holds")
        if page in self._digest_of:
            raise LawViolation("sealed once", f"page {page} is sealed already")
        self._page_of[digest] = page
        self._digest_of[page] = digest

    def move(self, digest: Digest, page: int) -> None:
        """Another full, written page with the same content is found in the place of the one that was."""
        self.forget(self._page_of[digest])
        self.seal(page, digest)

    def page_of(self, digest: Digest) -> int | None:
        """The sealed page of this digest, None where there is none."""
        return self._page_of.get(digest)

    def forget(self, page: int) -> None:
        """Removes a page that is about to hold something else."""
        del self._page_of[self._digest_of.pop(page)]

    def clear(self) -> None:
        """Forgets every page."""
        self._page_of.clear()
        self._digest_of.clear()

    def digests(self) -> KeysView[Digest]:
        """Digests of all sealed pages, as they are now and later."""
        return self._page_of.keys()

    def digest_of(self, page: int) -> Digest | None:
        """Digest of a sealed page, None of any other."""
        return self._digest_of.get(page)
