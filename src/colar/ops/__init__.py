"""Pure tensor and number functions."""
