"""The paper's studies: a plan of many runs, where they run, one table and one page."""
