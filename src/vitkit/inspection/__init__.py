"""What a model looks at, as NumPy arrays (Sec. 4.5, App. D.7-D.8); drawing is left to the report."""
