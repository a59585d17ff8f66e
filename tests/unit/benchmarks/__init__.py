"""The comparison with peers: its ratios, its table and its picture, without any server."""
