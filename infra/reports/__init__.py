"""The common parts of all reports: the page (`page`), tables (`tables`), charts (`charts`), and formats of figures.

Simulator, demos, replays and experiments use it. Importing `charts` takes a second, because it imports matplotlib.
"""
