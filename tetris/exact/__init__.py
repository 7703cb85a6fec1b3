"""The exact method."""
