"""The whole deployment in one thread, under a virtual clock, with faults drawn from a seed.

The router core, the prefill and decode schedulers and the event loop are the real ones. What they ask of the outside
has a second implementation here: the device is an oracle, the fabric reads pages one by one and unreliably, the
network breaks sessions. Read in this order: `oracle`, `oracle_device`, `fabric`, `network`, `scenario`, `world`.
"""
