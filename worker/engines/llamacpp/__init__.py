"""llama.cpp in this process: the embedded engine."""
