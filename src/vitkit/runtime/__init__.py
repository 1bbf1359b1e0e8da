"""Device, precision and processes."""
