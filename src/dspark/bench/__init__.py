"""Benchmarks: each compares modes inside one run and reports as text, JSON and a picture."""
