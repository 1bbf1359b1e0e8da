"""Numbers to pages, figures and a terminal; takes values, and knows no model and no file of a run."""
