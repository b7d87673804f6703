"""What the mesh's processes share, and what stands at its edge."""
