"""Measurements: what a layer costs here and in other libraries. Imports nothing heavy by itself."""
