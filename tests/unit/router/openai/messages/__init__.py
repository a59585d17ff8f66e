"""Tests of /v1/messages."""
