"""From tokens to the bytes of an answer, whole or as server-sent events; what it may hold until it is written."""
