"""The terminal front end: the command line and the full-screen chat."""
