"""Exact top rows of every scenario, renewed by ``python -m tests.golden.renew``."""
