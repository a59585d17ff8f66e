"""The parts of a simulated deployment: the real cores, and processes, links and memory that live in virtual time."""
