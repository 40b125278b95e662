"""Measurements of speed and memory; run by hand, never asserted."""
