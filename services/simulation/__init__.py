"""The real router and scheduler cores with virtual workers, in one process, under virtual time."""
