"""Tools as agents send them, over HTTP."""
