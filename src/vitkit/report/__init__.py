"""HTML reports, figures and terminal output, made from plain values without models or run folders."""
