"""Benchmarks: each compares within one run, since machines are shared and noisy."""
