"""The console: pages for browsers, served by the API at `/console`. See README.md."""
