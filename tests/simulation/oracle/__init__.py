"""What every request must answer: a model, a grammar and a device that show each mistake."""
