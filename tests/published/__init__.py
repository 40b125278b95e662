"""Published measured runs and user cases against the model."""
