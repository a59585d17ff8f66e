"""KV pages over TCP between workers that prove who they are: this worker's offer by the TLS transport.

The parts: `keys` (TLS 1.3 with the workers' keys), `listener` (listens), `server` (answers reads),
`client` (reads), `channel` (frames), `protocol` (what may be asked), `offered_memory` and `grants`
(what is given). No UCX, no NIXL, no torch.
"""

from __future__ import annotations

import msgspec

from shared.links.keys import LinkKeys
from shared.transfer.counters import KvCounters
from shared.transfer.grants import Grants
from shared.transfer.memory import PageMemory
from shared.transfer.tls.client import TlsAddress, TlsReader
from shared.transfer.tls.keys import make_contexts
from shared.transfer.tls.offered_memory import OfferedMemory
from shared.transfer.tls.server import TlsHolder
from shared.transfer.transfer import describe_holder


class TlsOffer:
    """Offers this worker's pages and lease words at one address. Implements `Offer`.

    `address` is numeric, and others reach this worker there. Pages of a device go by way of host memory, a portion at a
    time. `TransferError` when no port is free.
    """

    def __init__(
        self,
        uid: str,
        epoch: int,
        pages: PageMemory,
        lease_count: int,
        *,
        address: str,
        ports: range,
        keys: LinkKeys,
    ):
        self._pages = pages
        self._contexts = make_contexts(keys)
        self.counters = KvCounters()
        self.words = Grants(lease_count)
        memory = OfferedMemory(pages, self.words)
        self._server = TlsHolder(address, ports, self._contexts.holder, memory, self.counters)
        metadata = msgspec.msgpack.encode(TlsAddress(address, self._server.port))
        self.holder = describe_holder(uid, epoch, metadata, pages, words_address=0)

    def make_reader(self, slots: int) -> TlsReader:
        """See `Offer`."""
        return TlsReader(self._contexts.reader, self._pages, slots)

    def close(self) -> None:
        """See `Offer`."""
        self._server.close()
