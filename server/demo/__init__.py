"""`mizzen demo`: the main job on an embedded stack, watched live, checked at the end, with a report."""
