"""Which worker serves a request: queue, routing strategy, dispatch."""
