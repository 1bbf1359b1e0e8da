"""The implementation of each verb: its work and its output."""
