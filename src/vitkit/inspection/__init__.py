"""What a model looks at, as plain arrays (Sec. 4.5, App. D.7-D.8). Draws nothing."""
