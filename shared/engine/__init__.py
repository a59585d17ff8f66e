"""The CPU engine: loads a model and executes schedule batches; the only folder that imports torch."""
