"""What several tasks share: dense targets, windows of large images, and teachers."""
