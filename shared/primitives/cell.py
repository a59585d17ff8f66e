"""How many workers serve together: one number for the routers that divide a large fleet and for the KV readers.

Pages go from prefill to decode workers of a cell, and between its decode workers. So a reader that remembers as many
peers as a cell has workers never forgets one that it will meet again.
"""

from __future__ import annotations

CELL_WORKERS_MAX = 64
