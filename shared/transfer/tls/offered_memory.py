"""The page memory of a TLS holder, and which of its bytes a reader may have: `grants`' rules, applied to spans.

Every number in a request is the peer's. Knows no sockets and no keys.
"""

from __future__ import annotations

from shared.transfer.grants import Grants, Shown, Verdict
from shared.transfer.memory import PageMemory
from shared.transfer.tls.protocol import GetPages, Request


class OfferedMemory:
    """The pages that this worker lets others read, under the leases that it grants."""

    def __init__(self, pages: PageMemory, grants: Grants):
        self.grants = grants
        self.peer_ranks_max = pages.slices.peer_ranks_max
        self._pages = pages

    def refusal(self, request: Request) -> str:
        """What is wrong with the numbers themselves, whatever lives now; empty: nothing."""
        if not 0 <= request.lease < len(self.grants):
            return f"lease {request.lease} is not one of {len(self.grants)}"
        if not isinstance(request, GetPages):
            return ""
        if not request.spans:
            return "no span is asked for"
        size = self._pages.size_bytes
        for offset, length in request.spans:
            if offset < 0 or length <= 0 or offset + length > size:
                return f"{length} bytes at {offset} are not within the {size} bytes of KV pages"
        if sum(length for _, length in request.spans) > size:
            return f"more bytes are asked for than the {size} of all KV pages"
        return ""

    def verdict(self, shown: Shown, request: GetPages) -> Verdict:
        """Whether this connection may read the spans now. The known page has nobody's KV, and is open to all."""
        if self._is_known(request):
            return Verdict.GIVEN
        size = self._pages.page_bytes
        spans = (range(offset // size, (offset + length - 1) // size + 1) for offset, length in request.spans)
        return self.grants.pages(shown, request.lease, request.nonce, spans)

    def is_open(self, shown: Shown, request: GetPages) -> bool:
        """Whether what `verdict` has given is still to be read."""
        return self.grants.holds(shown, request.lease, request.nonce) or self._is_known(request)

    def page_bytes_at(self, offset: int, size_bytes: int) -> memoryview | None:
        """Bytes of the page memory, not copied; None where only `read` gets at them."""
        view = self._pages.access.view(self._pages.address + offset, size_bytes)
        return view.toreadonly() if view else None

    def read(self, offset: int, into: memoryview) -> None:
        """Copy bytes of the page memory."""
        self._pages.access.read(self._pages.address + offset, into)

    def buffer(self, size_bytes: int) -> memoryview:
        """Memory to read into."""
        return self._pages.access.buffer(size_bytes)

    def _is_known(self, request: GetPages) -> bool:
        known = self._pages.known_page * self._pages.page_bytes
        return known >= 0 and all(offset >= known for offset, _ in request.spans)
