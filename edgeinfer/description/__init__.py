"""What a file says of its model: the facts of its architecture, its sizes, its weights."""
