"""The engines behind a worker, one contract."""
