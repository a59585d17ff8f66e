"""What a reader of docs/proofs.md may check with one command each.

    python -m tests.proofs.cascade

They run on the virtual cluster, the simulation and the transfer that other tests use, at the sizes of docs/proofs.md.
Beside each a test runs it small.
"""
