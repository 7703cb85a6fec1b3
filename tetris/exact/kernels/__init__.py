"""Compiled loops of the branch and bound, in a separate folder, so that other changes do not cause recompilation."""
