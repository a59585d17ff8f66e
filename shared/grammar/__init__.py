"""What router and engine share of llguidance: its limits, and bounds of a text that it is to compile."""
