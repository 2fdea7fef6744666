"""Model files from elsewhere: found, fetched so that a break costs nothing, and checked to the byte."""
