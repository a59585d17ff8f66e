"""What workers say, and what becomes of the requests of one that goes, fails, lies or is silent."""
