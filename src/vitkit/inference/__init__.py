"""Prediction, inference engines and export. Imports no training code."""
