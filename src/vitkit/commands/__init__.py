"""What each verb does, once its words are parsed: the work, and what is printed of it."""
