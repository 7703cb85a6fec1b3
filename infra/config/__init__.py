"""Configuration: one model for each section, and `Settings`, which contains all sections."""
