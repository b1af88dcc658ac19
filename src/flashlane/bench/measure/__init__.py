"""Running, checking and timing."""
