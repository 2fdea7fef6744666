"""What a terminal shows: the command line and the chat."""
