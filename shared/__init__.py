"""What the roles share: requests, batches, caches, the loop, links, transfer and the engine.

Nothing here imports `router`, `prefill` or `decode`; only `shared.engine` and `shared.transfer.nixl` import
torch or nixl, so that the router's image needs neither.
"""
