"""How families of models write tool calls, and how these are read from text as it comes. Pure."""
