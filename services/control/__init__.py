"""Membership and configuration, pushed to every process."""
