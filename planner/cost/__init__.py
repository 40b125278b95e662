"""Bytes and seconds of a layout: pure formulas that serve one layout and a million alike."""
