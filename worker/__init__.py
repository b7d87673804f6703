"""Prefill and decode: a gRPC front and an engine core, two processes."""
