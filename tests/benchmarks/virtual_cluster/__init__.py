"""A whole deployment in virtual time: what requests see of it under load, and what its router costs.

    python -m tests.benchmarks.virtual_cluster --list
    python -m tests.benchmarks.virtual_cluster --scenario overload_2 [--seed N] [--scale X] [--json FILE]

The router core, both schedulers, the event loop and the drains are the real ones. The device and the KV fabric hold
nothing: a step takes a modelled time, a fetch takes bytes divided by a rate. So a run is deterministic in its seed, and
its seconds do not depend on the machine. Python's own time is not in them; the router's is measured beside them.

No oracle judges the scenarios: whether tokens are right is shown by tests/simulation, and by runs that ask for pages
(`WorkerShape.oracle`).
"""
