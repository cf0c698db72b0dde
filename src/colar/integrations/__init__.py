"""Adapters to other people's programs."""
