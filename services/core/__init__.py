"""Pure values and rules: no I/O, no asyncio, no gRPC, and nothing else of the mesh."""
