"""What a reader of docs/proofs.md may check with one command each.

    python -m tests.proofs.cascade      three workers are killed under conversations
    python -m tests.proofs.churn        workers come and go all the time
    python -m tests.proofs.real_cascade … with real processes
    python -m tests.proofs.real_churn   … with real processes
    python -m tests.proofs.handover     KV pages change hands in simulated worlds
    python -m tests.proofs.fetches      … and over real transports
    python -m tests.proofs.gap          what is waited for between the first token and the second

They run on the virtual cluster, the simulation, the transfer and the deployments that other tests use, at the sizes of
docs/proofs.md.
Beside each a test runs it small.
"""
