"""What every process has: settings, start and end, logs, metrics, probes, and its share of the machine."""
