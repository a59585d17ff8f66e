"""KV memory of one worker: whose page it is, what is cached, and how long pages stay locked for a reader."""
