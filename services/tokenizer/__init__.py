"""TokenizerService: what encodes, for every router of a mesh."""
