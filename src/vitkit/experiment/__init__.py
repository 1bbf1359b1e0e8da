"""Recipe to run folder: the only room that combines the others."""
