"""HTTP/1.1 for clients that may be hostile: sockets, connections, and the framing of requests and answers."""
