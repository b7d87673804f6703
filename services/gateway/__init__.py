"""The OpenAI-compatible HTTP edge of the mesh."""
