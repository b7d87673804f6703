"""The firsttoken command, one module a subcommand."""
