"""An HTTP service for a trained model, with limits on size, time and memory, and reloads without downtime."""
