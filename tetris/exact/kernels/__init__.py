"""The compiled loops of the branch and bound. A folder of its own, so that what else changes compiles nothing anew."""
