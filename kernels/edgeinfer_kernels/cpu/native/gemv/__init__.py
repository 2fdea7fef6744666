"""Matrix rows times vectors, for every weight format."""
