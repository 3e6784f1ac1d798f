"""Faults injected on purpose, and what must hold whatever they are."""
