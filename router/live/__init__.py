"""The live page: what a router serves for people who want to watch their fleet."""
