"""The client of the benchmarks: scenarios against any server of OpenAI's API."""
