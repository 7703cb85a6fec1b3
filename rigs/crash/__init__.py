"""Kills processes and simulates power losses while checkpoints are written."""
