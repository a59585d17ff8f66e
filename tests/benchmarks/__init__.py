"""Measurements on demand, each printed beside a baseline of the same run.

python -m tests.benchmarks           Segue beside llama.cpp and vLLM, over HTTP (`make bench`)
python -m tests.benchmarks.links     a link between two processes beside a bare TCP echo
"""
