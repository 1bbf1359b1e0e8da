"""A model file to answers. Imports no training code."""
